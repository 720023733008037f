"""How long sequences are: the long tail in numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class LengthBin:
    """Sequences of `low` to `high` tokens, both included: how many, and their tokens."""

    low: int
    high: int
    sequences: int
    tokens: int
    sequence_share: float
    token_share: float


@dataclass(frozen=True)
class LengthHistogram:
    """Lengths in tokens: `quantiles` maps 0.5 to the median; `bins` are powers of two, (2^(k-1), 2^k]."""

    count: int
    tokens: int
    mean: float
    longest: int
    quantiles: dict[float, int]
    bins: tuple[LengthBin, ...]

    @classmethod
    def of(cls, lengths: Sequence[int] | np.ndarray) -> LengthHistogram:
        """The histogram of lengths [N]; of no lengths it has no bins and zeros. A quantile is a length that occurs."""
        values = np.sort(np.asarray(lengths, dtype=np.int64))
        count, tokens = len(values), int(values.sum())
        if not count:
            return cls(0, 0, 0.0, 0, dict.fromkeys(QUANTILES, 0), ())
        quantiles = {q: int(values[max(int(np.ceil(q * count)) - 1, 0)]) for q in QUANTILES}
        return cls(count, tokens, tokens / count, int(values[-1]), quantiles, tuple(_bins(values)))

    def lines(self) -> Iterator[str]:
        """A table in plain text: how many there are, and `distribution`."""
        yield f"{self.count:,} sequences, {self.tokens:,} tokens"
        yield from self.distribution()

    def distribution(self) -> Iterator[str]:
        """How long they are, one bin per line."""
        ranks = ", ".join(f"{q:.0%} <= {length:,}" for q, length in self.quantiles.items())
        yield f"tokens per sequence: mean {self.mean:,.0f}, {ranks}, longest {self.longest:,}"
        for one in self.bins:
            bar = "#" * round(40 * one.sequence_share)
            yield (
                f"{one.low:>9,} .. {one.high:>9,}  {one.sequence_share:>6.1%} of sequences  "
                f"{one.token_share:>6.1%} of tokens  {bar}".rstrip()
            )

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _bins(values: np.ndarray) -> Iterator[LengthBin]:
    """Bins of sorted lengths, from the first to the last that is not empty."""
    tokens = max(int(values.sum()), 1)
    low, high = 0, 1
    while high < values[0]:
        low, high = high + 1, 2 * high
    while low <= values[-1]:
        inside = values[np.searchsorted(values, low) : np.searchsorted(values, high, side="right")]
        size = int(inside.sum())
        yield LengthBin(low, high, len(inside), size, len(inside) / len(values), size / tokens)
        low, high = high + 1, 2 * high
