"""Collectives of a lowered graph: what each one moves, for which module and parameters, and which pass asked for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import fx

from fxpar.ir.axes import USES
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.exec_graph import Communication, Part, PlainGraph, Program, collective_kind
from fxpar.ir.fqn import starred
from fxpar.ir.graph import Output, run_dims
from fxpar.ir.node_meta import comm_of, fqn_of, fused_count, is_backward, phase_of, reader_of, source_of
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.ir.printer import PrintedPart, op_name, parts
from fxpar.ir.sent import ONCE
from fxpar.ops import copies, layout
from fxpar.ops.traits import is_view
from fxpar.rules.view import resolve

What = Literal["parameters", "gradients", "loss", "buffers", "activations"]
_ENDS: dict[str, What] = {"grad": "gradients", "loss": "loss", "buffer": "buffers"}
SENDS = ("micro_batch_bytes", "mini_batch_bytes")  # what is sent for each micro-batch, and once: never added
_REDUCES = ("all_reduce", "reduce_scatter")
_WAIT = "_c10d_functional.wait_tensor"


@dataclass(frozen=True)
class CollectiveTraffic:
    """One collective, of one `stage` of a pipeline; `wire_bytes` that one rank sends, with the example's sizes.

    `value` and `users` are nodes of the model's own graph by their fx names, as far as they are: what it moves, and who
    reads that. `module` is the one that makes what is sent (`comm.fqn`, as in a dump). `params` are those it moves,
    reduces the gradients of, or that the ops which make partial sums, or want the value so, read. `reader` is who it is
    moved for. `exchanges`: it takes tokens to their experts or back, or says how many.
    """

    name: str
    part: str
    comm: Communication
    wire_bytes: float
    what: What
    module: str
    params: tuple[str, ...]
    value: str
    users: tuple[str, ...]
    source: str | None
    reader: str
    exchanges: bool = False
    stage: int | None = None

    @property
    def sends(self) -> str:
        """Which of `SENDS` its bytes count for."""
        return SENDS[self.part in ONCE]

    @property
    def added_by(self) -> tuple[str, ...]:
        """The passes that it comes from."""
        first = "exchange_tokens" if self.exchanges else "insert_reshards"
        if self.what == "parameters":
            first = "zero_shard"
        elif self.what == "gradients" and USES.get(self.comm.axis) == "weights" and self.comm.kind == "reduce_scatter":
            first = "insert_reshards"  # to lie like a parameter that tp cuts
        elif self.part == "epilogue" or self.what == "gradients":
            first = "reduce_gradients"
        return (first, *(["bucket_collectives"] if self.comm.fused > 1 else []))


@dataclass
class _Walker:
    """Walks through what lowering put between ops of the model, in one part of a program."""

    printed: PrintedPart
    weight_of: dict[fx.Node, str]  # placeholders and views of parameters
    ends: dict[fx.Node, Output]  # nodes that carry a result of the graph and nothing else


def traffic(program: Program) -> tuple[CollectiveTraffic, ...]:
    """All collectives in program order, those of all stages of a pipeline."""
    if isinstance(program, PipelineGraph):
        return tuple(replace(each, stage=stage.index) for stage in program.stages for each in traffic(stage))
    return tuple(_traffic(program))


def _traffic(program: Program) -> Iterator[CollectiveTraffic]:
    dims = run_dims(program)
    mesh = program.strategy.mesh
    ends, weights = _ends(program), _weights(program)
    for printed in parts(program):
        walker = _Walker(printed, weights, ends)
        for node in printed.graph.nodes:
            kind = collective_kind(node)
            if kind is None:
                continue
            axis, sent = comm_of(node)
            place = (fqn_of(node), is_backward(node))
            comm = Communication(kind, axis, sent, printed.name, *place, fused_count(node))
            sent_bytes = comm.wire_bytes(mesh.degree(axis), dims)
            yield _explained(walker, node, comm, sent_bytes)


def _explained(walker: _Walker, node: fx.Node, comm: Communication, wire_bytes: float) -> CollectiveTraffic:
    values = [_behind(v) for v in _sent(node)]
    users = [reader for got in node.users for reader in _readers(got)]
    moved = [walker.weight_of[v] for v in values if v in walker.weight_of]
    results = [walker.ends[v] for v in values if v in walker.ends]
    what: What = "activations"
    makers = [maker for v in values if v.op == "call_function" for maker in _makers(v)]
    if moved and comm.kind == "all_gather":
        what, params = "parameters", moved
    elif len(results) == len(values):
        params = [r.fqn for r in results if r.kind == "grad"]
        what = "gradients" if params else _ENDS[results[0].kind]  # the loss may go with them
    else:
        causes = makers if comm.kind in _REDUCES else users
        params = [walker.weight_of[o] for c in causes for o in c.all_input_nodes if o in walker.weight_of]
    return CollectiveTraffic(
        walker.printed.names[node],
        walker.printed.name,
        comm,
        wire_bytes,
        what,
        comm.fqn,
        tuple(dict.fromkeys(params)),
        values[0].name if len(values) == 1 else "",
        tuple(dict.fromkeys(u.name for u in users)) if what == "activations" else (),
        source_of(node),
        reader_of(node),
        node.target is copies.exchange or resolve(values[0])[0].target is copies.copies,
    )


def _is_layout(node: fx.Node) -> bool:
    return getattr(node.target, "__module__", "") == layout.__name__


def _is_wait(node: fx.Node) -> bool:
    return str(node.target).startswith(_WAIT)


def _sent(node: fx.Node) -> list[fx.Node]:
    """What goes into a collective: several tensors where some are fused."""
    rows: Any = node.args[0]
    while _is_layout(rows) and rows.target is not layout.fuse:
        rows = rows.args[0]
    return list(rows.args[0]) if rows.target is layout.fuse else [rows]


def _behind(node: fx.Node) -> fx.Node:
    """The node of the model, or the input, behind what passes put in."""
    while True:
        if node.op != "call_function" or node.target in (layout.fuse, layout.unfuse):
            return node
        value, index = resolve(node)
        if value is not node and value.target is layout.unfuse:
            collective: Any = value.args[0].args[0]  # type: ignore[union-attr]
            node = _sent(collective)[index]
        elif (
            _is_layout(node)
            or _is_wait(node)
            or collective_kind(node)
            or (op_name(node) == "_to_copy" and phase_of(node) in ("prologue", "epilogue"))
        ):
            node = node.args[0]  # type: ignore[assignment]
        else:
            return node


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The ops of the model that read a value, what passes put in and views looked through."""
    made = resolve(node)[0]
    through = _is_layout(made) or is_view(made.target) or _is_wait(node) or collective_kind(node)
    if node.op == "call_function" and through:
        for user in node.users:
            yield from _readers(user)
    elif node.op == "call_function":
        yield node


def _makers(value: fx.Node) -> list[fx.Node]:
    """The ops whose terms a partial value is the sum of, the last first; those behind a term that is sent for itself
    are left out.
    """
    found: set[fx.Node] = set()
    todo, seen = [resolve(value)[0]], set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        axes = _partial_axes(node)
        passed = [o for o in node.all_input_nodes if o.op == "call_function" and axes & _partial_axes(o)]
        todo += [resolve(o)[0] for o in passed if not any(_is_layout(u) or collective_kind(u) for u in o.users)]
        found |= set() if passed else {node}
    return sorted(found, reverse=True) or [value]


def _partial_axes(node: fx.Node) -> set[str]:
    dist = node.meta.get("dist")
    return {axis for axis, _ in dist.partial} if isinstance(dist, DistConfig) else set()


def _weights(program: Program) -> dict[fx.Node, str]:
    """Nodes that are a parameter: placeholders of all parts, and views and casts of them."""
    found: dict[fx.Node, str] = {}
    for part in program.parts.values():
        for place, (where, index) in zip(part.graph.find_nodes(op="placeholder"), part.sources, strict=True):
            if where == "input":
                if program.inputs[index].kind == "param":
                    found[place] = program.inputs[index].fqn
            else:
                behind = _behind(program.parts[where].results[index]) if where in program.parts else None
                if behind is not None and behind in found:
                    found[place] = found[behind]
        for node in part.graph.nodes:
            if node.op == "call_function" and not collective_kind(node):
                operands = node.all_input_nodes
                behind = _behind(node)
                if behind in found and behind is not node:
                    found[node] = found[behind]
                elif len(operands) == 1 and operands[0] in found and is_view(node.target):
                    found[node] = found[operands[0]]
    return found


def _ends(program: Program) -> dict[fx.Node, Output]:
    """Nodes that end as a result after reductions and casts alone."""
    found: dict[fx.Node, Output] = {}
    last = list(program.parts.values())[-1]
    kinds = ("grad",) if isinstance(program, PlainGraph) else tuple(_ENDS)
    for node, out in zip(last.results, (o for o in program.outputs if o.kind in kinds), strict=False):
        _mark(program, last, node, out, found)
    return found


def _mark(program: Program, part: Part, node: fx.Node, out: Output, found: dict[fx.Node, Output]) -> None:
    behind = _behind(node)
    found[behind] = out
    if behind.op == "placeholder":
        where, index = part.sources[list(part.graph.find_nodes(op="placeholder")).index(behind)]
        if where in program.parts:
            earlier = program.parts[where]
            _mark(program, earlier, earlier.results[index], out, found)
    elif op_name(behind) == "_to_copy":
        _mark(program, part, behind.all_input_nodes[0], out, found)
    elif op_name(behind) in ("add", "add_") and out.kind == "grad":  # of a tied weight: its terms are gradients too
        for operand in behind.all_input_nodes:
            if {reader for user in _behind(operand).users for reader in _readers(user)} == {behind}:
                _mark(program, part, operand, out, found)


def by_module(found: Sequence[CollectiveTraffic]) -> list[dict[str, Any]]:
    """Traffic per module with repeated layers folded: what is sent per micro-batch, and once per mini-batch."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    kinds: dict[tuple[str, str], dict[tuple[str, str], int]] = defaultdict(lambda: defaultdict(int))
    for each in found:
        key = (starred(each.module), each.what)
        row = rows.setdefault(key, {"module": key[0], "what": each.what, "calls": 0, **dict.fromkeys(SENDS, 0.0)})
        row["calls"] += 1
        row[each.sends] += each.wire_bytes
        kinds[key][each.comm.kind, each.comm.axis] += 1
    for key, row in rows.items():
        row |= {name: round(row[name]) for name in SENDS}
        row["collectives"] = [{"kind": k, "axis": a, "calls": n} for (k, a), n in kinds[key].items()]
    return list(rows.values())


def casts(program: Program) -> dict[str, tuple[str, ...]]:
    """Casts of parameters in the prologue by FQN, as the pass `casts` puts them there."""
    found: dict[str, list[str]] = defaultdict(list)
    for each in program.placed:
        weights = _weights(each)
        for printed in parts(each):
            for node in printed.graph.nodes:
                if op_name(node) == "_to_copy" and phase_of(node) == "prologue" and node in weights:
                    found[weights[node]].append(printed.names[node])
    return {fqn: tuple(names) for fqn, names in found.items()}


__all__ = ["SENDS", "CollectiveTraffic", "by_module", "casts", "traffic"]
