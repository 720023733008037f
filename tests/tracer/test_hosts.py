"""Models of transformers: numbers as in eager runs, packed documents kept apart, nothing left changed."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from fxpar import errors, losses
from fxpar.tracer import capture
from tests.repeat import thinned
from tests.tracer.helpers import check, difference, eager, ops, run
from tests.tracer.host_models import BY_ITSELF, GPT, LLAMA, TOLERANCE, TYPES, attention_nodes, build, tokens

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", thinned(TYPES, ["llama", "gemma2", "gpt2", "falcon", "bloom"]))
def test_numbers_of_eager_runs(name):
    layers = 2 if name == "gemma2" else 1
    model = build(name, layers)
    graph = check(model, losses.causal_lm, [tokens(16), tokens(23)], TOLERANCE.get(name, 1e-12))
    nodes = attention_nodes(graph)
    assert len(nodes) == (0 if name in BY_ITSELF else layers)
    for node in nodes:
        documents, mask, causal = node.args[3:6]
        assert (documents, mask, causal) == (None, None, True)
    assert not any("scaled_dot_product" in op for op in ops(graph))
    if name in ("mistral", "gemma2"):
        assert [node.args[6] for node in nodes] == ([5] if name == "mistral" else [5, 0])
    if name == "gemma2":
        assert [node.args[8] for node in nodes] == [50.0, 50.0]
    if name == "bloom":
        assert "aten.bmm" in ops(graph)
        assert "aten.baddbmm" not in ops(graph)
    if name in ("gpt2", "opt", "biogpt"):
        assert graph.dims[0].maximum == 64  # rows of the table of positions


def alone(model, batch):
    """The loss of every document run by itself."""
    starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), batch["input_ids"].shape[1]]
    parts = [
        {k: v[:, a:b] for k, v in batch.items() if k in ("input_ids", "labels")} for a, b in itertools.pairwise(starts)
    ]
    return sum(losses.causal_lm(model, part) for part in parts)


@pytest.mark.parametrize("name", thinned(["llama", "mistral", "gemma2", "gpt2", "opt", "falcon"], ["opt"]))
def test_packed_documents_equal_documents_alone(name):
    batches = [tokens(16, [9, 4, 3], B=1), tokens(24, [2, 22], B=1)]
    layers = 2 if name == "gemma2" else 1
    graph = check(build(name, layers), losses.causal_lm, batches, TOLERANCE.get(name, 1e-12), expected=alone)
    assert all(node.args[3] is not None and node.args[4] is None for node in attention_nodes(graph))
    assert len({node.args[3] for node in attention_nodes(graph)}) == 1


def test_rows_may_be_packed_differently():
    model, batch = build("llama"), tokens(12, [12])
    batch["position_ids"][1] = torch.cat([torch.arange(5), torch.arange(7)])
    rows = [{k: v[i : i + 1] for k, v in batch.items()} for i in range(2)]
    graph = capture(model, losses.causal_lm, batch)
    both = lambda m, b: alone(m, rows[0]) + alone(m, rows[1])  # noqa: E731
    assert difference(run(graph, model, batch), eager(model, both, batch)) < 1e-12


def test_document_bounds():
    def with_bounds(lengths):
        batch = tokens(sum(lengths), lengths, B=1)
        bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        return {**batch, "cu_seq_lens_q": bounds}

    batches = [with_bounds([7, 9]), with_bounds([3, 3, 15])]
    graph = check(build("llama"), losses.causal_lm, batches, expected=alone)
    assert {dim.name for dim in graph.dims} == {"T", "C"}
    assert "aten.searchsorted.Tensor" in ops(graph)
    assert "aten.cumsum" not in ops(graph)


def test_the_models_own_mean_loss_becomes_a_sum():
    model, batch = build("llama"), tokens(12)
    batch["labels"] = batch["input_ids"]

    def own_loss(model, batch):
        return model(**batch).loss

    graph = capture(model, own_loss, batch)
    count = 2 * 11  # transformers shifts by itself
    assert difference(run(graph, model, batch, 0.5), eager(model, own_loss, batch, 0.5 * count)) < 1e-5


def test_gradient_checkpointing():
    model = build("llama", 2)
    model.activation_checkpointing_enable()
    graph = check(model, losses.causal_lm, [tokens(12), tokens(17)])
    assert len(attention_nodes(graph)) == 4
    again = [n for n in attention_nodes(graph) if n.meta["backward"]]
    assert [n.meta["fqn"] for n in again] == ["model.layers.1.self_attn", "model.layers.0.self_attn"]


def test_dropout_in_attention_and_elsewhere():
    config = transformers.GPT2Config(**GPT | {"n_layer": 1}, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    model = transformers.GPT2LMHeadModel(config).double().train()
    graph = capture(model, losses.causal_lm, tokens(8))
    assert not attention_nodes(graph)
    assert ops(graph).count("fxpar.dropout") == 2 * (1 + 3)
    batch = tokens(11)
    first, second = (run(graph, model, batch, seed=seed) for seed in (1, 2))
    assert difference(first, run(graph, model, batch, seed=1)) == 0
    assert difference(first, second) > 1e-3


def test_nothing_is_left_changed():
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, find_packed_sequence_indices
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = build("mistral")
    config = copy.deepcopy(model.config.__dict__)
    before = dict(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping), dict(ALL_ATTENTION_FUNCTIONS._global_mapping)
    capture(model, losses.causal_lm, tokens(8))
    with pytest.raises(errors.LossError):
        capture(model, lambda m, b: m(b["input_ids"]).logits, tokens(8))
    assert model.config.__dict__ == config
    assert before == (ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, ALL_ATTENTION_FUNCTIONS._global_mapping)
    from transformers import masking_utils

    assert masking_utils.find_packed_sequence_indices is find_packed_sequence_indices


def test_what_capture_sets_in_a_config_is_no_state():
    """The model's own code keeps nothing, so it is traced once."""
    model, calls = build("llama"), []
    model.register_forward_pre_hook(lambda *_: calls.append(None))
    capture(model, losses.causal_lm, tokens(9))
    assert len(calls) == 1


def test_meta_device_allocates_nothing():
    options = LLAMA | {
        "num_hidden_layers": 1,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "vocab_size": 128256,
        "num_attention_heads": 64,
    }
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options, dtype=torch.bfloat16))
    graph = capture(model, losses.causal_lm, tokens(16))
    assert next(graph.params()).meta.shape == (128256, 8192)
    assert all(p.device.type == "meta" for p in model.parameters())


def test_encoder_decoder():
    config = transformers.T5Config(
        vocab_size=61, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4, dropout_rate=0.0
    )
    model = transformers.T5ForConditionalGeneration(config).double()

    def loss(model, batch):
        logits = model(input_ids=batch["input_ids"], decoder_input_ids=batch["labels"]).logits
        return losses.cross_entropy_sum(logits, batch["labels"])

    batches = [{"input_ids": torch.randint(61, (2, T)), "labels": torch.randint(61, (2, 5))} for T in (12, 50)]
    graph = check(model, loss, batches)
    assert graph.dims[0].maximum is None  # the table of relative positions is no bound


def test_attention_sinks_are_learned():
    config = transformers.GraniteSWAConfig(**LLAMA, head_dim=8)
    model = transformers.GraniteSWAForCausalLM(config).double()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    # The model itself takes the sigmoid of a sink in float32.
    graph = check(model, losses.causal_lm, [tokens(9), tokens(40)], 1e-6)
    assert all(len(node.args) == 10 for node in attention_nodes(graph))
    assert ops(graph).count("fxpar.attention_sinks_backward") == len(attention_nodes(graph))
