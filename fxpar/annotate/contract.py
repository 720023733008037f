"""Shrink a placement problem: ops with one operand that merely rename a placement need no decision of their own.

A view of a tensor can be had in placement q exactly if the tensor can be had in the placement that q is a view of. Such an
op becomes an *alias*: what its users want is wanted of its operand instead. About half of a training graph disappears.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxpar.annotate.problem import AxisProblem, OpClass
from fxpar.dist_config import Placement, R
from fxpar.rules.option import Option

Result = tuple[int, int]  # (class, result)


@dataclass(frozen=True)
class Alias:
    """The class' result in placement q is `source` in placement `inverse[q]`, and nothing else."""

    source: Result
    inverse: dict[Placement, Placement]


def find_aliases(problem: AxisProblem, demanded: dict[Result, set[Placement]]) -> dict[int, Alias]:
    """Classes with one operand fed by one result, whose options map placements one to one and cover what users want.

    A user that may want something else (attention wants heads where tokens are cut) needs a reshard behind the op, so the
    op has to decide for itself.
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
            if source[0] != entry.index and wants <= inverse.keys():
                aliases[entry.index] = Alias(source, inverse)
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
    """Options of the aliases: as the operand lies if a user wants that, else whole if a user does, else as wanted."""
    result = dict(chosen)

    def made(value: Result) -> Placement:
        index, position = value
        return decide(problem.classes[index]).outputs[position]

    def wants(entry: OpClass) -> list[Placement]:
        found = list(demanded.get((entry.index, 0), []))
        for user, position in sorted(entry.users):
            found.append(decide(problem.classes[user]).inputs[position])
        return found

    deciding: set[int] = set()

    def decide(entry: OpClass) -> Option:
        if entry.index in result:
            return result[entry.index]
        alias = aliases[entry.index]
        by_output = {o.outputs[0]: o for o in entry.options}
        if entry.index in deciding:  # a ring of aliases through repeated layers
            return by_output[R]
        deciding.add(entry.index)
        wanted = [p for p in wants(entry) if p in by_output] or [R]
        lies = made(alias.source)
        natural = [p for p in wanted if by_output[p].inputs[0] == lies]
        pick = natural[0] if natural else (R if R in wanted else wanted[0])
        deciding.discard(entry.index)
        result[entry.index] = by_output[pick]
        return by_output[pick]

    for entry in problem.classes:
        decide(entry)
    return result
