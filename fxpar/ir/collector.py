"""Python's cycle collector, kept away from work that makes large graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without the collector, which takes a twentieth of a capture and a fifth of a lowering to look through graphs that
    are in use.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def collector_of_new(times: int) -> Iterator[None]:
    """With a collector that looks so many times only among what is new, before it does among what it has seen: work
    that keeps nearly all that it makes would be looked through again for little.
    """
    new, before, old = gc.get_threshold()
    gc.set_threshold(new, times, old)
    try:
        yield
    finally:
        gc.set_threshold(new, before, old)
