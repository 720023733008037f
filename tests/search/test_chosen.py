"""From a cluster to the part of it that a plan is for."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fxpar.cost.cluster import ClusterSpec, usual_cluster
from fxpar.cost.device import CPU
from fxpar.errors import FxparError
from fxpar.search.chosen import of_ranks, planned_for, problem_of, whole_depth
from fxpar.search.driver import find_plan
from tests.cli.helpers import fxpar
from tests.search.shallow import shallow


@pytest.mark.parametrize(("world", "nodes", "local"), [(16, 2, 8), (8, 1, 8), (2, 1, 2), (12, 3, 4), (1, 1, 1)])
def test_a_plan_is_for_as_many_devices_as_there_are_ranks(world, nodes, local):
    found = of_ranks(usual_cluster(16), world)
    assert (found.nodes, found.devices_per_node, found.world) == (nodes, local, world)


def test_more_ranks_than_devices_are_refused():
    with pytest.raises(FxparError, match="17"):
        of_ranks(usual_cluster(16), 17)


def test_a_plan_has_each_option_once():
    """The last one counts, as for the model; a plan that has both is not read again."""
    depth = SimpleNamespace(samples=lambda extra: (1, 2), beyond=lambda samples: 0)
    problem = SimpleNamespace(depth=depth, cluster=SimpleNamespace(world=4), memory_bytes=None)
    rows = lambda layers: SimpleNamespace(params=list)  # noqa: E731
    assert planned_for("llama", ["layers=1", "dim=8", "layers=2"], 64, problem, rows).options == ("layers=2", "dim=8")


LINKS = ClusterSpec(1, 2, intra_gb_per_s=0.5, inter_gb_per_s=0.5, latency_us=100.0, device=CPU)


@pytest.mark.parametrize(
    ("model", "want"), [("stack", ["dp2", "tp2+sp", "cp2"]), ("mixture", ["dp2", "ep2", "tp2+sp", "cp2"])]
)
def test_experts_may_be_apart_where_there_are_some(model, want):
    known = shallow(model, 1)
    assert [str(one) for one in problem_of(known.rows, known.depth, LINKS, [[64]], 64, None).shapes] == want


def test_a_model_that_is_lowered_whole_has_stages_too():
    """As many as it has layers; where nothing is numbered there is one."""
    known = shallow("stack", 2)
    graph = known.rows(2)
    depth = whole_depth(graph)
    shapes = problem_of(lambda _: graph, depth, LINKS, [[64]], 64, None).shapes
    assert (depth.samples(1), depth.samples(2), depth.most_stages) == ((2,), (2,), 2)
    assert "pp2" in map(str, shapes)
    assert whole_depth(SimpleNamespace(params=list)).samples(1) == (1,)


def test_experts_are_apart_where_their_weights_do_not_fit_twice():
    """With memory for all that dp2 needs it is faster. The bound holds for bins that are filled unevenly."""
    known, batches = shallow("mixture", 1), [[64] * 7 + [24] * 5, [64] * 3]
    wide = problem_of(known.rows, known.depth, LINKS, batches, 64, None)
    wide = replace(wide, shapes=tuple(one for one in wide.shapes if not one.sp), max_strategies=1)
    roomy = find_plan(wide, known.lower, known.outlines)
    tight = find_plan(replace(wide, memory_bytes=4_600_000), known.lower, known.outlines)
    assert (roomy.plans[0].strategies, tight.plans[0].strategies) == (("dp2",), ("ep2",))
    assert max(tight.plans[0].memory_bytes.values()) <= 4_600_000 < roomy.plans[0].memory_bytes["dp2"]
    assert all(found.lower_bound_s <= found.plans[0].predicted_s for found in (roomy, tight))
    assert roomy.refused == tight.refused == {}


@pytest.mark.nightly
def test_what_is_planned_for_a_mixtral_computes_what_one_device_does(tmp_path):
    """Its experts have most of the weights, with room for half of them."""
    sizes = {"num_hidden_layers": 1, "intermediate_size": 64, "num_local_experts": 16, "num_experts_per_tok": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 16}
    model = ["hf:mixtral", *(word for name, size in sizes.items() for word in ("--set", f"{name}={size}"))]
    asked = ["--lengths", "github:64", "--tokens-per-step", "2048", "--samples", "2", "--memory", "5MB"]
    status, text, _ = fxpar("plan", *model, "--world", "2", *asked, "--json", str(tmp_path / "plan.json"))
    found = json.loads((tmp_path / "plan.json").read_text())
    names = list(dict.fromkeys(group["strategy"] for plan in found["plans"] for group in plan["groups"]))
    assert status == 0
    assert names[0].startswith("ep2")
    assert found["plans"][0]["lower_bound_s"] <= found["plans"][0]["predicted_s"]
    assert text.strip().endswith(*found["routes"])
    status, text, _ = fxpar("check", *model, "--dtype", "float64", *(word for name in names for word in ("-s", name)))
    assert status == 0, text
