"""`Sent`: what one rank sends, per micro-batch and per mini-batch: the figures of dump, explain, diff and viz."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fxpar.ir.axes import STAGES
from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import Input, TensorMeta, run_dims
from fxpar.ir.pipeline_graph import PipelineGraph

ONCE = ("prologue", "epilogue")  # parts that run once per mini-batch, however many micro-batches it has
TOKEN_IDS = ("input_ids", "tokens", "position_ids")


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends; with pipeline stages the rank that sends most, messages to other stages included.

    `micro_batch_bytes` are paid for every micro-batch: `fixed_bytes` of them at any length, the others grow with its
    tokens. `mini_batch_bytes` (prologue and epilogue) are paid once. `tokens` of a replica's micro-batch; 0 for a model
    without token ids, of which all bytes of a micro-batch count as fixed.
    """

    micro_batch_bytes: int
    mini_batch_bytes: int
    tokens: int
    fixed_bytes: int

    @property
    def per_token_bytes(self) -> float:
        """Of a micro-batch, beside `fixed_bytes`; 0.0 for a model without token ids."""
        return (self.micro_batch_bytes - self.fixed_bytes) / self.tokens if self.tokens else 0.0

    def each(self) -> str:
        """What the bytes of a micro-batch are made of: ` (25,152 at any length + 3,666.0 per token)`."""
        if not self.tokens:
            return ""
        fixed = f"{self.fixed_bytes:,} at any length + " if self.fixed_bytes else ""
        return f" ({fixed}{self.per_token_bytes:,.1f} per token)"

    def lines(self) -> list[str]:
        """Micro-batch and mini-batch as text, never added up."""
        return [
            f"per micro-batch: {self.micro_batch_bytes:,} bytes{self.each()}",
            f"per mini-batch, once: {self.mini_batch_bytes:,} bytes",
        ]

    def to_json(self) -> dict[str, Any]:
        """The fields, and the bytes per token."""
        return {**vars(self), "per_token_bytes": self.per_token_bytes}


def sent(program: Program, sizes: Mapping[str, int] | None = None, *, inputs: Sequence[Input] | None = None) -> Sent:
    """Of a lowered program, with dynamic dims at `sizes` by name (the example's where missing). Of a pipeline stage
    `inputs` are those of the whole model, as token ids may be read by another stage.
    """
    return _Sums.of(program, sizes, inputs).most(lambda axis: True)


def sent_by_axis(program: Program, sizes: Mapping[str, int] | None = None) -> dict[str, Sent]:
    """The same for each mesh axis that something is sent over, in the order of the mesh. A collective over several axes
    together counts for their names joined by ".", a message between stages for "pp".
    """
    sums = _Sums.of(program, sizes)
    order = tuple(dict.fromkeys(name for each in (program, *program.placed) for name, _ in each.strategy.axes))

    def place(axis: str) -> list[int]:
        return [order.index(name.partition(":")[0]) for name in axis.split(".")]  # of a sub-axis that of the whole one

    found = sorted({axis for each in sums.sums.values() for axis, _ in each}, key=place)
    return {axis: sums.most(partial(operator.eq, axis)) for axis in found}


_ByMesh = Mapping[Any, Mapping[tuple[str, bool], float]]  # axis, whether once


@dataclass(frozen=True)
class _Sums:
    """Bytes of one rank of each mesh, as they are and without tokens."""

    sums: _ByMesh
    fixed: _ByMesh
    tokens: int

    @classmethod
    def of(cls, program: Program, sizes: Mapping[str, int] | None, inputs: Sequence[Input] | None = None) -> _Sums:
        dims = run_dims(program, sizes)
        batch = program.inputs if inputs is None else inputs
        fixed = without_tokens(batch, dims)
        return cls(_by_mesh(program, dims), _by_mesh(program, fixed), tokens_of(batch, dims))

    def most(self, wanted: Callable[[str], bool]) -> Sent:
        """Over the `wanted` axes, of the ranks that send most."""

        def of(by_mesh: _ByMesh, once: bool) -> dict[Any, float]:
            return {
                mesh: sum(n for (axis, o), n in found.items() if o == once and wanted(axis))
                for mesh, found in by_mesh.items()
            }

        each, fixed = of(self.sums, False), of(self.fixed, False)
        busiest = max(each, key=lambda mesh: each[mesh], default=None)
        once = round(max(of(self.sums, True).values(), default=0.0))
        return Sent(round(each.get(busiest, 0.0)), once, self.tokens, round(fixed.get(busiest, 0.0)))


def _by_mesh(program: Program, dims: Mapping[Any, int]) -> _ByMesh:
    found: dict[Any, dict[tuple[str, bool], float]] = defaultdict(lambda: defaultdict(float))
    for stage in program.placed:
        for each in stage.communications():
            nbytes = each.wire_bytes(stage.mesh.degree(each.axis), dict(dims))
            found[stage.mesh][each.axis, each.part in ONCE] += nbytes
    if isinstance(program, PipelineGraph):
        for each in program.handovers:
            found[program.stages[each.stage].mesh][STAGES, False] += each.bytes_of_busiest(dims)
    return found


def tokens_of(inputs: Sequence[Input], dims: Mapping[Any, int]) -> int:
    """Of a replica's micro-batch, by its token ids; 0 without any."""
    ids = _token_ids(inputs)
    return 0 if ids is None else int(ids.numel(dict(dims)))


def without_tokens(inputs: Sequence[Input], dims: Mapping[Any, int]) -> dict[Any, int]:
    """The same dims of a micro-batch of no token; unchanged without token ids."""
    ids = _token_ids(inputs)
    shape = () if ids is None else ids.shape
    none = {symbol for size in shape if not isinstance(size, int) for symbol in size.free_symbols}
    return {symbol: 0 if symbol in none else size for symbol, size in dims.items()}


def _token_ids(inputs: Sequence[Input]) -> TensorMeta | None:
    batch = {info.fqn: info.meta for info in inputs if info.kind == "batch"}
    return next((batch[key] for key in TOKEN_IDS if key in batch), None)


__all__ = ["ONCE", "Sent", "sent", "sent_by_axis", "tokens_of", "without_tokens"]
