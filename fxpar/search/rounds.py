"""Which strategies the teams of rounds should run: of those that a search knows, some for each number of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fxpar.batching import LengthGroup, length_groups
from fxpar.errors import StrategySyntaxError
from fxpar.ir.axes import REPLICAS
from fxpar.ir.strategy import SINGLE, Strategy
from fxpar.search.known import KnownModel, Said
from fxpar.search.price import Priced
from fxpar.search.pricing import PricedSet, SetPricer
from fxpar.search.teams import Teams

PER_SIZE = 6  # strategies of equally many ranks that are tried
MORE = 1.1  # by so many times as many tokens a slower strategy has to hold to be tried
ALIKE = 1.01  # times as slow is no slower
SHRINK = 0.98  # of the tokens of all teams, where formations turn out not to fit
TRIES = 4

MOST = 5  # strategies of rounds

Chosen = tuple[Priced, ...]
"""What teams run, widest first, as it is priced with replicas on all ranks."""


@dataclass(frozen=True)
class Rounds:
    """`text` is what stands for sequences of up to `limit` tokens in a run; the widest team's micro-batches have
    `token_budget`. `priced` is what mini-batches that choose among its formations take.
    """

    text: str
    limit: int
    token_budget: int
    priced: PricedSet

    def to_json(self) -> dict[str, Any]:
        return {"strategy": self.text, "limit": self.limit, "token_budget": self.token_budget}


def best_rounds(
    candidates: Sequence[Priced], longest: int, pricer: SetPricer, known: KnownModel, said: Said
) -> Rounds | None:
    """Of `candidates`, strategies of all ranks, the replicas that should be teams; None where none of them holds a
    sequence of `longest` tokens on all ranks.

    A replica costs as a team what it costs beside others like it. For each number of ranks the fastest strategies are
    tried, and slower ones that hold more. From each widest team with the fastest beside it, and with those that hold
    most, one at a time is changed, left out or added, as long as the mini-batches take less.
    """
    options = _options(candidates, longest, pricer)
    known_s: dict[tuple[str, ...], float] = {}

    def seconds(chosen: Chosen) -> float:
        names = tuple(one.name for one in chosen)
        if names not in known_s:
            said(f"planning rounds of {', '.join(names)}")
            known_s[names] = _guessed_s(chosen, longest, pricer)
        return known_s[names]

    best: Chosen = ()
    for widest, place in itertools.product(options.get(pricer.cluster.world, ()), (0, -1)):
        beside = (found[place] for size, found in options.items() if size < pricer.cluster.world)
        best = min(best, _improved((widest, *beside), options, seconds), key=seconds)
    return _settled(best, longest, pricer, known, said) if math.isfinite(seconds(best)) else None


def _improved(chosen: Chosen, options: Mapping[int, Sequence[Priced]], seconds: Callable[[Chosen], float]) -> Chosen:
    """Changed one by one, until no change makes it faster."""
    ranked = [one for found in options.values() for one in found]
    while True:
        tried = [chosen]
        for one in ranked:
            if one in chosen:
                tried.append(tuple(other for other in chosen if other is not one))
                continue
            alike = [other for other in chosen if other.strategy.replicas == one.strategy.replicas]
            sets = [{*map(id, chosen), id(one)} - {id(other)} for other in alike]
            sets += [{*map(id, chosen), id(one)}] * (len(chosen) < MOST)
            tried += [tuple(other for other in ranked if id(other) in each) for each in sets]
        best = min(tried, key=seconds)
        if seconds(best) >= seconds(chosen):
            return chosen
        chosen = best


def _options(candidates: Sequence[Priced], longest: int, pricer: SetPricer) -> dict[int, list[Priced]]:
    """By the ranks of a team, most first: strategies, each slower than those before and with more tokens."""
    world, found = pricer.cluster.world, dict[int, list[Priced]]()
    held = dict[int, int]()
    for one in sorted(filter(_may_be_team, candidates), key=lambda one: _seconds(one, pricer)):
        size = world // one.strategy.replicas
        least = longest if size == world else 1
        (tokens,) = pricer.budgets(one, [least])
        if tokens is None or tokens <= held.get(size, 0):
            continue
        mine = found.setdefault(size, [])
        if mine and _seconds(one, pricer) <= ALIKE * _seconds(mine[-1], pricer):
            mine[-1], held[size] = one, tokens
        elif tokens >= MORE * held.get(size, 0):
            mine.append(one)
            held[size] = tokens
    return {size: _some(found[size]) for size in sorted(found, reverse=True)}


def _some(options: Sequence[Priced]) -> list[Priced]:
    """Of many those at equal steps, from the first to the last."""
    count = min(len(options), PER_SIZE)
    return [options[round(number * (len(options) - 1) / max(1, count - 1))] for number in range(count)]


def _may_be_team(one: Priced) -> bool:
    """Whether its replicas take the same on ranks of their own: ZeRO is over all of them. Pipelines take no more, as
    their stages lie behind each other there, and those of replicas between each other.
    """
    strategy = one.strategy
    return strategy.bins == 1 and not (strategy.teams or strategy.zero)


def _seconds(one: Priced, pricer: SetPricer) -> float:
    """Of all tokens on all ranks, evenly shared out."""
    cost = one.group_cost
    return sum(cost.sequence_s(n) for lengths in pricer.batches for n in lengths) / one.strategy.replicas


def _held(chosen: Chosen, longest: int, pricer: SetPricer, settle: bool) -> Iterator[list[int]]:
    """The tokens that replicas of these hold beside each other's weights; with and without room for the gradients of
    two groups. Nothing where none holds the longest sequence on all ranks.
    """
    pairs = [(longest if one.strategy.replicas == 1 else 1, one) for one in reversed(chosen)]
    for overlap in (False, True) if pricer.overlap else (False,):
        groups = pricer.groups(pairs, settle, overlap)
        if groups is not None:
            yield [group.token_budget for group in reversed(groups)]


def _text(chosen: Chosen, tokens: Sequence[int]) -> str:
    return f"rounds({', '.join(str(_team(one.strategy, n)) for one, n in zip(chosen, tokens, strict=True))})"


def _team(strategy: Strategy, tokens: int) -> Strategy:
    """One replica."""
    axes = tuple(axis for axis in strategy.axes if axis[0] != REPLICAS)
    return replace(strategy, axes=axes or SINGLE.axes, tokens=tokens, offset=0)


def _groups(text: str, longest: int, world: int) -> Sequence[LengthGroup]:
    """Of the formations; none if these are too many."""
    try:
        return length_groups({longest: text}, world=world)
    except StrategySyntaxError:
        return ()


def _guessed_s(chosen: Chosen, longest: int, pricer: SetPricer) -> float:
    """Seconds of a mini-batch, without lowering anything; endless if it does not fit, or is one strategy alone."""
    best, replicas = math.inf, [one.strategy.replicas for one in chosen]
    for tokens in _held(chosen, longest, pricer, settle=False) if 1 in replicas and len(chosen) > 1 else ():
        by_team = {_team(one.strategy, n): one for one, n in zip(chosen, tokens, strict=True)}
        groups: list[tuple[int, Priced]] = []
        for group in _groups(_text(chosen, tokens), longest, pricer.cluster.world):
            parts = [by_team[_team(team.strategy, team.strategy.tokens)] for team in group.teams]
            teams = Teams(group.strategy, pricer.cluster, parts[0].anchors, tuple(parts))
            groups.append((group.limit, teams if len(parts) > 1 else replace(parts[0], strategy=group.strategy)))
        priced = pricer.price(groups) if groups else None
        best = best if priced is None else min(best, priced.predicted_s)
    return best


def _settled(chosen: Chosen, longest: int, pricer: SetPricer, known: KnownModel, said: Said) -> Rounds | None:
    """With formations that are lowered, and micro-batches that fit."""
    found: list[Rounds] = []
    for held in _held(chosen, longest, pricer, settle=True):
        for number in range(TRIES):
            tokens = [max(1, int(count * SHRINK**number)) for count in held]
            if tokens[0] < longest:
                break
            text = _text(chosen, tokens)
            groups = [(g.limit, known.priced(g.strategy, said)) for g in _groups(text, longest, pricer.cluster.world)]
            lowered = [(limit, one) for limit, one in groups if one is not None]
            priced = pricer.price(lowered, settle=True) if len(lowered) == len(groups) else None
            if priced is not None:
                found.append(Rounds(text, longest, tokens[0], priced))
                break
    return min(found, key=lambda one: one.priced.predicted_s, default=None)
