"""Repair: move and swap sequences between teams, of one round or of two, until no round becomes shorter that way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fxpar.rounds.work import Filling, Work

MOST_GIVEN = 24  # lengths in the longest team that are looked at, spread over them
MOST_PAIRED = 10  # lengths of another team, of which two are looked at together
MOST_STEPS = 400
LEAST = 1e-6  # of a round's time that a step must win


class Repair:
    """Teams of all rounds as arrays: `rounds` [G], `rows` [G] their degrees, `load` [G] ms, `tokens` [G]; and the
    sequences that they have, `members` [K], with `team` [K], where each is. A team that has no sequence takes its fixed
    time, which makes no round longer.
    """

    def __init__(self, work: Work, rounds: Sequence[Sequence[Filling]]) -> None:
        teams = [(number, team) for number, teams in enumerate(rounds) for team in teams]
        self.fixed = work.fixed
        self.rounds = np.array([number for number, _ in teams])
        self.rows = np.array([team.row for _, team in teams])
        self.room = work.room[self.rows]
        self.load = np.array([team.load_ms for _, team in teams])
        self.tokens = np.array([team.tokens for _, team in teams])
        self.members = np.sort(np.array([one for _, team in teams for one in team.members], dtype=np.int64))
        self.lengths, self.ms = work.lengths[self.members], work.ms[:, self.members]
        self.kind = np.cumsum(np.diff(self.lengths, prepend=self.lengths[0]) != 0)  # [K] number of its length
        self.kinds = np.flatnonzero(np.diff(self.kind, prepend=-1))  # [C] a sequence of each length
        self.team = np.empty(len(self.members), dtype=np.int64)
        for number, (_, team) in enumerate(teams):
            self.team[np.searchsorted(self.members, team.members)] = number

    def run(self) -> None:
        """Improve one round after the other, and all of them again as long as that helps."""
        steps, before = 0, -1
        while before < steps:
            before = steps
            for number in range(int(self.rounds.max()) + 1):
                while steps < MOST_STEPS and self._improve(number):
                    steps += 1

    def _improve(self, number: int) -> bool:
        """Make the longest team of a round shorter, and no round longer; False if that cannot be done in one step."""
        limits = np.zeros(int(self.rounds.max()) + 1)
        np.maximum.at(limits, self.rounds, self.load)
        most = limits[self.rounds] * (1 - LEAST)  # [G]
        mine = np.flatnonzero(self.rounds == number)
        longest = int(mine[self.load[mine].argmax()])
        given = np.flatnonzero(self.team == longest)
        given = given[np.unique(self.kind[given], return_index=True)[1]]
        given = _spread(given, MOST_GIVEN)
        if not len(given):
            return False
        if self._move(longest, given, most):
            return True
        others = np.unique(self.team * len(self.kinds) + self.kind, return_index=True)[1]  # one per team and length
        others = others[self.team[others] != longest]
        return len(others) > 0 and (
            self._swap(longest, given, others, most) or self._eject(longest, given, others, most)
        )

    def _move(self, longest: int, given: np.ndarray, most: np.ndarray) -> bool:
        """To a team with time and room: of all moves the one after which the longer of both teams ends first."""
        after = self.load[:, None] + self.ms[:, given][self.rows]  # [G, S]
        full = self.tokens[:, None] + self.lengths[given] > self.room[:, None]
        rest = self.load[longest] - self.ms[self.rows[longest], given]
        score = np.maximum(after - most[:, None], rest - most[longest])
        score[full] = np.inf
        score[longest] = np.inf
        to, one = np.unravel_index(int(score.argmin()), score.shape)
        if score[to, one] >= 0:
            return False
        self._put(int(given[one]), int(to))
        return True

    def _swap(self, longest: int, given: np.ndarray, others: np.ndarray, most: np.ndarray) -> bool:
        """With a sequence of another team."""
        own, places = self.rows[longest], self.team[others]
        rest = self.load[longest] - self.ms[own, given] + self.ms[own, others][:, None]  # [O, S]
        held = self.tokens[longest] - self.lengths[given] + self.lengths[others][:, None]
        score = np.maximum(rest - most[longest], self._instead(given, others) - most[places][:, None])
        score[(held > self.room[longest]) | self._crowded(given, others)] = np.inf
        other, one = np.unravel_index(int(score.argmin()), score.shape)
        if not score[other, one] < 0:
            return False
        self._put(int(others[other]), longest)
        self._put(int(given[one]), int(places[other]))
        return True

    def _eject(self, longest: int, given: np.ndarray, others: np.ndarray, most: np.ndarray) -> bool:
        """In place of two: one comes back, and the other goes on to a third team. That helps where teams have time, but
        no room for a sequence in place of one shorter one.
        """
        first, second = self._pairs(others)
        if not len(first):
            return False
        behind = self.load[:, None] + self.ms[:, self.kinds][self.rows] - most[:, None]  # [G, C]
        behind[self.tokens[:, None] + self.lengths[self.kinds] > self.room[:, None]] = np.inf
        behind[longest] = np.inf
        own, places, kind = self.rows[longest], self.team[first], self.kind[second]
        third, over = behind.argmin(0)[kind], behind.min(0)[kind]
        over[third == places] = np.inf
        rest = self.load[longest] - self.ms[own, given] + self.ms[own, first][:, None] - most[longest]  # [P, S]
        after = self._instead(given, first) - (self.ms[self.rows[places], second] + most[places])[:, None]
        score = np.maximum(np.maximum(rest, after), over[:, None])
        held = self.tokens[longest] - self.lengths[given] + self.lengths[first][:, None]
        freed = (self.room - self.tokens)[places] + self.lengths[first] + self.lengths[second]
        score[(held > self.room[longest]) | (self.lengths[given] > freed[:, None])] = np.inf
        pair, one = np.unravel_index(int(score.argmin()), score.shape)
        if not score[pair, one] < 0:
            return False
        self._put(int(first[pair]), longest)
        self._put(int(second[pair]), int(third[pair]))
        self._put(int(given[one]), int(places[pair]))
        return True

    def _pairs(self, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """([P], [P]): two of `others` in the same team, of MOST_PAIRED spread over its lengths at most."""
        firsts: list[np.ndarray] = []
        seconds: list[np.ndarray] = []
        for mine in np.split(others, np.flatnonzero(np.diff(self.team[others])) + 1):
            some = _spread(mine, MOST_PAIRED)
            left, right = np.nonzero(~np.eye(len(some), dtype=bool))
            firsts.append(some[left])
            seconds.append(some[right])
        return np.concatenate(firsts), np.concatenate(seconds)

    def _instead(self, given: np.ndarray, others: np.ndarray) -> np.ndarray:
        """[O, S] load of the teams of `others` with a given one in their place."""
        rows = self.rows[self.team[others]]
        without = self.load[self.team[others]] - self.ms[rows, others]
        return without[:, None] + self.ms[:, given][rows]

    def _crowded(self, given: np.ndarray, others: np.ndarray) -> np.ndarray:
        """[O, S] whether it would not hold that."""
        left = (self.room - self.tokens)[self.team[others]] + self.lengths[others]
        return self.lengths[given] > left[:, None]

    def _put(self, one: int, to: int) -> None:
        start = int(self.team[one])
        self.load[start] -= self.ms[self.rows[start], one]
        self.load[to] += self.ms[self.rows[to], one]
        self.tokens[start] -= self.lengths[one]
        self.tokens[to] += self.lengths[one]
        self.team[one] = to

    def result(self) -> list[list[Filling]]:
        """The rounds, with their loads added up anew."""
        found: list[list[Filling]] = [[] for _ in range(int(self.rounds.max()) + 1)]
        for number, (at, row) in enumerate(zip(self.rounds.tolist(), self.rows.tolist(), strict=True)):
            mine = np.flatnonzero(self.team == number)
            load = float(self.fixed[row] + self.ms[row, mine].sum())
            found[at].append(Filling(row, load, int(self.lengths[mine].sum()), self.members[mine].tolist()))
        return found


def _spread(values: np.ndarray, most: int) -> np.ndarray:
    """At most so many of them, at equal distances."""
    return values if len(values) <= most else values[np.linspace(0, len(values) - 1, most).astype(np.int64)]


def repaired(work: Work, rounds: Sequence[Sequence[Filling]]) -> list[list[Filling]]:
    """The rounds after moves, swaps and ejections, none of which makes a round longer."""
    repair = Repair(work, rounds)
    repair.run()
    return repair.result()
