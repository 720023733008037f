"""Roles by name: what a strategy uses its tp or cp axis for. `tp` and `cp` themselves are fxpar's.

Other packages add roles through the entry-point group `fxpar.roles`; a strategy names them, `tp4+role(tp=my_role)`. A
role is a class of policies: one that derives from `TensorAxis` is for tp, one that derives from `ContextAxis` for cp.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from fxpar.annotate.policy import ContextAxis, TensorAxis
from fxpar.annotate.problem import AxisProblem
from fxpar.errors import RoleContractError, UnknownRoleError
from fxpar.ir.dist_config import OuterShard, Partial, Placement, Replicate, Shard
from fxpar.ir.registry import Registry
from fxpar.ir.strategy import Strategy
from fxpar.rules.option import Option, OpView

Policy = TensorAxis | ContextAxis
# What an axis is used for unless the strategy names another role, and what such another role derives from.
BASES: dict[str, type[Policy]] = {"tp": TensorAxis, "cp": ContextAxis}
BUILTIN = {axis: f"{base.__module__}:{base.__name__}" for axis, base in BASES.items()}
ROLES = Registry("role", "fxpar.roles", BUILTIN, UnknownRoleError)


def policy_of(strategy: Strategy, axis: str, overrides: Mapping[str, Placement], token: sympy.Symbol | None) -> Policy:
    """What `axis` is used for; `overrides` are by placeholder name, `token` is the symbol of the token dim.

    Raises UnknownRoleError, RoleContractError, DuplicateNameError, EntryLoadError.
    """
    role = _class(strategy, axis)
    return role(strategy.degree(axis), axis in strategy.token_axes, overrides, token)


def check_options(strategy: Strategy, axis: str, problem: AxisProblem) -> None:
    """Raise RoleContractError if the axis' role leaves a node without any placement, or gives it an impossible one."""
    role = role_of(strategy, axis)
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


def _class(strategy: Strategy, axis: str) -> type[Policy]:
    name, base = role_of(strategy, axis), BASES[axis]
    if name == axis:
        return base  # without a look at what is installed, which takes 15 ms
    found = ROLES.get(name)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise RoleContractError(name, f"on axis {axis!r} it must be a class that derives from {base.__name__}")
    return found
