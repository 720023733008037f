"""docs/how-to-add.md: what tests/example_package adds from outside works, and the page shows its code."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fxpar
from fxpar.annotate import annotate
from fxpar.annotate.driver import annotate_and_search
from fxpar.annotate.policy import TensorAxis
from fxpar.annotate.roles import ROLES
from fxpar.cli.cache import model_files
from fxpar.cost.calls import node_costs
from fxpar.errors import (
    CostModelError,
    DuplicateNameError,
    EntryLoadError,
    ModelFunctionError,
    ModelTypeError,
    NotAnOpError,
    OpExistsError,
    PlannerContractError,
    PlannerError,
    RoleContractError,
    StrategySyntaxError,
    SwitchPlanError,
    UnknownModelError,
    UnknownRoleError,
    VocabularyError,
)
from fxpar.graph_files import load_graph
from fxpar.ir import pass_registry
from fxpar.ir.dist_config import P, R, Shard
from fxpar.lowering import default_passes
from fxpar.models import LoadedModel, load
from fxpar.models.loaders import LOADERS
from fxpar.ops.traits import DECLARED
from fxpar.rules.installed import OPS
from fxpar.rules.option import Option, replicated
from fxpar.rules.table import TABLE, register_op
from fxpar.rules.validate import trials, validate_op
from fxpar.switch import layout_of, plan_switch
from fxpar.switch.planners import REGISTRY, planner_names
from fxpar.switch.transfers import TRANSFER
from fxpar.train.config import parse_config
from fxpar.train.model import build_model
from tests.cli.helpers import fxpar as command
from tests.docs.blocks import find_blocks
from tests.docs.extras import PACKAGE, ROLE, agree, module, squares

pytestmark = pytest.mark.usefixtures("extras")
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to-add.md"
CLUSTER = fxpar.ClusterSpec(2, 2, 200.0, 25.0, 10.0)


@pytest.fixture(scope="module")
def small(extras: None) -> LoadedModel:
    return load("extras:small", dtype="float64")


@pytest.fixture(scope="module")
def logical(small: LoadedModel) -> fxpar.LogicalGraph:
    return fxpar.capture(small.model, small.loss_fn, small.example_batch, name="small")


# ------------------------------------------------------------------------------------------------------- the page
def test_the_page_shows_the_code_of_the_package():
    shown = set()
    for block in find_blocks(PAGE, PAGE.name):
        if block.title.startswith("fxpar_extras/") or block.title == "pyproject.toml":
            assert block.text in (PACKAGE / block.title).read_text(), f"{block.where} is not in {block.title}"
            assert block.title == "pyproject.toml" or len(block.text.splitlines()) <= 15, block.where
            shown.add(block.title)
    parts = {f"fxpar_extras/{path.name}" for path in (PACKAGE / "fxpar_extras").glob("[a-z]*.py")}
    assert shown == {*parts, "pyproject.toml"}


def test_the_package_is_known_by_its_names():
    assert "square_by_mul" in pass_registry.available()
    assert ROLES.installed() == ("small_whole",)
    assert REGISTRY.installed() == ("nearest",)
    assert LOADERS.installed() == ("extras",)
    assert OPS.installed() == ("extras",)


@pytest.mark.parametrize("registry", [ROLES, REGISTRY, LOADERS], ids=lambda registry: registry.group)
def test_names_are_not_taken_twice_and_broken_entries_say_so(registry, tmp_path, monkeypatch):
    name = next(iter(registry.builtin))
    monkeypatch.syspath_prepend(tmp_path)
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.group}]\nbroken = no_such_module:thing\n")
    with pytest.raises(EntryLoadError, match=f"the {registry.noun} 'broken' of the package 'other'"):
        registry.get("broken")
    (info / "entry_points.txt").write_text(f"[{registry.group}]\n{name} = other:thing\n")
    with pytest.raises(DuplicateNameError, match=rf"the {registry.noun} name '{name}' is taken twice: by fxpar"):
        registry.available()


# ---------------------------------------------------------------------------------------------------- op and rule
def test_the_rules_are_right_and_allow_cuts():
    module("ops")
    x, weight, grad = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 6, 8), (8, 12), (2, 6, 12)))
    for op, arguments, cuts in (
        (torch.ops.extras.relu2.default, (x, weight), 3),
        (torch.ops.extras.relu2_backward.default, (grad, x, weight), 3),
    ):
        assert validate_op(op, arguments, degree=2) == []
        assert len(trials(op, arguments, sections=())) == cuts


def test_the_gradient_of_the_op_is_right():
    module("ops")
    x, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 6, 8), (8, 12)))
    assert torch.autograd.gradcheck(torch.ops.extras.relu2, (x, weight))


def test_the_op_is_cut_and_agrees_with_one_device(logical, small):
    program = fxpar.lower(logical, "tp2")
    (up,) = (s.dist for i, s in zip(program.inputs, program.stored_inputs, strict=True) if i.fqn == "up")
    assert up.placement("tp") == Shard(1)
    agree(logical, small, "tp2", "tp3", "dp2.tp2+sp", "cp2")


def test_operations_are_those_that_the_rule_counts(logical):
    """Products, forward and backward: 6 per token and weight of down and head, and of up 2 + 3 * 2."""
    one, two = (
        sum(call.flops.c1 for call in node_costs(fxpar.lower(logical, strategy), CLUSTER))
        for strategy in ("dp1", "tp2")
    )
    assert one == 6 * (96 * 24 + 24 * 131) + (2 + 6) * 24 * 96
    assert float(two) == pytest.approx(float(one) / 2, rel=0.02)


def test_an_op_with_operations_is_worth_cutting(logical):
    """A whole product costs tp more than its communication; an op that memory limits does not."""
    _, (search,) = annotate_and_search(logical, fxpar.Strategy.parse("tp2"))
    (entry,) = (c for c in search.problem.classes if c.view.target is torch.ops.extras.relu2.default)
    assert search.policy.node_cost(search.problem, entry, replicated(entry.view)) > 0


def test_graph_files_find_the_op(tmp_path, monkeypatch):
    """In a process that has imported nothing of the package; without its declaration the file is refused."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "small.fxpar"
    assert command("dump", "extras:small", "-s", "tp2", "-o", file)[0] == 0
    code = f"""
        import sys
        from fxpar.errors import FxparError
        from fxpar.graph_files import load_graph
        try:
            load_graph({str(file)!r})
        except FxparError as error:
            print(error)
        sys.path += {[place for place in sys.path if place]!r}
        print(type(load_graph({str(file)!r})).__name__)
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120, check=True)
    refused, read = done.stdout.splitlines()
    assert "op 'extras.relu2.default' is not available here" in refused
    assert read == "ExecGraph"


def test_rules_that_are_refused(monkeypatch, logical):
    op = torch.ops.extras.relu2.default
    monkeypatch.setattr("fxpar.rules.table.TABLE", dict(TABLE))
    monkeypatch.setattr("fxpar.ops.traits.DECLARED", dict(DECLARED))
    with pytest.raises(NotAnOpError, match=r"torch.ops.mine.gate.default"):
        register_op(torch.ops.extras.relu2, rule=lambda view: [])
    with pytest.raises(OpExistsError, match=r"extras.relu2.default has the sharding rule .*relu2_loops"):
        register_op(op, rule=lambda view: [])
    register_op(op, rule=module("ops").relu2_loops, flops=lambda operands, results: -1, replace=True)
    with pytest.raises(CostModelError, match=r"operations of extras.relu2.default = -1"):
        node_costs(fxpar.lower(logical, "dp1"), CLUSTER)


# ----------------------------------------------------------------------------------------------------------- pass
def test_the_pass_runs_in_the_ladder(logical, small):
    plain = fxpar.lower(logical, "tp2")
    changed = fxpar.lower(logical, "tp2", passes=[*default_passes(), module("passes").SquareByMul()])
    assert (squares(plain), squares(changed)) == (1, 0)
    agree(logical, small, changed)


def test_the_pass_runs_on_a_graph_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before, after = tmp_path / "before.fxpar", tmp_path / "after.fxpar"
    words = ("dump", "extras:small", "-s", "tp2", "--after", "cleanup", "-o", before)
    assert command(*words)[0] == 0
    status, said, _ = command("passes", "square_by_mul", "--on", before, "-o", after)
    assert status == 0
    assert "SquareByMul()" in said
    targets = [str(node.target) for node in load_graph(after).graph.nodes]
    assert "aten.pow.Tensor_Scalar" in targets  # rsqrt's gradient has a cube
    assert _powers(after) == [3]
    assert _powers(before) == [2, 3]
    assert "x ** 2 is a power" in command("passes", "square_by_mul")[1]


def _powers(path: Path) -> list[int]:
    nodes = load_graph(path).graph.nodes
    return sorted(node.args[1] for node in nodes if node.target is torch.ops.aten.pow.Tensor_Scalar)


# ----------------------------------------------------------------------------------------------------------- role
def _placements(logical: fxpar.LogicalGraph, strategy: str | fxpar.Strategy) -> dict[str, object]:
    strategy = fxpar.Strategy.parse(strategy) if isinstance(strategy, str) else strategy
    graph = annotate(logical, strategy)
    pairs = zip(graph.placeholders, graph.inputs, strict=True)
    return {info.fqn: node.meta["dist"].placement("tp") for node, info in pairs if info.kind == "param"}


def test_the_role_changes_placements(logical, small):
    usual, changed = _placements(logical, "tp2"), _placements(logical, ROLE)
    different = {fqn for fqn in usual if usual[fqn] != changed[fqn]}
    assert different == {"up", "down.weight"}
    assert all(changed[fqn] == R and usual[fqn] != R for fqn in different)
    assert isinstance(changed["head.weight"], Shard)
    agree(logical, small, ROLE, f"dp2.{ROLE}", f"cp2.{ROLE}")


def test_an_override_wins_over_the_role(logical):
    strategy = fxpar.Strategy.parse(ROLE, overrides={"up": "S(1)@tp"})
    assert _placements(logical, strategy)["up"] == Shard(1)


def test_a_role_is_part_of_the_strategy():
    strategy = fxpar.Strategy.parse("cp2.tp2+sp+role(tp=small_whole|cp=cp)+zero1")
    assert strategy.roles == (("tp", "small_whole"), ("cp", "cp"))
    assert fxpar.Strategy.parse(str(strategy)) == strategy
    assert fxpar.Strategy.from_json(strategy.to_json()) == strategy
    assert fxpar.Strategy.parse(f"pp2.{ROLE}").of_stage(1).roles == (("tp", "small_whole"),)


def test_what_a_role_lowers_is_not_kept(tmp_path, monkeypatch):
    """Its code may change, and nobody would see it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ("dump", "extras:small", "-s", ROLE, "--brief")
    first = command(*words)
    monkeypatch.setattr(module("roles").SmallWhole, "sources", TensorAxis.sources)
    second = command(*words)
    assert first[0] == second[0] == 0
    assert first[1] != second[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp2+role(tp=small_whole)", "needs a tp axis"),
        ("dp2.tp2+role(dp=small_whole)", "tp, cp, ring, rows"),
        ("tp2+role(small_whole)", r"role\(tp=name\)"),
        ("tp2+role(tp=a|tp=b)", "two roles"),
        ("tp2+role(tp=a)+role(tp=a)", "given twice"),
    ],
)
def test_roles_that_do_not_parse(text, message):
    with pytest.raises(StrategySyntaxError, match=message):
        fxpar.Strategy.parse(text)


def test_roles_that_are_refused(logical, monkeypatch):
    with pytest.raises(UnknownRoleError, match="did you mean 'small_whole'"):
        _placements(logical, "tp2+role(tp=smal_whole)")
    with pytest.raises(RoleContractError, match="derives from TensorAxis"):
        _placements(logical, "tp2+role(tp=cp)")
    with pytest.raises(RoleContractError, match="derives from ContextAxis"):
        _placements(logical, "cp2.tp2+role(cp=small_whole)")
    monkeypatch.setattr(module("roles").SmallWhole, "sources", lambda self, entry: [])
    with pytest.raises(RoleContractError, match=r"role 'small_whole': it leaves '.*' without a placement"):
        _placements(logical, ROLE)
    for impossible in (
        Option((), (Shard(7),)),
        Option((), (P,)),
        Option((), (R, R)),
        Option((R,), (R,)),
        Option((), ("R",)),
    ):
        monkeypatch.setattr(module("roles").SmallWhole, "sources", lambda self, entry, one=impossible: [one])
        with pytest.raises(RoleContractError, match=r"it gives '.*', with operands \[\] and results .* placements"):
            _placements(logical, ROLE)


# -------------------------------------------------------------------------------------------------------- planner
@pytest.fixture(scope="module")
def layouts(logical):
    return [layout_of(fxpar.lower(logical, text, for_store=True), text) for text in ("dp2.tp2", "tp4")]


def test_the_plan_is_verified_and_priced(layouts):
    for source, target in (layouts, layouts[::-1]):
        plan = plan_switch(source, target, CLUSTER, "nearest")
        plan.verify()
        assert plan.chosen == "nearest"
        assert plan.predicted_s > 0
        for move in plan.moves():
            assert abs(move.src - move.dst) <= 3
    assert planner_names()[-2:] == ("auto", "nearest")
    assert plan_switch(*layouts, CLUSTER).chosen != "nearest"  # auto does not try it


def test_nearest_takes_the_nearest(logical):
    texts = ("dp2.tp3", "tp6")
    source, target = (layout_of(fxpar.lower(logical, text, for_store=True), text) for text in texts)
    plan = plan_switch(source, target, replace(CLUSTER, nodes=3), "nearest")
    holders = {}  # of a slice: the ranks that have it before
    for tensor, index in enumerate(plan.problem.class_of):
        for piece, held in enumerate(plan.problem.classes[index].held):
            holders[tensor, piece] = np.flatnonzero(held)
    rows, choices = plan.transfers.tolist(), 0
    for tensor, piece, src, dst, *_ in rows:
        distances = abs(holders[tensor, piece] - dst)
        assert abs(src - dst) == distances.min()
        choices += distances.min() < distances.max()
    assert choices > 10


def test_the_command_line_takes_the_planner(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cluster = tmp_path / "cluster.json"
    cluster.write_text(
        '{"nodes": 2, "devices_per_node": 2, "intra_gb_per_s": 200, "inter_gb_per_s": 25, "latency_us": 10}'
    )
    words = ("switch", "extras:small", "--from", "dp4", "--to", "tp4", "--cluster", cluster, "--planner")
    status, said, _ = command(*words, "nearest")
    assert status == 0
    assert "nearest" in said
    status, _, said = command(*words, "neerest")
    assert status == 1
    assert "did you mean 'nearest'" in said


def test_planners_that_are_refused(layouts, monkeypatch):
    with pytest.raises(PlannerError, match=r"did you mean 'nearest'.*auto, nearest"):
        plan_switch(*layouts[::-1], CLUSTER, "nearst")
    planners = module("planners")
    right = planners.nearest
    for returned, what in (([], "list"), (np.zeros(3), "an array of float64")):
        monkeypatch.setattr(planners, "nearest", lambda problem, returned=returned: returned)
        with pytest.raises(PlannerContractError, match=f"planner 'nearest' returned {what}"):
            plan_switch(*layouts[::-1], CLUSTER, "nearest")
    monkeypatch.setattr(planners, "nearest", lambda problem: right(problem)[1:])
    with pytest.raises(SwitchPlanError, match="never"):
        plan_switch(*layouts[::-1], CLUSTER, "nearest")
    monkeypatch.setattr(planners, "nearest", lambda problem: np.empty(0, TRANSFER))
    with pytest.raises(SwitchPlanError):
        plan_switch(*layouts[::-1], CLUSTER, "nearest")


# ------------------------------------------------------------------------------------------------------ front end
def test_the_front_end_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    status, said, _ = command("check", "extras:small", "-s", f"tp2,{ROLE}", "--dtype", "float64", "--tokens", "21,12")
    assert status == 0, said
    assert "2 of 2 strategies agree" in said
    words = ("dump", "extras:small", "-s", "tp2", "--brief")
    first = command(*words)
    monkeypatch.setattr("fxpar.cli.source.capture_model", None)  # the second time it is in the cache
    assert command(*words) == first
    asked = []
    monkeypatch.setattr("fxpar.models.loaders.loader_of", asked.append)
    assert command("dump", "extras:small", "-s", "tp3", "--brief")[0] == 0
    assert set(asked) == {"extras"}  # its module may register rules that the lowering needs


def test_training_takes_the_front_end(tmp_path):
    model, data = '[model]\nname = "extras:small"', '[data]\nsource = "python-stdlib"\nbatch_tokens = 64'
    text = f'{model}\n{data}\n[strategies]\n64 = "dp1"\n[run]\nsteps = 1\n'
    config = parse_config(text, "run.toml", str(tmp_path))
    assert build_model(config, 100, "bytes").name == "extras:small"
    with pytest.raises(VocabularyError):
        build_model(config, 132, "bytes")


def test_a_change_of_the_package_is_no_hit_of_the_cache(small):
    files = {path.name for path in model_files(small, "extras:small") if path.is_relative_to(PACKAGE)}
    assert {"models.py", "ops.py"} <= files


def test_front_ends_that_are_refused(monkeypatch):
    with pytest.raises(ModelTypeError, match="'tiny' is none of small, large"):
        load("extras:tiny")
    with pytest.raises(UnknownModelError, match="prefix of an installed package"):
        load("extra")
    monkeypatch.setattr(module("models"), "load", lambda name, given, **settings: None)
    with pytest.raises(ModelFunctionError, match="its loader returned NoneType"):
        load("extras:small")
