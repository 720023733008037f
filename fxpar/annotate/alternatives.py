"""What else an op could have done on an axis, and what the search says it would cost.

Each option of an op's class is forced in turn and the program is solved again. The difference to the optimum is the
option's *price*, never negative. `alone` is the same with every other class held at what it does now. All nodes of a
class decide together, so costs are those of all of them.

An op that only renames a placement (an alias: most views) has no choice of its own. Its options cost what it would to
have the result that way *as well*.

Options that are not there are named with the reason: a size that does not divide, a cut that the axis does not make, a
rule that does not know it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from fxpar.annotate.cost import Cost
from fxpar.annotate.policy import ContextAxis, TensorAxis
from fxpar.annotate.problem import OpClass
from fxpar.annotate.solve import AxisSearch, AxisSolution, Demand
from fxpar.ir.dist_config import OuterShard, Placement, R, Shard
from fxpar.ir.node_meta import input_kind
from fxpar.rules.option import Cut, Option, OpView, Seed, replicated
from fxpar.rules.table import OpRule, options, passing, rule_of

WHOLE = "always possible"
PASSES_ON = "partial sums pass through"


@dataclass(frozen=True)
class Alternative:
    """One option. `rule` says what offers it; a cost of None: the rest of the graph cannot live with it."""

    option: Option
    rule: str
    chosen: bool
    price: Cost | None
    alone: Cost | None


@dataclass(frozen=True)
class Refused:
    """A way to run the op that is no option, as text such as `(S(0), R) -> S(0)`, and why not."""

    text: str
    reason: str


@dataclass(frozen=True)
class AxisChoice:
    """What `nodes` decided together on one axis; `best` is the cost of the whole graph. `renames`: they are an alias,
    see the module.
    """

    axis: str
    degree: int
    nodes: tuple[fx.Node, ...]
    renames: bool
    chosen: Option
    best: Cost
    alternatives: tuple[Alternative, ...]
    refused: tuple[Refused, ...]


def describe_option(option: Option) -> str:
    """`(S(1), S(0)) -> P`; the placement alone for an input."""
    made = ", ".join(map(str, option.outputs))
    made = made if len(option.outputs) == 1 else f"({made})"
    return f"({', '.join(map(str, option.inputs))}) -> {made}" if option.inputs else made


def axis_choice(found: AxisSearch, node: fx.Node) -> AxisChoice:
    """The choice of the class of `node`, an input or an op of the searched graph. Solves once or twice per option."""
    problem = found.problem
    entry = problem.classes[problem.class_of[node]]
    chosen = found.solution.options[entry.index]
    renames = entry.index in found.search.aliases
    rated = []
    for option in entry.options:
        taken = option == chosen
        price, alone = (Cost(), Cost()) if taken else _prices(found, entry, option)
        rated.append(Alternative(option, _offered_by(entry, option), taken, price, alone))
    order = sorted(rated, key=lambda a: (not a.chosen, a.price is None, a.price.total_bytes if a.price else 0.0))
    return AxisChoice(
        found.axis,
        problem.degree,
        tuple(entry.nodes),
        renames,
        chosen,
        found.solution.cost,
        tuple(order),
        tuple(_refused(found, entry)),
    )


def _prices(found: AxisSearch, entry: OpClass, option: Option) -> tuple[Cost | None, Cost | None]:
    """With everything else free; and with all other classes as they are, but graph results free to follow."""
    search, wanted = found.search, {entry.index: option}
    kept = {i: taken for i, taken in found.solution.options.items() if i not in {entry.index, *search.aliases}}
    if entry.index in search.aliases:
        search, wanted = search.with_demand(Demand((entry.index, 0), (option.outputs[0],), (0.0,))), {}
    price = _difference(search.forced(wanted), found)
    return price, None if price is None else _difference(search.forced({**kept, **wanted}), found)


def _difference(solution: AxisSolution | None, found: AxisSearch) -> Cost | None:
    """To the optimum, in whole bytes: sums of many floats differ in the last bits."""
    if solution is None:
        return None
    more = solution.cost - found.solution.cost
    return Cost(round(more.moved_bytes), round(more.penalty_bytes))


def _offered_by(entry: OpClass, option: Option) -> str:
    if entry.view.target == "input":
        return "any input"
    rule = rule_of(entry.view.target)
    if rule is None or option == replicated(entry.view):
        return WHOLE
    if option in passing(entry.view):
        return PASSES_ON
    return rule.name


def _refused(found: AxisSearch, entry: OpClass) -> Iterator[Refused]:
    if entry.view.target == "input":
        yield from _refused_input(found, entry)
        return
    rule = rule_of(entry.view.target)
    if rule is None:
        yield Refused("any cut", f"op {entry.view.target} has no sharding rule")
        return
    yield from _refused_op(found, entry, rule)


def _refused_input(found: AxisSearch, entry: OpClass) -> Iterator[Refused]:
    """Dims of an input that the axis does not cut."""
    (shape,) = entry.view.outputs
    offered = {o.outputs[0].dim for o in entry.options if isinstance(o.outputs[0], Shard)}
    role = found.policy.of(entry)
    fixed = role.overrides.get(entry.nodes[0].name) if isinstance(role, TensorAxis) else None
    for dim, size in enumerate(shape):
        if dim not in offered:
            yield Refused(str(Shard(dim)), _why_whole(found, entry, dim, size, fixed))
    if fixed is not None and R not in {o.outputs[0] for o in entry.options}:
        yield Refused(str(R), f"an override sets {fixed}")


def _why_whole(found: AxisSearch, entry: OpClass, dim: int, size: int, fixed: Placement | None) -> str:
    """Why an input is not cut along a dim."""
    degree, axis = found.problem.degree, found.axis
    is_param = input_kind(entry.nodes[0]) == "param"
    if fixed is not None:
        return f"an override sets {fixed}"
    role = found.policy.of(entry)
    if isinstance(role, ContextAxis) and is_param:
        return f"{axis} shards tokens, and leaves this dim of a parameter whole"
    if entry.token[0][dim] and isinstance(role, TensorAxis) and not role.cuts_tokens:
        return "it shards tokens, which tp does only with +sp"
    if is_param or entry.token[0][dim]:
        return f"size {size} is not divisible by {axis}={degree}"
    return f"{axis} does not shard it"


def _refused_op(found: AxisSearch, entry: OpClass, rule: OpRule) -> Iterator[Refused]:
    view, problem = entry.view, found.problem
    seeds = _all_seeds(entry)
    legal = [*options(view, problem.degree, seeds), *found.policy.extra(problem, entry)]
    wide = options(view, 1, seeds)  # every size divides by one
    for option in dict.fromkeys([*legal, *wide]):
        if option in entry.options:
            continue
        reason = found.policy.refusal(problem, entry, option)
        if not reason and option in legal:
            reason = "nothing it is connected to is sharded this way"
        yield Refused(describe_option(option), reason or _indivisible(view, option, found))
    cut = {(j, p.dim) for o in [*wide, *legal] for j, p in enumerate(o.outputs) if isinstance(p, Shard)}
    for result, shape in enumerate(view.outputs):
        for dim, size in enumerate(shape):
            if size > 1 and (result, dim) not in cut:
                which = f" of result {result}" if len(view.outputs) > 1 else ""
                yield Refused(f"-> {Shard(dim)}{which}", f"{rule.name} cannot shard this dim")


def _all_seeds(entry: OpClass) -> list[tuple[Seed, Cut]]:
    """Every dim of every operand and result, and the strided cuts that somebody could use."""
    seeds: list[tuple[Seed, Cut]] = []
    for made, shapes in ((False, entry.view.inputs), (True, entry.view.outputs)):
        seeds += [((made, i), Shard(d)) for i, shape in enumerate(shapes) for d, size in enumerate(shape) if size > 1]
    strided = [
        ((True, j), s)
        for j, known in enumerate(entry.candidates)
        for s in known
        if isinstance(s, OuterShard) or s.sections
    ]
    return seeds + sorted(strided, key=str)


def _indivisible(view: OpView, option: Option, found: AxisSearch) -> str:
    """Names the sizes that the degree does not divide."""
    degree, where = found.problem.degree, []
    tensors = [
        *((f"operand {i}", shape, p) for i, (shape, p) in enumerate(zip(view.inputs, option.inputs, strict=True))),
        *((f"result {j}", shape, p) for j, (shape, p) in enumerate(zip(view.outputs, option.outputs, strict=True))),
    ]
    for name, shape, placement in tensors:
        if isinstance(placement, Shard) and shape[placement.dim] % (degree * max(1, len(placement.sections))):
            where.append(f"{shape[placement.dim]} (dim {placement.dim} of {name})")
    if where:
        return f"{where[0]} is not divisible by {found.axis}={degree}"
    return f"the rule does not offer it for these sizes on {degree} ranks"


__all__ = ["Alternative", "AxisChoice", "Refused", "axis_choice", "describe_option"]
