"""Teams: how strategies side by side share what one of them would take, by the ranks that a replica of each has; and
the formations of rounds, all teams that the ranks of a strategy can be cut into.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from fxpar.errors import StrategySyntaxError, TeamsGatherError
from fxpar.ir.axes import BINS, REPLICAS, ROLE_AXES, USES
from fxpar.ir.strategy import SINGLE, Strategy

MOST_PARTS = 8  # of the ranks, that rounds have teams of: 10 formations
_ROUNDS = re.compile(r"\s*rounds\(([^,]*)(?:,\s*([0-9]{1,4})\s*)?\)\s*", re.DOTALL)


def ranks_of_replica(strategy: Strategy) -> int:
    """Among which the tokens of a micro-batch are shared: those of a pipeline stage."""
    return strategy.world // strategy.replicas // strategy.pipeline_size


def largest_team(strategy: Strategy) -> Strategy:
    """Of strategies side by side the first of those whose replicas have most ranks; else the strategy itself."""
    return max(strategy.teams, key=ranks_of_replica, default=strategy)


def team_budgets(strategy: Strategy, tokens: int) -> tuple[int, ...]:
    """Tokens of a micro-batch of each team, where the largest one's has so many: as many per rank."""
    return tuple(team_budget(strategy, team, tokens) for team in strategy.teams)


def team_budget(strategy: Strategy, team: Strategy, tokens: int) -> int:
    """That of one of the teams."""
    return max(team.bins, tokens * ranks_of_replica(team) // ranks_of_replica(largest_team(strategy)))


def in_step(strategy: Strategy) -> bool:
    """Whether strategies side by side cut parameters over the ranks of all teams, and so gather them together: where
    all of them have ZeRO-3, and none has stages.
    """
    return bool(strategy.teams) and all(team.zero == 3 and team.stages == 1 for team in strategy.teams)


def lowered_for(strategy: Strategy, number: int) -> Strategy:
    """What a team's program is lowered for: what the team runs under; in step the same with replicas on all ranks, of
    which the team's ranks run theirs. So parameters are cut over all ranks, and a collective of replicas is of them.

    Raises TeamsGatherError if replicas of the team, wherever it stands, do not cover the ranks of all teams.
    """
    own = strategy.of_team(number)
    if not in_step(strategy):
        return own
    ranks = own.world // own.replicas
    inside = tuple(axis for axis in own.axes if axis[0] != REPLICAS)
    if strategy.world % ranks or (own.offset - strategy.offset) % ranks:
        why = f"begins at rank {own.offset} of {strategy.world}, which are no multiples of the {ranks} of its replicas"
        raise TeamsGatherError(str(strategy), str(own), why)
    if own.replicas > 1 and own.axes[0][0] != REPLICAS:
        raise TeamsGatherError(str(strategy), str(own), f"does not begin with {REPLICAS}")
    count = strategy.world // ranks
    axes = ((REPLICAS, count), *inside) if count > 1 else inside
    return replace(own, axes=axes or SINGLE.axes, offset=strategy.offset)


def formations(choice: Strategy | str) -> tuple[Strategy, ...]:
    """The strategies that a group may run under: the one that `choice` is, or all of `rounds(cp8)`, `rounds(cp8, 2)`.

    Those are the ways to cut its ranks into teams of a power of two, of at least as many ranks as the second number
    says (default 1). A team is the strategy on fewer ranks: its axes are cut from the outermost on. Teams stand in
    descending order, so each begins at a multiple of its size; equal ones are written as replicas. The widest team's
    formation is the first.

    Raises StrategySyntaxError for other texts, for axes that do not stay inside of a replica, and for too many parts.
    """
    if isinstance(choice, Strategy):
        return (choice,)
    found = _ROUNDS.fullmatch(choice) if isinstance(choice, str) else None
    if found is None:
        return (Strategy.parse(choice),)
    widest, least = Strategy.parse(found[1]), int(found[2] or 1)
    _check_rounds(choice, widest, least)
    return tuple(_formation(widest, teams) for teams in _partitions(widest.world, widest.world, least))


def is_rounds(text: str) -> bool:
    """Whether a text stands for several strategies, see `formations`."""
    return text.lstrip().startswith("rounds(")


def replicas_of_ranks(widest: Strategy, sizes: Iterable[int]) -> dict[int, Strategy]:
    """By size: as many replicas of so many ranks as all ranks of `widest` are, each that strategy on fewer ranks, as in
    `formations`. Raises StrategySyntaxError, as that does.
    """
    found = {}
    for size in sizes:
        _check_axes(str(widest), widest, size)
        found[size] = _team(widest, size, widest.world // size)
    return found


def _check_rounds(text: str, widest: Strategy, least: int) -> None:
    _check_axes(text, widest, least)
    if widest.world > MOST_PARTS * least:
        why = (
            f"teams of {least} of {widest.world} ranks are more than {MOST_PARTS} parts, and every formation is "
            f"prepared; write rounds({widest}, {widest.world // MOST_PARTS})"
        )
        raise StrategySyntaxError(text, text, why)


def _check_axes(text: str, widest: Strategy, least: int) -> None:
    names = {name for name, _ in widest.axes}
    if widest.blocks or widest.rules or not names <= set(ROLE_AXES) - {BINS}:
        known = ", ".join(name for name in ROLE_AXES if name != BINS)
        why = f"what is cut into teams is one strategy of the axes {known}, without rules"
        raise StrategySyntaxError(text, str(widest), why)
    degrees = (*(degree for _, degree in widest.axes), least)
    if any(degree < 1 or degree & (degree - 1) for degree in degrees) or least > widest.world:
        why = f"its degrees, and the {least} ranks that a team has at least, must be powers of two up to {widest.world}"
        raise StrategySyntaxError(text, text, why)


def _partitions(ranks: int, most: int, least: int) -> Iterator[tuple[int, ...]]:
    """The powers of two, from `most` down to `least`, that add up to `ranks`; largest first."""
    if ranks == 0:
        yield ()
    while most >= least and ranks:
        if most <= ranks:
            for rest in _partitions(ranks - most, most, least):
                yield (most, *rest)
        most //= 2


def _formation(widest: Strategy, teams: tuple[int, ...]) -> Strategy:
    parts = tuple(_team(widest, size, teams.count(size)) for size in dict.fromkeys(teams))
    return parts[0] if len(parts) == 1 else Strategy((), teams=parts)


def _team(widest: Strategy, ranks: int, count: int) -> Strategy:
    """`count` replicas of so many ranks each."""
    axes: list[tuple[str, int]] = []
    for name, degree in reversed(widest.axes):
        mine = min(degree, ranks)
        ranks //= mine
        axes = [(name, mine), *axes] if mine > 1 else axes
    axes = [(REPLICAS, count), *axes] if count > 1 else axes
    sp = widest.sp and any(USES[name] == "weights" for name, _ in axes)
    return replace(widest, axes=tuple(axes) or SINGLE.axes, sp=sp)
