"""From a cluster to the part of it that a plan is for."""

import pytest

from fxpar.cost.cluster import usual_cluster
from fxpar.errors import FxparError
from fxpar.search.chosen import of_ranks


@pytest.mark.parametrize(("world", "nodes", "local"), [(16, 2, 8), (8, 1, 8), (2, 1, 2), (12, 3, 4), (1, 1, 1)])
def test_a_plan_is_for_as_many_devices_as_there_are_ranks(world, nodes, local):
    found = of_ranks(usual_cluster(16), world)
    assert (found.nodes, found.devices_per_node, found.world) == (nodes, local, world)


def test_more_ranks_than_devices_are_refused():
    with pytest.raises(FxparError, match="17"):
        of_ranks(usual_cluster(16), 17)
