"""The section of the mesh tab: boxes are those of DistConfig, switches those of plan_switch."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import ClusterError
from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.mesh import Mesh
from fxpar.ir.strategy import Strategy
from fxpar.store import home_layout, param_specs, wire_layout
from fxpar.switch import ParamLayout, PlacedParam, layout_of, plan_switch
from fxpar.viz.mesh import coordinates, kind_json, mesh_section, parameter_kinds, placement_json
from tests.viz.shown import viewed

CLUSTER = ClusterSpec(2, 2, 300, 20, 5)
NAMES = ("dp2.tp2+sp", "pp2.tp2")


def views(*names: str):
    return [replace(viewed(name), cluster=CLUSTER) for name in names]


@pytest.fixture(scope="module")
def section():
    return json.loads(json.dumps(mesh_section(views(*NAMES))))


def layouts():
    return {name: layout_of(viewed(name).stored, name) for name in NAMES}


def test_boxes_are_those_of_the_placements(section):
    """Of every parameter, under every strategy and at home, on every rank."""
    home = home_layout(param_specs(viewed(NAMES[0]).stored), 4)
    for name, layout in {**layouts(), "home": home}.items():
        shown = section["home"] if name == "home" else section["by_strategy"][name]
        seen = set()
        for kind, number in zip(section["kinds"], shown["placed"], strict=True):
            placement = section["placements"][number]
            for fqn in kind["members"]:
                seen.add(fqn)
                param = layout.params[fqn]
                assert kind["shape"] == list(param.shape)
                for rank, piece in enumerate(placement["of_rank"]):
                    boxes = [
                        [end for side in box for end in side]
                        for dist in param.copies
                        if rank in dist.mesh
                        for box in dist.boxes(rank, param.shape)
                    ]
                    assert (placement["pieces"][piece] if piece >= 0 else []) == boxes
                    if piece >= 0:
                        sizes = [(box[1] - box[0]) * (box[3] - box[2] if len(box) > 2 else 1) for box in boxes]
                        assert placement["bytes"][piece] == sum(sizes) * param.dtype.itemsize
        assert seen == set(layout.params)


def test_a_stage_holds_its_own_parameters_only(section):
    shown = section["by_strategy"]["pp2.tp2"]
    held = {
        kind["title"]: [piece >= 0 for piece in section["placements"][number]["of_rank"]]
        for kind, number in zip(section["kinds"], shown["placed"], strict=True)
    }
    assert held["embedding.weight"] == held["layers.0.ffn.up_proj.weight"] == [True, True, False, False]
    assert held["head.weight"] == held["layers.1.ffn.up_proj.weight"] == [False, False, True, True]


def test_switches_are_those_of_the_planner(section):
    known = layouts()
    home = wire_layout(home_layout(param_specs(viewed(NAMES[0]).stored), 4), param_specs(viewed(NAMES[0]).stored))
    for target, other in (NAMES, NAMES[::-1]):
        plans = {
            "home": plan_switch(home, known[target], CLUSTER),
            other: plan_switch(known[other], known[target], CLUSTER),
            f"{other} and home": plan_switch(known[other], known[target], CLUSTER, extra_holders=[home]),
        }
        shown = {flow["from"]: flow for flow in section["by_strategy"][target]["switches"]}
        assert list(shown) == list(plans)
        for source, plan in plans.items():
            wanted, flow = plan.to_json(), shown[source]
            for ours, theirs in {
                "inside_bytes": "intra_node_bytes",
                "between_bytes": "inter_node_bytes",
                "local_bytes": "local_bytes",
                "sent_between_bytes": "max_send_inter_bytes",
                "bound_between_bytes": "lower_bound_inter_bytes",
                "transfers": "transfers",
                "chosen": "chosen",
                "to": "to",
            }.items():
                assert flow[ours] == wanted[theirs], ours
            assert flow["predicted_ms"] == pytest.approx(1e3 * wanted["predicted_s"])
            assert flow["bound_ms"] <= flow["predicted_ms"]
            assert len(flow["kinds"]) == len(section["kinds"])


def test_layers_that_lie_alike_are_one_kind():
    alone = mesh_section(views("dp2.tp2+sp"))
    titles = {kind["title"]: kind for kind in alone["kinds"]}
    assert "layers.0-1.attention.q_proj.weight" in titles
    assert titles["layers.0-1.attention.q_proj.weight"]["pattern"] == "layers.*.attention.q_proj.weight"
    assert titles["embedding.weight"]["members"] == ["embedding.weight"]


def test_one_strategy_has_no_switch():
    alone = mesh_section(views("pp2.tp2"))
    assert alone["by_strategy"]["pp2.tp2"]["switches"] == []
    assert alone["home"]["world"] == 4


def test_what_modules_use_the_ranks_for():
    section = mesh_section(views("tp4+sp[*.attention: cp2.tp2+zero1; layers.1: +remat]"))
    (view,) = section["by_strategy"].values()
    (roles,) = view["roles"]
    assert roles["atoms"] == ["tp:(1)2", "tp:(2)2"]
    rows = {row[0]: row[1:] for row in json.loads(json.dumps(roles["modules"]))}
    assert rows["layers.1.attention"] == [1, ["cp", "tp"], 1, "remat"]
    assert rows["layers.0.ffn"] == [1, ["tp+sp", "tp+sp"], 0, ""]
    assert mesh_section(views("dp2.tp2+sp"))["by_strategy"]["dp2.tp2+sp"]["roles"] == []
    of_stages = mesh_section(views("tp2 > dp1"))["by_strategy"]["tp2 > dp1"]
    assert [(one["stage"], one["atoms"]) for one in of_stages["roles"]] == [
        ("stage 0: tp2", ["tp"]),
        ("stage 1: dp1", []),
    ]
    assert of_stages["coordinates"] == ["pp0 tp0", "pp0 tp1", "pp1"]


def test_strategies_of_different_worlds():
    found = mesh_section([viewed("dp2.tp2+sp"), viewed("tp2+zero3")])
    assert found["cluster"]["assumed"]
    assert [found["by_strategy"][name]["world"] for name in found["by_strategy"]] == [4, 2]
    assert found["home"]["world"] == 4


def test_a_cluster_that_is_too_small():
    with pytest.raises(ClusterError, match="too small for strategies on 4 ranks"):
        mesh_section([replace(viewed("dp2.tp2+sp"), cluster=ClusterSpec(1, 2, 1, 1, 1))])


def test_nothing_to_show():
    assert mesh_section([]) is None


def test_more_than_two_dims_are_drawn_by_those_that_are_cut():
    mesh = Mesh((("tp", 2),))
    dist = DistConfig(mesh, ((), (AxisShard("tp"),), (), ()))
    param = PlacedParam((3, 8, 1, 5), torch.float32, (dist,))
    (kind,) = parameter_kinds([ParamLayout("a", 2, {"conv.weight": param})])
    shown = kind_json(kind)
    assert (shown["drawn"], shown["cut"], shown["shape"]) == ([0, 1], 1, [3, 8, 1, 5])


def test_strided_pieces_and_ranks_with_several_copies():
    """A fused weight has one box per part; a rank of two copies holds what either gives it."""
    mesh = Mesh((("tp", 2),))
    dist = DistConfig(mesh, ((AxisShard("tp", (2, 1, 1)),),), dtype=torch.float32)
    fused = placement_json(PlacedParam((16,), torch.float32, (dist,)), 3)
    assert fused["pieces"] == [[[0, 4], [8, 10], [12, 14]], [[4, 8], [10, 12], [14, 16]]]
    assert (fused["of_rank"], fused["bytes"]) == ([0, 1, -1], [32, 32])
    halves = [DistConfig(replace(mesh, offset=i), ((AxisShard("tp"),),), dtype=torch.float32) for i in (0, 1)]
    twice = placement_json(PlacedParam((16,), torch.float32, tuple(halves)), 3)
    assert twice["of_rank"] == [0, 1, 2]
    assert twice["pieces"] == [[[0, 8]], [[0, 8], [8, 16]], [[8, 16]]]


@pytest.mark.parametrize(
    ("text", "rank", "where"),
    [("dp2.pp2.tp2", 5, "pp1 dp0 tp1"), ("dp2.tp4", 6, "dp1 tp2"), ("dp1", 0, ""), ("tp2.dp1", 1, "tp1")],
)
def test_coordinates(text, rank, where):
    assert coordinates(Strategy.parse(text))[rank] == where
