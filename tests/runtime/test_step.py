"""Which tasks of a step wait for which."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fxpar.runtime.step import _in_waves


def share(ranks: range, joined: bool) -> Any:
    options, switching = SimpleNamespace(joined=joined), SimpleNamespace(world=4)
    return SimpleNamespace(engine=SimpleNamespace(ranks=tuple(ranks), options=options, switching=switching))


@pytest.mark.parametrize(
    ("ranks", "apart", "joined"),
    [
        (["0-1", "2-3"], [2], [2]),
        (["0-1", "2-3", "0-0"], [2, 1], [3]),
        (["0-1", "1-2", "2-3"], [1, 1, 1], [3]),  # all in one order, so nobody waits in a circle
        (["0-3", "0-1", "2-3"], [1, 2], [1, 2]),
        (["0-1", "0-3", "1-2", "1-3"], [1, 1, 1, 1], [1, 1, 2]),
        (["0-3", "0-3"], [], []),
    ],
)
def test_tasks_wait_for_all_ranks_or_for_their_own(ranks, apart, joined):
    ends = [tuple(map(int, one.split("-"))) for one in ranks]
    for way, sizes in ((False, apart), (True, joined)):
        shares = [share(range(first, last + 1), way) for first, last in ends]
        groups: Any = [[f"group of {number}"] for number in range(len(shares))]
        works, found = _in_waves(shares, groups)
        assert [number for number, _ in works] == list(range(len(shares)))
        assert found == (sizes if max(sizes, default=1) > 1 else [])
