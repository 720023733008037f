"""Idle time of the schedules in closed form, for stages of equal costs and free transfers."""

from __future__ import annotations

from fxpar.errors import ScheduleOptionError


def bubble_ms(
    kind: str,
    stages: int,
    micro_batches: int,
    *,
    forward_ms: float,
    backward_ms: float,
    weight_ms: float | None = None,
    virtual: int = 1,
) -> float:
    """Idle ms of every rank in one mini-batch. `forward_ms` and `backward_ms` (I and W together) are of one stage and
    one micro-batch; `weight_ms` is the part of W, by default half of the backward.

    With p ranks, f, b and w: gpipe and 1f1b (p-1)(f+b) (Narayanan et al. 2021, 2.2.1); interleaved_1f1b the same with
    the costs of one of the `virtual` stages of a rank (2.2.2); zb_h1 (p-1)(f+b-2w) (Qi et al. 2023, table 2) for
    f = b - w = w. With m < p micro-batches zb_h1 has only m - 1 of the p - 1 weight parts to fill gaps with.
    """
    weight = backward_ms / 2 if weight_ms is None else weight_ms
    each = {
        "gpipe": forward_ms + backward_ms,
        "1f1b": forward_ms + backward_ms,
        "interleaved_1f1b": forward_ms + backward_ms,
        "zb_h1": forward_ms + backward_ms - weight,
    }
    if kind not in each or (virtual > 1 and kind != "interleaved_1f1b"):
        raise ScheduleOptionError(f"no bubble formula for {kind!r} with {virtual} stages per rank", "Simulate it")
    filled = (min(stages, micro_batches) - 1) * weight if kind == "zb_h1" else 0.0
    return (stages - 1) * each[kind] - filled


def bubble_fraction(
    kind: str,
    stages: int,
    micro_batches: int,
    *,
    forward_ms: float = 1.0,
    backward_ms: float = 2.0,
    weight_ms: float | None = None,
    virtual: int = 1,
) -> float:
    """Idle time over the whole time of a mini-batch; arguments as in `bubble_ms`."""
    idle = bubble_ms(
        kind,
        stages,
        micro_batches,
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        weight_ms=weight_ms,
        virtual=virtual,
    )
    return idle / (idle + micro_batches * virtual * (forward_ms + backward_ms))
