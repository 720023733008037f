"""Kills in all phases of training: every survivor names the victim, ends with status 1, and within 20 seconds."""

import pytest

from tests.monitor import kills
from tests.monitor.kills import Kill

# The moments at which the others went wrong once; rank 0 serves the store.
SAMPLE = [
    Kill("start", (0,), 0.17),
    Kill("start", (0,), 0.0),  # before there is a monitor
    Kill("switch", (1,), 0.0),
    Kill("reduction", (0,), 0.0),
    Kill("save", (1,), 0.03),
    Kill("evaluate", (2,), 0.02, abrupt=True),
    Kill("plain call", (0,), 0.02),
    Kill("forward", (2, 0), 0.0, world=4),
]


def blamed_right(kill, survivor):
    return survivor.status == 1 and bool(survivor.named) and survivor.named <= set(kill.victims)


@pytest.mark.parametrize("kill", SAMPLE, ids=lambda kill: f"{kill.phase}-{kill.victims}")
def test_survivors_name_the_victim(tmp_path, kill):
    kills.prepare(kill.world)
    survivors = kills.run(kill, tmp_path)
    assert len(survivors) == kill.world - len(kill.victims)
    for survivor in survivors:
        assert blamed_right(kill, survivor), survivor.printed
        assert survivor.seconds < kills.LIMIT_S


@pytest.mark.nightly
@pytest.mark.parametrize(("world", "victims"), [(3, 1), (4, 2)])
def test_a_hundred_kills_at_random(tmp_path, world, victims):
    kills.prepare(world)
    drawn = kills.draw(100, seed=11, world=world, victims=victims)
    results = [(kill, kills.run(kill, tmp_path / str(i))) for i, kill in enumerate(drawn)]
    print(kills.table(results))
    wrong = [(kill, survivor) for kill, ranks in results for survivor in ranks if not blamed_right(kill, survivor)]
    assert not wrong
