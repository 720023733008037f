"""Python's cycle collector, kept away from work that makes large graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused(stays: bool = False) -> Iterator[None]:
    """Without the collector, which takes a twentieth of a capture and a fifth of a lowering to look through graphs that
    are in use. `stays`: what is left of them then is looked through once, and not again in `collector_reset`.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if stays:
                gc.collect(0)
                gc.freeze()
            gc.enable()


@contextmanager
def collector_reset() -> Iterator[None]:
    """Behind it all is looked through again, unless somebody else has frozen objects."""
    is_ours = gc.get_freeze_count() == 0
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()
