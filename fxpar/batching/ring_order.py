"""In what order the tokens of a row lie that is cut over a ring, so that all ranks have as much causal attention.

A query sees the keys before it in its document, so the last ranks of a row that is cut in its order do most. Long
documents are cut in zigzag: of 2K chunks rank r of K has number r and number 2K - 1 - r, which together see as much as
any other two (Grattafiori et al., "The Llama 3 Herd of Models", arXiv 2407.21783, section 3.3.2; on the problem Brandon
et al., "Striped Attention", arXiv 2311.09431). Short ones lie whole on a rank, where nobody waits for their keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_EVEN = 1.01  # load of the slowest rank against the mean with which the search for another cut ends


@dataclass(frozen=True)
class Piece:
    """Tokens `begin` to `end` of a document."""

    document: int
    begin: int
    end: int

    @property
    def seen(self) -> int:
        """Pairs of a query in the piece and a key before it, or the same."""
        return (self.end * (self.end + 1) - self.begin * (self.begin + 1)) // 2


@dataclass
class _Layout:
    """Tokens that each rank can still take, and what it has."""

    room: list[int]
    pieces: list[list[Piece]] = field(init=False)
    load: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.pieces, self.load = [[] for _ in self.room], [0] * len(self.room)

    def put(self, rank: int, piece: Piece) -> None:
        if piece.begin < piece.end:
            self.pieces[rank].append(piece)
            self.load[rank] += piece.seen
            self.room[rank] -= piece.end - piece.begin

    def zigzag(self, document: int, length: int) -> None:
        """An equal share for each rank, a token more for those that have the most room."""
        ranks = range(len(self.room))
        more = set(sorted(ranks, key=lambda rank: -self.room[rank])[: length % len(self.room)])
        shares = [length // len(self.room) + (rank in more) for rank in ranks]
        sizes = [*((rank, (share + 1) // 2) for rank, share in enumerate(shares))]
        sizes += [(rank, shares[rank] // 2) for rank in reversed(ranks)]
        begin = 0
        for rank, size in sizes:
            self.put(rank, Piece(document, begin, begin + size))
            begin += size

    def whole(self, document: int, length: int) -> bool:
        """All of it on the rank that has least to do, of those with room for it; False if there is none."""
        fits = [rank for rank, room in enumerate(self.room) if room >= length]
        if fits:
            self.put(min(fits, key=lambda rank: (self.load[rank], rank)), Piece(document, 0, length))
        return bool(fits)

    def fill(self, document: int, length: int) -> None:
        """Pieces wherever there is room."""
        begin = 0
        for rank in sorted(range(len(self.room)), key=lambda rank: (-self.room[rank], rank)):
            end = min(length, begin + self.room[rank])
            self.put(rank, Piece(document, begin, end))
            begin = end

    @property
    def unevenness(self) -> float:
        """Load of the slowest rank against the mean."""
        return max(self.load) * len(self.load) / (sum(self.load) or 1)


def ring_layout(lengths: Sequence[int], degree: int) -> list[list[Piece]]:
    """The pieces of each rank, of documents of these lengths, in the order of the row; their sum divides by `degree`.

    Documents are cut that are longer than a rank's share, and ever shorter ones until loads are even.
    """
    share = sum(lengths) // degree
    limit, best = share, None
    while best is None or (best.unevenness > _EVEN and limit >= 2 * degree):
        found = _laid_out(lengths, degree, limit)
        best = found if best is None or found.unevenness < best.unevenness else best
        limit //= 2
    return [sorted(pieces, key=lambda piece: (piece.document, piece.begin)) for pieces in best.pieces]


def _laid_out(lengths: Sequence[int], degree: int, limit: int) -> _Layout:
    layout = _Layout([sum(lengths) // degree] * degree)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    for i in order:
        if lengths[i] > limit:
            layout.zigzag(i, lengths[i])
    left = [i for i in order if lengths[i] <= limit and not layout.whole(i, lengths[i])]
    for i in left:
        layout.fill(i, lengths[i])
    return layout


def ring_order(lengths: Sequence[int], degree: int) -> list[int]:
    """Where the tokens of the new row stand in the old one, of documents that follow each other with these lengths."""
    begins = [0]
    for length in lengths:
        begins.append(begins[-1] + length)
    order: list[int] = []
    for pieces in ring_layout(lengths, degree):
        for piece in pieces:
            begin = begins[piece.document]
            order += range(begin + piece.begin, begin + piece.end)
    return order
