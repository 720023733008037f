"""How long a sequence may be: what the captured graph holds for, and the table that says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxpar.batching.ids import IdLimit
from fxpar.ir.graph import LogicalGraph, TensorMeta
from fxpar.ir.node_meta import tensor_of, whole_meta
from fxpar.ops.traits import EMBEDDINGS

aten = torch.ops.aten


@dataclass(frozen=True)
class LengthLimits:
    """A sequence has `least` to `most` tokens (None: any number); `table` is what `most` comes from, where known.
    `least_at` and `most_at` are the lines ("file:line") where code of the model decides that, if it does, `least_in`
    and `most_in` where a call takes one side.
    """

    least: int = 1
    most: int | None = None
    table: str = ""
    least_at: str | None = None
    most_at: str | None = None
    least_in: str | None = None
    most_in: str | None = None

    def hold(self, length: int) -> bool:
        """Whether a sequence of so many tokens is within them."""
        return self.least <= length and (self.most is None or length <= self.most)

    def __str__(self) -> str:
        """Such as `at most 512 tokens (it has no more positions in the table of 'wpe')`."""
        bounds = [f"at least {self.least}"] * (self.least > 1)
        bounds += [f"at most {self.most}"] * (self.most is not None)
        places = " and ".join(dict.fromkeys(filter(None, (self.least_at, self.most_at))))
        source = f"it has no more positions in {self.table}" if self.table else ""
        source = source or (f"its code branches on the length at {places}" if places else "")
        calls = [f"it asks for so many at {self.least_in}"] * bool(self.least_in)
        calls += [f"what it calls at {self.most_in} is captured for so few"] * bool(self.most_in)
        if calls and not source:
            source = f"{' and '.join(calls)}; in a slice, torch.sym_min(n, T) holds for all lengths"
        return f"{' and '.join(bounds)} tokens{f' ({source})' if source else ''}"

    def narrowed(self, position_ids: IdLimit | None) -> LengthLimits:
        """With the table that positions of the batch index, which count from 0 unless a sequence brings its own."""
        if position_ids is None or (self.most is not None and self.most <= position_ids.rows):
            return self
        return replace(self, most=position_ids.rows, table=position_ids.table, most_at=None, most_in=None)


def length_limits(logical: LogicalGraph) -> LengthLimits:
    """Those of a graph; of one without tokens, any length."""
    tokens = next((dim for dim in logical.dims if dim.name == "T"), None)
    if tokens is None:
        return LengthLimits()
    least, most, most_at = tokens.minimum, tokens.maximum, tokens.maximum_at
    rows, table = (0, "") if most is None else _table(logical, most)
    if rows == most:
        most_at = None  # the model only says what its table says too
    table = "" if most_at else table
    most_in = None if table else tokens.maximum_in
    return LengthLimits(least, most, table, tokens.minimum_at, most_at, tokens.minimum_in, most_in)


def _table(logical: LogicalGraph, most: int) -> tuple[int, str]:
    """What has a row for each position: its rows, and in words what it is. A table that is indexed by numbers that the
    model counts itself, else one that is cut to the length of the sequence. A table may have some rows more.
    """
    inputs = dict(zip(logical.placeholders, logical.inputs, strict=True))
    batch = {node for node, info in inputs.items() if info.kind == "batch"}
    found: list[tuple[int, str]] = []
    cut: list[tuple[int, str]] = []
    for node in logical.gm.graph.nodes:
        if node.target in EMBEDDINGS:
            table, ids = node.args[:2]
            rows = tensor_of(table).shape[0]
            if isinstance(rows, int) and rows >= most and not batch & set(_values(ids)):
                found.append((rows, f"the table of {node.meta.get('fqn') or table.name!r}"))
        elif node.target is aten.slice.Tensor and node.args[0] in inputs and node.args[0] not in batch:
            info = inputs[node.args[0]]
            if info.meta.shape[node.args[1]] == most:
                cut.append((most, f"the table {info.fqn!r}"))
    return min(found or cut, default=(0, ""))


def _values(node: fx.Node) -> Iterator[fx.Node]:
    """The node and all tensors that its values come from; a size is no value."""
    seen, waiting = set(), [node]
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            yield one
            waiting += [n for n in one.all_input_nodes if isinstance(whole_meta(n), TensorMeta)]
