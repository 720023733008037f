from __future__ import annotations

import gc

from fxpar.ir.collector import collector_of_new, collector_paused


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


def test_the_collector_looks_among_what_is_new_and_then_as_before():
    before = gc.get_threshold()
    with collector_of_new(7):
        assert gc.get_threshold() == (before[0], 7, before[2])
    assert gc.get_threshold() == before
