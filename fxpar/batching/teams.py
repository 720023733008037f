"""`TeamsLoad`: the sequences of a group whose strategies run side by side, each in one of the teams.

Longest first, each sequence goes to the team that is then done first, of those that hold it (Graham's LPT with machines
of unlike speed); then single sequences leave the slowest team where that makes the group faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest

from fxpar.batching.groups import LengthGroup
from fxpar.batching.loads import Load, Member, rule_of
from fxpar.batching.packing import PackingRule, SequenceItem, ticks
from fxpar.cost.group_cost import GroupCost, TeamsCost

MOVES = 64  # tried at most


@dataclass(frozen=True)
class TeamRule:
    """How a team runs: the longest sequence that it takes, its ranks, its cost; `in_step` with all other teams."""

    limit: int
    ranks: int
    packing: PackingRule
    cost: GroupCost
    in_step: bool = False

    def adds(self, length: int) -> int:
        """Ticks that a sequence adds to a replica."""
        return self.packing.bins * ticks(self.cost.sequence_s(length))

    def guess(self, cost: int, tokens: int) -> float:
        """Ticks of sequences that cost so much and have so many tokens, shared out evenly."""
        packing = self.packing
        runs = -(-tokens // (packing.budget * packing.replicas)) if packing.packed else 1
        return cost / packing.replicas + packing.fixed * runs + (packing.fill(0) if cost else 0)


def team_rules(group: LengthGroup, cost: TeamsCost, packed: bool) -> tuple[TeamRule, ...]:
    """How the teams of a group run."""
    pairs = zip(group.teams, cost.teams, strict=True)
    return tuple(
        TeamRule(team.limit, team.strategy.world, rule_of(team, one, packed), one, group.in_step) for team, one in pairs
    )


@dataclass(frozen=True)
class TeamsLoad:
    """What each team runs; some may run nothing. As `Load` for those who plan."""

    teams: tuple[Load, ...]
    rules: tuple[TeamRule, ...]

    @classmethod
    def of(cls, members: Sequence[Member], rules: tuple[TeamRule, ...]) -> TeamsLoad:
        """These sequences, each of which some team takes, on the teams of a group."""
        best = cls._of(_share(members, rules), rules)
        for _ in range(MOVES):
            shares = _without_slowest(best)
            moved = best if shares is None else cls._of(shares, rules, best)
            if moved.time >= best.time:
                break
            best = moved
        return best

    @classmethod
    def _of(cls, shares: Shared, rules: tuple[TeamRule, ...], known: TeamsLoad | None = None) -> TeamsLoad:
        """`known`: another sharing, of which teams may run the same."""
        loads = [Load.of(share, rule.packing, rule.cost) for share, rule in zip(shares, rules, strict=True)]
        if known is not None:
            loads = [old if old.items == new.items else new for old, new in zip(known.teams, loads, strict=True)]
        return cls(tuple(loads), rules)

    @property
    def members(self) -> list[Member]:
        return [member for load in self.teams for member in load.members]

    @property
    def items(self) -> tuple[SequenceItem, ...]:
        """The sequences as they cost where they run."""
        return tuple(item for load in self.teams for item in load.items)

    @property
    def rule(self) -> PackingRule:
        """For guesses at what one sequence more or less does: that of the largest team, on the replicas of all."""
        largest = max(self.rules, key=lambda rule: rule.packing.budget).packing
        return replace(largest, replicas=sum(rule.packing.replicas for rule in self.rules))

    @cached_property
    def time(self) -> int:
        """What the slowest team takes; in step the sum of what the slowest does at each position. Where ranks that wait
        leave their core to others: all of the work is done by all cores, and no team is faster than alone on them.
        """
        shared_by = self.rules[0].packing.shared_by
        slowest = self._in_step if self.rules[0].in_step else max(load.slowest for load in self.teams)
        if shared_by == 1:
            return slowest
        work = sum(
            rule.ranks * load.work // rule.packing.replicas for rule, load in zip(self.rules, self.teams, strict=True)
        )
        return max(int(slowest / shared_by), work // self.ranks)

    @property
    def _in_step(self) -> int:
        """Ticks of all positions, at each of which the dearest micro-batch of any replica of any team counts."""
        runs = ([one.cost + load.rule.fixed for one in share] for load in self.teams for share in load.shares)
        return sum(max(found) for found in zip_longest(*runs, fillvalue=0))

    @property
    def ranks(self) -> int:
        """Of all teams."""
        return sum(rule.ranks for rule in self.rules)

    @cached_property
    def bound(self) -> int:
        """A time that no sharing among the teams undercuts: the dearest sequence where it costs least, and all of them
        where each takes the smallest share of all ranks. (The latter is the dual of the fractional problem at weights
        that are the teams' shares of the ranks, so it holds for any other weights, too.)
        """
        longest, total = 0, 0.0
        for _, length in self.members:
            able = [rule for rule in self.rules if rule.limit >= length]
            longest = max(longest, min(rule.adds(length) + rule.packing.fixed for rule in able))
            total += min(rule.adds(length) * rule.ranks / (rule.packing.replicas * self.ranks) for rule in able)
        return max(int(longest / self.rules[0].packing.shared_by), int(total * (1 - 1e-9)))

    @property
    def micro_batches(self) -> int:
        """Of the replica that has most."""
        return max(load.micro_batches for load in self.teams)


Shared = tuple[tuple[Member, ...], ...]  # what each team runs


def _share(members: Sequence[Member], rules: Sequence[TeamRule]) -> Shared:
    """Longest first to the team that is then done first."""
    shares: list[list[Member]] = [[] for _ in rules]
    costs, tokens = [0] * len(rules), [0] * len(rules)
    for index, length in sorted(members, key=lambda member: (-member[1], member[0])):
        able = [t for t, rule in enumerate(rules) if rule.limit >= length]
        ends = {t: rules[t].guess(costs[t] + rules[t].adds(length), tokens[t] + length) for t in able}
        t = min(able, key=lambda t: (ends[t], t))
        shares[t].append((index, length))
        costs[t] += rules[t].adds(length)
        tokens[t] += length
    return tuple(map(tuple, shares))


def _without_slowest(load: TeamsLoad) -> Shared | None:
    """One sequence of the slowest team goes where the later of both ends first, by a guess; None if nowhere."""
    rules, shares = load.rules, [tuple(sorted(team.members)) for team in load.teams]
    slowest = max(range(len(rules)), key=lambda t: load.teams[t].slowest)
    before, found = load.teams[slowest].slowest, []
    for index, length in dict((length, (index, length)) for index, length in shares[slowest]).values():
        left = before - rules[slowest].adds(length) // rules[slowest].packing.replicas
        for t, rule in enumerate(rules):
            if t != slowest and rule.limit >= length:
                ends = load.teams[t].slowest + rule.adds(length) // rule.packing.replicas
                found.append((max(left, ends), t, (index, length)))
    if not found or min(found)[0] >= before:
        return None
    _, t, member = min(found)
    shares[slowest] = tuple(one for one in shares[slowest] if one != member)
    shares[t] = (*shares[t], member)
    return tuple(shares)
