"""Proposals of layers that differ in roles, ZeRO levels and what they save, after Galvatron (Miao et al. 2022, 4.3).

kinds    what a layer may run under: rules for its modules, beside a level of savings. Of the rules those are taken that
         promise most by what each takes alone; with each of the best levels they are lowered. What is mixed are corners
         of the hull of bytes and seconds, and what is next to it
numbers  runs of layers of each kind, beside some choice of rules outside of layers, in `fxpar.search.cutting`: dynamic
         programming over Pareto fronts of bytes, seconds and gradient sync, with the last kind as border state
borders  cost nothing until a program has them. The best guess is lowered, what its program takes beyond its layers is
         the border of its kinds, and then the best other guess is looked for
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from fxpar.cost.polynomial import Polynomial
from fxpar.ir.axes import REPLICAS
from fxpar.ir.module_rules import ModuleRule
from fxpar.ir.strategy import SINGLE, Strategy
from fxpar.search.blends import ChangedFlat
from fxpar.search.fronts import Hull, undominated
from fxpar.search.kinds import MixedCandidate
from fxpar.search.known import KnownModel, Said
from fxpar.search.layer_list import Layers
from fxpar.search.positions import child_of
from fxpar.search.price import Candidate, Priced
from fxpar.search.proposals import WORTH, Group, Proposal
from fxpar.search.stage_options import GuessedStage, LoweredStage, beside_layers, of_layer, per_step
from fxpar.search.stages import Guess, guesses

ROLES, LEVELS, KINDS = 3, 3, 6  # choices of rules in a layer, of what it saves, and of both that are mixed
ENDS = 2  # choices of what is outside of layers
LOWERED = 3  # guesses
KEPT = 6  # guesses for each number of tokens, of which the best with new kinds is lowered

T = TypeVar("T")
Taken = NDArray[np.float64]  # bytes, seconds of a micro-batch, seconds of gradient sync
Rules = tuple[ModuleRule, ...]
Position = tuple[tuple[ModuleRule, Candidate], ...]  # rules, and what the model takes with one of them


@dataclass(frozen=True)
class Choice(Generic[T]):
    """Something to choose, and what it takes."""

    what: T
    taken: Taken


@dataclass
class LayerSearch:
    """`levels` are strategies that differ in what layers save, without stages; `positions` have the rules that may
    stand beside the first of them, and `own` rules for what the group's strategy does there.
    """

    known: KnownModel
    levels: Sequence[Candidate]
    positions: Sequence[Position]
    own: Rules
    layers: Layers
    said: Said
    _borders: dict[tuple[Strategy, Strategy], Polynomial] = field(default_factory=dict, init=False)

    def proposals(self, group: Group, one: Priced) -> Iterator[Proposal]:
        """What may take less than the strategy of the group does."""
        must_s = (1 - WORTH) * group.seconds(one)
        seen: set[tuple[tuple[Strategy, ...], ...]] = set()
        stages = self._stages(group, one)
        for _ in range(LOWERED):
            with_borders = [self._with_borders(stage) for stage in stages]
            every = guesses(group, one, one.strategy.pipeline_size, with_borders, must_s, self.layers, KEPT)
            new = [guess for guess in every if guess.used not in seen and guess.seconds < must_s]
            if not new:
                return
            best = min(new, key=lambda guess: guess.seconds)
            seen.add(best.used)
            yield best.proposal(group, self.layers)
            self._learn(best)

    # ------------------------------------------------------------------------------------------------------ kinds
    def _stages(self, group: Group, one: Priced) -> list[GuessedStage]:
        """With the best choices outside of layers, all kinds and those without bins."""
        tokens = group.budget(one) or group.limit
        kinds, ends = self._kinds(group, tokens), self._ends(group, tokens)
        found: list[list[Choice[Candidate]]] = []
        for some in (kinds, [kind for kind in kinds if kind.what.strategy.bins == 1]):
            best = _best(group, some, tokens, KINDS)
            if best and best not in found:
                found.append(best)
        return [self._stage(best, outside, one.strategy.pipeline_size) for best in found for outside in ends]

    def _kinds(self, group: Group, tokens: int) -> list[Choice[Candidate]]:
        """The best choices of rules in a layer, under the best levels of savings, as lowered."""
        first = self.levels[0]
        alone = self._per_layer(first, group, tokens)
        inside = [p for p in self.positions if child_of(p[0][0], self.layers)]
        summed = _choices(inside, [self._added(p, alone, group, tokens) for p in inside])
        roles = [one.what for one in _best(group, summed, tokens, ROLES)]
        own = tuple(rule for rule in self.own if child_of(rule, self.layers))
        levels = _best(group, [Choice(one, self._per_layer(one, group, tokens)) for one in self.levels], tokens, LEVELS)
        found = []
        for level, rules in itertools.product(levels, dict.fromkeys([*roles, own])):
            one = self.known.candidate(replace(level.what.strategy, rules=rules), self.said)
            if one is not None and len(one.samples) == 2:
                found.append(Choice(one, self._per_layer(one, group, tokens)))
        return found

    def _added(self, position: Position, alone: Taken, group: Group, tokens: int) -> list[Taken]:
        return [self._per_layer(one, group, tokens) - alone for _, one in position]

    def _per_layer(self, flat: Candidate, group: Group, tokens: int) -> Taken:
        held = of_layer(flat, tokens)
        seconds = flat.per_step()[1] * (1 / per_step(flat))
        return _taken(held.weight_bytes + held.step_bytes, seconds, flat.reduce_s / self.layers.count, group, tokens)

    def _ends(self, group: Group, tokens: int) -> list[Rules]:
        """Rules outside of layers: the best, what takes less memory, and what the group's strategy does."""
        alone = _beside(self.levels[0], group, tokens)
        outside = [p for p in self.positions if child_of(p[0][0], self.layers) is None]
        summed = _choices(outside, [[_beside(one, group, tokens) - alone for _, one in p] for p in outside])
        own = tuple(rule for rule in self.own if child_of(rule, self.layers) is None)
        return list(dict.fromkeys([*(one.what for one in _best(group, summed, tokens, ENDS)), own]))

    def _stage(self, kinds: Sequence[Choice[Candidate]], outside: Rules, stages: int) -> GuessedStage:
        """What saves most comes first, so that layers in front save."""
        first, with_one = self.levels[0], {rule: one for position in self.positions for rule, one in position}
        changes = tuple((with_one[rule], first) for rule in outside)
        texts, flats = [], []
        for kind in sorted(kinds, key=lambda kind: kind.taken[0]):
            one = kind.what.strategy
            flats.append(ChangedFlat(replace(one, rules=(*one.rules, *outside)), kind.what, changes))
            texts.append(_of_a_stage(flats[-1].strategy, stages))
        sync = tuple(flat.reduce_s / self.layers.count for flat in flats)
        return GuessedStage(tuple(texts), tuple(flats), stages, self.known.cluster, sync)

    # ---------------------------------------------------------------------------------------------------- borders
    def _with_borders(self, stage: GuessedStage) -> GuessedStage:
        rows = (tuple(self._borders.get((a, b), Polynomial()) for b in stage.strategies) for a in stage.strategies)
        return replace(stage, borders=tuple(rows))

    def _learn(self, guess: Guess) -> None:
        """What a program takes beyond its layers and what is no layer is shared by the borders that it has."""
        lowered = self.known.candidate(guess.probe(self.layers), self.said)
        if not isinstance(lowered, MixedCandidate):
            return
        for place, (stage, kinds) in enumerate(zip(guess.stages, guess.used, strict=True)):
            if len(kinds) < 2 or not isinstance(stage, GuessedStage):
                continue
            none = (0,) * len(kinds), (0,) * len(stage.strategies)
            beyond = LoweredStage(kinds, lowered, place).seconds_at(place, none[0])
            beyond += stage.seconds_at(place, none[1]) * -1
            for pair in itertools.pairwise(kinds):
                self._borders[pair] = beyond * Fraction(1, len(kinds) - 1)


def _of_a_stage(flat: Strategy, stages: int) -> Strategy:
    """What a stage runs under if so many share the ranks of `flat`."""
    replicas, inner = flat.replicas // stages, [axis for axis in flat.axes if axis[0] != REPLICAS]
    return replace(flat, axes=tuple([(REPLICAS, replicas)] * (replicas > 1) + inner) or SINGLE.axes)


def _beside(flat: Candidate, group: Group, tokens: int) -> Taken:
    """What is no layer; gradient sync is that of all, as what differs is of what is no layer."""
    held, (few, step) = beside_layers(flat, tokens), flat.per_step()
    seconds = few + step * -(Fraction(flat.samples[0]) / per_step(flat))
    return _taken(held.weight_bytes + held.step_bytes, seconds, flat.reduce_s, group, tokens)


def _taken(held: Fraction, seconds: Polynomial, reduce_s: float, group: Group, tokens: int) -> Taken:
    """Of a micro-batch of so many tokens, in sequences as those of the group."""
    squares = float(group.load.squares.mean()) / float(group.load.tokens.mean()) * tokens
    run_s = float(seconds.c0) + float(seconds.c1) * tokens + float(seconds.c2) * squares
    return np.array([float(held), run_s, reduce_s])


def _choices(positions: Sequence[Position], taken: Sequence[Sequence[Taken]]) -> list[Choice[Rules]]:
    """Rules for some positions, each with what it takes more; none is beaten in bytes, seconds and sync at once."""
    found: list[Choice[Rules]] = [Choice((), np.zeros(3))]
    for position, more in zip(positions, taken, strict=True):
        alone: list[Choice[Rules]] = [Choice((rule,), each) for (rule, _), each in zip(position, more, strict=True)]
        both = itertools.product(list(found), alone)
        found += [Choice(one.what + other.what, one.taken + other.taken) for one, other in both]
        sums = np.array([one.taken for one in found])
        keep = undominated(np.rint(sums[:, 0]).astype(np.int64), sums[:, 1], sums[:, 2], np.zeros(len(sums), np.int64))
        found = [found[at] for at in keep.tolist()]
    return found


def _best(group: Group, found: Sequence[Choice[T]], tokens: int, most: int) -> list[Choice[T]]:
    """Of which mixtures are best: corners of the hull of bytes and seconds, then what is closest above it."""
    if not found:
        return []
    taken = np.array([one.taken for one in found])
    count = max(1.0, float(group.load.tokens.mean()) / tokens)  # of micro-batches, by all replicas
    nbytes, seconds = np.rint(taken[:, 0]).astype(np.int64), taken[:, 1] * count + taken[:, 2]
    hull = Hull.of(nbytes, seconds)
    above = seconds - hull.least(nbytes.astype(np.float64))
    above[hull.corners] = -1.0
    return [found[at] for at in np.argsort(above, kind="stable")[:most].tolist()]
