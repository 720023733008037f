"""Teams: how strategies side by side share what one of them would take, by the ranks that a replica of each has; and
the formations of rounds, all teams that the ranks of a strategy can be cut into.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fxpar.errors import DegreeError, StrategySyntaxError, TeamsGatherError
from fxpar.ir.axes import BINS, REPLICAS, ROLE_AXES, USES
from fxpar.ir.module_rules import split_outside
from fxpar.ir.strategy import SINGLE, Strategy

MOST_FORMATIONS = 16  # of rounds, as each is lowered and bound: up to 8 parts of a power of two ranks make 10
_ROUNDS = re.compile(r"\s*rounds\((.*)\)\s*", re.DOTALL)
_NUMBER = re.compile(r"[0-9]{1,9}$", re.ASCII)
_JOINTS = frozenset("|>+.@[")  # what two words of one strategy have between them


def ranks_of_replica(strategy: Strategy) -> int:
    """Among which the tokens of a micro-batch are shared: those of a pipeline stage."""
    ranks = sum(stage.world for stage in strategy.by_stage) or strategy.world
    return ranks // strategy.replicas // strategy.pipeline_size


def largest_team(strategy: Strategy) -> Strategy:
    """Of strategies side by side the first of those whose replicas have most ranks; else the strategy itself."""
    return max(strategy.teams, key=ranks_of_replica, default=strategy)


def team_budgets(strategy: Strategy, tokens: int) -> tuple[int, ...]:
    """Tokens of a micro-batch of each team, where the largest one's has so many: see `team_budget`."""
    return tuple(team_budget(strategy, team, tokens) for team in strategy.teams)


def team_budget(strategy: Strategy, team: Strategy, tokens: int) -> int:
    """What a team says itself, or as many per rank as the largest one has."""
    return team.tokens or max(team.bins, tokens * ranks_of_replica(team) // ranks_of_replica(largest_team(strategy)))


def in_step(strategy: Strategy) -> bool:
    """Whether strategies side by side cut parameters over the ranks of all teams, and so gather them together: where
    all of them have ZeRO-3, and none has stages.
    """
    return bool(strategy.teams) and all(team.zero == 3 and team.stages == 1 for team in strategy.teams)


def lowered_for(strategy: Strategy, number: int) -> Strategy:
    """What a team's program is lowered for: what the team runs under; in step the same with replicas on all ranks, of
    which the team's ranks run theirs. So parameters are cut over all ranks, and a collective of replicas is of them.

    Raises TeamsGatherError if replicas of the team, wherever it stands, do not cover the ranks of all teams, or if it
    surely gathers in another way than the first team.
    """
    own = strategy.of_team(number)
    if not in_step(strategy):
        return own
    ranks, begins = own.world // own.replicas, own.offset - strategy.offset
    inside = tuple(axis for axis in own.axes if axis[0] != REPLICAS)
    if strategy.world % ranks:
        why = f"has replicas of {ranks} ranks, which do not divide the {strategy.world} of all"
        raise TeamsGatherError(str(strategy), str(own), why, "Take replicas whose ranks do")
    if begins % ranks:
        why = f"begins at rank {begins}, no multiple of the {ranks} ranks of its replicas"
        raise TeamsGatherError(str(strategy), str(own), why, "Write the largest replicas first")
    if own.replicas > 1 and own.all_digits[0] != (REPLICAS, own.replicas):
        why = f"does not begin with {REPLICAS}{own.replicas}"
        raise TeamsGatherError(str(strategy), str(own), why, f"Write {REPLICAS}{own.replicas} first")
    _check_gathers(strategy, own, strategy.of_team(0))
    count = strategy.world // ranks
    axes = ((REPLICAS, count), *inside) if count > 1 else inside
    return replace(own, axes=axes or SINGLE.axes, offset=strategy.offset)


def _check_gathers(strategy: Strategy, own: Strategy, first: Strategy) -> None:
    """What is sure of any model: `own` gathers other pieces than `first`, or other layers again. What rules do, and
    budgets of recomputation, only lowered programs say.
    """
    if own.rules or first.rules:
        return
    cut = [(*(one.degree(axis) for axis in ROLE_AXES if USES[axis] == "weights"), one.sp) for one in (own, first)]
    again = [_gathers_again(one) for one in (own, first)]
    if cut[0] != cut[1] or (None not in again and again[0] != again[1]):
        what = "tp and sp" if cut[0] != cut[1] else "remat"
        why = f"has other {what} than {str(first)!r}"
        raise TeamsGatherError(str(strategy), str(own), why, f"Give all teams the same {what}")


def _gathers_again(team: Strategy) -> str | None:
    """Of which layers a backward that recomputes does so; None if that depends on the model."""
    mode = "none" if team.remat is None else team.remat.mode
    return mode if mode in ("none", "full", "selective") else None


def teams_apart(strategy: Strategy) -> dict[Strategy, list[str]]:
    """What teams side by side run under, with the ranks of those that do: teams alike are one. Else the strategy, on
    its ranks.
    """
    found: dict[Strategy, list[str]] = {}
    for number, team in enumerate(strategy.teams):
        runs, first = lowered_for(strategy, number), strategy.of_team(number).offset
        alike = next((one for one in found if replace(one, offset=runs.offset) == runs), runs)
        found.setdefault(alike, []).append(f"{first}-{first + team.world - 1}" if team.world > 1 else str(first))
    return found or {strategy: []}


def formations(choice: Strategy | str) -> tuple[Strategy, ...]:
    """The strategies that a group may run under: the one that `choice` is, or all of `rounds(...)`: the ways to cut the
    ranks of the widest team into teams. Those with a widest team come first.

    `rounds(cp8)`, `rounds(cp8, 2)`: a team is that strategy on a number of ranks that divides its own, at least so many
    as the second number says (default 1); from the innermost axis on, each keeps what its degree has in common with the
    ranks that are left. `rounds(cp2.tp2+sp, tp2+sp+chunks(2), dp1+remat)`: a team runs one of these, whatever they are,
    on as many ranks as it has. Of several with equally many ranks, teams of a formation run the same one.

    Each team begins at a multiple of its size where an order of the teams allows it, descending sizes first; else they
    descend. Equal ones behind each other are written as replicas, pipelines one by one.

    Raises StrategySyntaxError for other texts, for a single strategy with axes that do not stay inside of a replica,
    for several that are no teams or that no formation has, and for too many formations.
    """
    if isinstance(choice, Strategy):
        return (choice,)
    words = _words(choice)
    if words is None:
        return (Strategy.parse(choice),)
    first, *others = words
    if not others or (len(others) == 1 and _NUMBER.match(others[0])):
        widest, least = Strategy.parse(first), int(others[0] if others else 1)
        _check_axes(choice, widest, least)
        _check_tokens(choice, widest, least)
        sizes = (size for size in range(widest.world, least - 1, -1) if widest.world % size == 0)
        by_size = {size: [_narrowed(widest, size)] for size in sizes}
    else:
        by_size = _by_size(choice, [Strategy.parse(text) for text in (first, *others)])
    made = tuple(itertools.islice(_formations(by_size), MOST_FORMATIONS + 1))
    if len(made) > MOST_FORMATIONS:
        sizes = ", ".join(map(str, by_size))
        why = (
            f"teams of {sizes} ranks make more than {MOST_FORMATIONS} formations, and every formation is prepared; "
            f"{_fewer(by_size) if len(others) < 2 else 'name fewer strategies'}"
        )
        raise StrategySyntaxError(choice, choice, why)
    return made


def each_rewritten(choice: Strategy | str, rewrite: Callable[[Strategy], Strategy]) -> Strategy | str:
    """The strategy, or each one that is named in `rounds(...)`, as `rewrite` has it."""
    words = _words(choice)
    if words is None:
        return rewrite(Strategy.parse(choice) if isinstance(choice, str) else choice)
    return f"rounds({', '.join(word if _NUMBER.match(word) else str(rewrite(Strategy.parse(word))) for word in words)})"


def is_compressed(choices: Mapping[int, Strategy | str]) -> bool:
    """Whether a strategy, or a rule of it, lets experts see means."""
    return any(strategy.most("lsh") for choice in choices.values() for strategy in formations(choice))


def is_rounds(text: str) -> bool:
    """Whether a text stands for several strategies, see `formations`."""
    return text.lstrip().startswith("rounds(")


def replicas_of_ranks(widest: Strategy, sizes: Iterable[int]) -> dict[int, Strategy]:
    """By size: as many replicas of so many ranks as all ranks of `widest` are, each that strategy on fewer ranks, as in
    `formations`. Raises StrategySyntaxError, as that does, and DegreeError for a size that does not divide all ranks.
    """
    found = {}
    for size in sizes:
        _check_axes(str(widest), widest, size)
        if widest.world % size:
            raise DegreeError(size, f"its teams are priced as replicas on all {widest.world} ranks; take a divisor")
        (found[size],) = _copies(_narrowed(widest, size), widest.world // size)
    return found


def _words(choice: Strategy | str) -> list[str] | None:
    """What stands between the commas of `rounds(...)`; None for another text. Raises StrategySyntaxError where nothing
    stands there, or a number that is no number of ranks.
    """
    found = _ROUNDS.fullmatch(choice) if isinstance(choice, str) else None
    if found is None or not _closed(found[1]):
        return None
    text, words = found[0], [word.strip() for word in split_outside(found[1], ",")]
    if not all(words):
        why = "a strategy stands between the commas, such as rounds(cp8), rounds(cp8, 2) or rounds(cp8, cp2, dp1)"
        raise StrategySyntaxError(text, text, why)
    for place, word in enumerate(words):
        beside = itertools.pairwise(filter(None, split_outside(re.sub(r"\s", " ", word), " ")))
        if len(split_outside(word, ";")) > 1 or any({one[-1], other[0]}.isdisjoint(_JOINTS) for one, other in beside):
            raise StrategySyntaxError(text, word, "strategies are separated by ',', as in rounds(cp8, cp2, dp1)")
        if re.match(r"[-+]?\d", word) and (place != 1 or len(words) > 2 or not _NUMBER.match(word)):
            why = "the least ranks of a team are one whole number behind it, as in rounds(cp8, 2)"
            raise StrategySyntaxError(text, word, f"{word} is not a strategy; {why}")
    return words


def _closed(text: str) -> bool:
    """Whether each bracket that closes in the text has been opened in it."""
    depths = itertools.accumulate((letter == "(") - (letter == ")") for letter in text)
    return all(depth >= 0 for depth in depths)


def _check_tokens(text: str, widest: Strategy, least: int) -> None:
    """Narrower teams hold their share of `tokens(...)`, which is at least one token."""
    if 0 < widest.tokens * least < widest.world:
        enough = f"take tokens({-(-widest.world // least)}) or more"
        why = f"narrower teams have as many tokens per rank, less than one on {least} of {widest.world} ranks; {enough}"
        raise StrategySyntaxError(text, f"tokens({widest.tokens})", why)


def _check_axes(text: str, widest: Strategy, least: int) -> None:
    names = {name for name, _ in widest.axes}
    if widest.blocks or widest.rules or widest.digits or not names <= set(ROLE_AXES) - {BINS}:
        known = ", ".join(name for name in ROLE_AXES if name != BINS)
        why = f"what is cut into teams is one strategy of the axes {known}, each in one place, without rules"
        raise StrategySyntaxError(text, str(widest), why)
    if not 1 <= least <= widest.world:
        raise StrategySyntaxError(text, text, f"a team has from 1 to {widest.world} ranks, not {least}")


def _by_size(text: str, written: Sequence[Strategy]) -> dict[int, list[Strategy]]:
    """Strategies by how many ranks they have, most first."""
    by_size: dict[int, list[Strategy]] = {}
    for one in sorted(dict.fromkeys(written), key=lambda one: -one.world):
        if one.teams or one.replicas > 1:
            raise StrategySyntaxError(text, str(one), f"a team is one replica, without teams and {REPLICAS} axes")
        by_size.setdefault(one.world, []).append(one)
    world, sizes = max(by_size), list(by_size)
    for size in sizes:
        if next(_partitions(world - size, sizes), None) is None:
            why = f"teams of {', '.join(map(str, sizes))} ranks never make {world} with one of {size}"
            why += "; name a strategy for the ranks that are left"
            raise StrategySyntaxError(text, str(by_size[size][0]), why)
    return by_size


def _fewer(by_size: Mapping[int, Sequence[Strategy]]) -> str:
    """What to write for the smallest teams that make few enough formations."""
    for least in sorted(by_size):
        enough = {size: strategies for size, strategies in by_size.items() if size >= least}
        if len(list(itertools.islice(_formations(enough), MOST_FORMATIONS + 1))) <= MOST_FORMATIONS:
            return f"write rounds({by_size[max(by_size)][0]}, {least})"
    raise AssertionError("the widest alone is one formation")


def _formations(by_size: Mapping[int, Sequence[Strategy]]) -> Iterator[Strategy]:
    """Each way to cut the ranks of the widest, under each choice of strategies for the sizes that it has."""
    for cut in _partitions(max(by_size), list(by_size)):
        sizes = list(dict.fromkeys(cut))
        for chosen in itertools.product(*(by_size[size] for size in sizes)):
            runs = dict(zip(sizes, chosen, strict=True))
            behind = ((size, len(list(alike))) for size, alike in itertools.groupby(_aligned(cut)))
            teams = tuple(team for size, count in behind for team in _copies(runs[size], count))
            yield teams[0] if len(teams) == 1 else Strategy((), teams=teams)


def _partitions(ranks: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The ways to make so many ranks of these sizes, which descend; largest first."""
    if ranks == 0:
        yield ()
    for place, size in enumerate(sizes):
        if 0 < size <= ranks:
            for rest in _partitions(ranks - size, sizes[place:]):
                yield (size, *rest)


def _aligned(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Descending sizes in an order in which each begins at a multiple of itself: first that of descending sizes, with
    equal ones together. As they are if there is none, such as 3 and 2. So few sets of ranks are those of a team, and
    none stands on two nodes whose ranks the sizes divide.
    """
    hopeless = set[tuple[int, ...]]()  # what was left when nothing fitted: that says where the next one begins

    def ordered(left: tuple[int, ...], last: int) -> tuple[int, ...] | None:
        if not left or left in hopeless:
            return None if left else ()
        begins = sum(sizes) - sum(left)
        for size in sorted(set(left), key=lambda size: (size != last, -size)):
            if begins % size == 0:
                place = left.index(size)
                rest = ordered(left[:place] + left[place + 1 :], size)
                if rest is not None:
                    return (size, *rest)
        hopeless.add(left)
        return None

    return ordered(sizes, 0) or sizes


def _copies(one: Strategy, count: int) -> tuple[Strategy, ...]:
    """So many teams under the same strategy, as replicas where these are the ranks behind each other."""
    if count == 1 or one.pipeline_size > 1:
        return (one,) * count
    axes = tuple(axis for axis in one.axes if axis[0] != REPLICAS)
    return (replace(one, axes=((REPLICAS, count), *axes)),)


def _narrowed(widest: Strategy, ranks: int) -> Strategy:
    """The strategy on fewer ranks, with as many tokens on each."""
    axes, left = list[tuple[str, int]](), ranks
    for name, degree in reversed(widest.axes):
        mine = math.gcd(degree, left)
        left //= mine
        axes = [(name, mine), *axes] if mine > 1 else axes
    sp = widest.sp and any(USES[name] == "weights" for name, _ in axes)
    tokens = widest.tokens * ranks // widest.world
    return replace(widest, axes=tuple(axes) or SINGLE.axes, sp=sp, tokens=tokens)
