"""Variants of strategies of a settled set: other schedules, a whole loss, tokens in chunks, activations on the host;
and what no mini-batch has of it with these.

A variant of a pipeline is lowered only if, guessed at, it could make the set faster: with all memory in the world, and
of what lies on the host with what is there beside a guess at the strategy itself. Another schedule is not lowered, and
is not played through where one position is sure to be too full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fxpar.ir.strategy import Strategy
from fxpar.search.blends import Between
from fxpar.search.known import KnownModel, Said
from fxpar.search.price import Candidate, Priced
from fxpar.search.pricing import PricedSet, SetPricer, least_tokens
from fxpar.search.proposals import Chosen
from fxpar.search.space import also_tried

SHARES = (0.25, 0.5, 0.75)  # of activations, on the host
TOO_SLOW = 0.005  # by so much guesses at pipelines may be: they were 0.1 to 0.3 % too fast
ALIKE = 0.001  # by so much, two guesses that differ in what is on the host beside each other


@dataclass
class Variants:
    """Of a model's strategies, in sets that `pricer` prices."""

    known: KnownModel
    pricer: SetPricer
    said: Said
    _too_full: dict[tuple[Strategy, int], bool] = field(default_factory=dict, init=False)

    def best(self, chosen: Chosen, best: PricedSet) -> PricedSet:
        """A settled set, with variants of its strategies where these take less time with the memory that they need."""
        beside = self.pricer.cluster.sustained.overlap_slowdown is not None
        for strategy in dict.fromkeys(one.strategy for _, one in chosen):
            settled, took_s = chosen, best.predicted_s
            for text in also_tried(strategy, beside):
                if not self._may_win(text, strategy, settled, took_s, best.predicted_s):
                    continue
                other = self.known.candidate(text, self.said)
                if other is None:
                    continue
                share = self._best_share(strategy, other, settled, best.predicted_s)
                for variant in filter(None, (other, share)):
                    tried = _with(variant, strategy, settled)
                    if self.pricer.at_best_s(tried) >= best.predicted_s or self._is_too_full(variant, tried):
                        continue  # what it needs takes long to find
                    # As it is guessed first: what it holds takes longer to find than what it takes.
                    for settle in (False, True):
                        priced = self.pricer.price(tried, settle)
                        if priced is None or priced.predicted_s >= best.predicted_s:
                            break
                    else:
                        best, chosen = priced, tried
        return best

    def _is_too_full(self, variant: Priced, tried: Chosen) -> bool:
        """Whether what differs from another strategy in its schedule alone is sure not to hold a sequence of some limit
        of its own: positions are looked at one by one, the last first, as what waits less keeps most more there.
        """
        if not isinstance(variant, Candidate) or variant.alike is None or self.pricer.memory_bytes is None:
            return False
        tokens = max(least_tokens(limit, one) for limit, one in tried if one is variant)
        key = variant.strategy, tokens
        if key not in self._too_full:
            weights = [one.weight_bytes for one in variant.alike.positions(variant.anchors[-1])]
            most_bytes = self.pricer.memory_bytes + max(weights) - min(weights)  # a set counts those of one position
            positions = variant.looked_at or range(variant.strategy.pipeline_size)
            held = (variant.at_position(place, tokens).peak_bytes for place in reversed(positions))
            self._too_full[key] = any(nbytes > most_bytes for nbytes in held)
        return self._too_full[key]

    def _may_win(self, variant: Strategy, strategy: Strategy, chosen: Chosen, took_s: float, must_s: float) -> bool:
        """Whether a variant, or one of its shares, may take less than `must_s` in place of `strategy`, with which the
        set takes `took_s`: with all memory in the world, and with what it is guessed to need, as far as it is then
        slower or faster than a guess at `strategy`. Of pipelines only those are guessed at that need programs of their
        own; all else has to be lowered to be known.
        """
        if replace(variant, pipeline=strategy.pipeline) == strategy:
            return True
        guess = self.known.guessed(variant, self.said)
        if guess is None:
            return True
        tried: list[Priced] = [guess]
        if variant.offload and (none := self.known.guessed(replace(variant, offload=0.0), self.said)):
            tried += [_between(none, guess, share) for share in _worth_a_look(none, guess)]
        most_s = (1 + TOO_SLOW) * must_s
        fast = [one for one in tried if self.pricer.at_best_s(_with(one, strategy, chosen)) < most_s]
        beside = self.known.guessed(strategy, self.said) if fast and variant.offload else None
        usual = None if beside is None else self.pricer.price(_with(beside, strategy, chosen))
        if usual is None:
            return bool(fast)
        guessed = (self.pricer.price(_with(one, strategy, chosen)) for one in fast)
        most_s = (1 + ALIKE) * must_s * usual.predicted_s / took_s
        return any(one is None or one.predicted_s < most_s for one in guessed)

    def _best_share(self, strategy: Strategy, other: Priced, chosen: Chosen, must_s: float) -> Priced | None:
        """Of a strategy that keeps all activations on the host: with the share that takes least in place of `strategy`,
        on the line between none and all; None if that is one of these, or if none could take less than `must_s`.
        """
        none = self.known.candidate(replace(other.strategy, offload=0.0), self.said) if other.strategy.offload else None
        if none is None:
            return None

        def tried(share: float) -> list[tuple[int, Priced]]:
            return _with(_between(none, other, share), strategy, chosen)

        if all(self.pricer.at_best_s(tried(share)) >= must_s for share in _worth_a_look(none, other)):
            return None
        seconds: dict[float, float] = {}
        for share in (0.0, *SHARES, 1.0):
            priced = self.pricer.price(tried(share))
            seconds[share] = np.inf if priced is None else priced.predicted_s
        best = min(seconds, key=lambda share: seconds[share])
        found = replace(other.strategy, offload=best)
        return self.known.candidate(found, self.said) if best in SHARES else None


def without_idle(settled: PricedSet) -> PricedSet:
    """Without groups that no mini-batch has, as all their sequences run better in a longer one: mini-batches are what
    they were. The last group stays, as it holds what is longer than all others do. Memory is that of before, which
    those that are left do not exceed.
    """
    last = len(settled.groups) - 1
    kept = [number for number, group in enumerate(settled.groups) if group.tokens or number == last]
    if len(kept) > last:
        return settled
    groups = tuple(settled.groups[number] for number in kept)
    parts = {group.strategy: settled.memory_parts[group.strategy] for group in groups}
    traffic, usual = settled.traffic and settled.traffic.only(kept), settled.usual and without_idle(settled.usual)
    return replace(settled, groups=groups, memory_parts=parts, traffic=traffic, usual=usual)


def _between(none: Priced, other: Priced, share: float) -> Between:
    """A guess at `other` with a share of its activations on the host."""
    return Between(replace(other.strategy, offload=share), other.cluster, other.anchors, none, other, share)


def _worth_a_look(none: Priced, other: Priced) -> Sequence[float]:
    """Shares of which one takes least time with all memory in the world: where all takes longer than none whatever the
    tokens, that is the smallest.
    """
    grows = [
        getattr(none.group_cost, name) <= getattr(other.group_cost, name)
        for name in ("fixed_s", "per_token_s", "per_square_s")
    ]
    return SHARES[:1] if all(grows) and none.reduce_s <= other.reduce_s else SHARES


def _with(variant: Priced, strategy: Strategy, chosen: Chosen) -> list[tuple[int, Priced]]:
    """A set with `variant` in place of a strategy."""
    return [(limit, variant if one.strategy == strategy else one) for limit, one in chosen]
