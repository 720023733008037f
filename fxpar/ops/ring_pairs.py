"""Which queries of a rank see which keys of another rank, where the tokens of a row are cut over a ring.

A row of T tokens is cut in equal pieces, one per rank. A *run* is a part of a piece: tokens of one document at
positions that count up by one. A document has one run on each rank that has a part of it, two where it is cut in
zigzag. A *stretch* is runs of one document that follow each other in its order, so that each token sees the ones before
it. Runs are read once per row on the host, and kept with the tensors as long as these live unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class Run:
    """Tokens `begin` to `end` of a piece: of one document, at positions that count up from `first`. `stretch` numbers
    the one that it is part of.
    """

    document: int
    first: int
    begin: int
    end: int
    stretch: int = 0

    @property
    def last(self) -> int:
        return self.first + self.end - self.begin - 1


@dataclass(frozen=True)
class Pair:
    """Queries and keys, as ranges of two pieces. Each query sees each key, but where a window hides some: then the
    first query stands `offset` places behind the first key.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    offset: int | None = None


@dataclass(frozen=True)
class Pieces:
    """The runs by row of the batch and rank; `stretches` and `numbers` [rows, S] of each rank tell its stretches apart
    and its runs.
    """

    versions: tuple[int, ...]
    positions: Tensor | None
    runs: tuple[tuple[tuple[Run, ...], ...], ...]
    stretches: tuple[Tensor, ...]
    numbers: tuple[Tensor, ...]


_KNOWN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def pieces_of(ids: Tensor, positions: Tensor | None, degree: int) -> Pieces:
    """The runs of `ids` [B or 1, T] cut in `degree` pieces; `positions` like it, by default the places in the row."""
    tensors = (ids,) if positions is None else (ids, positions)
    if any(x.is_inference() for x in tensors):  # counts no writes
        return _read(ids, positions, degree, ())
    versions = (degree, *(x._version for x in tensors))
    known = _KNOWN.get(ids)
    if known is None or known.versions != versions or known.positions is not positions:
        known = _read(ids, positions, degree, versions)
        _KNOWN[ids] = known
    return known


def _read(ids: Tensor, positions: Tensor | None, degree: int, versions: tuple[int, ...]) -> Pieces:
    places = torch.arange(ids.shape[1], device=ids.device) if positions is None else positions
    places, size = places.expand_as(ids), max(1, ids.shape[1] // degree)
    stretches, begins = (torch.ones_like(ids, dtype=torch.bool) for _ in range(2))
    other = ids[:, 1:] != ids[:, :-1]
    stretches[:, 1:] = other | (places[:, 1:] <= places[:, :-1])
    begins[:, 1:] = other | (places[:, 1:] != places[:, :-1] + 1)
    stretches[:, ::size] = begins[:, ::size] = True
    counted = stretches.cumsum(1)
    found = []
    for row in range(ids.shape[0]):
        at = begins[row].nonzero().squeeze(1)
        starts, *told = torch.stack([at, ids[row, at], places[row, at], counted[row, at]]).tolist()
        ends = [*starts[1:], ids.shape[1]]
        ranks: list[list[Run]] = [[] for _ in range(degree)]
        for start, end, document, first, stretch in zip(starts, ends, *told, strict=True):
            rank = start // size
            ranks[rank].append(Run(document, first, start - rank * size, end - rank * size, stretch))
        found.append(tuple(map(tuple, ranks)))
    numbers = ([x.contiguous() for x in all_.split(size, 1)] for all_ in (counted, begins.cumsum(1)))
    return Pieces(versions, positions, tuple(found), *map(tuple, numbers))


def whole(tokens: int, degree: int) -> tuple[tuple[Run, ...], ...]:
    """The runs of a row that is one document, by rank."""
    size = tokens // degree
    return tuple((Run(0, rank * size, 0, size),) if size else () for rank in range(degree))


def pairs(queries: tuple[Run, ...], keys: tuple[Run, ...], causal: bool, window: int, *, same: bool) -> Iterator[Pair]:
    """What the runs of one rank see of those of another. `same`: of its own, but for what stretches see of themselves,
    with a window runs.

    Neighbouring keys that are seen alike are one pair, and so are neighbouring queries, as kernels like large ones.
    """
    by_document: dict[int, list[Run]] = {}
    for key in keys:
        by_document.setdefault(key.document, []).append(key)
    open_: list[Pair] = []  # of the queries before, which may go on
    for query in queries:
        found: list[Pair] = []
        for key in by_document.get(query.document, ()):
            inside = same and (key == query if window else key.stretch == query.stretch)
            if inside or not _sees(query, key, causal, window):
                continue
            offset = None if _is_within(query, key, window) else query.first - key.first
            pair = Pair((query.begin, query.end), (key.begin, key.end), offset)
            if found and not window and found[-1].keys[1] == key.begin:
                found[-1] = replace(found[-1], keys=(found[-1].keys[0], key.end))
            else:
                found.append(pair)
        if not window and open_ and open_[0].queries[1] == query.begin and _alike(open_, found):
            open_ = [replace(pair, queries=(pair.queries[0], query.end)) for pair in open_]
            continue
        yield from open_
        open_ = found
    yield from open_


def _alike(some: list[Pair], others: list[Pair]) -> bool:
    return [pair.keys for pair in some] == [pair.keys for pair in others]


def _sees(query: Run, key: Run, causal: bool, window: int) -> bool:
    """Whether any token of a run sees any of another one: no position is in both."""
    if causal and key.first > query.first:
        return False
    apart = query.first - key.last if key.first < query.first else key.first - query.last
    return not window or apart < window


def _is_within(query: Run, key: Run, window: int) -> bool:
    """Whether every token of a run is in the window of every one of the other."""
    return not window or max(query.last - key.first, key.last - query.first) < window
