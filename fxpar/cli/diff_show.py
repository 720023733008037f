"""A comparison of two graphs as text: tables, and the nodes that differ.

Tables are as wide as they need to be where nobody looks; on a terminal that is too narrow the numbers of a row go on a
line of their own, and on lines of their own if need be. No number is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from fxpar.graph_diff.compare import DiffRow, GraphDiff, total
from fxpar.graph_diff.digest import Digest
from fxpar.graph_diff.lines import SectionDiff
from fxpar.graph_diff.modules import ModulePlace, ranges
from fxpar.ir.columns import human_bytes
from fxpar.ir.sent import ONCE, Sent

SUMS = ("per micro-batch", "per mini-batch")
CONTEXT = 2  # unchanged lines around a change
STYLES = {"-": "red", "+": "green", " ": ""}
RESHARD_NOTE = "bytes of a reshard are known after reshard_to_collectives"
Cell = str | tuple[str, str]  # a pair is "old -> new"


@dataclass(frozen=True)
class Styled:
    """One line of output."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of (what it is, values); the headers of both."""

    keys: tuple[str, ...]
    values: tuple[str, ...]
    rows: Sequence[tuple[tuple[str, ...], tuple[Cell, ...]]]

    def lines(self, width: int | None) -> list[Styled]:
        """Aligned columns, or what fits in `width`. Rows called as in SUMS are sums."""
        keys = _aligned([self.keys, *(row[0] for row in self.rows)], right=False)
        cells = _aligned([self.values, *_pairs([row[1] for row in self.rows])], right=True)
        styles = ["bold", *("bold" if row[0][0] in SUMS else "" for row in self.rows)]
        found: list[Styled] = []
        if width is None or 4 + len(keys[0]) + len(cells[0]) <= width:
            return [Styled(f"  {k}  {c}".rstrip(), s) for k, c, s in zip(keys, cells, styles, strict=True)]
        if 4 + len(cells[0]) <= width:
            for key, cell, style in zip(keys, cells, styles, strict=True):
                found += [Styled(f"  {key}".rstrip(), style), Styled(f"    {cell}".rstrip(), style)]
            return found
        for key, (_, values), style in zip(keys[1:], self.rows, styles[1:], strict=True):
            found.append(Styled(f"  {key}".rstrip(), style))
            texts = [" -> ".join(v) if isinstance(v, tuple) else v for v in values]
            found += [Styled(f"    {n} {t}".rstrip(), style) for n, t in zip(self.values, texts, strict=True) if t]
        return found


def _aligned(rows: Sequence[Sequence[str]], *, right: bool) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(c.rjust(w) if right else c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]


def _pairs(rows: Sequence[tuple[Cell, ...]]) -> list[tuple[str, ...]]:
    """Each pair as one text, with the arrows of a column under each other."""
    columns: list[list[str]] = []
    for column in zip(*rows, strict=True):
        new = max((len(cell[1]) for cell in column if isinstance(cell, tuple)), default=0)
        columns.append([f"{c[0]} -> {c[1]:>{new}}" if isinstance(c, tuple) else c for c in column])
    return list(zip(*columns, strict=True))


def show(console: Console, diff: GraphDiff, *, nodes: bool = True, text: bool = False) -> None:
    """Print all of it: the tables, with `nodes` where nodes differ, with `text` how."""
    width = console.width if console.is_terminal else None
    for line in report(diff, width, nodes=nodes, text=text):
        console.print(Text(line.text, line.style), soft_wrap=True)


def report(diff: GraphDiff, width: int | None, *, nodes: bool = True, text: bool = False) -> Iterator[Styled]:
    """The lines of `show`."""
    yield Styled(f"model {diff.old.model}", "bold")
    yield Styled(f"--- {diff.old.title}", "bold red")
    yield Styled(f"+++ {diff.new.title}", "bold green")
    yield from sides(diff).lines(width)
    if not diff.differs:
        same = _schedule(diff.old) == _schedule(diff.new)
        yield from (Styled(""), Styled("no differences" if same else "no differences except the schedule"))
        return
    yield from _params(diff, width)
    yield from _collectives(diff, width)
    yield from _blocks(diff, width)
    if nodes and not text:
        yield from _nodes(diff, width)
    if text:
        for section in diff.sections:
            yield Styled("")
            yield from section_text(section)


def sides(diff: GraphDiff) -> Table:
    """What both graphs are."""
    old, new = diff.old, diff.new
    rows: list[tuple[tuple[str, ...], tuple[Cell, ...]]] = [
        (("ranks",), (str(_ranks(old)), str(_ranks(new)), "")),
        (("mesh",), (_mesh(old), _mesh(new), "")),
    ]
    if _stages(old) + _stages(new) > 2:
        rows.append((("stages",), (str(_stages(old)), str(_stages(new)), "")))
        if _schedule(old) != _schedule(new):
            rows.append((("schedule",), (_schedule(old), _schedule(new), "")))
    for name in dict.fromkeys([*old.divisors, *new.divisors]):
        left, right = old.divisors.get(name, 1), new.divisors.get(name, 1)
        if left != right:
            rows.append(((f"{name} a multiple of",), (str(left), str(right), "")))
    rows += [
        (("ops",), (str(old.op_count), str(new.op_count), _signed(new.op_count - old.op_count))),
        (("weights per rank",), _bytes_of(old.weight_bytes, new.weight_bytes)),
        *_sent_rows(old.sent, new.sent),
    ]
    return Table(("",), ("-", "+", "change"), rows)


def _sent_rows(old: Sent, new: Sent) -> Iterator[tuple[tuple[str, ...], tuple[Cell, ...]]]:
    yield ("sent per micro-batch and rank",), _bytes_of(old.micro_batch_bytes, new.micro_batch_bytes)
    if old.tokens and new.tokens:
        if old.fixed_bytes or new.fixed_bytes:
            yield ("  at any length",), _bytes_of(old.fixed_bytes, new.fixed_bytes)
        yield ("  per token",), _bytes_of(old.per_token_bytes, new.per_token_bytes)
    yield ("sent once per mini-batch and rank",), _bytes_of(old.mini_batch_bytes, new.mini_batch_bytes)


def _params(diff: GraphDiff, width: int | None) -> Iterator[Styled]:
    if not diff.params:
        return
    count = sum(change.count for change in diff.params)
    yield from (Styled(""), Styled(f"parameters sharded differently ({count} of {len(diff.old.params)}):", "bold"))
    names = _aligned([(c.name, f"x{c.count}") for c in diff.params], right=False)
    for name, change in zip(names, diff.params, strict=True):
        line = f"  {name}  {change.old} -> {change.new}"
        if width is None or len(line) <= width:
            yield Styled(line)
        else:
            yield from (Styled(f"  {name}".rstrip()), Styled(f"    - {change.old}", "red"))
            yield Styled(f"    + {change.new}", "green")


def _collectives(diff: GraphDiff, width: int | None) -> Iterator[Styled]:
    new = diff.new.sizes
    sizes = ", ".join(
        f"{name}={size}" + (f" -> {new[name]}" if new.get(name, size) != size else "")
        for name, size in diff.old.sizes.items()
    )
    who = "a rank of each stage" if _stages(diff.old) + _stages(diff.new) > 2 else "a rank"
    yield Styled("")
    yield Styled(f"collectives ({f'{sizes}; ' if sizes else ''}bytes that {who} sends):", "bold")
    if not diff.collectives:
        yield Styled("  none")
        return
    rows = [(row.key, _sent(row, bare=row.key[1] == "reshard")) for row in diff.collectives]
    rows += [((name, "", ""), _sent(of)) for name, of in _sums(diff.collectives, lambda key: key[0])]
    yield from Table(("part", "kind", "axis"), ("calls", "bytes", "change", ""), rows).lines(width)
    if any(row.key[1] == "reshard" for row in diff.collectives):
        yield Styled(f"  {RESHARD_NOTE}")


def _blocks(diff: GraphDiff, width: int | None) -> Iterator[Styled]:
    """The places that differ in their numbers, equal ones once; the others together."""
    changed = [row for row in diff.blocks if row.differs]
    if not changed:
        return
    rows = [(key, _numbers(row)) for key, row in folded(changed)]
    same = [row for row in diff.blocks if not row.differs]
    rows += [(("others", name), _numbers(of)) for name, of in _sums(same, lambda key: key.part)]
    rows += [((name, ""), _numbers(of)) for name, of in _sums(diff.blocks, lambda key: key.part)]
    yield from (Styled(""), Styled("blocks that differ (ops, tensors sent, their bytes):", "bold"))
    yield from Table(("block", "part"), ("ops", "tensors", "bytes", "change"), rows).lines(width)


def _sums(rows: Sequence[DiffRow[Any]], part: Callable[[Any], str]) -> Iterator[tuple[str, DiffRow[str]]]:
    """What counts per micro-batch and what once per mini-batch, never added; `part` of a row's key."""
    for name, once in zip(SUMS, (False, True), strict=True):
        of = [row for row in rows if (part(row.key) in ONCE) == once]
        if of:
            yield name, total(of)


def folded(rows: Iterable[DiffRow[ModulePlace]]) -> list[tuple[tuple[str, str], DiffRow[ModulePlace]]]:
    """Rows with (blocks, part) as what they are called; equal ones of a part are one, which says `each`."""
    found: dict[Any, list[DiffRow[ModulePlace]]] = {}
    for row in rows:
        found.setdefault((row.key.part, row.old, row.new), []).append(row)
    return [((_each([row.key.block for row in like]), part), like[0]) for (part, _, _), like in found.items()]


def _nodes(diff: GraphDiff, width: int | None) -> Iterator[Styled]:
    if not diff.sections:
        return
    yield from (Styled(""), Styled("nodes that differ (--text shows them):", "bold"))
    rows: list[tuple[tuple[str, ...], tuple[Cell, ...]]] = [
        ((_each(s.blocks), s.place.part), (str(s.removed), str(s.added), str(s.changed))) for s in diff.sections
    ]
    yield from Table(("block", "part"), ("removed", "added", "changed"), rows).lines(width)


def _each(blocks: Sequence[str]) -> str:
    return ranges(blocks) + (", each" if len(blocks) > 1 else "")


def section_text(section: SectionDiff) -> Iterator[Styled]:
    """The nodes of a place that differ, with a few around them."""
    counts = f"{section.removed} removed, {section.added} added, {section.changed} changed"
    yield Styled(f"@@ {_each(section.blocks)}, {section.place.part}: {counts}", "cyan")
    marks = [mark for mark, _ in section.lines]
    near = {j for i, m in enumerate(marks) if m != " " for j in range(i - CONTEXT, i + CONTEXT + 1)}
    for shown, group in groupby(enumerate(section.lines), key=lambda item: item[0] in near):
        lines = [line for _, line in group]
        if shown:
            yield from (Styled(f"{mark}{text}", STYLES[mark]) for mark, text in lines)
        else:
            yield Styled(f" ... {len(lines)} unchanged", "dim")


def _sent(row: DiffRow[Any], *, bare: bool = False) -> tuple[Cell, ...]:
    """Calls and bytes; a reshard has no bytes yet."""
    calls = (str(row.old.calls), str(row.new.calls))
    if bare:
        return calls, "", "", ""
    change, share = row.new.bytes - row.old.bytes, _share(row.old.bytes, row.new.bytes)
    return calls, (human_bytes(row.old.bytes), human_bytes(row.new.bytes)), _signed_bytes(change), share


def _numbers(row: DiffRow[Any]) -> tuple[Cell, ...]:
    sent = (human_bytes(row.old.bytes), human_bytes(row.new.bytes))
    tensors = (str(row.old.tensors), str(row.new.tensors))
    return (str(row.old.ops), str(row.new.ops)), tensors, sent, _signed_bytes(row.new.bytes - row.old.bytes)


def _bytes_of(old: float, new: float) -> tuple[Cell, ...]:
    change = f"{_signed_bytes(new - old)} {_share(old, new)}".strip()
    return human_bytes(old), human_bytes(new), change


def _signed(change: int) -> str:
    return f"{change:+}" if change else ""


def _signed_bytes(change: float) -> str:
    size = human_bytes(abs(change))
    return "" if size == "0 B" else f"{'+' if change > 0 else '-'}{size}"


def _share(old: float, new: float) -> str:
    """The change in per cent; beyond tenfold how many times."""
    if round(old) == round(new):
        return ""
    if round(old) == 0 or round(new) == 0:
        return "new" if round(old) == 0 else "gone"
    text = f"x{new / old:.0f}" if new / old >= 10 else f"{100 * (new / old - 1):+.1f}%"
    return "" if text in ("+0.0%", "-0.0%") else text


def _ranks(side: Digest) -> int:
    return 1 if side.strategy is None else side.strategy.world


def _mesh(side: Digest) -> str:
    return "none" if side.strategy is None else " x ".join(f"{a}{n}" for a, n in side.strategy.all_digits)


def _schedule(side: Digest) -> str:
    """How pipeline stages run; empty where there are none."""
    strategy = side.strategy
    return "" if strategy is None or strategy.pipeline_size == 1 else strategy.pipeline.schedule


def _stages(side: Digest) -> int:
    return len(side.stage_bytes)
