"""Proposals of layers and stages that differ: how many layers recompute or have which ZeRO level, stage by stage, how
each stage runs, on how many ranks, and where it begins.

guess    per number of replicas and of stages, stages are guessed from strategies without stages that are known, their
         kinds of layers are all that was priced to save memory, and `fxpar.search.cutting` finds the best pipeline for
         some numbers of tokens of a micro-batch (of one stage too: how many layers save memory)
closer   the best guess is lowered, in a small model that has its kinds of layers in each stage; from what that takes,
         numbers and cuts are found anew

Only classes that could be faster with all memory in the world are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from fxpar.cost.group import of_strategy
from fxpar.ir.axes import BINS, ROLE_AXES
from fxpar.ir.mesh import Axes
from fxpar.ir.strategy import Strategy
from fxpar.search.cutting import FIRST, StagesProblem, best_stages
from fxpar.search.kinds import MixedCandidate
from fxpar.search.known import KnownModel, Said
from fxpar.search.layer_list import Layers
from fxpar.search.positions import PlannedStage, of_planned
from fxpar.search.price import Candidate, Priced
from fxpar.search.proposals import WORTH, Group, Proposal
from fxpar.search.space import layout_of_ranks, of_a_stage, with_layout
from fxpar.search.stage_options import GuessedPipeline, GuessedStage, LoweredStage, Stage, option_of, planned
from fxpar.search.staged import StagedGuess

BUDGETS = 6  # numbers of tokens of a micro-batch that are tried
CLASSES = 3  # of numbers of replicas and stages
CLOSE = 3  # pipelines of a program, for each number of tokens
NEAR = 2  # numbers of layers on either side of the best, where memory is no line
BEGUN = 200  # beginnings that are kept where programs are known


@dataclass(frozen=True)
class _Class:
    """Strategies of the search with so many replicas and stages."""

    replicas: int
    stages: int
    members: tuple[Priced, ...]


@dataclass
class StageSearch:
    """`candidates` are what the search has priced."""

    known: KnownModel
    candidates: Sequence[Priced]
    said: Said

    def proposals(self, group: Group, now_s: float) -> Iterator[Proposal]:
        """What may take less than `now_s`."""
        layers = self.known.layers
        if layers is None:
            return
        must_s = (1 - WORTH) * now_s
        classes = [one for one in self._classes() if one.stages <= layers.count]
        found = [(min(_at_best(group, member) for member in one.members), one) for one in classes]
        ranked = sorted((pair for pair in found if pair[0] < must_s), key=lambda pair: pair[0])
        for number, (_, one) in enumerate(ranked[:CLASSES]):
            with_others = one.stages > 1 and number == 0
            guess = self._guess(group, one, self._options(group, one, with_others), must_s, layers)
            if guess is not None:
                yield guess

    def _classes(self) -> list[_Class]:
        found: dict[tuple[int, int], list[Priced]] = {}
        for one in self.candidates:
            if _flat(one) is not None:
                found.setdefault((one.strategy.replicas, one.strategy.pipeline_size), []).append(one)
        return [_Class(*key, tuple(members)) for key, members in found.items()]

    # ------------------------------------------------------------------------------------------------------ guess
    def _options(self, group: Group, one: _Class, with_others: bool) -> list[Stage]:
        """Those of the class's own members; with others also on other numbers of ranks and with documents in bins."""
        families: dict[tuple[Axes, int], list[Priced]] = {}
        for member in one.members:
            families.setdefault((member.strategy.axes, member.strategy.chunks), []).append(member)
        found: list[Stage] = [self._option(mine, one.stages) for mine in families.values()]
        if with_others:
            best = min(one.members, key=lambda member: _at_best(group, member))
            mine = families[best.strategy.axes, best.strategy.chunks]
            # What saves least, and most.
            ordered = sorted(mine, key=lambda m: m.at(m.anchors[-1]).peak_bytes)
            plain = [of_a_stage(member.strategy) for member in (ordered[-1], *ordered[:1])]
            for layout in _other_layouts(plain[0], one.stages, self.known.cluster.devices_per_node):
                texts = dict.fromkeys(with_layout(text, layout) for text in plain)
                flats = [self.known.candidate(text, self.said) for text in texts]
                priced = [flat for flat in flats if flat is not None and len(flat.samples) == 2]
                if priced:
                    found.append(self._option(priced, one.stages))
        return found

    def _option(self, members: Sequence[Priced], stages: int) -> GuessedStage:
        """What saves most comes first, so that layers in front save: a run of layers is placed alike."""
        ordered = sorted(members, key=lambda m: (-m.strategy.zero, m.at(m.anchors[-1]).step_bytes))
        texts = tuple(of_a_stage(one.strategy) for one in ordered)
        flats = tuple(flat for one in ordered if (flat := _flat(one)) is not None)
        return GuessedStage(texts, flats, stages, self.known.cluster)

    def _guess(
        self, group: Group, one: _Class, options: Sequence[Stage], must_s: float, layers: Layers
    ) -> Proposal | None:
        found = guesses(group, one.members[0], one.stages, options, must_s, layers)
        guess = min(found, key=lambda each: each.seconds, default=None)
        return None if guess is None or guess.seconds >= must_s else guess.proposal(group, layers)


@dataclass(frozen=True)
class Guess:
    """A pipeline that takes so many seconds, as it is guessed: by place a way to run it, and layers of each kind."""

    seconds: float
    stages: tuple[Stage, ...]
    counts: tuple[tuple[int, ...], ...]

    @property
    def used(self) -> tuple[tuple[Strategy, ...], ...]:
        """By place the kinds of its way that any place has layers of."""
        pairs = list(zip(self.stages, self.counts, strict=True))
        return tuple(_used(stage, [counts for other, counts in pairs if other is stage]) for stage in self.stages)

    def probe(self, layers: Layers) -> Strategy:
        """What is lowered for it."""
        return _probe(self.used, [sum(each) for each in self.counts], layers)

    def proposal(self, group: Group, layers: Layers) -> Proposal:
        def closer(lowered: Candidate) -> list[Candidate]:
            return _closer(group, lowered, self.used, layers)

        return Proposal(self.seconds, (self.probe(layers),), closer)


def guesses(
    group: Group, like: Priced, stages: int, options: Sequence[Stage], must_s: float, layers: Layers, keep: int = 1
) -> Iterator[Guess]:
    """The best `keep` pipelines, for each number of tokens of a micro-batch. `like` has as many replicas."""
    for usable, problem in _problems(group, like, stages, options, layers):
        for best in best_stages(problem, must_s, keep, most=FIRST).best:
            chosen = tuple(usable[stage.option] for stage in best.stages)
            counts = tuple(stage.counts for stage in best.stages)
            pairs = tuple(zip(chosen, counts, strict=True))
            guess = GuessedPipeline(_text(chosen, counts, layers), like.cluster, like.anchors, pairs, like)
            yield Guess(group.seconds(guess), chosen, counts)


def _flat(one: Priced) -> Candidate | None:
    """The strategy without stages that a candidate is, or was guessed from, if it was priced from two samples."""
    flat = one.flat if isinstance(one, StagedGuess) else one
    alone = isinstance(flat, Candidate) and flat.strategy.pipeline_size == 1 and not flat.strategy.rules
    return flat if isinstance(flat, Candidate) and alone and len(flat.samples) == 2 else None


def _at_best(group: Group, one: Priced) -> float:
    """Seconds with all memory in the world, and stages that take equally long."""
    flat, stages = _flat(one), one.strategy.pipeline_size
    if flat is None or stages == 1:
        return group.at_best(one, one.cost)
    few, step = flat.per_step()
    mean = (few + step * flat.steps) * Fraction(1, stages)
    return group.at_best(one, of_strategy([mean] * stages, one.strategy, one.cluster))


def _other_layouts(stage: Strategy, stages: int, per_node: int) -> list[Axes]:
    """For stages beside those of `stage`: half as many ranks, and what is then left for another one; bins."""
    layout = layout_of_ranks(stage)
    ranks = math.prod(degree for _, degree in layout)
    axis = layout[-1][0] if layout else ROLE_AXES[0]
    widths = [ranks // 2, ranks + ranks // 2] if ranks > 1 and stages > 1 else []
    found: list[Axes] = [((axis, width),) if width > 1 else () for width in widths if width <= per_node]
    return [*found, *([((BINS, ranks),)] if ranks > 1 else [])]


def _problems(
    group: Group, like: Priced, stages: int, options: Sequence[Stage], layers: Layers
) -> Iterator[tuple[list[Stage], StagesProblem]]:
    """For some numbers of tokens of a micro-batch: the options that hold the longest sequence in so many, and what is
    to be found.
    """
    load, pricer, replicas = group.load, group.pricer, like.strategy.replicas
    tokens, squares = float(load.tokens.mean()), float(load.squares.mean())
    others = (other.stays.weight_bytes for _, other in group.chosen)
    mine = next(other.stays.weight_bytes for _, other in group.chosen if other.name == group.name)
    room = 1 << 60 if pricer.memory_bytes is None else pricer.memory_bytes - (max(others) - mine)
    largest = max(group.limit, pricer.largest if pricer.packed else 0)
    steps = max(1, min(BUDGETS, math.ceil(largest / group.limit)))
    for step in range(steps):
        budget = round(group.limit * (largest / group.limit) ** (step / max(1, steps - 1)))
        count = max(1, math.ceil(tokens / replicas / budget))
        mean = tokens / replicas / count
        usable = [one for one in options if max(kind.bins for kind in one.strategies) * group.limit <= budget]
        made = tuple(option_of(one, stages, budget, mean, squares * mean / tokens) for one in usable)
        if made:
            yield usable, StagesProblem(stages, layers.count, like.strategy.world, count, room, made)


def _text(stages: Sequence[Stage], counts: Sequence[tuple[int, ...]], layers: Layers) -> Strategy:
    return of_planned([planned(*one) for one in zip(stages, counts, strict=True)], "1f1b", layers)


def _used(stage: Stage, counts: Sequence[tuple[int, ...]]) -> tuple[Strategy, ...]:
    """The kinds of a stage that any place has layers of."""
    return tuple(one for one, some in zip(stage.strategies, zip(*counts, strict=True), strict=True) if any(some))


def _probe(used: Sequence[tuple[Strategy, ...]], sizes: Sequence[int], layers: Layers) -> Strategy:
    """A pipeline with layers of all of these kinds in each stage, if there is room for them."""
    parts = []
    for kinds, size in zip(used, sizes, strict=True):
        few = [1] * len(kinds)
        few[-1] += size - len(kinds)
        parts.append(PlannedStage(kinds, tuple(few)))
    return of_planned(parts, "1f1b", layers)


def _closer(group: Group, lowered: Candidate, used: Sequence[tuple[Strategy, ...]], layers: Layers) -> list[Candidate]:
    """The best numbers and cuts of a pipeline with these kinds, from what it takes as lowered."""
    if not isinstance(lowered, MixedCandidate):
        return [lowered]
    stages = [LoweredStage(kinds, lowered, place) for place, kinds in enumerate(used)]
    found: dict[Strategy, Candidate] = {}
    for usable, problem in _problems(group, lowered, len(stages), stages, layers):
        for best in best_stages(problem, keep=CLOSE, most=BEGUN).best:
            mine = [usable[stage.option] for stage in best.stages]
            for counts in _near([stage.counts for stage in best.stages]):
                text = _text(mine, counts, layers)
                found[text] = lowered.with_counts(text, counts)
    return list(found.values())


def _near(counts: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """These, and without stages some more or fewer layers of the kind that saves most."""
    yield counts
    if len(counts) == 1 and len(counts[0]) > 1:
        (first, second, *others), *_ = counts
        for more in range(-NEAR, NEAR + 1):
            if more and first + more >= 0 and second - more >= 0:
                yield [(first + more, second - more, *others)]
