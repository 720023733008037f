"""How two digests differ, as numbers: parameters, collectives by kind, blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from fxpar.errors import DifferentModelsError
from fxpar.graph_diff.digest import Digest, SentTensor
from fxpar.graph_diff.lines import SectionDiff, compare_sections
from fxpar.graph_diff.modules import PARTS, ModulePlace
from fxpar.ir.fqn import starred

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class GraphCounts:
    """Ops of the graph, tensors that a rank sends, in how many calls, and bytes."""

    ops: int = 0
    tensors: int = 0
    calls: int = 0
    bytes: float = 0.0

    def __add__(self, other: GraphCounts) -> GraphCounts:
        return GraphCounts(
            self.ops + other.ops, self.tensors + other.tensors, self.calls + other.calls, self.bytes + other.bytes
        )


@dataclass(frozen=True)
class DiffRow(Generic[Key]):
    """What both graphs have under one key."""

    key: Key
    old: GraphCounts
    new: GraphCounts

    @property
    def differs(self) -> bool:
        return self.old != self.new


@dataclass(frozen=True)
class ParamChange:
    """Parameters that lie otherwise: those of repeated blocks that change alike, with `*` for the number."""

    name: str
    count: int
    old: str
    new: str


@dataclass(frozen=True)
class GraphDiff:
    """What `new` has that `old` has not, and the other way round. Rows are there for all keys of either."""

    old: Digest
    new: Digest

    @property
    def differs(self) -> bool:
        """Whether the graphs do; the schedule of pipeline stages is none of them."""
        return bool(self.params or self.sections or any(row.differs for row in self.blocks))

    @cached_property
    def params(self) -> list[ParamChange]:
        found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        for fqn, old in self.old.params.items():
            new = self.new.params[fqn]
            if old != new:
                found[starred(fqn), old.text, new.text].append(fqn)
        return [
            ParamChange(name if len(fqns) > 1 else fqns[0], len(fqns), old, new)
            for (name, old, new), fqns in found.items()
        ]

    @cached_property
    def collectives(self) -> list[DiffRow[tuple[str, str, str]]]:
        """By part, kind and axis, in the order of the parts."""
        rows = _rows(self, lambda move: (move.place.part, move.kind, move.axis))
        return sorted(rows, key=lambda row: PARTS.index(row.key[0]))

    @cached_property
    def blocks(self) -> list[DiffRow[ModulePlace]]:
        """By block and part, without calls: blocks in the order of the old graph and then of the new one."""
        rows = {row.key: row for row in _rows(self, lambda move: move.place, ops=True)}
        order = {block: i for i, block in enumerate(dict.fromkeys(place.block for place in rows))}
        return sorted(rows.values(), key=lambda row: (order[row.key.block], PARTS.index(row.key.part)))

    @cached_property
    def sections(self) -> list[SectionDiff]:
        return compare_sections(self.old.sections, self.new.sections)

    def to_json(self) -> dict[str, Any]:
        """All numbers; each `changes` is (removed, added, changed) nodes."""
        return {
            "model": self.old.model,
            "differs": self.differs,
            "old": _side(self.old),
            "new": _side(self.new),
            "params": [asdict(change) for change in self.params],
            "collectives": [
                {
                    "part": row.key[0],
                    "kind": row.key[1],
                    "axis": row.key[2],
                    **_counts(row, "calls", "tensors", "bytes"),
                }
                for row in self.collectives
            ],
            "blocks": [{**row.key._asdict(), **_counts(row, "ops", "tensors", "bytes")} for row in self.blocks],
            "nodes": [
                {
                    "part": section.place.part,
                    "blocks": list(section.blocks),
                    **{name: getattr(section, name) for name in ("removed", "added", "changed")},
                    "lines": [mark + text for mark, text in section.lines if mark != " "],
                }
                for section in self.sections
            ],
        }


def compare(old: Digest, new: Digest) -> GraphDiff:
    """Compare two graphs of one model. Raises DifferentModelsError if the parameters are others."""
    for fqn in dict.fromkeys([*old.shapes, *new.shapes]):
        left, right = (side.shapes.get(fqn) for side in (old, new))
        if left != right:
            raise DifferentModelsError(_side_name(old), _side_name(new), fqn, left, right)
    return GraphDiff(old, new)


def _side_name(side: Digest) -> str:
    return f"{side.model} ({side.title})"


def _rows(diff: GraphDiff, key: Callable[[SentTensor], Key], *, ops: bool = False) -> list[DiffRow[Key]]:
    """Sums of the moves of both sides by key; with `ops` keys are places, and ops are counted too."""
    sums: list[dict[Any, GraphCounts]] = []
    for side in (diff.old, diff.new):
        counts: dict[Any, GraphCounts] = defaultdict(GraphCounts)
        for place, count in side.ops.items() if ops else ():
            counts[place] += GraphCounts(ops=count)
        for move in side.moves:
            calls = 0 if ops else move.calls  # a call with tensors of several blocks is none's
            counts[key(move)] += GraphCounts(0, 1, calls, move.bytes)
        sums.append(counts)
    old, new = sums
    return [DiffRow(k, old.get(k, GraphCounts()), new.get(k, GraphCounts())) for k in dict.fromkeys([*old, *new])]


def total(rows: Sequence[DiffRow[Any]]) -> DiffRow[str]:
    """The sum of rows."""
    return DiffRow("all", sum((row.old for row in rows), GraphCounts()), sum((row.new for row in rows), GraphCounts()))


def _side(side: Digest) -> dict[str, Any]:
    strategy = side.strategy
    return {
        "title": side.title,
        "strategy": None if strategy is None else str(strategy),
        "world": 1 if strategy is None else strategy.world,
        "mesh": [] if strategy is None else [list(axis) for axis in strategy.all_digits],
        "cuts": list(side.cuts),
        "ops": side.op_count,
        "collective_bytes": side.rank_bytes,
        "sent": side.sent.to_json(),
        "weight_bytes": side.weight_bytes,
    }


def _counts(row: DiffRow[Any], *names: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        old, new = getattr(row.old, name), getattr(row.new, name)
        found |= {f"old_{name}": round(old), f"new_{name}": round(new)}
    return found
