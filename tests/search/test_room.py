"""Micro-batches are as large as memory allows, wherever a guess at them began."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fxpar.search.room import settled_tokens
from tests.search.test_price import priced


@pytest.mark.parametrize("off", [-0.03, 0.0, 0.05])
@pytest.mark.parametrize("want", [600, 1000, 3000])
def test_as_many_tokens_as_fit_and_no_more(want, off):
    """Behind a guess that is off, as a line between two anchors may be."""
    one = priced("dp2.tp2+sp+remat", True)
    room = one.predicted(want).beside_bytes
    tokens = settled_tokens(one, room, 64, round(want * (1 + off)), 4096)
    assert tokens is not None
    assert one.predicted(tokens).beside_bytes <= room
    assert 0.99 * want <= tokens


def test_no_more_than_wanted_and_no_fewer_than_must():
    one = priced("dp2.tp2+sp+remat", True)
    room = one.predicted(1000).beside_bytes
    assert settled_tokens(one, room, 64, 800, 850) == 850
    assert settled_tokens(one, 10 * one.predicted(4096).beside_bytes, 64, 700, 4096) == 4096
    assert settled_tokens(one, room, 1200, 1300, 4096) is None


def test_where_memory_jumps_fewer_tokens_are_tried():
    """Kernels that need memory in blocks: what a chord allows may not fit."""
    jumps = SimpleNamespace(
        anchors=(1, 4000), at=lambda tokens: SimpleNamespace(beside_bytes=tokens + 500 * (tokens >= 1500))
    )
    assert 1200 < settled_tokens(jumps, 1600, 100, 1000, 4000) < 1500
