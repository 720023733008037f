"""What is planned: sequences under every degree, as arrays; and teams while they are being filled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from fxpar.errors import DegreeError, LengthsError, SequenceFitsNoTeamError
from fxpar.rounds.cost import TeamCost


@dataclass(frozen=True)
class Work:
    """K sequences, longest first, and D degrees, largest first.

    `lengths` [K] in tokens, `places` [K] where each stands in the input; `ms` [D, K] is what a sequence adds to a team
    of a degree (inf where the team cannot hold it), `fixed` [D] what a team takes anyway, `room` [D] the tokens that it
    holds.
    """

    devices: int
    devices_per_node: int
    degrees: tuple[int, ...]
    lengths: np.ndarray
    places: np.ndarray
    ms: np.ndarray
    fixed: np.ndarray
    room: np.ndarray

    @classmethod
    def of(
        cls, lengths: Sequence[int] | np.ndarray, devices: int, devices_per_node: int, costs: Mapping[int, TeamCost]
    ) -> Work:
        """Raises DegreeError, LengthsError, SequenceFitsNoTeamError."""
        if not costs:
            raise DegreeError("none", "there is no degree to make teams of. Give one at least")
        for degree in costs:
            if not 1 <= degree <= devices:
                raise DegreeError(degree, f"a team has from 1 to {devices} ranks, as there are so many devices")
        given = np.asarray(lengths)
        if given.ndim != 1 or not len(given) or given.dtype.kind not in "iu" or given.min() < 1:
            raise LengthsError("lengths=", "these are not lengths of sequences", "Give whole numbers from 1 on")
        places = np.argsort(-given.astype(np.int64), kind="stable")
        ordered = given[places].astype(np.int64)
        degrees = tuple(sorted(costs, reverse=True))
        step = int(np.gcd.reduce(ordered))  # lengths are padded: no team is filled up to a token
        room = np.array([costs[degree].tokens // step * step for degree in degrees])
        if ordered[0] > room.max():
            ranks = max(degrees, key=lambda degree: costs[degree].tokens)
            raise SequenceFitsNoTeamError(int(places[0]), int(ordered[0]), costs[ranks].tokens, ranks, devices)
        rows = [np.where(ordered <= costs[d].tokens, costs[d].sequence_ms(ordered), np.inf) for d in degrees]
        fixed = np.array([costs[degree].fixed_ms for degree in degrees])
        return cls(devices, devices_per_node, degrees, ordered, places, np.stack(rows), fixed, room)

    @cached_property
    def capacity(self) -> int:
        """Tokens that all devices hold at the same time, at most."""
        rooms = zip(self.room.tolist(), self.degrees, strict=True)
        return max(room * self.devices // degree for room, degree in rooms)

    @property
    def fewest_rounds(self) -> int:
        """As many as the tokens need at least."""
        return -(-int(self.lengths.sum()) // self.capacity)

    def part(self, first: int, last: int) -> Work:
        """Of these sequences alone."""
        mine = slice(first, last)
        return replace(self, lengths=self.lengths[mine], places=self.places[mine], ms=self.ms[:, mine])

    def with_degree(self, row: int) -> Work:
        """With teams of this degree alone, which hold the longest sequence."""
        one = slice(row, row + 1)
        return replace(self, degrees=self.degrees[one], ms=self.ms[one], fixed=self.fixed[one], room=self.room[one])


@dataclass(frozen=True)
class Kinds:
    """Sequences by length, the longest first: `lengths` [C], `counts` [C] of each, `firsts` [C] how many longer ones
    there are, and `ms` [D, C] of one of them.
    """

    lengths: np.ndarray
    counts: np.ndarray
    firsts: np.ndarray
    ms: np.ndarray

    @classmethod
    def of(cls, work: Work, members: np.ndarray | None = None) -> Kinds:
        """Of these sequences, ascending; None: of all."""
        given = np.arange(len(work.lengths)) if members is None else members
        firsts = np.flatnonzero(np.diff(work.lengths[given], prepend=0))
        counts = np.diff(firsts, append=len(given))
        chosen = given[firsts]
        return cls(work.lengths[chosen], counts, firsts, work.ms[:, chosen])

    def between(self, values: np.ndarray, places: np.ndarray) -> np.ndarray:
        """[Q, G, G] sums over the sequences from one place to another; `values` [Q, C] are those of one of a kind."""
        sums = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values * self.counts, 1)], 1)
        kind = np.searchsorted(self.firsts, places, "right") - 1
        begun = sums[:, kind] + (places - self.firsts[kind]) * values[:, kind]
        return begun[:, None, :] - begun[:, :, None]


@dataclass
class Filling:
    """A team while it is being filled: the row of its degree, what it takes and holds so far, and its sequences."""

    row: int
    load_ms: float
    tokens: int = 0
    members: list[int] = field(default_factory=list)


def longest_ms(teams: Sequence[Filling]) -> float:
    """What a round of these teams takes; without sequences it runs nothing."""
    return max((team.load_ms for team in teams if team.members), default=0.0)
