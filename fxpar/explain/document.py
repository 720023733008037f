"""The answer of `fxpar explain` as plain data: what `--json` writes, and what the text is made of."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from fxpar.annotate.alternatives import AxisChoice, axis_choice, describe_option
from fxpar.annotate.cost import LAUNCH_BYTES, Cost
from fxpar.explain.reshards import Reshard
from fxpar.explain.subject import Placed, Subject, alike
from fxpar.explain.traffic import CollectiveTraffic
from fxpar.ir.axes import ROLE_AXES, USES
from fxpar.ir.exec_graph import Program
from fxpar.ir.fqn import starred
from fxpar.ir.graph import Dim, Input
from fxpar.ir.node_meta import fqn_of, is_backward, is_size, source_of, tensor_metas
from fxpar.ir.printer import op_name, type_of, without_folders
from fxpar.ir.strategy import Strategy
from fxpar.rules.view import Sizes, resolve

Document = dict[str, Any]
PRICES = {"tokens": Sizes.NOMINAL, "bytes_per_float": 2, "bytes_per_collective": LAUNCH_BYTES}


def heading(model: str, strategy: Strategy, dims: Sequence[Dim], stages: Sequence[int] = ()) -> Document:
    """What every answer begins with."""
    found: Document = {"model": model, **strategy.to_json(), "mesh": [list(axis) for axis in strategy.all_digits]}
    found["sizes"] = {d.name: d.example for d in dims}
    return found | ({"pipeline_stages": list(stages)} if stages else {})


def noted(notes: Iterable[str]) -> Document:
    """What the strategy does otherwise than one may expect, each once: stages say the same."""
    return {"notes": [without_folders(note) for note in dict.fromkeys(notes)]}


def decided_by(strategy: Strategy, info: Input) -> Document:
    """The override that fixes a parameter, or the search, where some rank of its module is for cutting weights."""
    for glob, placement in strategy.overrides:
        if any(fnmatch.fnmatchcase(name, glob) for name in (info.fqn, *info.aliases)):
            return {"by": "override", "glob": glob, "placement": placement}
    rule = strategy.rule_of(info.fqn.rpartition(".")[0])
    cut = any(USES[strategy.axis_in(atom, rule)] == "weights" for atom in strategy.atoms)
    return {"by": "search" if cut else "nothing to decide"}


# --------------------------------------------------------------------------------------------------------- one subject
def subject_document(known: Placed, subject: Subject) -> Document:
    """What was asked about, each group of alike nodes once."""
    found: Document = {"kind": subject.kind} | ({} if known.stage is None else {"stage": known.stage})
    if subject.kind == "module":
        return found | _module(known, subject)
    return found | {"values": [_value(known, group) for group in alike(known, subject.nodes)]}


def _value(known: Placed, nodes: tuple[fx.Node, ...]) -> Document:
    (first, *_), strategy = nodes, known.graph.strategy
    info = known.inputs.get(first)
    is_param = info is not None and info.kind == "param"
    choices = [axis_choice(search, first) for search in known.searches]
    found: Document = {
        "name": _name(known, nodes),
        "nodes": [known.label(n) for n in nodes],
        "kind": info.kind if info else "op",
        "lies": type_of(first),
        "made": "" if info else f"{op_name(first)}({', '.join(known.label(o) for o in operands_of(first))})",
        **_place(first),
        "decided": decided_by(strategy, info) if info and is_param else {"by": "search"},
        "axes": [_axis(known, choice) for choice in choices],
        "undecided_axes": [name for name, degree in strategy.axes if degree > 1 and name not in ROLE_AXES],
    }
    chosen = set(nodes)
    made = [m for m in known.moves if resolve(m.value)[0] in chosen]
    wants = [m for m in known.moves if chosen & set(m.users)]
    found["wanted_otherwise"] = moves_document(known, made)
    found["wants_otherwise"] = moves_document(known, wants)
    later = [m for m in known.moves if m not in made and m.have.partial and chosen & set(m.terms)]
    found["summed_later"] = moves_document(known, later)
    if is_param:
        read = [m for m in known.moves if m not in made and _because_of(known, m, chosen)]
        found["because_of_it"] = moves_document(known, read)
    return found


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Tensor operands as the annotated graph has them, without the reshards in front."""
    found = []
    for operand in node.all_input_nodes:
        while op_name(operand) == "reshard":
            operand = operand.all_input_nodes[0]
        if not is_size(operand):
            found.append(operand)
    return found


def _name(known: Placed, nodes: tuple[fx.Node, ...]) -> str:
    (first, *rest) = nodes
    if first in known.inputs:
        return starred(known.inputs[first].fqn) if rest else known.inputs[first].fqn
    return known.label(first)


def _place(node: fx.Node) -> Document:
    source = source_of(node)
    return {
        "module": fqn_of(node),
        "source": without_folders(source) if source else None,
        "backward": is_backward(node),
    }


def _because_of(known: Placed, move: Reshard, params: set[fx.Node]) -> bool:
    """Whether an op that reads one of the parameters makes the partial sums, or wants the value so."""
    causes = move.terms if move.have.partial else move.behind
    return any(params & known.weights.get(cause, set()) for cause in causes)


def _axis(known: Placed, choice: AxisChoice) -> Document:
    return {
        "axis": choice.axis,
        "degree": choice.degree,
        "chosen": describe_option(choice.chosen),
        "renames": choice.renames,
        "together": [known.label(n) for n in choice.nodes],
        "best_bytes": round(choice.best.total_bytes),
        "alternatives": [
            {
                "option": describe_option(a.option),
                "rule": a.rule,
                "chosen": a.chosen,
                "price": _cost(a.price),
                "alone": _cost(a.alone),
            }
            for a in choice.alternatives
        ],
        "refused": [{"option": r.text, "reason": r.reason} for r in choice.refused],
    }


def _cost(cost: Cost | None) -> Document | None:
    if cost is None:
        return None
    return {
        "bytes": round(cost.total_bytes),
        "moved_bytes": round(cost.moved_bytes),
        "penalty_bytes": round(cost.penalty_bytes),
    }


def moves_document(known: Placed, found: Iterable[Reshard]) -> list[Document]:
    """Moves, those of repeated layers once with their number."""
    rows: dict[object, Document] = {}
    for move in found:
        document = _move(known, move)
        key = (
            document["have"],
            document["wanted"],
            starred(document["module"]),
            is_backward(move.value),
            tuple((op_name(u), starred(fqn_of(u))) for u in move.users),
        )
        if key in rows:
            rows[key]["count"] += 1
        else:
            rows[key] = document
    return list(rows.values())


def _move(known: Placed, move: Reshard) -> Document:
    shape = tensor_metas(resolve(move.value)[0])[resolve(move.value)[1]].shape  # type: ignore[union-attr]
    found: Document = {
        "value": known.label(move.value),
        **_place(resolve(move.value)[0]),
        "have": move.have.describe(shape),
        "wanted": move.wanted.describe(shape),
        "steps": [
            {"kind": s.kind, "axis": s.axis, "sent": str(s.sent), "wire_bytes": round(s.wire_bytes)} for s in move.steps
        ],
        "wire_bytes": round(move.wire_bytes),
        "count": 1,
        "users": [_user(known, u) for u in move.users],
        "behind": [_user(known, u) for u in move.behind] if move.behind != move.users else [],
    }
    if move.cut_from != move.have:
        found["cut_from"] = move.cut_from.describe(shape)
    if move.have.partial and move.terms != (resolve(move.value)[0],):
        found["terms"] = [_user(known, node) for node in move.terms]
    return found


def _user(known: Placed, node: fx.Node) -> Document:
    return {"node": known.label(node), **_place(node)}


def _module(known: Placed, subject: Subject) -> Document:
    """Parameters as they lie, and what moves because of the module's ops: in, out and inside."""
    inside = set(subject.nodes)
    params = [n for n in subject.nodes if n in known.inputs and known.inputs[n].kind == "param"]

    def causes(move: Reshard) -> bool:
        return any(n in inside for n in (move.terms if move.have.partial else (*move.users, *move.behind)))

    return {
        "nodes": len(inside - set(params)),
        "params": [
            {
                "name": _name(known, group),
                "count": len(group),
                "lies": type_of(group[0]),
                "decided": decided_by(known.graph.strategy, known.inputs[group[0]]),
            }
            for group in alike(known, params)
        ],
        "moves": moves_document(known, [m for m in known.moves if causes(m)]),
    }


# ------------------------------------------------------------------------------------------ what a lowered graph says
def collective_document(found: CollectiveTraffic) -> Document:
    """One collective of the lowered graph."""
    return {
        "kind": "collective",
        **({} if found.stage is None else {"stage": found.stage}),
        "name": found.name,
        "part": found.part,
        "collective": found.comm.kind,
        "axis": found.comm.axis,
        "sent": str(found.comm.sent),
        "fused": found.comm.fused,
        "wire_bytes": round(found.wire_bytes),
        "what": found.what,
        "module": found.module,
        "backward": found.comm.backward,
        "source": without_folders(found.source) if found.source else None,
        "params": list(found.params),
        "added_by": list(found.added_by),
    }


def passes_document(found: Sequence[CollectiveTraffic], cast: Sequence[str], fqn: str) -> list[Document]:
    """What passes put between a stored parameter (or its gradient) and the ops of the model."""
    rows: list[Document] = [{"pass": ["casts"], "node": name, "what": "a cast to what the body uses"} for name in cast]
    for each in found:
        if fqn in each.params and each.what in ("parameters", "gradients"):
            what = f"{each.comm.kind} on {each.comm.axis} of {each.what}"
            what += f", {each.comm.fused} tensors in one" if each.comm.fused > 1 else ""
            rows.append({"pass": list(each.added_by), "node": each.name, "what": what})
    return rows


def stored_document(program: Program, fqn: str) -> Document | None:
    """How a parameter is stored in a lowered graph."""
    for info, stored in program.params():
        if fqn in (info.fqn, *info.aliases):
            local = stored.local
            return {
                "name": info.fqn,
                "stored": stored.dist.describe(stored.meta.shape),
                "local": str(local),
                "local_bytes": local.numel({}) * local.dtype.itemsize,
            }
    return None


__all__ = [
    "PRICES",
    "Document",
    "collective_document",
    "heading",
    "moves_document",
    "noted",
    "passes_document",
    "stored_document",
    "subject_document",
]
