"""Shrink a placement problem: ops with one operand that merely rename a placement need no decision of their own.

A view of a tensor can be had in placement q exactly if the tensor can be had in the placement that q is a view of.
Such an op becomes an *alias*: what its users want is wanted of its operand instead. About half of a training graph
disappears.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxpar.annotate.problem import AxisProblem, OpClass
from fxpar.ir.dist_config import Placement, R
from fxpar.ir.graph import TensorMeta
from fxpar.ir.node_meta import tensor_of
from fxpar.ir.pass_base import tensor_operands
from fxpar.rules.option import Option

Result = tuple[int, int]  # (class, result)


@dataclass(frozen=True)
class Alias:
    """The class' result in placement q is `source` in placement `inverse[q]`, and nothing else."""

    source: Result
    inverse: dict[Placement, Placement]


def find_aliases(problem: AxisProblem, demanded: dict[Result, set[Placement]]) -> dict[int, Alias]:
    """Classes with one operand fed by one result, whose options map placements one to one and cover what users want.

    A user that may want something else (attention wants heads where tokens are cut) needs a reshard behind the op, so
    the op has to decide for itself.
    """
    aliases = {}
    for entry in problem.classes:
        if entry.view.target == "input" or len(entry.operands) != 1 or len(entry.view.outputs) != 1:
            continue
        inverse = {o.outputs[0]: o.inputs[0] for o in entry.options}
        distinct = {o.inputs[0] for o in entry.options}
        if len(inverse) == len(distinct) == len(entry.options) and len(entry.operands[0]) == 1:
            (source,) = entry.operands[0]
            wants = {o.inputs[p] for user, p in entry.users for o in problem.classes[user].options}
            wants |= demanded.get((entry.index, 0), set())
            if wants <= inverse.keys():
                aliases[entry.index] = Alias(source, inverse)
    for index in list(aliases):  # layers of nothing but renaming would chase their own tail
        seen = {index}
        here = aliases[index].source[0] if index in aliases else None
        while here in aliases and here not in seen:
            seen.add(here)
            here = aliases[here].source[0]
        if here in seen:
            del aliases[index]
    return aliases


def resolve_want(aliases: dict[int, Alias], value: Result, placement: Placement) -> tuple[Result, Placement]:
    """The result behind aliases, and the placement wanted of it."""
    while value[0] in aliases:
        alias = aliases[value[0]]
        value, placement = alias.source, alias.inverse[placement]
    return value, placement


def expand(
    problem: AxisProblem,
    aliases: dict[int, Alias],
    chosen: dict[int, Option],
    demanded: dict[Result, list[Placement]],
) -> dict[int, Option]:
    """Options of the aliases: as the operand lies if somebody behind it wants that, else whole if wanted so, else as
    wanted. A cast to a narrower dtype stays where its operand lies: what has to move then moves narrow.
    """
    result = dict(chosen)
    wanted: dict[int, set[Placement]] = {}

    def wants(entry: OpClass) -> set[Placement]:
        """Placements in which users want the result, those behind further aliases included."""
        if entry.index not in wanted:
            found = wanted[entry.index] = set(demanded.get((entry.index, 0), []))
            for user, position in entry.users:
                if user in aliases:
                    found |= {aliases[user].inverse[p] for p in wants(problem.classes[user])}
                else:
                    found.add(chosen[user].inputs[position])
        return wanted[entry.index]

    def decide(entry: OpClass) -> Option:
        """Operands first, so that every alias knows how its operand lies."""
        if entry.index not in result:
            source, position = aliases[entry.index].source
            lies = decide(problem.classes[source]).outputs[position]
            by_output = {o.outputs[0]: o for o in entry.options}
            possible = sorted((p for p in wants(entry) if p in by_output), key=str)
            natural = [p for p in possible if by_output[p].inputs[0] == lies]
            if not natural and _narrows(entry):
                natural = [p for p, option in by_output.items() if option.inputs[0] == lies]
            pick = natural[0] if natural else (R if R in possible or not possible else possible[0])
            result[entry.index] = by_output[pick]
        return result[entry.index]

    for entry in problem.classes:
        decide(entry)
    return result


def _narrows(entry: OpClass) -> bool:
    """Whether the result takes fewer bytes per element than the operand."""
    (node, *_) = entry.nodes
    (operand,) = tensor_operands(node)
    before, after = tensor_of(operand), tensor_of(node)
    return isinstance(before, TensorMeta) and before.dtype.itemsize > after.dtype.itemsize
