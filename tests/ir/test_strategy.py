"""`Strategy`: text and value say the same, and a mistake is named together with what to write instead."""

from __future__ import annotations

import ast
import json
import math
import pickle
import string
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fxpar.errors import FxparError, StrategySyntaxError, WorldSizeError
from fxpar.ir.axes import AXES, BINS, STAGES
from fxpar.ir.remat import Remat
from fxpar.ir.strategy import Strategy
from fxpar.ir.strategy_text import MOST_CHUNKS, MOST_RANKS, MOST_TOKENS, SCHEDULES, Pipeline, joined_digits

PLACEMENTS = ["S(0)@tp", "S(1)@tp", "R@tp", "S(2)", "R"]


@st.composite
def remats(draw) -> Remat | None:
    mode = draw(st.sampled_from([None, "full", "selective", "modules", "budget"]))
    if mode is None:
        return None
    names = st.text(string.ascii_lowercase, min_size=1).map(lambda name: f"*.{name}")
    globs = tuple(draw(st.lists(names, unique=True, min_size=1))) if mode == "modules" else ()
    budget = draw(st.integers(1, 10**13)) if mode == "budget" else 0
    return Remat(mode, globs, budget, draw(st.sampled_from(["auto", "keep", "redo"])))


@st.composite
def pipelines(draw, ranks: int) -> Pipeline:
    """For a pp axis of `ranks`: flags need one, and cuts one per boundary."""
    if ranks == 1:
        return Pipeline()
    schedule = draw(st.sampled_from(SCHEDULES))
    virtual = draw(st.integers(2, 9)) if schedule == "interleaved_1f1b" else 1
    boundaries = ranks * virtual - 1
    modules = st.from_regex(r"[a-z_]{1,3}(\.[0-9]{1,2}){0,2}", fullmatch=True)
    named = boundaries < 8 and draw(st.booleans())
    cuts = draw(st.lists(modules, min_size=boundaries, max_size=boundaries)) if named else []
    return Pipeline(schedule, virtual, tuple(cuts))


@st.composite
def strategies(draw) -> Strategy:
    names = draw(st.lists(st.sampled_from(AXES), unique=True, min_size=1))
    axes = tuple((name, draw(st.integers(1, 64))) for name in names)
    twice = [name for name in names if name != STAGES][:2]
    digits = tuple((name, draw(st.integers(2, 4))) for name in (*twice, twice[0])) if len(twice) == 2 else ()
    if digits and draw(st.booleans()):
        axes = joined_digits(digits)
    globs = draw(st.dictionaries(st.text(string.ascii_lowercase + ".*", min_size=1), st.sampled_from(PLACEMENTS)))
    flags = draw(st.booleans()), draw(st.integers(0, 3)), tuple(globs.items()), draw(remats())
    assume(math.prod(dict(axes).values()) <= MOST_RANKS)
    pipeline, counts = draw(pipelines(dict(axes).get("pp", 1))), st.integers(1, MOST_CHUNKS)
    chunks = {"chunks": draw(counts), "ep_chunks": draw(counts)}
    tokens = draw(st.integers(0, MOST_TOKENS))
    share = st.one_of(st.just(0.0), st.just(1.0), st.integers(1, 10**6).map(lambda share: share / 10**6))
    capacity = st.one_of(st.just(0.0), st.integers(10**6, 10**9).map(lambda capacity: capacity / 10**6))
    shares = {"offload": draw(share), "lsh": draw(share), "capacity": draw(capacity)}
    return Strategy(axes, *flags, pipeline, tokens=tokens, digits=digits, **chunks, **shares)


@given(strategies())
def test_text_round_trip(strategy):
    assert Strategy.parse(str(strategy), overrides=dict(strategy.overrides)) == strategy
    assert Strategy.parse(f"  {strategy}\n", overrides=dict(strategy.overrides)) == strategy


@given(strategies())
def test_json_round_trip(strategy):
    text = json.dumps(strategy.to_json())
    assert Strategy.from_json(text) == strategy
    assert Strategy.from_json(json.loads(text)) == strategy
    assert hash(Strategy.from_json(text)) == hash(strategy)


@given(strategies())
def test_pickle_round_trip(strategy):
    assert pickle.loads(pickle.dumps(strategy)) == strategy


@given(strategies())
def test_world_is_the_product_of_the_degrees(strategy):
    assert strategy.world == strategy.mesh.size
    strategy.check_world(strategy.world)
    with pytest.raises(WorldSizeError):
        strategy.check_world(strategy.world + 1)


def test_parts():
    strategy = Strategy.parse("dp2.cp3.tp4+sp+zero1")
    assert strategy.axes == (("dp", 2), ("cp", 3), ("tp", 4))
    assert (strategy.sp, strategy.zero, strategy.world) == (True, 1, 24)
    assert strategy.data_axes == ("dp", "cp")
    assert [strategy.degree(axis) for axis in AXES] == [2, 1, 3, 1, 4, 1, 1]
    assert str(strategy.mesh) == "dp2xcp3xtp4"


def test_rank_order_is_kept():
    first, second = Strategy.parse("tp2.dp3"), Strategy.parse("dp3.tp2")
    assert first != second
    assert first.mesh.groups(("tp",)) == [(0, 3), (1, 4), (2, 5)]
    assert second.mesh.groups(("tp",)) == [(0, 1), (2, 3), (4, 5)]


def test_an_axis_in_several_places_is_one_axis():
    strategy = Strategy.parse("dp4.tp4.dp2+zero1", world=32)
    assert (strategy.axes, strategy.replicas, strategy.data_axes) == ((("dp", 8), ("tp", 4)), 8, ("dp",))
    assert strategy.mesh.groups(("tp",))[:2] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert strategy.mesh.groups(("dp",))[0] == (0, 1, 8, 9, 16, 17, 24, 25)
    staged = Strategy.parse("dp2.pp2.tp2.dp2")
    assert (str(staged.of_stage(1)), staged.of_stage(1).mesh) == ("dp2.tp2.dp2", staged.mesh.at("pp", 1))
    # A process group has its ranks in ascending order: what is cut over both says where the others lie between.
    assert Strategy.parse("dp2.cp2.dp2+zero1").data_axes_of("head.weight") == "dp:(1)2.cp.dp:(2)2"
    assert Strategy.parse("cp2.dp4+zero1").data_axes_of("head.weight") == "cp.dp"


def test_places_go_with_the_axes():
    strategy = Strategy.parse("dp2.tp2.dp2.cp2")
    changed = {
        (("tp", 2), ("cp", 2)): "tp2.cp2",
        (("dp", 4), ("tp", 2)): "dp2.tp2.dp2",
        (("dp", 8), ("tp", 2)): "dp8.tp2",
    }
    changed |= {(("ring", 2), *strategy.axes): "ring2.dp2.tp2.dp2.cp2", (("tp", 2), ("dp", 4)): "tp2.dp4"}
    assert {axes: str(replace(strategy, axes=axes)) for axes in changed} == changed


def test_order_of_flags_does_not_matter():
    assert Strategy.parse("tp2+zero3+sp") == Strategy.parse("tp2+sp+zero3")
    assert str(Strategy.parse("tp2+zero3+sp")) == "tp2+sp+zero3"


REMATS = [
    ("remat", Remat("full"), "remat"),
    ("remat(full)", Remat("full"), "remat"),
    ("remat(none)", None, None),
    ("remat(selective)", Remat("selective"), "remat(selective)"),
    ("remat(200MB)", Remat("budget", budget_bytes=200_000_000), "remat(200MB)"),
    ("remat( 1.5 gb )", Remat("budget", budget_bytes=1_500_000_000), "remat(1500MB)"),
    ("remat(1001B)", Remat("budget", budget_bytes=1001), "remat(1001B)"),
    ("remat(layers.*.ffn)", Remat("modules", ("layers.*.ffn",)), "remat(layers.*.ffn)"),
    ("remat(*.ffn | *.o_proj)", Remat("modules", ("*.ffn", "*.o_proj")), "remat(*.ffn|*.o_proj)"),
    ("remat(keep_comm)", Remat("full", collectives="keep"), "remat(full|keep_comm)"),
    ("remat(selective|redo_comm)", Remat("selective", collectives="redo"), "remat(selective|redo_comm)"),
]


@pytest.mark.parametrize(("flag", "remat", "printed"), REMATS, ids=[flag for flag, _, _ in REMATS])
def test_recomputation(flag, remat, printed):
    strategy = Strategy.parse(f"dp2.tp2+{flag}+sp")
    assert strategy == Strategy((("dp", 2), ("tp", 2)), sp=True, remat=remat)
    assert str(strategy) == "dp2.tp2+sp" + (f"+{printed}" if printed else "")


SCHEDULED = [
    ("", Pipeline(), 4, ""),
    ("1f1b", Pipeline(), 4, ""),
    ("gpipe", Pipeline("gpipe"), 4, "+gpipe"),
    ("zb_h1", Pipeline("zb_h1"), 4, "+zb_h1"),
    ("interleaved_1f1b", Pipeline("interleaved_1f1b", 2), 8, "+interleaved_1f1b(2)"),
    ("interleaved_1f1b(3)", Pipeline("interleaved_1f1b", 3), 12, "+interleaved_1f1b(3)"),
    ("cut(a.1|b|c)", Pipeline(cuts=("a.1", "b", "c")), 4, "+cut(a.1|b|c)"),
    ("cut( a.1 | b |c )+gpipe", Pipeline("gpipe", cuts=("a.1", "b", "c")), 4, "+gpipe+cut(a.1|b|c)"),
]


@pytest.mark.parametrize(
    ("flags", "pipeline", "stages", "printed"), SCHEDULED, ids=[f or "none" for f, *_ in SCHEDULED]
)
def test_pipelines(flags, pipeline, stages, printed):
    strategy = Strategy.parse(f"dp2.pp4+zero1+{flags}" if flags else "dp2.pp4+zero1")
    assert strategy == Strategy((("dp", 2), ("pp", 4)), zero=1, pipeline=pipeline)
    assert (strategy.stages, strategy.world) == (stages, 8)
    assert str(strategy) == f"dp2.pp4+zero1{printed}"


BY_STAGE = [
    ("tp4 > tp2.rows2", 8, [(0, 1, 2, 3), (4, 5, 6, 7)]),
    ("tp2+sp+tokens(64)+zb_h1+cut(a.1|a.2)[*.x: cp2] > dp1 > cp3+zero2+remat+chunks(4)", 6, [(0, 1), (2,), (3, 4, 5)]),
    ("dp2.tp2 > tp3.dp2", 10, [(0, 1, 2, 3), (4, 5, 6, 7, 8, 9)]),
    ("cp2+zb_h1 > cp2+remat > cp4@0+sp", 4, [(0, 1), (2, 3), (0, 1, 2, 3)]),
    ("cp2@1 > cp1@0", 3, [(1, 2), (0,)]),
]


@pytest.mark.parametrize(("text", "world", "ranks"), BY_STAGE)
def test_stages_that_differ(text, world, ranks):
    strategy = Strategy.parse(text, world=world)
    assert str(strategy) == text
    assert Strategy.parse(text.replace(" > ", ">")) == strategy
    assert Strategy.from_json(strategy.to_json()) == strategy
    assert [strategy.of_stage(i).mesh.ranks for i in range(strategy.stages)] == ranks
    assert strategy.mesh.ranks == tuple(range(world))
    assert (strategy.stages, strategy.pipeline_size, strategy.degree("pp")) == (len(ranks),) * 3
    shared = sum(map(len, ranks)) > world
    assert strategy.places == (((0,), (1,), (0, 1)) if shared else ())


def test_what_stages_that_differ_have_together():
    strategy = Strategy.parse(
        "dp2.rows2.tp2+sp+gpipe > dp2.rows3+zero3 > dp2.cp4+remat+chunks(8)", overrides={"*": "R"}
    )
    assert (strategy.replicas, strategy.bins, strategy.token_parts) == (2, 6, 12)
    assert (strategy.most_zero, strategy.most("chunks"), strategy.degree("cp")) == (3, 8, 4)
    assert strategy.pipeline == Pipeline("gpipe")
    assert strategy.of_stage(1) == replace(Strategy.parse("dp2.rows3+zero3", overrides={"*": "R"}), offset=8)
    assert str(strategy.placing()) == "dp2.rows2.tp2+sp+gpipe > dp2.rows3 > dp2.cp4"


def test_what_a_stage_runs_under():
    strategy = Strategy.parse("dp2.pp2.tp4+sp+zero1+remat+zb_h1+cut(layers.3)", overrides={"*": "R"})
    assert strategy.of_stage(0) == Strategy.parse("dp2.tp4+sp+zero1+remat", overrides={"*": "R"})
    assert str(Strategy.parse("pp4").of_stage(0)) == "dp1"
    assert Strategy.parse("dp2").stages == Strategy.parse("dp2.pp1").stages == 1


@pytest.mark.parametrize(
    ("text", "replicas", "pipeline_size", "model_axes", "token_axes"),
    [
        ("dp4", 4, 1, (), ()),
        ("dp2.pp3.cp4.tp2", 2, 3, ("tp", "cp"), ("cp",)),
        ("cp2.tp2+sp", 1, 1, ("tp", "cp"), ("tp", "cp")),
        ("rows2.tp2", 1, 1, ("tp", "rows"), ("rows",)),
        ("tp2.cp1+sp", 1, 1, ("tp",), ("tp",)),
        ("tp2", 1, 1, ("tp",), ()),
        ("dp1", 1, 1, (), ()),
    ],
)
def test_what_axes_are_used_for(text, replicas, pipeline_size, model_axes, token_axes):
    strategy = Strategy.parse(text)
    assert (strategy.replicas, strategy.pipeline_size) == (replicas, pipeline_size)
    assert (strategy.model_axes, strategy.token_axes) == (model_axes, token_axes)


NAMES_AXES = {"fxpar/ir/axes.py", "fxpar/annotate/roles.py"}


def test_no_other_file_knows_axes_by_name():
    root = Path(__file__).resolve().parents[2]
    found = {
        f"{path.relative_to(root)}:{node.lineno}"
        for folder in ("fxpar", "passes", "recipes")
        for path in (root / folder).rglob("*.py")
        if str(path.relative_to(root)) not in NAMES_AXES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in AXES
        if node.value != BINS
        or not (path.parent.name == "viz" or path.name == "reading.py")  # tables, batches have rows
    }
    assert not found


def test_axes_of_degree_one_hold_no_data():
    assert Strategy.parse("dp1.cp1.tp2").data_axes == ()
    assert Strategy.parse("cp2.dp1").data_axes == ("cp",)


# ---------------------------------------------------------------------------------------------------- mistakes
SYNTAX = [
    ("tp", "'tp'", "an axis is a name and a degree"),
    ("2", "'2'", "an axis is a name and a degree"),
    ("tp2.", "''", "an axis is a name and a degree"),
    (".tp2", "''", "an axis is a name and a degree"),
    ("dp2..tp2", "''", "an axis is a name and a degree"),
    ("dp2,tp2", "'dp2,tp2'", "an axis is a name and a degree"),
    ("dp2 tp2", "'dp2 tp2'", "an axis is a name and a degree"),
    ("tp-2", "'tp-2'", "an axis is a name and a degree"),
    ("tp2.5", "'5'", "an axis is a name and a degree"),
    ("TP2", "'TP2'", "an axis is a name and a degree"),
    ("tp=2", "'tp=2'", "an axis is a name and a degree"),
    ("tp0", "'tp0'", "a degree is from 1 to 1,048,576"),
    ("dp2.tp99999999999", "'tp99999999999'", "a degree is from 1 to 1,048,576"),
    ("dp2.dp4", "'dp4'", "axis 'dp' stands twice without another one between; write dp8"),
    ("dp2.pp2.dp4", "'dp4'", "axis 'dp' stands twice without another one between; write dp8"),
    ("dp2.tp1.dp4", "'dp4'", "axis 'dp' stands twice without another one between; write dp8"),
    ("dp2.tp2.dp1", "'dp1'", "each part of an axis in several places has 2 or more; leave dp1 out"),
    ("pp2.tp2.pp2", "'pp'", "stages are blocks of neighbouring ranks wherever pp stands, so it stands once"),
    ("tp8[*.mlp: tp2.cp2.tp2]", "'tp2'", "axis 'tp' is given twice"),
    ("tpp2", "'tpp2'", "unknown axis 'tpp'; did you mean 'tp'?"),
    ("ddp2", "'ddp2'", "unknown axis 'ddp'; did you mean 'dp'?"),
    ("xyz2", "'xyz2'", "Axes are dp, pp, cp, ring, tp, rows, ep"),
    ("tp2+", "'+'", "there is no flag behind a '+'"),
    ("dp\u0662", "'dp\u0662'", "an axis is a name and a degree"),  # a digit, but none of ASCII
    (None, "'None'", "it is not text"),
    ("tp2+sq", "'sq'", "unknown flag 'sq'; did you mean 'sp'?"),
    ("dp2+ep2", "'ep2'", "ep2 is an axis, not a flag: join axes with '.', as in dp2.ep2"),
    ("tp2+zero", "'zero'", "did you mean 'zero"),
    ("tp2+zero4", "'zero4'", "did you mean 'zero"),
    ("tp2+sp+sp", "'sp'", "flag 'sp' is given twice"),
    ("tp2+zero1+zero2", "'zero2'", "one ZeRO level at a time"),
    ("tp2+zero1+zero1", "'zero1'", "one ZeRO level at a time"),
    ("sp+tp2", "'sp'", "an axis is a name and a degree"),
    ("tp2+remt", "'remt'", "unknown flag 'remt'; did you mean 'remat'?"),
    ("tp2+remat+remat(full)", "'remat(full)'", "flag 'remat' is given twice"),
    ("tp2+remat(", "'remat('", "unknown flag 'remat('; did you mean 'remat'?"),
    ("tp2+remat()", "'remat()'", "'' says nothing about recomputation. Write full, selective, a size such as 200MB"),
    ("tp2+remat(selectiv)", "'remat(selectiv)'", "did you mean 'selective'?"),
    ("tp2+remat(keep_com)", "'remat(keep_com)'", "did you mean 'keep_comm'?"),
    ("tp2+remat(full|selective)", "'remat(full|selective)'", "'full' stands alone in remat(...)"),
    ("tp2+remat(*.ffn|20MB)", "'remat(*.ffn|20MB)'", "'20MB' stands alone in remat(...)"),
    ("tp2+remat(infGB)", "'remat(infGB)'", "'infGB' is not a size"),
    ("tp2+remat(-1MB)", "'remat(-1MB)'", "'-1MB' is not a size"),
    ("dp99999999", "'dp99999999'", "99,999,999 ranks are more than 1,048,576"),
    ("tp2+remat(*.ffn|*.ffn)", "'remat(*.ffn|*.ffn)'", "a glob is given twice"),
    ("tp2+remat(full|keep_comm|redo_comm)", "'remat(full|keep_comm|redo_comm)'", "keep_comm or redo_comm, once"),
    ("tp2+remat(none|keep_comm)", "'remat(none|keep_comm)'", "says twice what to do"),
    ("tp2+remat(200)", "'remat(200)'", "'200' is not a size; units are B, kB, MB, GB, TB, such as 200MB"),
    ("tp2+remat(200MiB)", "'remat(200MiB)'", "'200MiB' is not a size"),
    ("tp2+remat(0MB)", "'remat(0MB)'", "a budget is at least 1 byte"),
    ("tp2+remat(a b)", "'remat(a b)'", "'a b' says nothing about recomputation"),
    ("tp2+offload(0)", "'offload(0)'", "'0' is not a share of what is saved; write one above 0 and up to 1"),
    ("tp2+offload(0.0)", "'offload(0.0)'", "'0.0' is not a share"),
    ("tp2+offload(1.5)", "'offload(1.5)'", "'1.5' is not a share"),
    ("tp2+offload(-0.5)", "'offload(-0.5)'", "'-0.5' is not a share"),
    ("tp2+offload(nan)", "'offload(nan)'", "'nan' is not a share"),
    ("tp2+offload()", "'offload()'", "'' is not a share"),
    ("tp2+offload(\u0661)", "'offload(\u0661)'", "is not a share"),  # a digit, but none of ASCII
    ("tp2+offload+offload", "'tp2+offload+offload'", "flag 'offload' is given twice"),
    ("tp2+lsh(0)", "'lsh(0)'", "'0' is not a share of what experts are given; write one above 0 and up to 1"),
    ("tp2+lsh(1.1)", "'lsh(1.1)'", "'1.1' is not a share"),
    ("tp2+lsh", "'lsh'", "there is no share of what experts are given; write one above 0 and up to 1, such as"),
    ("tp2+lsh(0.2)+lsh(0.2)", "'tp2+lsh(0.2)+lsh(0.2)'", "flag 'lsh' is given twice"),
    (
        "ep2+capacity",
        "'capacity'",
        "there is no capacity; write a number of 1 or more, such as capacity(1.25)",
    ),
    ("ep2+capacity(0.99)", "'capacity(0.99)'", "'0.99' is not a capacity"),
    ("ep2+capacity(2)+capacity(2)", "'ep2+capacity(2)+capacity(2)'", "flag 'capacity' is given twice"),
    ("tp2+ofload", "'ofload'", "did you mean 'offload'?"),
    ("tp2+chunks", "'chunks'", "write in how many chunks of tokens the loss runs, such as chunks(16)"),
    ("tp2+chunks(0)", "'chunks(0)'", "the loss runs in 1 to 64 chunks"),
    ("tp2+chunks(65)", "'chunks(65)'", "the loss runs in 1 to 64 chunks"),
    ("tp2+chunks(-2)", "'chunks(-2)'", "write in how many chunks"),
    ("tp2+chunks(\u0662)", "'chunks(\u0662)'", "write in how many chunks"),  # a digit, but none of ASCII
    ("tp2+chunks(2)+chunks(2)", "'tp2+chunks(2)+chunks(2)'", "flag 'chunks' is given twice"),
    ("ep2+ep_chunks", "'ep_chunks'", "write in how many chunks tokens travel to their experts, such as ep_chunks(2)"),
    ("ep2+ep_chunks(0)", "'ep_chunks(0)'", "tokens travel to their experts in 1 to 64 chunks"),
    ("tp2+tokens", "'tokens'", "write how many tokens a micro-batch has at most, such as tokens(4096)"),
    ("tp2+tokens(0)", "'tokens(0)'", "a micro-batch has from 1 to 2,147,483,647 tokens"),
    ("tp2+tokens(2)+tokens(2)", "'tp2+tokens(2)+tokens(2)'", "flag 'tokens' is given twice"),
    ("tp2[a: +tokens(2)]", "'a: +tokens(2)'", "tokens(...) and role(...) are of all modules"),
    ("tp2 > tp2+tokens(9)", "'tp2+tokens(9)'", "a schedule, cuts and tokens(...) are of all stages"),
    ("tp2+chunk(2)", "'chunk(2)'", "did you mean 'chunks'?"),
    ("pp2+1f1", "'1f1'", "unknown flag '1f1'; did you mean '1f1b'?"),
    ("pp2+gpip", "'gpip'", "did you mean 'gpipe'?"),
    ("pp2+gpipe+zb_h1", "'pp2+gpipe+zb_h1'", "a schedule is given twice"),
    ("pp2+1f1b+1f1b", "'pp2+1f1b+1f1b'", "a schedule is given twice"),
    ("pp2+gpipe(2)", "'gpipe(2)'", "only interleaved_1f1b(2) has several stages per rank"),
    ("pp2+interleaved_1f1b(1)", "'interleaved_1f1b(1)'", "needs 2 or more stages per rank; else write 1f1b"),
    ("pp2+interleaved_1f1b(0)", "'interleaved_1f1b(0)'", "needs 2 or more stages per rank"),
    ("pp2+interleaved_1f1b()", "'interleaved_1f1b()'", "did you mean 'interleaved_1f1b'?"),
    ("tp2+gpipe", "'gpipe'", "it needs a pp axis, such as pp2"),
    ("pp1+interleaved_1f1b", "'interleaved_1f1b(2)'", "it needs a pp axis, such as pp2"),
    ("dp2+cut(a)", "'cut(a)'", "it needs a pp axis, such as pp2"),
    ("pp3+cut(a)", "'cut(a)'", "3 stages have 2 cuts, not 1"),
    ("pp2+cut(a|b)", "'cut(a|b)'", "2 stages have 1 cuts, not 2"),
    ("pp2+interleaved_1f1b+cut(a)", "'cut(a)'", "4 stages have 3 cuts, not 1"),
    ("pp2+cut()", "'cut()'", "'' is not a module; write cut(layers.3|layers.6)"),
    ("pp2+cut(a.*)", "'cut(a.*)'", "'a.*' is not a module"),
    ("pp2+cut(a)+cut(b)", "'pp2+cut(a)+cut(b)'", "flag 'cut' is given twice"),
    ("pp2+cut", "'cut'", "Flags are"),
    ("tp2 >", "'>'", "a pipeline stage stands on each side of it"),
    ("tp2 > pp2", "'pp2'", "what stands between '>' is one stage, without a pp axis"),
    ("dp2 > dp3", "'dp3'", "all stages have as many replicas, the first one 2 and this one 3"),
    ("tp2 > tp2+gpipe", "'tp2+gpipe'", "cuts and tokens(...) are of all stages; write them with the first"),
    (
        "tp2+gpipe > tp2+1f1b",
        "'tp2+1f1b'",
        "a schedule, cuts and tokens(...) are of all stages; write them with the first",
    ),
    (
        "tp2 > tp2+cut(a)",
        "'tp2+cut(a)'",
        "a schedule, cuts and tokens(...) are of all stages; write them with the first",
    ),
    ("tp2+cut(a|b) > tp2", "'cut(a|b)'", "2 stages have 1 cuts, not 2"),
    ("tp2+interleaved_1f1b > tp2", "'tp2+interleaved_1f1b'", "a stage that is written has one place"),
    ("tp2+chunks(2) > tp2", "'tp2+chunks(2)'", "the loss is on the last stage; write its chunks there"),
    ("cp2@0", "'cp2@0'", "says where one of several stages begins, such as cp2 > cp2 > cp4@0"),
    ("cp2 > cp2@x", "'cp2@x'", "behind '@' stands the rank at which a stage begins, such as cp4@0"),
    ("cp2 > cp2+remat@0", "'cp2+remat@0'", "stands behind the axes of a stage, before its flags, such as cp4@0+remat"),
    ("cp2 > cp4@3", "'cp4@3'", "no stage is on rank 2, where an earlier one has to begin"),
    ("dp2 > dp2@0", "'dp2'", "stages that share ranks have one replica"),
    ("cp2+gpipe > cp2@0", "'cp2+gpipe'", "run one micro-batch after the other: 1f1b or zb_h1"),
]


@pytest.mark.parametrize(("text", "part", "why"), SYNTAX, ids=[text or "empty" for text, _, _ in SYNTAX])
def test_syntax_errors(text, part, why):
    with pytest.raises(StrategySyntaxError) as caught:
        Strategy.parse(text)
    message = str(caught.value)
    assert repr(text) in message
    assert f"(at {part})" in message
    assert why in message
    assert "for example 'dp2.tp4+sp+zero1'" in message


@given(st.text(string.ascii_lowercase + string.digits + ".+ _-@()|>", max_size=12))
def test_any_text_parses_or_says_why(text):
    try:
        strategy = Strategy.parse(text)
    except FxparError:
        return
    assert Strategy.parse(str(strategy)) == strategy


def test_messages_read_as_sentences():
    """No nearest name: the list of names still starts after a full stop."""
    with pytest.raises(StrategySyntaxError, match=r"unknown axis 'xyz'\. Axes are"):
        Strategy.parse("xyz2")
    with pytest.raises(StrategySyntaxError, match=r"unknown flag 'fast'\. Flags are"):
        Strategy.parse("tp2+fast")


def test_world_error_names_both_numbers():
    with pytest.raises(WorldSizeError, match=r"'dp2.tp4' needs 8 ranks .* but the world has 6"):
        Strategy.parse("dp2.tp4", world=6)
    with pytest.raises(WorldSizeError, match=r"needs 9 ranks \(its stages 8 \+ 1\), .* so that the sum is 8, or use 9"):
        Strategy.parse("tp4.cp2 > dp1", world=8)
    assert Strategy.parse("dp2.tp4", world=8).world == 8
