"""Models of transformers: numbers as in eager runs, packed documents kept apart, nothing left changed."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch

from fxpar import errors, losses
from fxpar.tracer import capture, hosts
from fxpar.tracer.context import MaskRule, running
from tests.repeat import thinned
from tests.tracer.helpers import check, difference, eager, ops, run

transformers = pytest.importorskip("transformers")

LLAMA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
PLAIN = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BLOOM = {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}

# name -> (class, config, options): the op's count in a graph is that of layers unless the type computes by itself
TYPES = {
    "llama": ("Llama", LLAMA),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 8}),
    "mistral": ("Mistral", LLAMA | {"sliding_window": 5}),
    "gemma2": ("Gemma2", LLAMA | {"head_dim": 8, "sliding_window": 5, "attn_implementation": "eager"}),
    "phi3": ("Phi3", LLAMA | {"pad_token_id": 0}),
    "gpt_neox": ("GPTNeoX", PLAIN),
    "gpt2": ("GPT2", GPT | NO_DROPOUT),
    "opt": ("OPT", PLAIN | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "pad_token_id": 0}),
    "falcon": ("Falcon", PLAIN),
    "bloom": ("Bloom", BLOOM),
    "biogpt": ("BioGpt", PLAIN | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
}
BY_ITSELF = {"bloom"}
TOLERANCE = {"gemma2": 1e-5}  # its eager attention computes in fp32


def build(name: str, layers: int = 1) -> torch.nn.Module:
    kind, options = TYPES[name]
    config = getattr(transformers, f"{kind}Config")(**options)
    config.num_hidden_layers = layers
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    return model.double().train()


def tokens(T: int, lengths: list[int] | None = None, B: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 61, (B, T))
    batch = {"input_ids": ids}
    if lengths is not None:
        batch["position_ids"] = torch.cat([torch.arange(n) for n in lengths]).expand(B, T).clone()
    batch["labels"] = losses.next_token_labels(ids, position_ids=batch.get("position_ids"))
    return batch


def attention_nodes(graph):
    return graph.gm.graph.find_nodes(op="call_function", target=torch.ops.fxpar.attention.default)


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


@pytest.mark.parametrize("name", thinned(["llama", "mistral", "gemma2", "gpt2", "opt", "falcon"], ["opt", "falcon"]))
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


@pytest.mark.parametrize("hidden", [slice(0, 5), slice(11, 16), slice(4, 8)])
def test_padding_sees_the_tokens_and_may_have_a_loss(hidden):
    model, batch = build("llama"), tokens(16)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, hidden] = 0
    batch["attention_mask"] = mask
    graph = check(model, losses.causal_lm, [batch])
    assert all(node.args[4] is not None and node.args[5] for node in attention_nodes(graph))


def test_padding_in_a_bidirectional_model():
    config = transformers.BertConfig(**PLAIN | {"num_hidden_layers": 1}, hidden_dropout_prob=0.0)
    config.attention_probs_dropout_prob = 0.0
    batch = tokens(12)
    batch["attention_mask"] = torch.ones(2, 12, dtype=torch.long)
    batch["attention_mask"][0, 9:] = 0
    check(transformers.BertForMaskedLM(config).double().train(), losses.causal_lm, [batch])


def test_beside_a_mask_positions_make_no_documents():
    batch = tokens(12, [7, 5])
    batch["attention_mask"] = torch.ones(2, 12, dtype=torch.long)
    check(build("llama"), losses.causal_lm, [batch])


class Masking(transformers.LlamaForCausalLM):
    """Makes its masks by itself."""

    def __init__(self, padding=None, change=None, late=None, **options):
        super().__init__(transformers.LlamaConfig(**LLAMA | {"num_hidden_layers": 1}))
        self.padding, self.change, self.late, self.options = padding, change, late, options
        self.register_buffer("kept", torch.arange(64) >= 2)

    def forward(self, input_ids):
        embedded = self.model.embed_tokens(input_ids)
        padding = None if self.padding is None else self.padding(self, input_ids)
        mask = transformers.masking_utils.create_causal_mask(
            self.config, embedded, padding, None, allow_is_causal_skip=False, **self.options
        )
        if self.change is not None:
            self.change(mask)
        if self.late is not None:
            self.late(padding)
        return self.lm_head(self.model(inputs_embeds=embedded, attention_mask=mask).last_hidden_state)


def first_hidden(model, ids):
    mask = torch.ones_like(ids)
    mask.view(-1)[1] = 0
    return mask.bool()


PADDINGS = {
    "ones": lambda model, ids: torch.ones_like(ids),
    "of a buffer": lambda model, ids: model.kept[: ids.shape[1]].expand(ids.shape),
    "of positions": lambda model, ids: (torch.arange(ids.shape[1]) >= 2).expand(ids.shape),
    "written": first_hidden,
    "halves": lambda model, ids: torch.full(ids.shape, 0.5).long(),
}


@pytest.mark.parametrize("name", PADDINGS)
def test_a_mask_that_the_model_makes_is_left_out_only_if_it_hides_nothing(name):
    model = Masking(PADDINGS[name]).double()
    graph = check(model, losses.causal_lm, [tokens(12)])
    assert all((node.args[4] is None) == (name == "ones") for node in attention_nodes(graph))


CHANGES = {
    "whole": lambda mask: mask.logical_or_(torch.arange(mask.shape[-1]) < 3),
    "part": lambda mask: mask[..., :3].fill_(True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_mask_that_the_model_writes_to_is_used_as_it_is(name):
    """Such as a prefix that all tokens see."""
    graph = check(Masking(change=CHANGES[name]).double(), losses.causal_lm, [tokens(12, B=1)])
    assert all(node.args[4] is not None and not node.args[5] for node in attention_nodes(graph))


def test_padding_that_is_written_to_after_the_mask_was_made():
    """The mask was made of what the padding was before."""
    model = Masking(first_hidden, late=lambda padding: padding.fill_(False)).double()
    graph = check(model, losses.causal_lm, [tokens(12)])
    assert all(not node.args[5] for node in attention_nodes(graph))


def test_documents_that_are_written_to_after_the_mask_was_made():
    from transformers import masking_utils as masks

    class Documents(Masking):
        def forward(self, input_ids):
            documents = (torch.arange(input_ids.shape[1]) < 5).expand(input_ids.shape).clone()
            self.options = {"and_mask_function": masks.packed_sequence_mask_function(documents)}
            self.change = lambda mask: documents.fill_(True)
            return super().forward(input_ids)

    check(Documents().double(), losses.causal_lm, [tokens(12)])


class Attending(transformers.LlamaForCausalLM):
    """Calls the attention interface of transformers by itself, without a mask."""

    def __init__(self, queries=None, **options):
        super().__init__(transformers.LlamaConfig(**LLAMA | {"num_hidden_layers": 1}))
        self.queries, self.options = queries, options

    def forward(self, input_ids):
        x = self.model.embed_tokens(input_ids)
        heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
        attention = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        options = {name: give(heads) for name, give in self.options.items()}
        found, _ = attention(self, heads[:, :, : self.queries], heads, heads, None, **options)
        return self.lm_head(x + found.flatten(2))


ATTENDING = {
    "one query sees all keys": Attending(1),
    "a window is the mask's business": Attending(sliding_window=lambda heads: 3),
    "numbers that change nothing": Attending(position_embeddings=lambda heads: heads),
}


@pytest.mark.parametrize("name", ATTENDING)
def test_attention_without_a_mask_is_that_of_torch(name):
    check(ATTENDING[name].double(), losses.causal_lm, [tokens(12), tokens(17)])


@pytest.mark.parametrize("sinks", [lambda heads: heads.sum(-1), lambda heads: 2.0])
def test_numbers_that_some_attention_computes_with_are_an_error(sinks):
    with pytest.raises(errors.UnsupportedOpError, match="attention with 'sinks' cannot be captured"):
        capture(Attending(sinks=sinks).double(), losses.causal_lm, tokens(8))


def test_prepared_mask_is_used_as_it_is():
    model, batch = build("llama"), tokens(8)
    batch["attention_mask"] = torch.rand(2, 1, 8, 8).gt(0.3) | torch.eye(8, dtype=torch.bool)
    graph = check(model, losses.causal_lm, [batch])
    assert all(node.args[4] is not None and not node.args[5] for node in attention_nodes(graph))


def test_a_part_of_a_model_that_adds_its_mask_to_the_scores():
    """Padding stays hidden in the encoder of an eager model; its decoder calls the attention interface."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BigBirdPegasusConfig(vocab_size=61, max_position_embeddings=64, **sizes, **heads)
    config.attention_type, config._attn_implementation = "original_full", "eager"
    model = transformers.BigBirdPegasusForConditionalGeneration(config).double().eval()

    def loss(model, batch):
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
        return losses.cross_entropy_sum(model(**inputs, decoder_input_ids=batch["labels"]).logits, batch["labels"])

    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 8:] = 0
    batch = {"input_ids": torch.randint(61, (2, 12)), "attention_mask": mask, "labels": torch.randint(61, (2, 5))}
    check(model, loss, [batch], 1e-5)  # eager attention computes in fp32


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


def test_what_builders_of_masks_say():
    """Releases of transformers put a mask together in different ways: 5.23 in one call, 5.24 in two."""
    from transformers import masking_utils as masks

    ids, more, positions = torch.tensor([[1, 1, 2]]), torch.tensor([[1, 2, 2]]), torch.tensor([[0, 1, 0]])
    with hosts._described_masks():
        within = masks.packed_sequence_mask_function(ids)
        windowed = masks.sliding_window_causal_mask_function(5)
        packed = masks.and_masks(masks.remap_positions_for_packed_sequence(windowed, positions), within)
        assert hosts._rule_of(packed) == MaskRule(True, 5, documents=ids, positions=positions)
        assert hosts._rule_of(masks.and_masks(masks.causal_mask_function, within)) == MaskRule(True, documents=ids)
        unknown = masks.or_masks(windowed, masks.causal_mask_function)
        for meaningless in (
            unknown,
            masks.and_masks(unknown, within),
            masks.and_masks(within, unknown),
            masks.and_masks(windowed, masks.causal_mask_function),
            masks.and_masks(packed, masks.packed_sequence_mask_function(more)),
            masks.and_masks(windowed, within, within),
        ):
            assert hosts._rule_of(meaningless) is None
    assert hosts._rule_of(masks.and_masks(masks.causal_mask_function, within)) is None


@pytest.mark.parametrize("restarting", [True, False])
def test_chunks_of_documents_are_known_by_their_positions(restarting):
    """Chunks of three tokens, counted within documents of four and two, or along the row as before 5.23."""
    from transformers import masking_utils as masks

    ids, positions = torch.tensor([[1, 1, 1, 1, 2, 2]]), torch.tensor([[0, 1, 2, 3, 0, 1]])
    rules = []
    with hosts._described_masks(), running(SimpleNamespace(add_mask=lambda mask, rule: rules.append(rule))):
        function = masks.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.long))
        if restarting:
            function = masks.remap_positions_for_packed_sequence(function, positions)
        function = masks.and_masks(function, masks.packed_sequence_mask_function(ids))
        dense = hosts.mask_forward(1, 6, 6, mask_function=function)
    assert len(rules) == restarting
    if restarting:
        within = rules[0].documents[:, :, None] == rules[0].documents[:, None, :]
        assert torch.equal(dense[0], within & torch.ones(6, 6).tril().bool())


def test_a_builder_that_a_release_lacks_costs_knowledge_only(monkeypatch):
    """The mask stays in the graph as the model makes it, and the numbers are the same."""
    from transformers import masking_utils as masks

    monkeypatch.setattr(hosts, "_rule_of", lambda function: None)
    monkeypatch.delattr(masks, "chunked_causal_mask_function")
    graph = check(build("llama"), losses.causal_lm, [tokens(16), tokens(23)])
    assert all(node.args[4] is not None and not node.args[5] for node in attention_nodes(graph))


def test_meta_device_allocates_nothing():
    options = LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256, "num_attention_heads": 64}
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


def test_attention_sinks_are_an_error():
    config = transformers.GptOssConfig(**LLAMA, head_dim=8, num_local_experts=2)
    model = transformers.GptOssForCausalLM(config)
    with pytest.raises(errors.UnsupportedOpError, match=r"s_aux.*layers\.0\.self_attn.*modeling_gpt_oss\.py"):
        capture(model, losses.causal_lm, tokens(8))
