"""From a cluster to the part of it that a plan is for."""

from types import SimpleNamespace

import pytest

from fxpar.cost.cluster import usual_cluster
from fxpar.errors import FxparError
from fxpar.search.chosen import of_ranks, planned_for


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
