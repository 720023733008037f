"""Local search over an order of pieces: layers moved between pieces, widths, cuts, places in the order, loans."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random

from fxpar.waves.order import Piece, Problem

_MOST_STEPS = 5000
_WARM, _COLD = 0.0015, 0.0002


def improved(
    problem: Problem, pieces: Sequence[Piece], effort: int, enough_ms: float, seed: int = 0, loans: bool = False
) -> list[Piece]:
    """The shortest order found by simulated annealing (Kirkpatrick et al. 1983) that times `effort` pieces at most,
    never longer than the given one. It ends at one of `enough_ms`. `loans`: pieces lend devices to others too. Equal
    arguments give equal orders.
    """
    random = Random(seed)
    here = best = tidied(problem, pieces)
    time = least = max(problem.times(here)[1])
    steps = min(effort // len(here), _MOST_STEPS)
    cooling = (_COLD / _WARM) ** (1 / max(steps, 1))
    heat = _WARM * least
    moves, weights = (MOVES, _WEIGHTS) if loans else (MOVES[:-1], _WEIGHTS[:-1])
    for _ in range(steps):
        if least <= enough_ms:
            break
        heat *= cooling
        (move,) = random.choices(moves, weights)
        there = move(problem, list(here), random.randrange(len(here)), random)
        if there is None:
            continue
        limit = time - heat * math.log(1 - random.random())  # what may be taken at this heat, drawn first
        found = max(problem.times(there, limit)[1])
        if found <= limit:
            here, time = there, found
            if found < least:
                best, least = there, found
    return best


def tidied(problem: Problem, pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of a MetaOp as one piece, of the width of either, wherever the order is no longer for it."""
    here, at = list(pieces), 0
    time = max(problem.times(here)[1])
    while at < len(here):
        for there in _joined(here, at):
            found = max(problem.times(there, time)[1])
            if found <= time:
                here, time = there, found
                break
        else:
            at += 1
    return here


def _joined(pieces: Sequence[Piece], at: int) -> Iterator[list[Piece]]:
    """Orders in which the piece has the layers of the next one of its MetaOp too, if there is one."""
    mine = pieces[at]
    for i in range(at + 1, len(pieces)):
        if pieces[i].metaop == mine.metaop:
            for width in sorted({mine.width, pieces[i].width}):
                both = Piece(mine.metaop, width, mine.layers + pieces[i].layers)
                yield [*pieces[:at], both, *pieces[at + 1 : i], *pieces[i + 1 :]]
            return


def _shift(problem: Problem, pieces: list[Piece], at: int, random: Random) -> list[Piece] | None:
    """Layers of a piece go to another one of its MetaOp."""
    mine = pieces[at]
    others = [i for i, one in enumerate(pieces) if one.metaop == mine.metaop and i != at]
    if not others:
        return None
    to = random.choice(others)
    count = random.randint(1, max(1, min(3, mine.layers))) if random.random() < 0.8 else mine.layers
    count = min(count, mine.layers)
    pieces[to] = pieces[to]._replace(layers=pieces[to].layers + count)
    pieces[at] = mine._replace(layers=mine.layers - count)
    if pieces[at].layers == 0:
        del pieces[at]
    return pieces


def _widen(problem: Problem, pieces: list[Piece], at: int, random: Random) -> list[Piece] | None:
    """A piece gets the next width, up or down."""
    mine = pieces[at]
    widths = problem.curves[mine.metaop].widths
    place = widths.index(mine.width) + random.choice((-1, 1))
    if not 0 <= place < len(widths):
        return None
    pieces[at] = mine._replace(width=widths[place])
    return pieces


def _cut(problem: Problem, pieces: list[Piece], at: int, random: Random) -> list[Piece] | None:
    """A piece becomes two; the second one may begin later, on another number of devices."""
    mine = pieces[at]
    if mine.layers < 2:
        return None
    first = random.randrange(1, mine.layers)
    pieces[at] = mine._replace(layers=first)
    widths = problem.curves[mine.metaop].widths
    place = widths.index(mine.width) + random.choice((-1, 1))
    width = widths[min(max(place, 0), len(widths) - 1)]
    _, high = _room(problem, pieces, at)
    where = random.randint(at + 1, max(high, at + 1))
    pieces.insert(where, Piece(mine.metaop, width, mine.layers - first))
    return pieces


def _move(problem: Problem, pieces: list[Piece], at: int, random: Random) -> list[Piece] | None:
    """A piece stands elsewhere in the order, between what it needs and what needs it."""
    low, high = _room(problem, pieces, at)
    if low >= high:
        return None
    piece = pieces.pop(at)
    pieces.insert(random.randint(low, high), piece)
    return pieces


def _lend(problem: Problem, pieces: list[Piece], at: int, random: Random) -> list[Piece] | None:
    """Some layers of a piece run on the next width, and about as long some of another one that runs beside it on the
    one below: first or last. The order is that of starts, as if the others kept theirs.
    """
    starts, ends = problem.times(pieces)
    metaop = pieces[at].metaop
    beside = [
        i for i, one in enumerate(pieces) if one.metaop != metaop and starts[i] < ends[at] and ends[i] > starts[at]
    ]
    if not beside:
        return None
    other = random.choice(beside)
    wider = [width for width in problem.curves[metaop].widths if width > pieces[at].width]
    narrower = [width for width in problem.curves[pieces[other].metaop].widths if width < pieces[other].width]
    if not wider or not narrower:
        return None
    count = random.randint(1, pieces[at].layers)
    took = count * problem.layer_ms[metaop][wider[0]]
    given = round(took / problem.layer_ms[pieces[other].metaop][narrower[-1]])
    changed = {at: (wider[0], count), other: (narrower[-1], min(max(given, 1), pieces[other].layers))}
    first = random.random() < 0.5
    found = [(start, i, one) for i, (start, one) in enumerate(zip(starts, pieces, strict=True)) if i not in changed]
    for i, (width, layers) in changed.items():
        begin, mine = starts[i], pieces[i]
        parts = mine._replace(width=width, layers=layers), mine._replace(layers=mine.layers - layers)
        for part in parts if first else reversed(parts):
            if part.layers:
                found.append((begin, i, part))
                begin = min(begin + part.layers * problem.layer_ms[part.metaop][part.width], ends[i])
    return [one for *_, one in sorted(found, key=lambda entry: entry[:2])]


def _room(problem: Problem, pieces: Sequence[Piece], at: int) -> tuple[int, int]:
    """The first and last place that the piece may have, once it is taken out."""
    metaop = pieces[at].metaop
    first, last = {metaop, *problem.before[metaop]}, {metaop, *problem.after[metaop]}
    low = max((i + 1 for i in range(at) if pieces[i].metaop in first), default=0)
    high = min((i - 1 for i in range(at + 1, len(pieces)) if pieces[i].metaop in last), default=len(pieces) - 1)
    return low, high


MOVES = (_shift, _widen, _cut, _move, _lend)
_WEIGHTS = (4, 3, 1, 2, 1)
