"""Roles by name: what a strategy uses its tp, cp, ring, rows or ep axis for. Those of these names are fxpar's.

Other packages add roles through the entry-point group `fxpar.roles`; a strategy names them, `tp4+role(tp=my_role)`. A
role is a class of policies: one that derives from `TensorAxis` is for tp, one that derives from `ContextAxis` for cp,
one that derives from `RingAxis` for ring, one that derives from `RowsAxis` for rows, one that derives from
`ExpertsAxis` for ep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from fxpar.annotate.narrow import narrow_classes
from fxpar.annotate.policy import ContextAxis, ExpertsAxis, RingAxis, RowsAxis, TensorAxis
from fxpar.annotate.problem import AxisProblem, OpClass
from fxpar.errors import RoleContractError, UnknownRoleError
from fxpar.ir.axes import BINS, EXPERTS, RING
from fxpar.ir.dist_config import OuterShard, Partial, Placement, Replicate, Shard
from fxpar.ir.registry import Registry
from fxpar.ir.strategy import Strategy
from fxpar.rules.option import Option, OpView

Role = TensorAxis | ContextAxis
# What an axis is used for unless the strategy names another role, and what such another role derives from.
BASES: dict[str, type[Role]] = {
    "tp": TensorAxis,
    "cp": ContextAxis,
    RING: RingAxis,
    BINS: RowsAxis,
    EXPERTS: ExpertsAxis,
}
BUILTIN = {axis: f"{base.__module__}:{base.__name__}" for axis, base in BASES.items()}
ROLES = Registry("role", "fxpar.roles", BUILTIN, UnknownRoleError)


@dataclass(frozen=True)
class ByModule:
    """An axis whose role depends on the module: `base` is for those of no rule, `others[i]` for those of rule i."""

    base: Role
    others: Mapping[int, Role]

    @property
    def degree(self) -> int:
        return self.base.degree

    def of(self, entry: OpClass) -> Role:
        """What the axis is for in the module that a class belongs to."""
        return self.others.get(entry.nodes[0].meta["rule"], self.base)

    def seeds(self, entry: OpClass, result: int) -> list[int]:
        return self.of(entry).seeds(entry, result)

    def sources(self, entry: OpClass) -> list[Option]:
        return self.of(entry).sources(entry)

    def narrow(self, problem: AxisProblem) -> dict[int, int]:
        return narrow_classes(problem, lambda entry: isinstance(self.of(entry), TensorAxis))

    def extra(self, problem: AxisProblem, entry: OpClass) -> list[Option]:
        return self.of(entry).extra(problem, entry)

    def refusal(self, problem: AxisProblem, entry: OpClass, option: Option) -> str:
        return self.of(entry).refusal(problem, entry, option)

    def node_cost(self, problem: AxisProblem, entry: OpClass, option: Option) -> float:
        return self.of(entry).node_cost(problem, entry, option)


Policy = Role | ByModule


def policy_of(
    strategy: Strategy, axis: str, overrides: Mapping[str, Placement], token: sympy.Symbol | None, in_bins: bool
) -> Policy:
    """What `axis` is used for; `overrides` are by placeholder name, `token` is the symbol of the token dim. Without
    documents packed `in_bins`, rows is as cp.

    Raises UnknownRoleError, RoleContractError, DuplicateNameError, EntryLoadError.
    """

    def role(rule: int | None) -> Role:
        cuts_tokens = strategy.cuts_tokens_in(axis, rule)
        found = _class(strategy, strategy.axis_in(axis, rule))
        if issubclass(found, ExpertsAxis):
            return found(strategy.degree(axis), cuts_tokens, overrides, token, in_bins)
        found = found if in_bins or not issubclass(found, RowsAxis) else ContextAxis
        return found(strategy.degree(axis), cuts_tokens, overrides, token)

    others = {index: role(index) for index, rule in enumerate(strategy.rules) if rule.axes}
    return ByModule(role(None), others) if others else role(None)


def check_options(strategy: Strategy, axis: str, problem: AxisProblem) -> None:
    """Raise RoleContractError if the axis' role leaves a node without any placement, or gives it an impossible one."""
    role = role_of(strategy, strategy.axis_in(axis, None))
    for entry in problem.classes:
        name, view = entry.nodes[0].name, entry.view
        if not entry.options:
            raise RoleContractError(role, f"it leaves {name!r} without a placement")
        for option in entry.options:
            if not _is_possible(option, view):
                shapes = f"operands {list(view.inputs)} and results {list(view.outputs)}"
                raise RoleContractError(role, f"it gives {name!r}, with {shapes}, the placements {option}")


def _is_possible(option: Option, view: OpView) -> bool:
    """A placement of each operand and result, by dims that it has. No input of the graph comes in terms of a sum."""
    if (len(option.inputs), len(option.outputs)) != (len(view.inputs), len(view.outputs)):
        return False
    found = zip((*option.inputs, *option.outputs), (*view.inputs, *view.outputs), strict=True)
    return all(
        0 <= placement.dim < len(shape)
        if isinstance(placement, Shard | OuterShard)
        else isinstance(placement, Replicate) or (isinstance(placement, Partial) and view.target != "input")
        for placement, shape in found
    )


def role_of(strategy: Strategy, axis: str) -> str:
    """The name of an axis' role; without another one that of the axis."""
    return dict(strategy.roles).get(axis, axis)


def _class(strategy: Strategy, axis: str) -> type[Role]:
    name, base = role_of(strategy, axis), BASES[axis]
    if name == axis:
        return base  # without a look at what is installed, which takes 15 ms
    found = ROLES.get(name)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise RoleContractError(name, f"on axis {axis!r} it must be a class that derives from {base.__name__}")
    return found
