"""`Strategy`: text and value say the same."""

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

from fxpar.errors import WorldSizeError
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
