"""One step: what one or several engines run of a mini-batch, agreed on by all ranks, run together, reported."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.errors import FxparError, NanLossError
from fxpar.runtime.agree import check_same_batch
from fxpar.runtime.binding import Bound
from fxpar.runtime.engine import Engine, Given, Share
from fxpar.runtime.expert_rows import expert_loads
from fxpar.runtime.mini_batch import GroupWork, MiniBatch
from fxpar.runtime.modes import cast_as_captured, deterministic_kernels
from fxpar.runtime.report import GroupReport, StepReport, metrics_of


def agreed(given: Sequence[Given]) -> list[Share]:
    """The shares, once all ranks have found the same: an error is every rank's."""
    shares, problem = [], None
    try:
        shares = [one.engine.planned(one) for one in given]
    except FxparError as error:
        problem = error
    engine = given[0].engine
    if engine.options.check_batches and engine.switching.world > 1:
        plans = [share.engine.task + share.plan.fingerprint() for share in shares]
        mine = " ".join(plans) if problem is None else str(problem)
        # What is no list of items is an error on every rank; each item is compared by itself.
        sequences = given[0].sequences if len(given) == 1 else _all(given)
        denominators = [one.denominator for one in given]
        same = denominators[0] if len(given) == 1 else tuple(denominators)
        check_same_batch(sequences, mine, engine.device, engine.world_group, same)
    if problem is not None:
        raise problem
    return shares


def heard_by_all(engine: Engine, text: str) -> None:
    """Raise BatchMismatchError on every rank if one is at something else: what would leave the others waiting."""
    if engine.options.check_batches and engine.switching.world > 1:
        check_same_batch([], text, engine.device, engine.world_group)


def _all(given: Sequence[Given]) -> list[Any]:
    return [item for one in given for item in (one.sequences if isinstance(one.sequences, list | tuple) else [one])]


def step(given: Sequence[Given], buffers: dict[str, Tensor]) -> StepReport:
    """Run one mini-batch, of engines that share weights; home gradients are added to. `buffers` (by FQN) are replaced
    by their new values. Engines run in this order, and what an engine finds is in the report's `tasks`.

    Raises AutocastError, NoGradError, NanLossError, DenominatorError, BatchMismatchError, the errors of
    `fxpar.batching`, and what the watcher makes of a rank that is gone.
    """
    engine = given[0].engine
    options = engine.options
    with (
        cast_as_captured(engine.device, options.autocast),
        deterministic_kernels(options.deterministic),
        engine.watched(f"step {engine.steps + 1}"),
    ):
        return _step(given, buffers)


def _step(given: Sequence[Given], buffers: dict[str, Tensor]) -> StepReport:
    begun, engine = time.perf_counter(), given[0].engine
    if engine.recorder is not None:
        engine.recorder.begin()
    with engine.phase("compare mini-batches"):
        shares = agreed(given)
    planned = time.perf_counter()
    factor = 1.0 if engine.scaler is None else engine.scaler.scale
    engine.gradients.begin(factor, set().union(*(share.engine.trained for share in shares)))
    for share in shares:
        share.engine.lately.append(share.engine.reading.lengths(share.sequences))
    works, waves = _in_waves(
        shares, [one.engine.works(one.plan.groups, one.sequences, factor * one.scale) for one in shares]
    )
    bound = {name: one for share in shares for name, one in share.engine.bound.items()}
    batch = MiniBatch(
        [work for _, work in works],
        bound,
        engine.switching,
        engine.gradients,
        buffers,
        engine.phase,
        engine.recorder,
        engine.border_factor,
    )
    reports = batch.run(engine.options.overlap, waves)
    _hear_of_others(batch, bound, engine)
    losses = [loss / factor for loss in batch.losses]
    engine.gradients.end()
    skipped = _overflowed(engine, factor) or _is_no_number(engine, losses, batch.groups)
    for share in shares:
        share.engine.steps += 1
    loads = expert_loads(
        batch.experts,
        engine.expert_layers,
        engine.gradients.store.rank,
        engine.switching.world,
        engine.device,
        engine.world_group,
    )
    spent = {"wall_s": time.perf_counter() - begun, "plan_s": planned - begun, "skipped": skipped, "experts": loads}
    found = []
    for number, share in enumerate(shares):
        own = [place for place, (of, _) in enumerate(works) if of == number]
        metrics = metrics_of([batch.metrics[place] for place in own])
        found.append(_report(share, [reports[i] for i in own], [losses[i] for i in own], metrics, spent))
    whole = found[0] if not engine.task else _together(shares, found)
    if engine.recorder is None:
        return whole
    runs = [run for of, work in works for run in shares[of].engine.runs([work.plan], shares[of].sequences)]
    return replace(whole, trace=engine.recorder.trace(runs, waves))


def _in_waves(
    shares: Sequence[Share], works: Sequence[Sequence[GroupWork]]
) -> tuple[list[tuple[int, GroupWork]], list[int]]:
    """The works in the order of running, each with the number of its share, and how many wait for nobody but their own
    ranks: the first groups of shares that follow each other on parts of the ranks, then their second ones. No waves if
    all shares run on all ranks.
    """
    side_by_side: list[list[int]] = []
    for number, share in enumerate(shares):
        if not side_by_side or not _beside([shares[one].engine for one in side_by_side[-1]], share.engine):
            side_by_side.append([])
        side_by_side[-1].append(number)
    found: list[tuple[int, GroupWork]] = []
    sizes = []
    for numbers in side_by_side:
        for turn in range(max(len(works[number]) for number in numbers)):
            wave = [(number, works[number][turn]) for number in numbers if turn < len(works[number])]
            found, sizes = found + wave, [*sizes, len(wave)]
    return found, sizes if max(sizes) > 1 else []


def _beside(before: Sequence[Engine], engine: Engine) -> bool:
    """Whether an engine begins without all ranks having ended those `before`: it has ranks of its own; or engines are
    `joined`, and all are on parts of the ranks. Each rank then runs its own in the order of all, so that no two engines
    wait for each other.
    """
    ranks, busy = set(engine.ranks), set().union(*(one.ranks for one in before))
    if not ranks & busy:
        return True
    return engine.options.joined and all(len(one.ranks) < engine.switching.world for one in (*before, engine))


def _hear_of_others(batch: MiniBatch, bound: Mapping[str, Bound], engine: Engine) -> None:
    """Losses and metrics of groups of which each rank knows a part, or only some ranks anything, on all ranks. Once per
    mini-batch: ranks with nothing else in common do not wait for each other before.
    """
    ranks = [engine.gradients.programs[one.name].mesh.ranks for one in batch.groups]
    pairs = zip(batch.groups, ranks, strict=True)
    counts = [_counts(bound[one.name], mine, engine.switching.world) for one, mine in pairs]
    partly = {i: told for i, told in enumerate(counts) if told is not None}
    if not partly:
        return
    mine = [value * told for i, told in partly.items() for value in (batch.losses[i], *batch.metrics[i].values())]
    sums = torch.tensor(mine, dtype=torch.float64, device=engine.device)
    dist.all_reduce(sums, group=engine.world_group)
    values = iter(sums.tolist())
    for i in partly:
        batch.losses[i] = next(values)
        batch.metrics[i] = {name: next(values) for name in batch.metrics[i]}


def _counts(one: Bound, ranks: Sequence[int], world: int) -> bool | None:
    """Whether what this rank has found of a group on these ranks counts in the sum over all; None if every rank has
    found that sum.
    """
    return ranks[0] == one.rank if one.tells is None and len(ranks) < world else one.tells


def _report(
    share: Share,
    groups: Sequence[GroupReport],
    losses: Sequence[float],
    metrics: dict[str, float],
    spent: dict[str, Any],
) -> StepReport:
    """Of one engine; the loss is without its weight."""
    engine, plan, limits = share.engine, share.plan, [group.limit for group in share.engine.groups]
    return StepReport(
        step=engine.steps,
        loss=math.fsum(losses) / share.weight,
        sequences=len(share.sequences),
        tokens=sum(engine.reading.lengths(share.sequences)),
        valid_tokens=share.valid,
        groups=tuple(groups),
        merged=tuple((limits[a], limits[b]) for a, b in plan.merged),
        predicted_s=plan.predicted_s,
        rides=tuple((limits[a], limits[b], number) for a, b, number in plan.rides),
        packed=engine.options.packed,
        metrics=metrics,
        **spent,
    )


def _together(shares: Sequence[Share], found: Sequence[StepReport]) -> StepReport:
    """Of all tasks: the weighted sum of their losses."""
    tasks = {share.engine.task: one for share, one in zip(shares, found, strict=True)}
    return replace(
        found[0],
        loss=math.fsum(share.weight * one.loss for share, one in zip(shares, found, strict=True)),
        sequences=sum(one.sequences for one in found),
        tokens=sum(one.tokens for one in found),
        valid_tokens=sum(one.valid_tokens for one in found),
        groups=tuple(group for one in found for group in one.groups),
        merged=tuple(pair for one in found for pair in one.merged),
        rides=tuple(ride for one in found for ride in one.rides),
        predicted_s=sum(one.predicted_s for one in found),
        metrics={f"{task}/{name}": value for task, one in tasks.items() for name, value in one.metrics.items()},
        packed=all(one.packed for one in found),
        tasks=tasks,
    )


def _overflowed(engine: Engine, factor: float) -> bool:
    """Whether the mini-batch is left out because fp16 gradients overflowed, on any rank and in any group."""
    if engine.scaler is None:
        return False
    overflow = not engine.gradients.unscale(factor)
    give_up = overflow and engine.scaler.is_exhausted
    engine.scaler.update(overflow)
    if overflow and not give_up:
        engine.gradients.drop()
    return overflow and not give_up


def _is_no_number(engine: Engine, losses: Sequence[float], groups: Sequence[GroupWork]) -> bool:
    """Whether the mini-batch is left out because its loss is no number. Losses are the same on every rank."""
    bad = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if bad is None:
        return False
    engine.gradients.drop()
    if engine.options.nan == "error":
        where = str(groups[bad].spec) if not engine.task else f"<={groups[bad].spec.limit}: {groups[bad].name}"
        raise NanLossError(losses[bad], engine.steps + 1, where)
    return True
