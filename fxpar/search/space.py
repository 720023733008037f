"""The strategies that a search tries: all degrees of data, pipeline, context, tensor and expert parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from fxpar.ir.axes import BINS, EXPERTS, REPLICAS, RING, ROLE_AXES, STAGES, USES
from fxpar.ir.mesh import Axes
from fxpar.ir.module_rules import NOTHING, ModuleRule
from fxpar.ir.remat import Remat
from fxpar.ir.strategy import SINGLE, Strategy, of_degrees
from fxpar.ir.strategy_text import Pipeline

# What saves memory and costs time, the least costly first: a level is tried where those before it do not fit.
# ZeRO level, and what is recomputed.
SELECTIVE = Remat("selective")
SAVINGS: tuple[tuple[int, Remat | None], ...] = (
    (0, None),
    (0, SELECTIVE),
    (3, None),
    (0, Remat("full")),
    (3, Remat("full")),
)


# That the pipelines of the best sets may have instead of 1f1b. gpipe takes as long and more memory. interleaved_1f1b is
# not searched: deep pipelines are put together from three stages on ranks of their own; with two per rank it waits
# longer than zb_h1 by the costs that are known here.
FASTER_SCHEDULE = "zb_h1"
MOST_CUT = 64  # ranks that share the layers of a stage


def shapes(world: int, most_tp: int, most_pp: int, experts: int = 1) -> Iterator[Strategy]:
    """All strategies of `world` ranks with tp of at most `most_tp`, pp of at most `most_pp`, ep of a divisor of
    `experts`, these three but pp of at most MOST_CUT together with cp, dp the rest; sp wherever there is tp. Those
    without stages come first, and of them those that cut a model least.
    """
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    found = [
        (pp * cp * tp * ep, pp, cp, tp, ep)
        for pp in divisors
        if pp <= most_pp
        for cp in divisors
        for tp in divisors
        if tp <= most_tp
        for ep in divisors
        if experts % ep == 0 and cp * tp * ep <= MOST_CUT and world % (pp * cp * tp * ep) == 0
    ]
    for cut, pp, cp, tp, ep in sorted(found, key=lambda one: (one[1] > 1, one)):
        yield of_degrees(world // cut, pp, cp, tp, experts=ep)


def with_rings(found: Iterable[Strategy], kv_heads: int) -> Iterator[Strategy]:
    """The strategies, and behind each whose tokens and weights are cut in more parts than a model has key-value heads
    one in which keys and values travel over the ranks beyond: `ring4.cp2` in place of `cp8` for 2 heads.
    """
    weight_axis, token_axis, *_ = ROLE_AXES
    for strategy in found:
        yield strategy
        degree, weights = strategy.degree(token_axis), strategy.degree(weight_axis)
        inside = max((d for d in range(1, degree + 1) if degree % d == 0 and kv_heads % (d * weights) == 0), default=1)
        if inside < degree:
            ours = {token_axis: ((RING, degree // inside), (token_axis, inside))}
            axes = [one for axis in strategy.axes for one in ours.get(axis[0], (axis,))]
            yield replace(strategy, axes=tuple(one for one in axes if one[1] > 1 or one[0] not in (RING, token_axis)))


def without_stages(strategy: Strategy) -> Strategy:
    """The same on as many ranks, with replicas in place of stages."""
    kept = [axis for axis in strategy.axes if axis[0] not in (REPLICAS, STAGES)]
    replicas = strategy.replicas * strategy.pipeline_size
    return replace(strategy, axes=((REPLICAS, replicas), *kept) if replicas > 1 else tuple(kept), pipeline=Pipeline())


def with_stages(strategy: Strategy, stages: int) -> Strategy:
    """The same in so many stages, each with all of its ranks."""
    outer = [axis for axis in strategy.axes if axis[0] == REPLICAS]
    inner = [axis for axis in strategy.axes if axis[0] not in (REPLICAS, STAGES)]
    return replace(strategy, axes=(*(one for one in outer if one[1] > 1), (STAGES, stages), *inner))


def of_a_stage(strategy: Strategy) -> Strategy:
    """What a stage of a pipeline with equal stages runs under."""
    kept = tuple(axis for axis in strategy.axes if axis[0] != STAGES)
    return replace(strategy, axes=kept or SINGLE.axes, pipeline=Pipeline())


def placed_alike(strategy: Strategy) -> Strategy:
    """The one that stands for all under which parameters lie as they do here: what is recomputed moves none, chunks of
    tokens and the schedule of one stage per rank do not.
    """
    if strategy.teams:
        return replace(strategy, teams=tuple(map(placed_alike, strategy.teams)))
    if strategy.by_stage:
        alike = replace(strategy, tokens=0, by_stage=tuple(map(placed_alike, strategy.by_stage)))
        return replace(alike, pipeline=replace(strategy.pipeline, schedule="1f1b"))
    pipeline = strategy.pipeline if strategy.pipeline.virtual > 1 else replace(strategy.pipeline, schedule="1f1b")
    placing = [rule for rule in strategy.rules if rule.axes or rule.zero is not None]
    rules = tuple(ModuleRule(rule.glob, rule.axes, rule.sp, rule.zero) for rule in placing)
    return replace(strategy, remat=None, tokens=0, pipeline=pipeline, rules=rules, **NOTHING)


def rescheduled(strategy: Strategy) -> Strategy | None:
    """Under FASTER_SCHEDULE; None if there are no stages, or if it is several teams."""
    faster = replace(strategy.pipeline, schedule=FASTER_SCHEDULE)
    return replace(strategy, pipeline=faster) if strategy.pipeline_size > 1 and not strategy.teams else None


def also_tried(strategy: Strategy, beside: bool) -> tuple[Strategy, ...]:
    """What to try in place of a strategy that a set has. For a pipeline a schedule that waits less, and a loss that is
    whole, as the rank that has it may have room where a guess has none. Where transfers run `beside` kernels: with ep
    tokens in two chunks; for one that recomputes or has ZeRO-3, to keep on the host what its forward saves, beside as
    much recomputation, or less.
    """
    faster = rescheduled(strategy)
    found = () if faster is None else (faster,)
    if faster is not None and strategy.chunks > 1:
        found += replace(strategy, chunks=1), replace(faster, chunks=1)
    if beside and not strategy.blocks and strategy.degree(EXPERTS) > 1 and strategy.ep_chunks == 1:
        found += () if strategy.most("lsh") else (replace(strategy, ep_chunks=2),)
    if beside and (strategy.remat is not None or strategy.zero):
        less = (None, SELECTIVE) if strategy.remat is not None and strategy.remat.mode == "full" else (None,)
        remats = dict.fromkeys([*(_of_shape(one, strategy) for one in less), strategy.remat])
        found += tuple(replace(strategy, remat=one, offload=1.0) for one in remats)
    return found


def with_savings(shape: Strategy, level: int) -> Strategy | None:
    """`shape` with what level `level` of SAVINGS adds; None where that would change nothing."""
    zero, remat = SAVINGS[level]
    return None if zero and not shape.data_axes else replace(shape, zero=zero, remat=_of_shape(remat, shape))


def _of_shape(remat: Remat | None, shape: Strategy) -> Remat | None:
    """`selective` gathers again what sequence parallelism has gathered: under large tp that is most of what is saved,
    as every rank holds it whole.
    """
    return replace(SELECTIVE, collectives="redo") if remat == SELECTIVE and shape.sp else remat


# How the ranks of a replica may be used in a module: an axis, and whether it needs the links inside of a node. A layout
# is a product of them, outermost first. Bins are not among them: they are for attention, see `in_bins`; nor is what is
# for modules with experts alone. Rings (but see `with_rings`) are not searched.
ROLES = tuple((axis, USES[axis] == "weights") for axis in reversed(ROLE_AXES) if axis not in (BINS, EXPERTS, RING))


def role_layouts(ranks: int, per_node: int, experts: int = 1) -> list[Axes]:
    """All layouts of so many ranks, axes of degree 1 left out; for a module with experts also with ep of a divisor of
    their number.
    """
    found: list[Axes] = [
        ((EXPERTS, degree),) if degree > 1 else () for degree in range(1, ranks + 1) if experts % degree == 0
    ]
    for name, inside_node in ROLES:
        left = [(axes, ranks // math.prod(degree for _, degree in axes)) for axes in found]
        found = [
            axes + (((name, degree),) if degree > 1 else ())
            for axes, rest in left
            for degree in range(1, (min(rest, per_node) if inside_node else rest) + 1)
        ]
    return [axes for axes in found if math.prod(degree for _, degree in axes) == ranks]


def in_bins(layout: Axes) -> Axes:
    """With whole documents on the ranks that otherwise cut the tokens of each."""
    return tuple((BINS if USES[name] == "tokens" else name, degree) for name, degree in layout)


def layout_of_ranks(strategy: Strategy) -> Axes:
    """How the ranks of a replica are used where no rule says it."""
    return tuple(axis for axis in strategy.axes if axis[0] in ROLE_AXES and axis[1] > 1)


def single_axis(layout: Axes) -> Axes:
    """As many ranks on the innermost role's axis, whatever its links: rules split it."""
    return ((ROLES[-1][0], math.prod(degree for _, degree in layout)),)


def with_layout(strategy: Strategy, layout: Axes) -> Strategy:
    """With other roles for as many ranks; sp wherever weights are cut."""
    outer = tuple(axis for axis in strategy.axes if axis[0] not in ROLE_AXES)
    return replace(strategy, axes=(*outer, *layout) or SINGLE.axes, sp=_cuts_weights(layout))


def layout_rule(glob: str, layout: Axes, zero: int | None, chunks: int | None = None) -> ModuleRule:
    """For modules that use their ranks so."""
    return ModuleRule(glob, layout, _cuts_weights(layout), zero, chunks=chunks)


def _cuts_weights(layout: Axes) -> bool:
    return any(USES[name] == "weights" for name, _ in layout)
