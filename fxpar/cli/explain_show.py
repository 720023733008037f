"""The answer of `fxpar explain` as text: headings, tables and sentences, made of the document that `--json` writes.

Where nobody looks lines are as long as they need to be. On a narrow terminal tables fold and sentences wrap; no number
is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from rich.console import Console
from rich.text import Text

from fxpar.cli.diff_show import Styled, Table
from fxpar.explain.document import Document
from fxpar.explain.experts import experts_text
from fxpar.explain.traffic import SENDS
from fxpar.ir.columns import folded, human_bytes
from fxpar.ir.sent import Sent

_SENT = tuple(field.name for field in fields(Sent))
_SENDS = ("sends per micro-batch", "per mini-batch")
MOST_NODES = 4  # names of nodes in a row before the rest is counted
EVERYWHERE = "root, or several modules"
PRICE_LINE = (
    "price: extra bytes that one rank sends, over the best choice, if all nodes that are decided together take the "
    "option and the rest of the graph may adapt; moved: the part of it that is sent; unsharded: the rest, a charge for "
    "work and memory that is not sharded; alone: the price if nothing else changes. Assumes {tokens} tokens, "
    "{bytes_per_float} bytes per float and {bytes_per_collective} extra bytes per collective"
)


def show(console: Console, document: Document, *, top: int = 12) -> None:
    """Print it; of the summary's modules the `top` largest."""
    width = console.width if console.is_terminal else None
    for line in report(document, width, top=top):
        console.print(Text(line.text, line.style), soft_wrap=True)


def report(document: Document, width: int | None = None, *, top: int = 12) -> Iterator[Styled]:
    """The lines of `show`."""
    mesh = " x ".join(f"{axis}{degree}" for axis, degree in document["mesh"])
    ranks = " and ".join(document.get("teams", ()))
    on = ranks and f", on rank{'' if ranks.isdecimal() else 's'} {ranks}"
    yield Styled(f"{document['model']} under {document['strategy']}, mesh {mesh}{on}", "bold")
    if "missing" in document:
        yield from _said(f"note: {document['missing']}", width, 0)
    if document.get("kind") == "summary":
        yield from _summary(document, width, top)
        return
    for answer in document["answers"]:
        yield Styled("")
        yield from _ANSWERS[answer["kind"]](answer, width)
        yield from _passes(answer, width)
    yield from _notes(document, width, apart=True)
    if any(value["axes"] for answer in document["answers"] for value in answer.get("values", [])):
        yield Styled("")
        yield from _said(PRICE_LINE.format(**document["prices"]), width, 0, "dim")


def _said(text: str, width: int | None, indent: int, style: str = "") -> Iterator[Styled]:
    """A sentence, wrapped where the width is limited."""
    pad = " " * indent
    if width is None:
        yield Styled(pad + text, style)
        return
    for line in folded(text, width, pad, pad + "  "):
        yield Styled(line, style)


def _table(headers: Sequence[str], words: int, rows: Sequence[Sequence[str]], width: int | None) -> Iterator[Styled]:
    """Rows of which the first `words` columns stand left, the others, one at least, right. Where that is too wide only
    the first column leads a row, and the others follow below.
    """

    def cut(at: int) -> Table:
        pairs = [(tuple(row[:at]), tuple(row[at:])) for row in rows]
        return Table(tuple(headers[:at]), tuple(headers[at:]), pairs)

    wide = cut(words).lines(None)
    fits = width is None or max(len(line.text) for line in wide) <= width
    yield from wide if fits else cut(1).lines(width)


def _notes(document: Document, width: int | None, *, apart: bool = False) -> Iterator[Styled]:
    yield from [Styled("")] * (apart and bool(document["notes"]))
    for note in document["notes"]:
        yield from _said(f"note: {note}", width, 0, "yellow")


# ------------------------------------------------------------------------------------------------------------- summary
def _summary(document: Document, width: int | None, top: int) -> Iterator[Styled]:
    if "params" not in document:
        return
    for axis in document["axes"]:
        stage = f"stage {axis['stage']}, " if "stage" in axis else ""
        yield from _said(f"{stage}{axis['axis']}{axis['degree']}: {axis['does']}", width, 2)
    for rule in document.get("rules", []):
        yield from _said(f"{rule['rule']} ({rule['modules']} modules, {rule['params']} parameters)", width, 2)
    whole, staged = human_bytes(document["weight_bytes"]), "messages" in document
    shown = f"the most that a rank holds of each; the fullest rank {whole}" if staged else f"one rank's share: {whole}"
    yield Styled("")
    yield from _said(f"parameters, {shown}", width, 0, "bold")
    yield from _param_table(document, width)
    yield Styled("")
    padded = document["padded"]
    sizes = ", ".join(
        f"{name}={size}" + (f", figures are for {padded[name]}" if padded[name] != size else "")
        for name, size in document["sizes"].items()
    )
    total = f"{document['collectives']} collectives"
    if "messages" in document:
        total += f" of all stages; {document['messages']} messages between stages"
    yield from _said(f"communication{f' (example: {sizes})' if sizes else ''}: {total}", width, 0, "bold")
    named = {name: document["sent"][name] for name in _SENT}
    for line in Sent(**named).lines():
        yield from _said(f"{'the busiest rank' if 'messages' in document else 'one rank'} sends {line}", width, 2)
    if "host_bytes" in document:
        yield from _said(f"to its host and back per micro-batch: {document['host_bytes']:,} bytes", width, 2)
    yield from _module_table(document["modules"], top, width)
    for row in document.get("experts", ()):
        yield from _said(experts_text(row), width, 2)
    if "borders" in document:
        yield from _border_table(document["borders"], width)
    yield Styled("")
    if not document["overrides"]:
        yield from _said("you chose the axes and flags (no overrides); the search chose the rest", width, 0)
    for override in document["overrides"]:
        text = f"override {override['glob']}={override['placement']}: {override['params']} parameters"
        yield from _said(text, width, 0)
    yield from _notes(document, width)


def _param_table(document: Document, width: int | None) -> Iterator[Styled]:
    staged = "messages" in document
    rows = [
        (
            row["name"] + (" (override)" if row["override"] else ""),
            f"x{row['count']}",
            *([_ranges(row["stages"])] if staged else []),
            row["stored"],
            human_bytes(row["local_bytes"]),
            *(human_bytes(row[name]) for name in SENDS),
        )
        for row in document["params"]
    ]
    titles = ("parameter", "", *["stages"] * staged, "stored", "holds", *_SENDS)
    return _table(titles, 3 + staged, rows, width)


def _ranges(numbers: Sequence[int]) -> str:
    """`0-2, 5` for [0, 1, 2, 5]."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _module_table(modules: Sequence[Document], top: int, width: int | None) -> Iterator[Styled]:
    rows = []
    for row in modules[:top]:
        calls = ", ".join(f"{c['calls']} {c['kind']} {c['axis']}" for c in row["collectives"])
        name = row["module"] or EVERYWHERE
        rows.append((name, row["what"], calls, *(human_bytes(row[each]) for each in SENDS)))
    rest = modules[top:]
    if rest:
        sizes = (human_bytes(sum(r[each] for r in rest)) for each in SENDS)
        count = sum(r["calls"] for r in rest)
        calls = f"{count} collective{'s' * (count != 1)}"
        rows.append((f"{len(rest)} more", "", calls, *sizes))
    return _table(("module", "of", "collectives", *_SENDS), 3, rows, width)


def _border_table(borders: Sequence[Document], width: int | None) -> Iterator[Styled]:
    """What moves between modules of different roles."""
    yield Styled("")
    if not borders:
        yield from _said("nothing moves between modules of different roles", width, 0)
        return
    rows = []
    for row in borders:
        calls = ", ".join(f"{c['calls']} {c['kind']} {c['axis']}" for c in row["collectives"])
        rows.append((f"{row['from']} to {row['to']}", calls, human_bytes(row["wire_bytes"])))
    yield from _table(("between modules of different roles", "collectives", "sends"), 2, rows, width)


# -------------------------------------------------------------------------------------------------- values and modules
def _values(answer: Document, width: int | None) -> Iterator[Styled]:
    for i, value in enumerate(answer["values"]):
        if i:
            yield Styled("")
        yield from _value(value, answer.get("stage"), width)


def _value(value: Document, stage: int | None, width: int | None) -> Iterator[Styled]:
    alike = f", {len(value['nodes'])} alike" if len(value["nodes"]) > 1 else ""
    made = f" = {value['made']}" if value["made"] else ""
    yield from _said(f"{value['name']} : {value['lies']}{made}{alike}", width, 0, "bold")
    facts = [value["kind"], f"stage {stage}" if stage is not None else "", _where(value)]
    yield from _said(", ".join(filter(None, facts)), width, 2)
    if value["decided"]["by"] == "override":
        yield from _said("set by override {glob}={placement}".format(**value["decided"]), width, 2)
    for axis in value["axes"]:
        yield from _axis(axis, width)
    if value["undecided_axes"]:
        yield from _said(f"nothing to decide on {', '.join(value['undecided_axes'])}", width, 2)
    for key, title in (
        ("wanted_otherwise", "resharded for its users:"),
        ("wants_otherwise", "operands resharded for it:"),
        ("summed_later", "it leaves partial sums, which are reduced later:"),
        ("because_of_it", "communication it causes:"),
    ):
        if value.get(key):
            yield Styled(f"  {title}", "bold")
            for move in value[key]:
                yield from _move(move, width)


def _axis(axis: Document, width: int | None) -> Iterator[Styled]:
    together = f", decided for {len(axis['together'])} nodes together" if len(axis["together"]) > 1 else ""
    name = axis["axis"] if ":" in axis["axis"] else f"{axis['axis']}{axis['degree']}"  # of a part it says the degree
    yield from _said(f"{name}: {axis['chosen']}{together}", width, 2, "bold")
    if axis["renames"]:
        yield from _said(
            "a view is sharded like its operand; a price is that of also having the result this way", width, 4
        )
    rows = []
    for each in axis["alternatives"]:
        price, alone = each["price"], each["alone"]
        chosen = "chosen" if each["chosen"] else _signed(price["bytes"]) if price else "impossible"
        apart = "" if each["chosen"] else _signed(alone["bytes"]) if alone else "impossible"
        moved = _signed(price["moved_bytes"]) if price and not each["chosen"] else ""
        work = _signed(price["penalty_bytes"]) if price and not each["chosen"] else ""
        rows.append((f"  {each['option']}", each["rule"], chosen, moved, work, apart))
    yield from _table(("  option", "offered by", "price", "moved", "unsharded", "alone"), 2, rows, width)
    for refused in axis["refused"]:
        yield from _said(f"not {refused['option']}: {refused['reason']}", width, 4)


def _signed(count: int) -> str:
    return "0" if not count else ("+" if count > 0 else "-") + human_bytes(abs(count))


def _move(move: Document, width: int | None) -> Iterator[Styled]:
    times = f" (x{move['count']})" if move["count"] > 1 else ""
    steps = ", then ".join(f"{s['kind']} on {s['axis']}" for s in move["steps"])
    size = f", {human_bytes(move['wire_bytes'])}" if move["wire_bytes"] else ""
    yield from _said(f"%{move['value']} : {move['have']} -> {move['wanted']}{times}", width, 4)
    yield from _said(f"by {steps}{size}", width, 6)
    if "cut_from" in move:
        yield from _said(f"cut from {move['cut_from']}, which other users need anyway", width, 6)
    if "terms" in move:
        more = f" and {len(move['terms']) - MOST_NODES} more" if len(move["terms"]) > MOST_NODES else ""
        yield from _said(f"partial sums of {_users(move['terms'][:MOST_NODES])}{more}", width, 6)
    yield from _said(f"needed by {_users(move['users'])}", width, 6)
    if move["behind"]:
        yield from _said(f"for {_users(move['behind'])}", width, 6)


def _users(users: Sequence[Document]) -> str:
    """`pow_1, mul_12 (layers.0.norm, model.py:33)`; nodes of one place together."""
    places: dict[str, list[str]] = {}
    for user in users:
        places.setdefault(_where(user), []).append(user["node"])
    return ", ".join(f"{_some(nodes)} ({where})" if where else _some(nodes) for where, nodes in places.items())


def _some(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - MOST_NODES} more" if len(nodes) > MOST_NODES else ""
    return ", ".join(nodes[:MOST_NODES]) + more


def _where(place: Document) -> str:
    return ", ".join(filter(None, (place["module"], place["source"], "backward" if place["backward"] else "")))


def _module(answer: Document, width: int | None) -> Iterator[Styled]:
    stage = f", stage {answer['stage']}" if "stage" in answer else ""
    yield from _said(f"{answer['nodes']} ops, {sum(p['count'] for p in answer['params'])} parameters{stage}", width, 0)
    if answer["params"]:
        rows = []
        for row in answer["params"]:
            by = row["decided"]
            text = f"override {by['glob']}={by['placement']}" if by["by"] == "override" else by["by"]
            rows.append((row["name"], f"x{row['count']}", row["lies"], text))
        yield from _table(("parameter", "", "sharded as", "decided by"), 3, rows, width)
    size = sum(move["wire_bytes"] * move["count"] for move in answer["moves"])
    yield Styled(
        f"  communication it causes, {human_bytes(size)}:" if answer["moves"] else "  no communication", "bold"
    )
    for move in answer["moves"]:
        yield from _move(move, width)


# --------------------------------------------------------------------------------------------------- the lowered graph
def _collective(answer: Document, width: int | None) -> Iterator[Styled]:
    stage = f" of stage {answer['stage']}" if "stage" in answer else ""
    head = f"{answer['name']}: {answer['collective']} on {answer['axis']} in the {answer['part']}{stage}"
    yield from _said(head, width, 0, "bold")
    fused = f" in {answer['fused']} tensors" if answer["fused"] > 1 else ""
    yield from _said(f"input per rank {answer['sent']}{fused}, sends {human_bytes(answer['wire_bytes'])}", width, 2)
    yield from _said(f"moves {answer['what']}{f': {where}' if (where := _where(answer)) else ''}", width, 2)
    if answer["params"]:
        verb = "reads" if answer["what"] == "activations" else "of"
        yield from _said(f"{verb} {_some(answer['params'])}", width, 2)
    yield from _said(f"added by {' and '.join(answer['added_by'])}", width, 2)
    if answer.get("comes_from"):
        yield Styled("  the reshard behind it:", "bold")
        for move in answer["comes_from"]:
            yield from _move(move, width)


def _stored(answer: Document, width: int | None) -> Iterator[Styled]:
    yield from _said("what the lowered graph says:", width, 0)


def _passes(answer: Document, width: int | None) -> Iterator[Styled]:
    for each in answer.get("passes", []):
        yield from _said(f"what passes add for {each['name']}:", width, 2, "bold")
        if "stored" in each:
            text = f"stored as {each['stored']}, {human_bytes(each['local_bytes'])} on a rank"
            yield from _said(text, width, 4)
        for row in each["added"]:
            yield from _said(f"{' and '.join(row['pass'])}: {row['node']}, {row['what']}", width, 4)
        if not each["added"]:
            yield from _said("no pass adds anything for it", width, 4)


_ANSWERS = {
    "parameter": _values,
    "node": _values,
    "module": _module,
    "collective": _collective,
    "stored": _stored,
}

__all__ = ["report", "show"]
