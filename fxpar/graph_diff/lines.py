"""The nodes of a graph as lines that do not change when other nodes come or go, and how two such texts differ.

A node is named by its module, its op and how many of that op the module has had: `%attention.q_proj.mm`. Names are
relative to the block that a line stands in, so that equal blocks have equal lines. Lines are aligned by name: a node
that changed stands as `-` and `+` under each other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal, NamedTuple

from torch import fx

from fxpar.graph_diff.modules import PARTS, ModulePlace, place_of
from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.node_meta import fqn_of
from fxpar.ir.printer import AnyGraph, matches, node_line, op_name

Mark = Literal[" ", "-", "+"]
_MANY = 16  # longer lists of operands are shortened
_SAME_OP = {"view": "reshape", "_unsafe_view": "reshape"}  # a name outlives these changes of an op
_ELSEWHERE = re.compile(rf"%(?:(?:{'|'.join(PARTS)})/)?[\w.()]+/[\w.]+")


class Line(NamedTuple):
    """One node."""

    name: str
    text: str


Section = tuple[Line, ...]


class _Name(NamedTuple):
    """`place` is None for an input of the graph."""

    place: ModulePlace | None
    text: str


def graphs_of(graph: AnyGraph) -> Iterator[tuple[str, fx.Graph]]:
    """The fx graphs by name, in the order in which they run; "step" is one that is not yet cut. No pipeline."""
    if isinstance(graph, Program):
        yield from ((name, part.graph) for name, part in graph.parts.items())
    else:
        yield "step", graph.gm.graph if isinstance(graph, LogicalGraph) else graph.graph


def places_of(graph: AnyGraph) -> dict[fx.Node, ModulePlace]:
    """Where each call belongs, in program order."""
    return {n: place_of(n, name) for name, part in graphs_of(graph) for n in part.nodes if n.op == "call_function"}


def sections_of(graph: AnyGraph, places: Mapping[fx.Node, ModulePlace], only: str | None) -> dict[ModulePlace, Section]:
    """The lines by block and part, in program order, without what packs buckets; of the modules that the glob `only`
    matches.
    """
    names = _names(graph, places)
    sections: dict[ModulePlace, list[Line]] = {}
    for node, place in places.items():
        fqn = fqn_of(node)
        if matches(fqn, only) and not packs_a_bucket(node):
            known = {n: _seen_from(place, names[n]) for n in (node, *node.all_input_nodes)}
            sections.setdefault(place, []).append(Line(known[node], node_line(node, known, fqn, _MANY)))
    return {place: tuple(lines) for place, lines in sections.items()}


def packs_a_bucket(node: fx.Node) -> bool:
    """Whether a node only brings tensors into the buffer of a fused collective, or out of it: that says nothing of the
    model, and how much of it there is depends on the sizes of buckets.
    """
    name = op_name(node)
    if name in ("fuse", "unfuse"):
        return True
    if name == "lift":
        return any(op_name(user) == "fuse" for user in node.users)
    source = node.args[0] if node.args else None
    if name == "lower" and isinstance(source, fx.Node):
        node, source = source, source.args[0] if source.args else None
    return op_name(node) == "getitem" and isinstance(source, fx.Node) and op_name(source) == "unfuse"


def _names(graph: AnyGraph, places: Mapping[fx.Node, ModulePlace]) -> dict[fx.Node, _Name]:
    """A name per node of all parts; what a part takes of an earlier one is called as there."""
    inputs = [_Name(None, f"tangent.{i.fqn}" if i.kind == "tangent" else i.fqn) for i in graph.inputs]
    results: dict[str, list[_Name]] = {"input": inputs}
    names: dict[fx.Node, _Name] = {}
    counts: Counter[tuple[ModulePlace, str]] = Counter()
    for title, part in graphs_of(graph):
        known = list(inputs)
        if isinstance(graph, Program):
            known = [results[where][index] for where, index in graph.parts[title].sources]
        names.update(zip(part.find_nodes(op="placeholder"), known, strict=True))
        names.update((n, _new_name(n, places[n], counts)) for n in part.nodes if n.op == "call_function")
        (output,) = part.find_nodes(op="output")
        results[title] = [names[n] for n in output.args[0]]
    return names


def _new_name(node: fx.Node, place: ModulePlace, counts: Counter[tuple[ModulePlace, str]]) -> _Name:
    fqn = fqn_of(node)
    inside = fqn[len(place.block) + 1 :] if fqn.startswith(f"{place.block}.") else ""
    op = op_name(node)
    op = _SAME_OP.get(op, op.rstrip("_"))
    base = f"{inside}.{op}" if inside else op
    counts[place, base] += 1
    count = counts[place, base]
    return _Name(place, base if count == 1 else f"{base}.{count}")


def _seen_from(here: ModulePlace, name: _Name) -> str:
    """`mlp.mm` of the same place, `forward/mlp.mm` of another part of the block, `layers.0/mlp.mm` of another block."""
    if name.place is None:
        inside = name.text.startswith(f"{here.block}.")
        return name.text[len(here.block) + 1 :] if inside else name.text
    part = "" if name.place.part == here.part else f"{name.place.part}/"
    block = "" if name.place.block == here.block else f"{name.place.block}/"
    return f"{part}{block}{name.text}"


@dataclass(frozen=True)
class SectionDiff:
    """How the nodes of a place differ, and the other blocks in which they do in the same way. `lines` are (mark, text),
    with all that did not change.
    """

    place: ModulePlace
    blocks: tuple[str, ...]
    lines: tuple[tuple[Mark, str], ...]
    removed: int  # nodes
    added: int
    changed: int


def compare_sections(old: dict[ModulePlace, Section], new: dict[ModulePlace, Section]) -> list[SectionDiff]:
    """The places that differ, in the order of the old graph and then of the new one, equal differences once."""
    found: dict[object, tuple[ModulePlace, list[str], Section, Section]] = {}
    for place in dict.fromkeys([*old, *new]):
        left, right = old.get(place, ()), new.get(place, ())
        if left != right:
            key = (place.part, tuple(_canonical(left)), tuple(_canonical(right)))
            found.setdefault(key, (place, [], left, right))[1].append(place.block)
    return [_diff(*each) for each in found.values()]


def _canonical(section: Section) -> Iterable[str]:
    """The lines with what is of other blocks called by its order of appearance."""
    seen: dict[str, str] = {}

    def rename(match: re.Match[str]) -> str:
        own = match[0][1:].partition("/")[0] in PARTS and match[0].count("/") == 1  # another part of this block
        return match[0] if own else seen.setdefault(match[0], f"%{len(seen)}")

    return [_ELSEWHERE.sub(rename, line.text) for line in section]


def _diff(place: ModulePlace, blocks: list[str], old: Section, new: Section) -> SectionDiff:
    lines: list[tuple[Mark, str]] = []
    removed = added = changed = 0
    for tag, i, i_end, j, j_end in _alignment([line.name for line in old], [line.name for line in new]):
        if tag != "equal":
            removed, added = removed + i_end - i, added + j_end - j
            lines.extend(("-", line.text) for line in old[i:i_end])
            lines.extend(("+", line.text) for line in new[j:j_end])
            continue
        for left, right in zip(old[i:i_end], new[j:j_end], strict=True):
            if left.text == right.text:
                lines.append((" ", left.text))
            else:
                changed += 1
                lines.extend((("-", left.text), ("+", right.text)))
    return SectionDiff(place, tuple(blocks), tuple(lines), removed, added, changed)


def _alignment(old: list[str], new: list[str]) -> Iterator[tuple[str, int, int, int, int]]:
    """The opcodes of difflib, which finds other matches when the sides are swapped: here they stay the same."""
    swapped = new < old
    for tag, i, i_end, j, j_end in SequenceMatcher(None, *sorted((old, new)), autojunk=False).get_opcodes():
        yield (tag, j, j_end, i, i_end) if swapped else (tag, i, i_end, j, j_end)
