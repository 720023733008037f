"""Proposals of layers that differ in roles, ZeRO levels and what they save, after Galvatron (Miao et al. 2022, 4.3).

kinds    what a layer may run under: rules for its modules, beside a level of savings. What a kind takes is that of the
         level and what each rule takes more, as lowered alone; the ones kept are corners of the hull of bytes and
         seconds, and those next to it
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

import numpy as np
from numpy.typing import NDArray

from fxpar.cost.polynomial import Polynomial
from fxpar.ir.module_rules import ModuleRule
from fxpar.ir.strategy import Strategy
from fxpar.search.blends import ChangedFlat
from fxpar.search.fronts import Hull, undominated
from fxpar.search.kinds import Layers, MixedCandidate
from fxpar.search.known import KnownModel, Said
from fxpar.search.positions import child_of
from fxpar.search.price import Candidate, Priced
from fxpar.search.proposals import WORTH, Group, Proposal
from fxpar.search.space import of_a_stage
from fxpar.search.stage_options import GuessedStage, LoweredStage, beside_layers, of_layer, per_step
from fxpar.search.staged import StagedGuess
from fxpar.search.stages import Guess, guesses

KINDS = 5  # of layers, that are mixed
ENDS = 2  # choices of what is outside of layers
LOWERED = 3  # guesses
KEPT = 6  # guesses for each number of tokens, of which the best with new kinds is lowered

Taken = NDArray[np.float64]  # bytes, seconds of a micro-batch, seconds of gradient sync
Rules = tuple[tuple[ModuleRule, Candidate], ...]
_Pair = tuple[Strategy, Strategy]


@dataclass(frozen=True)
class Level:
    """What all layers save under `strategy`: priced without stages, and with one rule for each of the positions."""

    strategy: Strategy
    flat: Candidate
    positions: Sequence[tuple[str, Sequence[tuple[ModuleRule, Priced]]]]


@dataclass(frozen=True)
class _Kind:
    level: Level
    rules: Rules
    taken: Taken


@dataclass
class LayerSearch:
    """`levels[0]` saves nothing."""

    known: KnownModel
    levels: Sequence[Level]
    layers: Layers
    said: Said
    _borders: dict[_Pair, Polynomial] = field(default_factory=dict, init=False)

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
        found = []
        for outside in ends:
            for mine in (kinds, [kind for kind in kinds if _bins(kind) == 1]):
                best = _best(group, mine, tokens, KINDS)
                if best and best not in [each for _, each in found]:
                    found.append((outside, best))
        return [self._stage(best, outside, one.strategy.pipeline_size, tokens) for outside, best in found]

    def _kinds(self, group: Group, tokens: int) -> list[_Kind]:
        """Of all levels, with all rules for positions in layers."""
        found = []
        for level in self.levels:
            alone = self._per_layer(level.flat, group, tokens)
            kinds = [_Kind(level, (), alone)]
            for rules in self._options(level, inside=True):
                more = [(pair, self._per_layer(pair[1], group, tokens) - alone) for pair in rules]
                longer = [_Kind(level, (*k.rules, pair), k.taken + taken) for k in kinds for pair, taken in more]
                kinds = _undominated([*kinds, *longer])
            found += kinds
        return found

    def _per_layer(self, flat: Candidate, group: Group, tokens: int) -> Taken:
        held = of_layer(flat, tokens)
        seconds = flat.per_step()[1] * (1 / per_step(flat))
        return _taken(held.weight_bytes + held.step_bytes, seconds, flat.reduce_s / self.layers.count, group, tokens)

    def _ends(self, group: Group, tokens: int) -> list[Rules]:
        """Rules outside of layers: the best, and what takes less memory."""
        level = self.levels[0]
        found = [_Kind(level, (), np.zeros(3))]
        for rules in self._options(level, inside=False):
            more = [(pair, _beside(pair[1], group, tokens) - _beside(level.flat, group, tokens)) for pair in rules]
            longer = [_Kind(level, (*k.rules, pair), k.taken + taken) for k in found for pair, taken in more]
            found = _undominated([*found, *longer])
        return [kind.rules for kind in _best(group, found, tokens, ENDS)]

    def _options(self, level: Level, inside: bool) -> Iterator[Rules]:
        """Rules of each position in layers, or outside of them. A layer itself has what it saves as its rule."""
        for _, rules in level.positions:
            pairs = [(rule, flat) for rule, one in rules if (flat := _flat(one)) is not None]
            children = {child_of(rule, self.layers) for rule, _ in pairs}
            if pairs and "" not in children and (None not in children) == inside:
                yield tuple(pairs)

    def _stage(self, kinds: Sequence[_Kind], outside: Rules, stages: int, tokens: int) -> GuessedStage:
        """What saves most comes first, so that layers in front save."""
        texts, flats = [], []
        for kind in sorted(kinds, key=lambda kind: kind.taken[0]):
            rules = (*kind.rules, *outside)
            written = tuple(rule for rule, _ in rules)
            base, changes = kind.level.flat, tuple(flat for _, flat in rules)
            texts.append(replace(of_a_stage(kind.level.strategy), rules=written))
            flats.append(ChangedFlat(replace(base.strategy, rules=written), base, changes))
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


def _flat(one: Priced) -> Candidate | None:
    """The strategy without stages that a priced one is, or was guessed from."""
    flat = one.flat if isinstance(one, StagedGuess) else one
    return flat if isinstance(flat, Candidate) and len(flat.samples) == 2 else None


def _bins(kind: _Kind) -> int:
    return replace(kind.level.strategy, rules=tuple(rule for rule, _ in kind.rules)).bins


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


def _undominated(kinds: list[_Kind]) -> list[_Kind]:
    """None is beaten in bytes, seconds and sync at once."""
    taken = np.array([kind.taken for kind in kinds])
    keep = undominated(np.rint(taken[:, 0]).astype(np.int64), taken[:, 1], taken[:, 2], np.zeros(len(taken), np.int64))
    return [kinds[at] for at in keep.tolist()]


def _best(group: Group, kinds: Sequence[_Kind], tokens: int, most: int) -> list[_Kind]:
    """Of which mixtures are best: corners of the hull of bytes and seconds, then what is closest above it."""
    if not kinds:
        return []
    taken = np.array([kind.taken for kind in kinds])
    count = max(1.0, float(group.load.tokens.mean()) / tokens)  # of micro-batches, by all replicas
    nbytes, seconds = np.rint(taken[:, 0]).astype(np.int64), taken[:, 1] * count + taken[:, 2]
    hull = Hull.of(nbytes, seconds)
    above = seconds - hull.least(nbytes.astype(np.float64))
    above[hull.corners] = -1.0
    return [kinds[at] for at in np.argsort(above, kind="stable")[:most].tolist()]
