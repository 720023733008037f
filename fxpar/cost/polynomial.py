"""What a micro-batch counts, as polynomials in the lengths of its documents: fitted to counts at four sizes.

The square term is attention's, which stays inside of documents: it is meant per document, c2 * sum(len**2). The other
two are meant per row, c0 + c1 * T. What grows faster than a square, such as a product of two T x T matrices, is bounded
from above (`fitted`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from fxpar.cost.ops import SizesAt
from fxpar.errors import DimNameError, MicroBatchTokensError
from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import Dim, LogicalGraph, TensorMeta
from fxpar.ir.sent import tokens_of

MOST_TOKENS = 16384  # a matrix of T x T numbers takes 1 GB then
TOKEN_KEYS = ("input_ids", "tokens", "labels", "position_ids")


@dataclass(frozen=True)
class Polynomial:
    """c0 + c1 * T + c2 * sum(len**2), exact."""

    c0: Fraction = Fraction(0)
    c1: Fraction = Fraction(0)
    c2: Fraction = Fraction(0)

    def __add__(self, other: Polynomial) -> Polynomial:
        return Polynomial(self.c0 + other.c0, self.c1 + other.c1, self.c2 + other.c2)

    def __mul__(self, factor: Fraction | int) -> Polynomial:
        return Polynomial(self.c0 * factor, self.c1 * factor, self.c2 * factor)

    def at(self, tokens: int) -> Fraction:
        """Value for one document of `tokens`."""
        return self.c0 + self.c1 * tokens + self.c2 * tokens * tokens

    def over(self, lengths: Sequence[int]) -> Fraction:
        """Value for documents of these lengths."""
        return self.c0 + self.c1 * sum(lengths) + self.c2 * sum(length * length for length in lengths)


def sent_bytes(program: Program, sent: Sequence[TensorMeta]) -> Polynomial:
    """Bytes of these local tensors of `program`, with one row of T tokens."""
    samples = sizes_of(program)
    values = [sum(s.numel(meta) * meta.dtype.itemsize for meta in sent) for s in samples]
    return fitted(values, samples[0].tokens, samples[0].most)


def fitted(values: Sequence[Fraction | int], n: int, most: int) -> Polynomial:
    """The polynomial with these values at `n`, 2n, 3n and 4n tokens.

    If there is none of degree two, as of T**3, it is that of degree three, where T**3 is replaced by the larger
    `most` * T**2 and terms below 0 are left out. For the polynomial of degree three this is a bound from above up
    to `most` tokens; for shorter sequences a loose one. What grows more slowly than its square says, such as
    T * log(T), keeps the square through the first three values, again without terms below 0.
    """
    a, b, c, d = values
    third = d - 3 * c + 3 * b - a
    through_three = Polynomial(
        Fraction(3 * a - 3 * b + c), Fraction(-5 * a + 8 * b - 3 * c, 2 * n), Fraction(a - 2 * b + c, 2 * n**2)
    )
    if third == 0:
        return through_three
    cubic = max(Fraction(third) / (6 * n**3), Fraction(0))  # times (T - n) * (T - 2n) * (T - 3n)
    rest = through_three + Polynomial(cubic * -6 * n**3, cubic * 11 * n**2, cubic * (most - 6 * n))
    return Polynomial(max(rest.c0, Fraction(0)), max(rest.c1, Fraction(0)), max(rest.c2, Fraction(0)))


def sizes_of(program: Program) -> list[Sizes]:
    """Those that `fitted` takes values at."""
    return [Sizes(program, k) for k in (1, 2, 3, 4)]


class Sizes(SizesAt):
    """Sizes of local tensors with `k` times a base number of tokens in one row. A sequence has at most `most` tokens,
    where that has to be known: those that the graph holds for, else MOST_TOKENS.
    """

    def __init__(self, program: Program, k: int) -> None:
        token = token_dim(program)
        self.tokens = 4096 * k * math.lcm(*program.divisors.values())
        self.most = MOST_TOKENS if token is None or token.maximum is None else token.maximum
        super().__init__({d.symbol: self.tokens if d is token else base_rows(program, d) for d in program.dims})

    def size(self, size: Any) -> Any:
        """Without rounding: a mean of counts at run time need not be whole, and a line through rounded values may begin
        below 0.
        """
        if size not in self._known:
            found = size.subs(self.dims)
            self._known[size] = int(found) if found.is_Integer else Fraction(int(found.p), int(found.q))
        return self._known[size]

    def numel(self, meta: TensorMeta) -> Fraction | int:
        return math.prod(self(meta))


def micro_batch_sizes(graph: Program | LogicalGraph, tokens: int) -> dict[str, int]:
    """The dynamic dim of `token_dim` by name for a micro-batch of so many tokens, in as many rows as the example's;
    without token ids it is the dim itself. Raises MicroBatchTokensError.
    """
    dim = token_dim(graph)
    if dim is None:
        raise DimNameError("T", ())
    rows = tokens_of(graph.inputs, {d.symbol: 1 if d is dim else d.example for d in graph.dims}) or 1
    most = dim.maximum or tokens
    if tokens % rows or not dim.minimum <= tokens // rows <= most:
        raise MicroBatchTokensError(tokens, rows, dim.name, dim.minimum, dim.maximum)
    return {dim.name: tokens // rows}


def token_dim(program: Program | LogicalGraph) -> Dim | None:
    """The dynamic dim that counts tokens: the last dim of the token ids; without such a batch, the first one."""
    by_symbol = {d.symbol: d for d in program.dims}
    batch = {i.fqn: i.meta for i in program.inputs if i.kind == "batch"}
    for key in TOKEN_KEYS:
        if key in batch and batch[key].shape and batch[key].shape[-1] in by_symbol:
            return by_symbol[batch[key].shape[-1]]  # type: ignore[index]
    return next(iter(program.dims), None)


@dataclass(frozen=True)
class Sequences:
    """A replica's micro-batch as costs are asked for it. Without token ids `lengths` is one: the first dynamic dim.

    Rows whose number is fixed in the graph count as one, as the costs of the graph are those of all of them: each of
    `lengths` stands for `rows` sequences.
    """

    lengths: tuple[int, ...]
    rows: int = 1

    @property
    def tokens(self) -> int:
        return self.rows * sum(self.lengths)


def sequences_of(program: Program, sizes: Mapping[str, int]) -> Sequences:
    """Of `program` with its dynamic dims at `sizes` by name: rows, or bins of them, of equal length."""
    batch = {info.fqn: info.meta for info in program.inputs if info.kind == "batch"}
    ids = next((batch[key] for key in TOKEN_KEYS if key in batch), None)
    dim = token_dim(program)
    if dim is None:
        return Sequences((next((meta.numel({}) for meta in [ids, *batch.values()] if meta is not None), 0),))
    times = 1
    for other in program.dims:
        if ids is not None and other is not dim and any(other.symbol == size for size in ids.shape):
            times *= max(1, sizes[other.name] // base_rows(program, other))
    lengths = (sizes[dim.name] // program.bins,) * (times * program.bins)
    if ids is None or not sum(lengths):
        return Sequences(lengths)
    return Sequences(lengths, max(1, ids.numel({d.symbol: sizes[d.name] for d in program.dims}) // sum(lengths)))


def base_rows(program: Program, dim: Dim) -> int:
    """Size of a further dynamic dim: one packed row, or as few as the strategy can divide."""
    return max(dim.minimum, program.divisors.get(dim.name, 1))
