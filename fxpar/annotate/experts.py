"""Experts under ep: which values are weights of experts, and which models may have their experts apart."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from fxpar.errors import ExpertIdsError, ExpertsDivideError, NoExpertsError
from fxpar.flow import token_symbol
from fxpar.ir.axes import EXPERTS
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.node_meta import fqn_of, input_kind, tensor_of
from fxpar.ir.pass_base import tensor_operands
from fxpar.ir.strategy import Strategy
from fxpar.ops.traits import EXPERT_PRODUCTS, EXPERT_PRODUCTS_BACKWARD
from fxpar.rules.view import is_op


def is_of_experts(node: fx.Node) -> bool:
    """Whether a value has weights of experts, or their gradients, and nothing else: cut by expert, all that makes one
    of another is on one rank.
    """
    if node.op == "placeholder":
        return input_kind(node) == "param" and _feeds_experts(node)
    if node.target in EXPERT_PRODUCTS_BACKWARD:
        return True
    if not is_op(node) or node.target in EXPERT_PRODUCTS:
        return False
    operands = tensor_operands(node)
    return bool(operands) and all(map(is_of_experts, operands))


def _feeds_experts(node: fx.Node) -> bool:
    """Whether a product by expert takes the value as its weights, perhaps relabelled or cast before."""
    return any(
        user.args[1] is node
        if user.target in EXPERT_PRODUCTS
        else is_op(user) and len(tensor_operands(user)) == 1 and _feeds_experts(user)
        for user in node.users
    )


def experts_degree(strategy: Strategy, rule: int | None) -> int:
    """Over how many ranks experts are cut in the modules of a rule."""
    return math.prod(strategy.degree(atom) for atom in strategy.atoms if strategy.axis_in(atom, rule) == EXPERTS)


def check_experts(logical: LogicalGraph, strategy: Strategy) -> None:
    """Raise NoExpertsError for a strategy that cuts experts of a model, or of modules, without any; ExpertsDivideError
    where they do not divide, ExpertIdsError where an exchange of tokens does not know the tokens.
    """
    for block in strategy.blocks:
        check_experts(logical, block)
    if strategy.blocks:
        return
    layouts = [None, *(i for i, rule in enumerate(strategy.rules) if rule.axes)]
    wanted = {rule for rule in layouts if experts_degree(strategy, rule) > 1}
    if not wanted:
        return
    token = token_symbol(logical)
    for node in logical.gm.graph.nodes:
        if node.target not in EXPERT_PRODUCTS:
            continue
        rule = strategy.rule_of(fqn_of(node))
        degree = experts_degree(strategy, rule)
        if degree == 1:
            continue
        wanted.discard(rule)
        weight: Any = tensor_of(node.args[1]).shape
        experts, ids = int(weight[0]), tensor_of(node.args[2])
        if experts % degree:
            raise ExpertsDivideError(str(strategy), fqn_of(node), experts, degree)
        if len(ids.shape) != 2 or token not in getattr(ids.shape[0], "free_symbols", ()):
            raise ExpertIdsError(str(strategy), fqn_of(node), str(ids))
    if wanted:
        rule = min(wanted, key=lambda rule: -1 if rule is None else rule)
        raise NoExpertsError(str(strategy), logical.name, None if rule is None else str(strategy.rules[rule]))


__all__ = ["check_experts", "experts_degree", "is_of_experts"]
