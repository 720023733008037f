"""Repair: move and swap sequences between teams, of one round or of two, until no round becomes shorter that way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fxpar.rounds.work import Filling, Work

MOST_GIVEN = 24  # sequences of the longest team that are looked at, spread over its lengths
MOST_STEPS = 400
LEAST = 1e-6  # of a round's time that a step must win


class Repair:
    """Teams of all rounds as arrays: `rounds` [G], `rows` [G] their degrees, `load` [G] ms, `tokens` [G]; and the
    sequences that they have, `members` [K], with `team` [K], where each is. A team that has no sequence takes its fixed
    time, which makes no round longer.
    """

    def __init__(self, work: Work, rounds: Sequence[Sequence[Filling]]) -> None:
        teams = [(number, team) for number, teams in enumerate(rounds) for team in teams]
        self.work = work
        self.rounds = np.array([number for number, _ in teams])
        self.rows = np.array([team.row for _, team in teams])
        self.load = np.array([team.load_ms for _, team in teams])
        self.tokens = np.array([team.tokens for _, team in teams])
        self.members = np.sort(np.array([one for _, team in teams for one in team.members], dtype=np.int64))
        self.lengths, self.ms = work.lengths[self.members], work.ms[:, self.members]
        self.team = np.empty(len(self.members), dtype=np.int64)
        for number, (_, team) in enumerate(teams):
            self.team[np.searchsorted(self.members, team.members)] = number

    def run(self) -> None:
        """Improve until nothing is found."""
        waiting = list(range(int(self.rounds.max()) + 1))
        for _ in range(MOST_STEPS):
            improved = next((number for number in waiting if self._improve(number)), None)
            if improved is None:
                return
            waiting = [*(number for number in waiting if number != improved), improved]

    def limits(self) -> np.ndarray:
        """[R] what each round takes."""
        found = np.zeros(int(self.rounds.max()) + 1)
        np.maximum.at(found, self.rounds, self.load)
        return found

    def _improve(self, number: int) -> bool:
        """Make the longest team of a round shorter, and no round longer; False if that cannot be done in one step."""
        limits = self.limits()
        mine = np.flatnonzero(self.rounds == number)
        longest = int(mine[self.load[mine].argmax()])
        given = np.flatnonzero(self.team == longest)
        if not len(given):
            return False
        if len(given) > MOST_GIVEN:
            given = given[np.unique(np.linspace(0, len(given) - 1, MOST_GIVEN).astype(np.int64))]
        most = limits[self.rounds] * (1 - LEAST)
        return self._move(longest, given, most) or self._swap(longest, given, most) or self._eject(longest, given, most)

    def _move(self, longest: int, given: np.ndarray, most: np.ndarray) -> bool:
        """To a team with time and room: of all moves the one after which the longer of both teams ends first."""
        work = self.work
        after = self.load[None, :] + self.ms[self.rows][:, given].T  # [S, G]
        room = self.tokens[None, :] + self.lengths[given][:, None] <= work.room[self.rows][None, :]
        rest = self.load[longest] - self.ms[self.rows[longest], given]
        score = np.maximum(after - most[None, :], rest[:, None] - most[longest])
        score[~room] = np.inf
        score[:, longest] = np.inf
        at = np.unravel_index(int(score.argmin()), score.shape)
        if score[at] >= 0:
            return False
        self._put(int(given[at[0]]), int(at[1]))
        return True

    def _swap(self, longest: int, given: np.ndarray, most: np.ndarray) -> bool:
        """With a sequence of another team."""
        work, team = self.work, self.team
        every = np.arange(len(team))
        own = self.rows[longest]
        rest = self.load[longest] - self.ms[own, given][:, None] + self.ms[own][None, :]  # [S, K]
        held = self.tokens[longest] - self.lengths[given][:, None] + self.lengths[None, :]
        after = self._instead(given)
        score = np.maximum(rest - most[longest], after - most[team][None, :])
        score[(held > work.room[own]) | self._crowded(given)] = np.inf
        score[:, team == longest] = np.inf
        at = np.unravel_index(int(score.argmin()), score.shape)
        if not score[at] < 0:
            return False
        one, other = int(given[at[0]]), int(every[at[1]])
        place = int(team[other])
        self._put(other, longest)
        self._put(one, place)
        return True

    def _eject(self, longest: int, given: np.ndarray, most: np.ndarray) -> bool:
        """In place of a sequence that goes on to a third team: where teams have time but no room."""
        work, team = self.work, self.team
        ends = self.load[:, None] + self.ms[self.rows]  # [G, K]
        full = self.tokens[:, None] + self.lengths[None, :] > work.room[self.rows][:, None]
        behind = ends - most[:, None]
        behind[full] = np.inf
        behind[longest] = np.inf
        behind[team, np.arange(len(team))] = np.inf
        third = behind.argmin(0)
        over = behind[third, np.arange(len(team))]  # [K]
        rest = self.load[longest] - self.ms[self.rows[longest], given]
        score = np.maximum(np.maximum(self._instead(given) - most[team][None, :], over[None, :]), rest[:, None] - most[longest])
        score[self._crowded(given)] = np.inf
        score[:, team == longest] = np.inf
        at = np.unravel_index(int(score.argmin()), score.shape)
        if not score[at] < 0:
            return False
        one, other = int(given[at[0]]), int(at[1])
        place = int(team[other])
        self._put(other, int(third[other]))
        self._put(one, place)
        return True

    def _instead(self, given: np.ndarray) -> np.ndarray:
        """[S, K] load of the team of each sequence with a given one in its place."""
        work, team = self.work, self.team
        mine = self.ms[self.rows[team], np.arange(len(team))]
        return (self.load[team] - mine)[None, :] + self.ms[self.rows[team]][:, given].T

    def _crowded(self, given: np.ndarray) -> np.ndarray:
        """[S, K] whether it would not hold that."""
        work, team = self.work, self.team
        held = (self.tokens[team] - self.lengths)[None, :] + self.lengths[given][:, None]
        return held > work.room[self.rows[team]][None, :]

    def _put(self, one: int, to: int) -> None:
        work, start = self.work, int(self.team[one])
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
            load = float(self.work.fixed[row] + self.ms[row, mine].sum())
            found[at].append(Filling(row, load, int(self.lengths[mine].sum()), self.members[mine].tolist()))
        return found


def repaired(work: Work, rounds: Sequence[Sequence[Filling]]) -> list[list[Filling]]:
    """The rounds after moves, swaps and ejections, none of which makes a round longer."""
    repair = Repair(work, rounds)
    repair.run()
    return repair.result()
