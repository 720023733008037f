"""What a rank sends, in all and over each axis of the mesh."""

from __future__ import annotations

import pytest

from fxpar.ir.sent import sent, sent_by_axis
from fxpar.lowering import lower
from tests.captured import llama


@pytest.mark.parametrize("strategy", ["dp2.tp2+sp", "dp2.tp2+zero3", "tp4", "cp2.tp2"])
def test_axes_add_up(strategy):
    program = lower(llama().graph, strategy)
    whole, each = sent(program, {"T": 64}), sent_by_axis(program, {"T": 64})
    assert set(each) == set(program.axes())
    for name in ("micro_batch_bytes", "fixed_bytes", "mini_batch_bytes"):
        assert sum(getattr(one, name) for one in each.values()) == pytest.approx(getattr(whole, name), abs=2)


def test_replicas_send_once_and_stages_messages():
    each = sent_by_axis(lower(llama(layers=2).graph, "dp2.pp2.tp2"))
    assert list(each) == ["dp", "pp", "tp"]
    assert each["dp"].micro_batch_bytes == 0 < each["dp"].mini_batch_bytes
    assert each["pp"].mini_batch_bytes == 0 < each["pp"].micro_batch_bytes
    assert each["tp"].micro_batch_bytes > 0


def test_what_is_sent_at_any_length_stands_apart():
    """The gradient of a sharded embedding is reduced in each micro-batch; replicas and stages have no such part."""
    program = lower(llama().graph, "tp4+sp")
    short, long = sent(program, {"T": 64}), sent(program, {"T": 640})
    assert short.fixed_bytes == long.fixed_bytes > 0
    assert short.per_token_bytes == long.per_token_bytes
    assert long.micro_batch_bytes == long.fixed_bytes + long.tokens * short.per_token_bytes
    assert sent(lower(llama().graph, "cp2.tp2")).fixed_bytes > 0
    assert sent(lower(llama(layers=2).graph, "dp2.pp2.tp2")).fixed_bytes == 0
