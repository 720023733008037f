"""`NodeFirstReduction`: carries out a NodeFirstPlan on one rank, two exchanges a round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxpar.switch.layout import ParamLayout
from fxpar.switch.node_first import NodeFirstPlan
from fxpar.switch.reduction import AnyReductionPlan
from fxpar.transport.holding import Holding
from fxpar.transport.reduction import Reduction
from fxpar.transport.staging import Arena, Staging, aligned, staging_on
from fxpar.transport.switch import SwitchReport, device_of

SUMS_SLOT = 2  # of the staging memory, after the two that messages use


class NodeFirstReduction:
    """Sums gradients into the tensors of `target`, inside each node first. Arguments, errors and use are those of
    Reduction; the sums of a node lie in the staging memory. Padding of the target becomes zero without `accumulate`.
    """

    def __init__(
        self, plan: NodeFirstPlan, rank: int, target: Holding, *, staging: Staging | None = None, **options: Any
    ) -> None:
        device = torch.device(options.pop("device", None) or device_of((target,)))
        staging = staging_on(device, staging)
        self._target = target
        self._rounds: list[tuple[Tensor, dict[str, Tensor], Reduction, Reduction]] = []
        room = staging.slot(SUMS_SLOT, max(_bytes_of(one.sums, rank) for one in plan.rounds))
        for one in plan.rounds:
            memory, sums = _sums_in(room, one.sums, rank)
            names = one.between.target.params
            part = Holding(one.between.target, {f: t for f, t in target.tensors.items() if f in names})
            shared: dict[str, Any] = {"staging": staging, "device": device, **options}
            inside = Reduction(one.inside, rank, Holding(one.sums, sums), **shared)
            self._rounds.append((memory, sums, inside, Reduction(one.between, rank, part, **shared)))

    @torch.no_grad()
    def run(self, sources: Mapping[str, Tensor], accumulate: bool = True, *, compared: bool = False) -> SwitchReport:
        """Add the sum of all ranks' `sources` to the target, or with `accumulate=False` put it there."""
        if not accumulate:
            for tensor in self._target.tensors.values():
                tensor.zero_()
        reports = []
        for memory, sums, inside, between in self._rounds:
            memory.zero_()
            reports += [inside.run(sources, compared=compared), between.run(sums, compared=compared)]
        return SwitchReport(
            math.fsum(one.wall_ms for one in reports),
            sum(one.sent_bytes for one in reports),
            sum(one.received_bytes for one in reports),
            sum(one.copied_bytes for one in reports),
            0,
        )


def reduction_on(
    plan: AnyReductionPlan | NodeFirstPlan, rank: int, target: Holding, **options: Any
) -> Reduction | NodeFirstReduction:
    """What carries out `plan`; see Reduction for the options."""
    made = NodeFirstReduction if isinstance(plan, NodeFirstPlan) else Reduction
    return made(plan, rank, target, **options)  # type: ignore[arg-type]


def _shapes(layout: ParamLayout, rank: int) -> dict[str, tuple[int, ...]]:
    """What a rank holds of each tensor that its node collects; all ranks of these nodes hold equally much."""
    mine = {fqn: p for fqn, p in layout.params.items() if rank in p.copies[0].mesh.ranks}
    return {fqn: tuple(map(int, p.copies[0].local_shape(p.shape))) for fqn, p in mine.items()}


def _bytes_of(layout: ParamLayout, rank: int) -> int:
    return sum(aligned(math.prod(s) * layout.params[fqn].dtype.itemsize) for fqn, s in _shapes(layout, rank).items())


def _sums_in(room: Tensor, layout: ParamLayout, rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The sums of a round, one after the other, and the memory that they take together."""
    arena, sums = Arena(room), {}
    for fqn, shape in _shapes(layout, rank).items():
        dtype = layout.params[fqn].dtype
        sums[fqn] = arena.take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
    return room[: arena.used], sums
