"""The ways in which a run may train a task: one strategy for all of it, or towers as stages on ranks of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations, pairwise, permutations, product

from torch import fx

from fxpar.errors import FxparError, RunMemoryError
from fxpar.ir.columns import human_bytes
from fxpar.ir.node_meta import fqn_of
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.switch.order import EXHAUSTIVE
from fxpar.tasks.contract import Contracted, TaskStep
from fxpar.tasks.held import Held, Home, on_rank
from fxpar.tasks.layers import around
from fxpar.tasks.times import Layout
from fxpar.waves.joined import joined
from fxpar.waves.runs import Option, RunPlan, TaskRun, least_bytes, plan_runs

MOST_STAGES = 4


def planned_runs(
    tasks: Mapping[str, TaskStep],
    found: Sequence[Contracted],
    layouts: Mapping[str, Sequence[Layout]],
    home: Home,
    memory_bytes: float = math.inf,
    has_budget: bool = False,
) -> RunPlan:
    """The shortest step that the runtime can run on the ranks of `home`: each task on consecutive ranks, its towers
    side by side or not, and tasks on disjoint ranks at the same time. A rank holds `memory_bytes`, all told. Towers
    that cannot be lowered are left out. What moving takes is guessed until an option is part of the shortest step.
    With a budget of memory (`has_budget`) tasks that share a rank wait for each other on all ranks, as in a run.

    Raises RunMemoryError.
    """
    ways = _Ways(tasks, layouts, home)
    devices, room = home.masters.world, memory_bytes - home.nbytes
    options = {name: ways.whole(name) for name in tasks}
    sequential_ms = sum(min(one.ms + one.moved_ms for one in mine) for mine in options.values())
    for name, step in tasks.items():
        mine = [one for one in found if one.task == name]
        options[name] += _of_towers(step, mine, found, layouts[name], home)
    while True:
        plan = plan_runs(options, devices, sequential_ms, room)
        if plan is None:
            raise _no_room({name: ways.whole(name) for name in tasks}, home, memory_bytes)
        guessed = ways.guessed(plan)
        if not guessed and not has_budget:
            plan = joined(plan, options)
            guessed = ways.guessed(plan)
        if not guessed:
            made = _settled(plan, ways, home, memory_bytes)
            if has_budget or not (made.needs_budget or max(made.rank_bytes) > memory_bytes):
                return replace(made, needs_budget=has_budget)
            has_budget = True
        for run in guessed:
            options[run.task].remove(run.option)
            options[run.task] += ways.exactly(run.task, run.option)


@dataclass
class _Ways:
    """Strategies of tasks with what they hold, each found once."""

    tasks: Mapping[str, TaskStep]
    layouts: Mapping[str, Sequence[Layout]]
    home: Home
    known: dict[tuple[str, str], Held] = field(default_factory=dict)

    def whole(self, task: str) -> list[Option]:
        """One strategy for all of the task. Of the one that takes least it is known what moving takes."""
        found = []
        for one in self.layouts[task]:
            held = one.held.held_bytes
            guess = self.home.guessed_ms(held)
            found.append(Option(one.width, sum(one.ms), one.strategy, guess, held, one.held.active_bytes))
        while True:
            best = min(found, key=lambda one: one.ms + one.moved_ms)
            if (task, best.strategy) in self.known:
                return found
            found = [*self.exactly(task, best), *(one for one in found if one is not best)]

    def guessed(self, plan: RunPlan) -> list[TaskRun]:
        """Runs of the plan of which it is guessed what they hold and move."""
        return [run for run in plan.runs if (run.task, run.option.strategy) not in self.known]

    def exactly(self, task: str, option: Option) -> list[Option]:
        """The option with what it holds and moves; none where it cannot be lowered."""
        held = self._held(task, option)
        if held is None:
            return []
        (moved,) = self.home.moved_ms([held])
        return [replace(option, moved_ms=moved, held_bytes=held.held_bytes, active_bytes=held.active_bytes)]

    def _held(self, task: str, option: Option) -> Held | None:
        key, step = (task, option.strategy), self.tasks[task]
        if key not in self.known:
            if ">" not in option.strategy:
                layout = next(one for one in self.layouts[task] if one.strategy == option.strategy)
                self.known[key] = layout.held.placed(layout.replicas)
            else:
                try:
                    program = lower(step.logical, option.strategy, for_store=True, verified=False)
                    self.known[key] = Held.of(program, step.tokens)
                except FxparError:
                    return None
        return self.known[key]


def _settled(plan: RunPlan, ways: _Ways, home: Home, memory_bytes: float) -> RunPlan:
    """The plan with what is moved to and from the ranks that tasks have in it, and what each rank holds."""
    runs = plan.runs
    held = [ways.known[run.task, run.option.strategy].placed(first=run.ranks[0]) for run in runs]
    ends = list(accumulate(map(len, plan.waves)))
    by_wave = [held[end - len(wave) : end] for end, wave in zip(ends, plan.waves, strict=True)]
    nbytes = {stay: rank_bytes(by_wave, home, stay) for stay in (True, False)}
    stay = max(nbytes[True]) <= memory_bytes
    order = _cheapest_order(plan, home.weights_ms(by_wave)) if stay else range(len(by_wave))
    moved = iter(home.moved_ms([one for wave in order for one in by_wave[wave]], stay))
    waves = tuple(tuple(_moving(run, next(moved)) for run in plan.waves[wave]) for wave in order)
    more = {"optimizer_bytes": home.optimizer_bytes, "in_turns": not stay, "needs_budget": not stay}
    return replace(plan, waves=waves, rank_bytes=nbytes[stay], **more)


def _cheapest_order(plan: RunPlan, weights_ms: Callable[[tuple[int, ...]], float]) -> tuple[int, ...]:
    """The order of waves in which their weights take least to come, as those of earlier ones need not come again; the
    one that there is, if there are too many to try all. Waves on parts of the ranks are not brought together: a run
    would take them for one.
    """
    given = tuple(range(len(plan.waves)))
    partly = [len(wave[0].ranks) < plan.devices for wave in plan.waves]

    def touching(order: tuple[int, ...]) -> int:
        return sum(partly[one] and partly[other] for one, other in pairwise(order))

    if not 1 < len(given) <= EXHAUSTIVE:
        return given
    orders = [order for order in permutations(given) if touching(order) <= touching(given)]
    return min(orders, key=lambda order: round(weights_ms(order), 9))  # of equal ones the one that there is


def _moving(run: TaskRun, moved_ms: float) -> TaskRun:
    return replace(run, option=replace(run.option, moved_ms=moved_ms))


def rank_bytes(waves: Sequence[Sequence[Held]], home: Home, stay: bool) -> tuple[float, ...]:
    """What each rank holds at its fullest: gradients of all of its tasks of a wave, activations of one of them. Weights
    of tasks that lie alike are held once where they stay, else those of one task at a time.
    """
    tasks = [task for wave in waves for task in wave]
    known: dict[tuple[bool, ...], float] = {}
    found = []
    for rank in range(home.masters.world):
        key = tuple(rank in mesh for task in tasks for mesh in task.meshes)
        if key not in known:
            mine = [task for task in tasks if any(rank in mesh for mesh in task.meshes)]
            weights = [on_rank(task.weights, rank) for task in mine]
            together = sum({piece: size for one in weights for piece, size in one.items()}.values())
            known[key] = float(
                home.nbytes
                + (together if stay else max((sum(one.values()) for one in weights), default=0))
                + max(sum(sum(on_rank(task.sums, rank).values()) for task in wave) for wave in waves)
                + max((task.active_bytes for task in mine), default=0)
            )
        found.append(known[key])
    return tuple(found)


def _no_room(options: Mapping[str, Sequence[Option]], home: Home, memory_bytes: float) -> RunMemoryError:
    """With what would do, and what takes most."""
    needed, (held_by, held), (active_by, active) = least_bytes(options)
    parts = [
        f"{human_bytes(home.nbytes)} masters, gradients, optimizer states and messages",
        f"{human_bytes(held.held_bytes)} weights and sums of gradients of task {held_by!r} under {held.strategy!r}",
        f"{human_bytes(active.active_bytes)} activations of task {active_by!r} under {active.strategy!r}",
    ]
    return RunMemoryError(home.masters.world, human_bytes(memory_bytes), _enough(home.nbytes + needed), parts)


def _enough(nbytes: float) -> str:
    """As `--memory` takes it, rounded up."""
    return f"{math.ceil(nbytes / 1e8) / 10:.1f}GB" if nbytes >= 1e9 else f"{math.ceil(nbytes / 1e6)}MB"


def _of_towers(
    step: TaskStep, mine: Sequence[Contracted], found: Sequence[Contracted], layouts: Sequence[Layout], home: Home
) -> list[Option]:
    """Stages of neighbours among the MetaOps of a task, in the order in which its loss calls them."""
    place = {node: at for at, node in enumerate(step.forward.calls)}
    order = sorted(range(len(mine)), key=lambda i: min(place[node] for node in mine[i].part.all_calls))
    number = {id(one): i for i, one in enumerate(mine)}
    reads = [{number[id(found[a])] for a in one.reads} for one in mine]
    params = [step.forward.read_by(one.part.all_calls) for one in mine]
    options = []
    for stages in _splits(order):
        cuts = _cuts([[node for i in stage for node in mine[i].part.all_calls] for stage in stages])
        if cuts is not None:
            options += _options(_Towers(step, stages, cuts, reads, params), layouts, home)
    return options


def _splits(order: Sequence[int]) -> Iterator[list[list[int]]]:
    for count in range(2, min(len(order), MOST_STAGES) + 1):
        for ends in combinations(range(1, len(order)), count - 1):
            yield [list(order[first:last]) for first, last in pairwise([0, *ends, len(order)])]


def _cuts(stages: Sequence[Sequence[fx.Node]]) -> list[str] | None:
    """For each stage but the first the outermost module that begins in it; None where there is none. What a stage does
    in no module of its own before that, such as to add features up, is left to the one before.
    """
    before: set[str] = set()
    cuts = []
    for number, calls in enumerate(stages):
        modules = {module for node in calls for module in around(fqn_of(node))}
        if number:
            first = next((one for node in calls for one in around(fqn_of(node)) if one and one not in before), None)
            if first is None:
                return None
            cuts.append(first)
        before |= modules
    return cuts


@dataclass(frozen=True)
class _Towers:
    """MetaOps of a task (by number) in `stages`, which begin with `cuts`; what each MetaOp reads, and its params."""

    step: TaskStep
    stages: Sequence[Sequence[int]]
    cuts: Sequence[str]
    reads: Sequence[set[int]]
    params: Sequence[Sequence[str]]

    def option(self, layouts: Sequence[Layout], home: Home, shared: bool = False) -> Option:
        """Stages under these layouts, each on ranks of its own; `shared`: the last one on those of all others."""
        texts, replicas = [one.strategy for one in layouts], layouts[0].replicas
        if shared:
            texts[-1] = str(replace(Strategy.parse(texts[-1]), at=0))
        text = " > ".join([f"{texts[0]}+zb_h1+cut({'|'.join(self.cuts)})", *texts[1:]])
        batches = 1 if self.step.logical.packing is not None else math.ceil(self.step.batches / replicas)
        held = [
            sum(layout.held.by_param[fqn] for fqn in {fqn for i in stage for fqn in self.params[i]})
            for stage, layout in zip(self.stages, layouts, strict=True)
        ]
        most = max(held[:-1]) + held[-1] if shared else max(held)  # a guess at the fullest rank
        width = layouts[-1].width if shared else sum(one.width for one in layouts)
        return Option(width, self._step_ms(layouts, batches, shared), text, home.guessed_ms(most), most)

    def _step_ms(self, layouts: Sequence[Layout], batches: int, shared: bool) -> float:
        """Of the first batch each MetaOp begins when its stage has done those before it, and what it reads is there;
        the backward is the same in reverse. The others follow as fast as the slowest stage is. A last stage on the
        ranks of all others begins behind them, and each batch behind the one before.
        """
        ends: dict[int, float] = {}
        slowest = 0.0
        for stage, layout in zip(self.stages, layouts, strict=True):
            now = max(ends.values()) if shared and stage is self.stages[-1] else 0.0
            for i in stage:
                now = max([now, *(ends[a] for a in self.reads[i] if a in ends)]) + layout.ms[i] / batches
                ends[i] = now
            slowest = max(slowest, sum(layout.ms[i] for i in stage) / batches)
        first = max(ends.values())
        return batches * first if shared else first + (batches - 1) * slowest


def _options(towers: _Towers, layouts: Sequence[Layout], home: Home) -> Iterator[Option]:
    """By replicas and ranks of each stage, under the layouts that are the fastest there: stages on ranks of their own,
    and the last one on those of all others.
    """
    for replicas in sorted({one.replicas for one in layouts}):
        alike = [one for one in layouts if one.replicas == replicas]
        widths = sorted({one.width for one in alike})
        fastest = [
            {
                width: min((one for one in alike if one.width == width), key=lambda one: sum(one.ms[i] for i in stage))
                for width in widths
            }
            for stage in towers.stages
        ]
        for chosen in product(widths, repeat=len(towers.stages)):
            mine = [by_width[width] for by_width, width in zip(fastest, chosen, strict=True)]
            if sum(chosen) <= home.masters.world:
                yield towers.option(mine, home)
            differ = len({one.strategy for one in mine}) > 1  # if not, it is one strategy for all of the task
            if replicas == 1 and differ and sum(chosen[:-1]) == chosen[-1]:
                yield towers.option(mine, home, shared=True)
