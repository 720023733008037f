"""What `annotate` does where a model is not a plain Llama: overrides, fused weights, odd heads, unknown ops."""

from __future__ import annotations

import functools
import itertools
import warnings

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.annotate import AnnotateOnce, annotate, driver
from fxpar.annotate.driver import annotate_and_search, combine, search_placements
from fxpar.annotate.solve import _solved
from fxpar.checking import check
from fxpar.errors import FxparWarning, NoExpertsError, NotYetError, OverrideError
from fxpar.ir.dist_config import DistConfig, R, Shard
from fxpar.ir.graph import TensorMeta, dim_symbol
from fxpar.ir.mesh import Mesh
from fxpar.ir.node_meta import dists_of
from fxpar.ir.printer import format_graph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import default_passes, lower
from fxpar.lowering.verify import verify, verify_placements
from fxpar.passes.pack_documents import pack_documents
from fxpar.rules.option import replicated
from tests.captured import Captured, fused, gpt, llama, squared, take, vectors
from tests.repeat import crossed, thinned


def stored(captured: Captured, strategy: str, **overrides: str) -> dict[str, str]:
    """How each parameter is stored, such as `[32@tp, 16]`."""
    program = lower(captured.graph, Strategy.parse(strategy, overrides=overrides))
    return {
        info.fqn: place.dist.describe(info.meta.shape).removeprefix("f64")
        for info, place in zip(program.inputs, program.stored_inputs, strict=True)
        if info.kind == "param"
    }


# --------------------------------------------------------------------------------------------------- overrides
@pytest.mark.parametrize(
    ("placement", "expected"), [("S(0)@tp", "[32@tp, 48]"), ("S(1)@tp", "[32, 48@tp]"), ("R@tp", "[32, 48]")]
)
def test_override_wins(placement, expected):
    found = stored(llama(layers=2), "tp2", **{"*.down_proj.weight": placement})
    assert {found[f"layers.{i}.ffn.down_proj.weight"] for i in (0, 1)} == {expected}


PATTERNS = ["*.down_proj.weight", "*.q_proj.*", "*norm.weight", "*", "head.weight"]


@pytest.mark.parametrize(("pattern", "placement"), crossed(PATTERNS, ["S(0)@tp", "S(1)@tp", "R@tp"]))
def test_overridden_strategies_stay_exact(pattern, placement):
    captured = llama(layers=1)
    if ("norm" in pattern and placement == "S(1)@tp") or (pattern == "*" and placement != "R@tp"):
        return  # a norm's weight has one dim
    strategy = Strategy.parse("tp3", overrides={pattern: placement})
    (result,) = check(captured.graph, [strategy], captured.params, captured.buffers, captured.batches)
    assert result.ok, result


def test_first_matching_override_wins():
    found = stored(llama(), "tp2", **{"head.*": "S(1)@tp", "*.weight": "R@tp"})
    assert found["head.weight"] == "[97, 32@tp]"
    assert found["embedding.weight"] == "[97, 32]"


def test_override_of_a_tied_weight_by_either_name():
    for name in ("head.weight", "embedding.weight"):
        found = stored(llama(tied=True), "tp2", **{name: "S(1)@tp"})
        assert found["embedding.weight"] == "[97, 32@tp]"


def test_override_of_one_layer_is_not_another_layers():
    """Or it is refused: repeated layers are solved as one."""
    for layer in (0, 1):
        try:
            found = stored(llama(layers=2), "tp2", **{f"layers.{layer}.ffn.down_proj.weight": "R@tp"})
        except OverrideError:
            continue
        assert found[f"layers.{layer}.ffn.down_proj.weight"] == "[32, 48]"
        assert found[f"layers.{1 - layer}.ffn.down_proj.weight"] == "[32, 48@tp]"


def test_override_typo_names_the_nearest_parameter():
    with pytest.raises(OverrideError, match=r"'head.wieght': matches no parameter; did you mean 'head.weight'\?"):
        stored(llama(), "tp2", **{"head.wieght": "R@tp"})
    with pytest.raises(OverrideError, match=r"matches no parameter; did you mean '\*.up_proj.weight'\?"):
        stored(llama(layers=1), "tp2", **{"*.up_prj.weight": "R@tp"})
    with pytest.raises(OverrideError, match=r"'zzz': matches no parameter. Globs run over parameter FQNs"):
        stored(llama(), "tp2", zzz="R@tp")


def test_override_of_a_dim_that_is_not_there():
    with pytest.raises(OverrideError, match=r"S\(1\) names dim 1, but parameter 'norm.weight' has 1 dims"):
        stored(llama(), "tp2", **{"norm.weight": "S(1)@tp"})


def test_overrides_are_checked_without_a_tensor_axis():
    with pytest.raises(OverrideError, match="matches no parameter"):
        stored(llama(), "dp2", **{"head.wieght": "R@tp"})


# ----------------------------------------------------------------------------------------------- fused weights
FUSED = {
    # how, heads, key-value heads: sections of the fused weight
    ("split", 4, 4): "*3",
    ("chunk", 4, 4): "*3",
    ("slice", 4, 4): "*3",
    ("view", 4, 4): "*3",
    ("split", 4, 2): "(2:1:1)",
    ("slice", 8, 2): "(4:1:1)",
}


OFTEN = [("chunk", 4, 4), ("view", 4, 4), ("split", 4, 2), ("slice", 8, 2)]  # each way to cut once


@pytest.mark.parametrize(("how", "heads", "kv_heads"), thinned(FUSED, OFTEN), ids=str)
def test_fused_projections_are_cut_part_by_part(how, heads, kv_heads):
    found = stored(fused(how, heads, kv_heads), "tp2")
    rows = (heads + 2 * kv_heads) * 4
    assert found["qkv.weight"] == f"[{rows}@tp{FUSED[how, heads, kv_heads]}, 16]"
    assert found["qkv.bias"] == f"[{rows}@tp{FUSED[how, heads, kv_heads]}]"
    assert found["gate_up.weight"] == "[48@tp*2, 16]"
    assert found["down.weight"] == "[16, 24@tp]"


@pytest.mark.parametrize(("how", "heads", "kv_heads"), thinned(FUSED, OFTEN), ids=str)
def test_fused_projections_cost_no_extra_traffic(how, heads, kv_heads):
    """One all-reduce behind the embedding, the attention and the feed-forward, one for each of their inputs'
    gradients.
    """
    moved = [c for c in lower(fused(how, heads, kv_heads).graph, "tp2").communications() if 16 in c.sent.shape]
    assert [c.kind for c in moved if not c.backward] == ["all_reduce"] * 3
    assert [c.kind for c in moved if c.backward][:2] == ["all_reduce"] * 2
    assert len(moved) == 6  # the last one may sum up the embedding's gradient instead of the tokens'


EXACT = [("view", 4, 4), ("split", 4, 2), ("slice", 8, 2), ("slice", 6, 3), ("split", 6, 2), ("split", 5, 1)]


EXACT_OFTEN = [  # heads that divide, key-value heads that do not, no heads that do
    (("split", 4, 2), "tp2+sp"),
    (("slice", 8, 2), "cp2.tp2"),
    (("view", 4, 4), "tp3"),
    (("split", 5, 1), "cp2.tp2"),
]


@pytest.mark.parametrize(
    ("model", "strategy"), thinned(itertools.product(EXACT, ["tp2+sp", "tp3", "cp2.tp2"]), EXACT_OFTEN), ids=str
)
def test_fused_projections_are_exact(model, strategy):
    result = fused(*model).check(strategy)
    assert result.ok, result


# -------------------------------------------------------------------------------------- heads that do not divide
def test_groups_of_heads_are_cut_where_key_value_heads_do_not_divide():
    """Two key-value heads on four ranks: one of the four query heads each, each key-value head on two."""
    program = lower(llama().graph, "tp4")
    assert not program.notes
    found = stored(llama(), "tp4")
    assert found["layers.0.attention.q_proj.weight"] == "[32@tp, 32]"


@pytest.mark.parametrize(("strategy", "axis"), [("tp3", "tp"), ("cp3", "cp")])
def test_odd_heads_make_a_note(strategy, axis):
    program = lower(gpt().graph, strategy)
    (note,) = program.notes
    assert note == (
        f"{axis} does not shard the attention of layers.*.attention: 4 query and 4 key-value heads are not divisible "
        f"by {axis}=3, so every {axis} rank runs all of them"
    )


class WrittenOut(nn.Module):
    """Attention of three heads of two, without an operator for it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(6, 6, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (3, 2)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return self.out((torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2))


def test_odd_heads_of_attention_that_is_written_out_make_a_note():
    model, values = nn.Sequential(WrittenOut()), torch.randn(1, 8, 6)
    graph = fxpar.capture(model, squared, {"x": values, "y": values}, dynamic={"x": {1: "T"}, "y": {1: "T"}})
    (note,) = lower(graph, "tp2").notes
    assert note == (
        "tp does not shard the attention of 0: 3 heads are not divisible by tp=2, so every tp rank runs all of them"
    )
    assert lower(graph, "tp3").notes == ()  # a head on each
    assert lower(graph, "cp2").notes == ()  # the rows of the scores are sharded


def test_an_axis_that_shards_nothing_makes_a_note():
    heads, params = lower(gpt().graph, "tp99").notes
    assert "by tp=99, so every tp rank runs all of them" in heads
    assert params == (
        "tp shards no parameter: no parameter has a dim that 99 ranks can share, so every tp rank holds all of them "
        "and does all the work"
    )
    whole = Strategy.parse("tp2", overrides={"*": "R@tp"})
    assert lower(gpt().graph, whole).notes[-1].startswith("tp shards no parameter, so every tp rank holds")


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("dp2+sp", "sp has no effect: it shards tokens over the ranks of tp, and there is no tp"),
        ("tp2+zero1", "zero1 has no effect: it shards what several replicas hold, and there is one (no dp, no cp)"),
        ("dp2.tp2+sp+zero1", None),
        ("cp2+zero3", None),
    ],
)
def test_a_flag_without_effect_makes_a_note(strategy, said):
    assert annotate(llama().graph, Strategy.parse(strategy)).notes == ([said] if said else [])


def test_stages_say_it_once():
    assert len(lower(gpt().graph, "pp2.tp3").notes) == 1


def test_heads_that_divide_make_no_note():
    assert lower(gpt().graph, "tp2").notes == ()
    assert lower(gpt().graph, "cp4").notes == ()


# ------------------------------------------------------------------------------------------- ops without a rule
class Scan(nn.Module):
    """`cummax` has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cummax(self.into(x), 1).values)


@functools.cache
def scan() -> Captured:
    torch.manual_seed(0)
    return take(Scan(), squared, vectors(6, 4, 12, 24))


@pytest.mark.parametrize("strategy", ["tp2", "tp3", "cp2", "dp2.tp2", "cp2.tp2"])
def test_an_op_without_a_rule_is_named_and_exact(strategy):
    named = r"op aten.cummax.default \(1x, first at .*test_driver.py:\d+\) has no sharding rule"
    with pytest.warns(FxparWarning, match=named):
        result = scan().check(strategy)
    assert result.ok, result
    assert any("aten.cummax.default" in note and "runs replicated" in note for note in result.notes)


def test_no_warning_without_a_tensor_or_context_axis():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lower(scan().graph, "dp2+zero3")


# ------------------------------------------------------------------------------------------------------- others
def test_no_experts():
    with pytest.raises(NoExpertsError, match="ep cuts experts, and model 'Llama' has none"):
        annotate(pack_documents(llama().graph), Strategy.parse("dp2.ep2"))
    annotate(llama().graph, Strategy.parse("dp2.ep1.pp1"))


def test_stages_are_annotated_one_by_one():
    """A graph of the whole model has no mesh under pp."""
    with pytest.raises(NotYetError, match=r"'dp2\.pp2' .* Cut it .*: fxpar\.lowering\.pipeline\.lower_pipeline"):
        annotate(llama().graph, Strategy.parse("dp2.pp2"))


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "tp3", "cp2", "cp2.tp2+sp", "dp2.cp2.tp2+sp+zero3"])
def test_annotations_type_check(strategy):
    graph = annotate(llama().graph, Strategy.parse(strategy))
    verify(graph, "annotate")
    verify_placements(graph, "annotate", resharded=False)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            assert len(node.meta["dist"].local_shape(node.meta["tensor"].shape)) == len(node.meta["tensor"].shape)
        elif node.meta.get("tensor") is not None:
            assert "dist" in node.meta, node


def test_annotate_leaves_the_logical_graph_alone():
    graph = llama().graph
    before = [(n.name, n.op, str(n.args), set(n.meta)) for n in graph.gm.graph.nodes]
    annotate(graph, Strategy.parse("cp2.tp2+sp"))
    assert [(n.name, n.op, str(n.args), set(n.meta)) for n in graph.gm.graph.nodes] == before


def test_token_dims_must_divide_by_what_cuts_them():
    def divisors(strategy: str) -> dict[str, int]:
        return annotate(llama().graph, Strategy.parse(strategy)).divisors

    assert divisors("dp2.cp3.tp2")["T"] == 3
    assert divisors("cp3.tp2+sp")["T"] == 6
    assert divisors("tp4+sp")["T"] == 4
    assert divisors("tp4").get("T", 1) == 1


def test_context_cuts_tokens_outside_of_tensor():
    """A cp rank holds a run of tokens; on weights tp comes first."""
    mesh, token = Mesh((("cp", 2), ("tp", 2))), dim_symbol("T")
    base = DistConfig.replicated(mesh, 1)
    both = {"tp": Shard(0), "cp": Shard(0)}
    roles = {"tp": "tp", "cp": "cp"}
    tokens = combine(base, TensorMeta((token,), torch.int64), both, token, roles)
    heads = combine(base, TensorMeta((8,), torch.int64), both, token, roles)
    assert [e.axis for e in tokens.dims[0]] == ["cp", "tp"]
    assert [e.axis for e in heads.dims[0]] == ["tp", "cp"]
    in_bins = combine(base, TensorMeta((token,), torch.int64), both, token, roles, ["tp"])
    assert [e.axis for e in in_bins.dims[0]] == ["tp", "cp"]
    assert combine(base, TensorMeta((8,), torch.int64), {"tp": R}, token, roles) == base


@pytest.mark.parametrize(("how", "kv_heads"), [("split", 2), ("chunk", 4), ("view", 4)])
def test_parts_of_an_activation_allocate_nothing(how, kv_heads):
    """Under sequence parallelism an activation that is whole on every rank costs its bytes, a view of it nothing."""
    _, (search,) = annotate_and_search(fused(how, 4, kv_heads).graph, Strategy.parse("tp2+sp"))
    parts = [entry for entry in search.problem.classes if len(entry.view.outputs) > 1 and entry.view.target.is_view]
    assert len(parts) == 2
    assert all(search.policy.node_cost(search.problem, entry, replicated(entry.view)) == 0 for entry in parts)


def test_strategies_with_the_same_degree_of_an_axis_are_solved_once():
    _solved.cache_clear()
    first = annotate(llama().graph, Strategy.parse("tp2"))
    before = _solved.cache_info()
    second = annotate(llama().graph, Strategy.parse("dp2.tp2"))
    after = _solved.cache_info()
    assert (after.hits - before.hits, after.misses - before.misses) == (1, 0)
    for one, other in zip(first.graph.nodes, second.graph.nodes, strict=True):
        assert [str(dist) for dist in dists_of(one)] == [str(dist) for dist in dists_of(other)]
    annotate(llama().graph, Strategy.parse("tp2+sp"))
    assert _solved.cache_info().misses == after.misses + 1


# ----------------------------------------------------------------------------------------------- once for several
def test_one_search_is_for_all_that_saves_memory(monkeypatch):
    """The programs are those of a search for each."""
    graph, searched = llama().graph, []
    monkeypatch.setattr(driver, "search_placements", lambda g: (searched.append(g.strategy), search_placements(g))[1])
    ladder = [AnnotateOnce(), *default_passes(for_store=True)[1:]]
    names = ("dp2.tp2+sp", "dp2.tp2+sp+zero3+remat(selective)", "dp2.cp2")
    found = [lower(graph, name, passes=ladder) for name in names]
    assert [str(one) for one in searched] == ["dp2.tp2+sp", "dp2.cp2"]
    for name, program in zip(names, found, strict=True):
        want = lower(graph, name, for_store=True)
        assert format_graph(program) == format_graph(want)
        assert (program.divisors, program.notes) == (want.divisors, want.notes)
    ladder = [AnnotateOnce(), *default_passes(for_store=True)[1:]]
    for name in ("dp2.tp2", "dp2.tp2+zero3"):  # what is warned of belongs to both
        with pytest.warns(FxparWarning, match="has no sharding rule"):
            lower(scan().graph, name, passes=ladder)
