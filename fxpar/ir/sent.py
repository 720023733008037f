"""`Sent`: what one rank sends, per micro-batch and per mini-batch: the figures of dump, explain, diff and viz."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import Input
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.ir.strategy import STAGES

ONCE = ("prologue", "epilogue")  # parts that run once per mini-batch, however many micro-batches it has
TOKEN_IDS = ("input_ids", "tokens", "position_ids")


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends; with pipeline stages the rank that sends most, messages to other stages included.

    `micro_batch_bytes` grow with its tokens and are paid for every micro-batch; `mini_batch_bytes` (prologue and
    epilogue) are paid once. `tokens` of a replica's micro-batch; 0 for a model without token ids.
    """

    micro_batch_bytes: int
    mini_batch_bytes: int
    tokens: int = 0

    @property
    def per_token_bytes(self) -> float:
        """Of a micro-batch; 0.0 for a model without token ids."""
        return self.micro_batch_bytes / self.tokens if self.tokens else 0.0

    def lines(self) -> list[str]:
        """Both as text, never added up."""
        each = f" ({self.per_token_bytes:,.1f} per token)" if self.tokens else ""
        return [
            f"per micro-batch: {self.micro_batch_bytes:,} bytes{each}",
            f"per mini-batch, once: {self.mini_batch_bytes:,} bytes",
        ]

    def to_json(self) -> dict[str, Any]:
        """The fields, and the bytes per token."""
        return {**vars(self), "per_token_bytes": self.per_token_bytes}


def sent(program: Program, sizes: Mapping[str, int] | None = None) -> Sent:
    """Of a lowered program, with dynamic dims at `sizes` by name (the example's where missing)."""
    dims = _dims(program, sizes)
    return _most(_sums(program, dims), lambda axis: True, tokens_of(program.inputs, dims))


def sent_by_axis(program: Program, sizes: Mapping[str, int] | None = None) -> dict[str, Sent]:
    """The same for each mesh axis that something is sent over, in the order of the mesh. A collective over several axes
    together counts for their names joined by ".", a message between stages for "pp".
    """
    dims = _dims(program, sizes)
    sums, tokens = _sums(program, dims), tokens_of(program.inputs, dims)
    order = program.strategy.mesh.names

    def place(axis: str) -> list[int]:
        return [order.index(name.partition(":")[0]) for name in axis.split(".")]  # of a sub-axis that of the whole one

    found = sorted({axis for each in sums.values() for axis, _ in each}, key=place)
    return {axis: _most(sums, partial(operator.eq, axis), tokens) for axis in found}


_Sums = Mapping[Any, Mapping[tuple[str, bool], float]]  # by mesh; axis, whether once


def _sums(program: Program, dims: Mapping[Any, int]) -> _Sums:
    found: dict[Any, dict[tuple[str, bool], float]] = defaultdict(lambda: defaultdict(float))
    for stage in program.placed:
        for each in stage.communications():
            nbytes = each.wire_bytes(stage.mesh.degree(each.axis), dict(dims))
            found[stage.mesh][each.axis, each.part in ONCE] += nbytes
    if isinstance(program, PipelineGraph):
        for index, _, meta in program.transfers:
            found[program.stages[index].mesh][STAGES, False] += meta.numel(dict(dims)) * meta.dtype.itemsize
    return found


def _most(sums: _Sums, wanted: Callable[[str], bool], tokens: int) -> Sent:
    """Of the ranks that send most."""

    def of(once: bool) -> int:
        each = (sum(n for (axis, o), n in found.items() if o == once and wanted(axis)) for found in sums.values())
        return round(max(each, default=0.0))

    return Sent(of(False), of(True), tokens)


def _dims(program: Program, sizes: Mapping[str, int] | None) -> dict[Any, int]:
    return {d.symbol: (sizes or {}).get(d.name, d.example) for d in program.dims}


def tokens_of(inputs: Sequence[Input], dims: Mapping[Any, int]) -> int:
    """Of a replica's micro-batch, by its token ids; 0 without any."""
    batch = {info.fqn: info.meta for info in inputs if info.kind == "batch"}
    return next((int(batch[key].numel(dict(dims))) for key in TOKEN_IDS if key in batch), 0)


__all__ = ["ONCE", "Sent", "sent", "sent_by_axis", "tokens_of"]
