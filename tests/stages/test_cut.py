"""`cut_stages`: the stages run in order have the bits of the graph that was cut; bad cuts are told."""

from __future__ import annotations

import random
import re

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fxpar import losses
from fxpar.errors import NotAChainError, StageCountError, UnknownCutError
from fxpar.stages import StagedGraph, cut_stages
from tests.captured import squared, tokens, vectors
from tests.repeat import examples, thinned
from tests.stages.models import Model, loaded, odd, random_model, take
from tests.stages.running import pipeline, runners_of, same, whole

MODELS = {
    "llama": lambda: loaded("llama", layers=3),
    "gpt, tied, dropout": lambda: loaded("gpt", layers=2, dropout=0.25),
    "vit": lambda: loaded("vit", layers=4),
    "mlp": lambda: loaded("mlp", layers=4),
    "hf:llama, tied": lambda: loaded("hf:llama", num_hidden_layers=3, tie_word_embeddings=True),
    "hf:qwen3": lambda: loaded("hf:qwen3", num_hidden_layers=4),
    "skips": lambda: odd("skips"),
    "norms": lambda: odd("norms"),
    "counted": lambda: odd("counted"),
    "recomputed": lambda: odd("recomputed"),
}
STAGES = {"llama": (1, 2, 3), "gpt, tied, dropout": (2,), "hf:llama, tied": (2, 3), "counted": (2, 3)}


def check(model: Model, staged: StagedGraph, micro_batches: int = 2) -> None:
    """Bit for bit, with whole and with halved backwards, over micro-batches of different lengths."""
    runners = runners_of(staged)
    for i in range(micro_batches):
        tables = model.tables(i)
        truth = whole(model.graph, tables)
        for halves in (False, True):
            found = pipeline(staged, runners, tables, halves=halves)
            assert same(found, truth) == []


@pytest.mark.parametrize("name", thinned(MODELS, [name for name in MODELS if name != "vit" and ":" not in name]))
def test_bits(name):
    model = MODELS[name]()
    for stages in STAGES.get(name, (2, 4)):
        staged = cut_stages(model.graph, stages)
        assert [stage.index for stage in staged.stages] == list(range(stages))
        check(model, staged)


def test_every_parameter_is_somewhere_once():
    model = MODELS["gpt, tied, dropout"]()
    staged = cut_stages(model.graph, 3, cuts=["layers.1", "norm"])
    (tied,) = staged.shared
    assert (tied.fqn, tied.stages, tied.terms) == ("embedding.weight", (0, 2), (2, 0))
    found = [fqn for k in range(3) for fqn in staged.params(k)]
    assert sorted(found) == sorted([*model.params, "embedding.weight"])
    for stage in staged.stages:
        gradients = [o.fqn for o in stage.outputs if o.kind == "grad"]
        assert sorted(gradients) == sorted(staged.params(stage.index))


def test_one_tensor_crosses_each_boundary():
    staged = cut_stages(MODELS["llama"]().graph, 3)
    for boundary in range(2):
        here, following = staged.stages[boundary : boundary + 2]
        (value,), (gradient,) = here.sent, here.gradients_received
        assert str(value.meta) == str(gradient.meta) == "f64[1, T, 64]"
        assert following.received == (value,)
        assert [out.fqn for out in following.outputs if out.kind == "sent_grad"] == [gradient.name]


def test_a_stage_takes_what_it_needs():
    """Token ids on the first stage, labels and scale on the last; sizes are read from what was received."""
    staged = cut_stages(MODELS["hf:llama, tied"]().graph, 3)
    kinds = [
        [i.fqn for i in stage.inputs if i.kind in ("batch", "received", "scale", "seed")] for stage in staged.stages
    ]
    received = [[c.name for c in stage.received] for stage in staged.stages]
    assert kinds == [
        ["input_ids"],
        received[1],
        ["labels", *received[2], "scale"],
    ]
    assert [o.kind for o in staged.stages[1].outputs if o.kind != "grad"] == ["sent", "sent_grad"]
    mlp = cut_stages(MODELS["mlp"]().graph, 2).stages[1]
    assert [i.fqn for i in mlp.inputs if i.kind in ("batch", "received")] == ["labels", mlp.received[0].name]


def test_summary():
    assert_expected_inline(
        str(cut_stages(MODELS["hf:llama, tied"]().graph, 2)),
        """\
hf:llama in 2 stages
  stage 0: 19 parameters, 66% of the FLOPs
    -> %add_14 f64[1, T, 64]
    <- %add_33 f64[1, T, 64]
  stage 1 from model.layers.2: 11 parameters, 34% of the FLOPs
  model.embed_tokens.weight is on stages 0, 1""",
    )


def test_the_model_is_left_alone():
    model = MODELS["gpt, tied, dropout"]()
    before = str(model.graph.gm.graph)
    cut_stages(model.graph, 2)
    assert str(model.graph.gm.graph) == before


# ------------------------------------------------------------------------------------------------ what crosses
def test_values_are_passed_along():
    """A U: what the outermost layers share goes over all boundaries, and so do its gradients."""
    model = odd("skips")
    staged = cut_stages(model.graph, 6)
    assert [len(staged.stages[k].sent) for k in range(5)] == [2, 3, 4, 3, 2]
    assert [len(staged.stages[k].gradients_received) for k in range(5)] == [2, 3, 4, 3, 2]
    first = staged.stages[0].sent[0]
    assert all(first in staged.stages[k].sent for k in range(5))
    check(model, staged)


def test_encoder_and_decoder():
    """The encoder's result goes to all layers of the decoder; the table is read on several stages."""
    model = odd("seq2seq")
    staged = cut_stages(model.graph, 3, cuts=["encoder.1", "decoder.2"])
    # What goes to the last layer, not what that puts together from the two.
    assert [str(c.meta) for c in staged.stages[1].sent] == ["f64[2, T, 16]"] * 2
    (table,) = staged.shared
    assert table.stages == (0, 1, 2)
    tables = model.tables(0)
    truth, found = whole(model.graph, tables), pipeline(staged, runners_of(staged), tables)
    assert set(same(found, truth)) <= {table.fqn}
    torch.testing.assert_close(found.grads[table.fqn], truth.grads[table.fqn], rtol=1e-13, atol=1e-13)


def test_gradients_cross_where_they_are_smallest():
    """One number per row, although the layer behind the cut sends each of them eight times."""
    model = odd("means")
    staged = cut_stages(model.graph, 2, cuts=["layers.1"])
    (value,), (gradient,) = staged.stages[0].sent, staged.stages[0].gradients_received
    assert (str(value.meta), str(gradient.meta)) == ("f64[B, 8]", "f64[B, 1]")
    check(model, staged)


def test_a_cut_inside_a_layer():
    model = MODELS["llama"]()
    staged = cut_stages(model.graph, 3, cuts=["layers.1.ffn.down_proj", "layers.2.attention.o_proj"])
    assert len(staged.stages[0].sent) == 2  # the residual stream and the activation
    assert "layers.1.ffn.up_proj.weight" in staged.params(0)
    assert "layers.1.ffn.down_proj.weight" in staged.params(1)
    check(model, staged)


def test_cuts_between_other_modules():
    model = MODELS["gpt, tied, dropout"]()
    staged = cut_stages(model.graph, 3, cuts=["layers.0", "norm"])
    assert staged.params(0) == ("embedding.weight", "positions.weight")
    assert staged.params(2) == ("embedding.weight", "norm.weight", "norm.bias")
    check(model, staged)


@settings(max_examples=examples(3))
@given(seed=st.integers(0, 10_000), stages=st.integers(2, 4))
@pytest.mark.filterwarnings("ignore::fxpar.errors.FxparWarning")  # some weights of random models do nothing
def test_random_models(seed, stages):
    """Layers that read any earlier values and weights of one another, with odd widths, cut anywhere."""
    model = random_model(seed)
    ran = {n.meta["fqn"] for n in model.graph.gm.graph.nodes if n.op == "call_function"}
    steps = [f"steps.{i}" for i in range(8) if f"steps.{i}" in ran]
    picks = sorted(random.Random(seed).sample(range(len(steps)), min(len(steps), stages - 1)))
    try:
        staged = cut_stages(model.graph, len(picks) + 1, cuts=[steps[i] for i in picks])
    except UnknownCutError as error:
        assert "parameters runs before" in str(error) or "does not run after" in str(error)  # noqa: PT017
        return
    for stage in staged.stages:
        gradients = {o.fqn for o in stage.outputs if o.kind == "grad"}
        assert gradients <= set(staged.params(stage.index))
    shared = {p.fqn for p in staged.shared}
    runners = runners_of(staged)
    for i in range(2):
        truth = whole(model.graph, model.tables(i))
        for halves in (False, True):
            found = pipeline(staged, runners, model.tables(i), halves=halves)
            assert set(same(found, truth)) <= shared
            for fqn in shared:
                torch.testing.assert_close(found.grads[fqn], truth.grads[fqn], rtol=1e-12, atol=1e-13)


# --------------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("stages", "cuts", "error", "words"),
    [
        (4, None, StageCountError, r"4 stages need 4 layers, there are 3 \('layers.0', 'layers.1', 'layers.2'\)"),
        (0, None, StageCountError, "0 stages"),
        (3, ["layers.1"], StageCountError, "2 boundaries, 1 cuts are given"),
        (2, ["layer.2"], UnknownCutError, r"no module 'layer.2' runs .*did you mean 'layers.\d"),
        (2, ["layers.9"], UnknownCutError, "for example 'layers.0'"),
        (2, [""], UnknownCutError, "no module ''"),
        (2, ["embedding"], UnknownCutError, "nothing with parameters runs before 'embedding'"),
        (3, ["layers.2", "layers.1"], UnknownCutError, "'layers.1' does not run after 'layers.2'"),
        (3, ["layers.1", "layers.1.attention_norm"], UnknownCutError, "does not run after"),
    ],
)
def test_bad_cuts(stages, cuts, error, words):
    with pytest.raises(error, match=words):
        cut_stages(MODELS["llama"]().graph, stages, cuts=cuts)


def test_no_more_than_four_layers_are_named():
    with pytest.raises(StageCountError, match=r"8 stages need 8 layers, there are 6 \('layers.0', .*'layers.3', ...\)"):
        cut_stages(odd("skips").graph, 8)


def test_layers_that_run_twice():
    """Each layer needs what the last one made in the first round."""
    graph = odd("twice").graph
    with pytest.raises(
        NotAChainError, match=r"'layers.0' runs before and after the cut at 'layers.1'.*%\w+ f64\[B, 8\]"
    ):
        cut_stages(graph, 2, cuts=["layers.1"])
    with pytest.raises(StageCountError, match="2 stages need 2 layers, there are 1"):
        cut_stages(graph, 2)
    check(odd("twice"), cut_stages(graph, 2, cuts=["layers.0"]))
    with pytest.raises(NotAChainError, match=r"Cuts that work are for example 'layers.0'"):
        cut_stages(graph, 2, cuts=["layers.2"])


class Named(nn.Module):
    """No module has a number."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.front = nn.Embedding(31, 8), nn.Sequential()
        self.front.first, self.front.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.back, self.head = nn.Linear(8, 8), nn.Linear(8, 31)

    def forward(self, input_ids):
        return self.head(self.back(self.front(self.embedding(input_ids)).tanh()).tanh())


def test_a_model_without_layers_is_told_where_it_can_be_cut():
    named = take(Named().double(), losses.causal_lm, tokens(31, 5, 8))
    for stages, cuts in ((2, ["head"]), (3, ["back", "head"]), (5, ["front.first", "front.second", "back", "head"])):
        words = rf"there are 0\. Numbered modules count .*, for example \+cut\({re.escape('|'.join(cuts))}\)$"
        with pytest.raises(StageCountError, match=words):
            cut_stages(named.graph, stages)
        check(named, cut_stages(named.graph, stages, cuts=cuts))
    with pytest.raises(StageCountError, match=r"Use fewer stages \(a smaller pp\)$"):
        cut_stages(named.graph, 6)
    with pytest.raises(UnknownCutError, match=r"Cuts that work are for example 'head'$"):
        cut_stages(named.graph, 2, cuts=["tail"])


def test_a_buffer_that_changes_has_one_stage():
    graph = odd("counted late").graph
    with pytest.raises(NotAChainError, match=r"buffer 'average'.* stages"):
        cut_stages(graph, 2, cuts=["layers.2"])


def test_stages_are_balanced_by_time():
    """Layers with the same products; the first one also does what memory limits, which takes longer than they do."""

    class Layer(torch.nn.Module):
        def __init__(self, sines: int) -> None:
            super().__init__()
            self.into, self.sines = torch.nn.Linear(64, 64), sines

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.into(x)
            for _ in range(self.sines):
                x = torch.sin(x)
            return x

    def cuts(*sines: int) -> tuple[str, ...]:
        model = torch.nn.Sequential(*map(Layer, sines))
        graph = take(model, squared, vectors(64, 64, 5)).graph
        return cut_stages(graph, 2).cuts

    assert cuts(1, 1, 1, 1) == ("2",)
    assert cuts(9, 1, 1, 1) == ("1",)
