from __future__ import annotations

import gc

from fxpar.ir.collector import collector_paused


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
