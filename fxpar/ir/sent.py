"""`Sent`: what one rank sends, per micro-batch and per mini-batch: the figures of dump, explain, diff and viz."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import Input
from fxpar.ir.pipeline_graph import PipelineGraph

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
    dims = {d.symbol: (sizes or {}).get(d.name, d.example) for d in program.dims}
    found: dict[Any, dict[bool, float]] = defaultdict(lambda: {True: 0.0, False: 0.0})  # by mesh; whether once
    for stage in program.placed:
        for each in stage.communications():
            found[stage.mesh][each.part in ONCE] += each.wire_bytes(stage.mesh.degree(each.axis), dims)
    if isinstance(program, PipelineGraph):
        for index, _, meta in program.transfers:
            found[program.stages[index].mesh][False] += meta.numel(dims) * meta.dtype.itemsize
    most = {once: max((sums[once] for sums in found.values()), default=0.0) for once in (True, False)}
    return Sent(round(most[False]), round(most[True]), tokens_of(program.inputs, dims))


def tokens_of(inputs: Sequence[Input], dims: Mapping[Any, int]) -> int:
    """Of a replica's micro-batch, by its token ids; 0 without any."""
    batch = {info.fqn: info.meta for info in inputs if info.kind == "batch"}
    return next((int(batch[key].numel(dict(dims))) for key in TOKEN_IDS if key in batch), 0)


__all__ = ["ONCE", "Sent", "sent", "tokens_of"]
