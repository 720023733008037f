"""Experts under ep: which values are weights of experts, and which models may have their experts apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import fx

from fxpar.errors import ExpertChunksError, ExpertIdsError, ExpertsDivideError, ExpertWeightsError, NoExpertsError
from fxpar.flow import token_symbol
from fxpar.ir.axes import EXPERTS
from fxpar.ir.dist_config import Shard
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.node_meta import fqn_of, input_kind, tensor_of
from fxpar.ir.pass_base import tensor_operands
from fxpar.ir.strategy import Strategy
from fxpar.ops.copies import mean_copies
from fxpar.ops.traits import EXPERT_PRODUCTS, EXPERT_PRODUCTS_BACKWARD
from fxpar.rules.table import options
from fxpar.rules.view import Sizes, is_op, make_view, resolve


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


def _rules_of_experts(strategy: Strategy) -> set[int | None]:
    """The rules that cut experts, None for what no rule says."""
    layouts = [None, *(i for i, rule in enumerate(strategy.rules) if rule.axes)]
    return {rule for rule in layouts if experts_degree(strategy, rule) > 1}


def experts_of(logical: LogicalGraph) -> int:
    """What a degree of ep must divide: the number of experts, or the largest that divides those of all layers; 1 for a
    model without experts.
    """
    products = (node for node in logical.gm.graph.nodes if node.target in EXPERT_PRODUCTS)
    return math.gcd(*(int(tensor_of(node.args[1]).shape[0]) for node in products)) or 1


def balanced_routes(logical: Callable[[], LogicalGraph], strategies: Iterable[Strategy]) -> tuple[str, ...]:
    """What predictions under ep assume of a router, in a sentence for each degree and kind of layer; none without ep,
    which takes no graph.
    """
    alone = [block for strategy in strategies for block in strategy.blocks or (strategy,)]
    alone = [one for one in alone if _rules_of_experts(one)]
    found: dict[str, None] = {}
    for node in logical().gm.graph.nodes if alone else ():
        if node.target in EXPERT_PRODUCTS:
            slots, experts = tensor_of(node.args[2]).shape[-1], tensor_of(node.args[1]).shape[0]
            degrees = {experts_degree(one, one.rule_of(fqn_of(node))) for one in alone} - {1}
            found |= {_balanced(int(slots), int(experts), degree): None for degree in sorted(degrees)}
    return tuple(found)


def _balanced(slots: int, experts: int, degree: int) -> str:
    ranks = float(mean_copies(slots, experts, degree))
    return (
        f"under {EXPERTS}{degree} routes are taken to be balanced: the {slots} of {experts} experts of a token are on "
        f"{ranks:.2f} of {degree} ranks in the mean; where they are not, the fullest rank needs more time and memory"
    )


def check_experts(logical: LogicalGraph, strategy: Strategy) -> None:
    """Raise NoExpertsError for a strategy that cuts experts of a model, or of modules, without any; ExpertsDivideError
    where they do not divide, ExpertIdsError where an exchange of tokens does not know the tokens, ExpertWeightsError
    where the weights of a rank's experts are not made of its part of the parameter.
    """
    for block in strategy.blocks:
        check_experts(logical, block)
    if strategy.blocks:
        return
    wanted = _rules_of_experts(strategy)
    if not wanted:
        return
    token, found, sizes = token_symbol(logical), set(), Sizes([dim.symbol for dim in logical.dims], 1)
    inputs = zip(logical.placeholders, logical.inputs, strict=True)
    params = {node for node, info in inputs if info.kind == "param"}
    for node in logical.gm.graph.nodes:
        if node.target not in EXPERT_PRODUCTS:
            continue
        rule = strategy.rule_of(fqn_of(node))
        degree = experts_degree(strategy, rule)
        found.add(degree)
        if degree == 1:
            continue
        wanted.discard(rule)
        weight: Any = tensor_of(node.args[1]).shape
        experts, ids = int(weight[0]), tensor_of(node.args[2])
        if experts % degree:
            raise ExpertsDivideError(str(strategy), fqn_of(node), experts, degree)
        if len(ids.shape) != 2 or token not in getattr(ids.shape[0], "free_symbols", ()):
            raise ExpertIdsError(str(strategy), fqn_of(node), str(ids))
        mixed = _mixes_experts(node.args[1], params, sizes, degree)
        if mixed is not None:
            raise ExpertWeightsError(str(strategy), fqn_of(node), mixed.name, str(mixed.target))
    if None in wanted and max(found, default=1) > 1:
        wanted.discard(None)  # all experts are in modules of rules with ep; between modules, ep is as rows
    if wanted:
        rule = min(wanted, key=lambda rule: -1 if rule is None else rule)
        text = None if rule is None else str(strategy.rules[rule])
        raise NoExpertsError(str(strategy), logical.name, text, taken=rule is None and bool(found))


def check_expert_chunks(logical: LogicalGraph, strategy: Strategy) -> None:
    """Raise ExpertChunksError for a strategy, or a rule of it, that lets tokens travel in chunks, where experts are not
    apart, see means of rows, or are none.
    """
    for block in strategy.blocks:
        check_expert_chunks(logical, block)
    if strategy.blocks or strategy.most("ep_chunks") == 1:
        return
    text, layouts = str(strategy), (None, *range(len(strategy.rules)))
    said = {rule for rule in layouts if ((strategy if rule is None else strategy.rules[rule]).ep_chunks or 1) > 1}
    for node in logical.gm.graph.nodes:
        module = fqn_of(node)
        if node.target not in EXPERT_PRODUCTS or strategy.chunks_of(module, "ep_chunks") == 1:
            continue
        said.discard(strategy.rule_of(module, "ep_chunks"))
        where = f"those of {module!r}"
        if experts_degree(strategy, strategy.rule_of(module)) == 1:
            do = f"Give them ep, such as {EXPERTS}2, or leave the flag out."
            raise ExpertChunksError(text, where, "are on every rank", do)
        if strategy.share_of("lsh", strategy.rule_of(module, "lsh")):
            do = f"Leave one of the two out, as in [{module or '*'}: +ep_chunks(1)]."
            raise ExpertChunksError(text, where, "see means of all rows of a rank, because of lsh(...)", do)
    for rule in sorted(said, key=lambda rule: -1 if rule is None else rule):
        where = f"model {logical.name!r}" if rule is None else f"the modules of rule {str(strategy.rules[rule])!r}"
        do = "Leave the flag out, or write it for modules around experts."
        raise ExpertChunksError(text, where, "has no experts" if rule is None else "have no experts", do)


def _mixes_experts(made: Any, params: Collection[fx.Node], sizes: Sizes, degree: int) -> fx.Node | None:
    """The last call on the way from parameters to weights of experts, [E, ...], of which no cut by expert is known to
    give a cut by expert; None if there is none, or if the weights are made of something else too.
    """
    calls, todo = [], [resolve(made)]
    while todo:
        node, index = todo.pop()
        if node.op != "placeholder":
            calls.append((node, index))
            todo += map(resolve, tensor_operands(node))
        elif node not in params or not _feeds_experts(node):
            return None
    for node, index in calls:
        view, _ = make_view(node, sizes)
        cuts = options(view, degree, [((True, index), Shard(0))])
        if not any({*option.inputs, option.outputs[index]} == {Shard(0)} for option in cuts):
            return node
    return None


__all__ = ["balanced_routes", "check_expert_chunks", "check_experts", "experts_degree", "experts_of", "is_of_experts"]
