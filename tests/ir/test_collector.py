from __future__ import annotations

import gc
import weakref

from fxpar.ir.collector import collector_paused, collector_reset


def test_the_collector_is_paused_and_left_as_it_was():
    seen = []
    for on in (True, False):
        gc.enable() if on else gc.disable()
        try:
            with collector_paused():
                seen.append(gc.isenabled())
                raise KeyError
        except KeyError:
            seen.append(gc.isenabled())
        finally:
            gc.enable()
    assert seen == [False, True, False, False]


class Cycle:
    """Of which only the collector can tell whether it is in use."""

    def __init__(self) -> None:
        self.me = self


def test_what_stays_is_not_looked_through_until_the_end():
    """Unless it is garbage already; and what somebody else has frozen stays frozen."""
    gc.unfreeze()
    with collector_reset():
        with collector_paused(stays=True):
            kept, gone = Cycle(), weakref.ref(Cycle())
        assert gone() is None
        assert gc.get_freeze_count() > 0
        assert not any(one is kept for one in gc.get_objects())  # frozen ones are not in there
    assert any(one is kept for one in gc.get_objects())
    gc.freeze()
    with collector_reset():
        pass
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
