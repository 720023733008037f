"""What one micro-batch of a program does on one rank: arithmetic, memory traffic, collectives, as polynomials in T.

Read off the local shapes of the nodes that run per micro-batch; nothing runs. The square term is attention's, which
stays inside of documents: it is meant per document, c2 * sum(len**2). The other two are meant per row, c0 + c1 * T.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from torch import fx

from fxpar.cost.ops import SizesAt, flops, is_kernel, touched_bytes
from fxpar.ir.exec_graph import Communication, Program
from fxpar.ir.graph import Dim, TensorMeta
from fxpar.ir.mesh import Mesh
from fxpar.ops.traits import ATTENTION

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


@dataclass(frozen=True)
class Traffic:
    """One collective: its axes joined by '.', and the bytes that one rank sends."""

    axis: str
    sent_bytes: Polynomial


@dataclass(frozen=True)
class Work:
    """Of one rank for one micro-batch.

    `memory_bytes` are read and written by ops that are limited by memory; of products and attention only what does not
    grow with T counts (reading weights, writing their gradients), the rest hides behind the arithmetic.
    """

    product_flops: Polynomial
    attention_flops: Polynomial
    memory_bytes: Polynomial
    kernels: int
    traffic: tuple[Traffic, ...]

    @property
    def flops(self) -> Polynomial:
        return self.product_flops + self.attention_flops


PER_MICRO_BATCH = ("body", "forward", "backward")  # parts of a program


def sent_bytes(program: Program, sent: Sequence[TensorMeta]) -> Polynomial:
    """Bytes of these local tensors of `program`, with one row of T tokens."""
    samples = [Sizes(program, k) for k in (1, 2, 3)]
    values = [Fraction(sum(s.numel(meta) * meta.dtype.itemsize for meta in sent)) for s in samples]
    return fitted(values, samples[0].tokens)


def body_work(program: Program) -> Work:
    """The work of the parts of `program` that run per micro-batch, with one row of T tokens."""
    samples = [Sizes(program, k) for k in (1, 2, 3)]
    nodes = list(_kernels(program))
    counts = [_count(nodes, sizes) for sizes in samples]

    def fit(values: list[Fraction]) -> Polynomial:
        return fitted(values, samples[0].tokens)

    products, attention, moved, held = (fit([c[what] for c in counts]) for what in _COUNTED)
    mesh = program.strategy.mesh
    traffic = tuple(
        Traffic(c.axis, fit([Fraction(s.numel(c.sent)) for s in samples]) * bytes_per_element(c, mesh.degree(c.axis)))
        for c in program.communications()
        if c.part in PER_MICRO_BATCH
    )
    return Work(products, attention, moved + Polynomial(held.c0), len(nodes), traffic)


def link_crosses_nodes(mesh: Mesh, axis: str, node_of: Callable[[int], int]) -> bool:
    """Whether any process group of `axis` has ranks on several nodes."""
    return any(len(set(map(node_of, group))) > 1 for group in mesh.groups(tuple(axis.split("."))))


_COUNTED = ("products", "attention", "moved", "held")


def _count(nodes: list[fx.Node], sizes: Sizes) -> dict[str, Fraction]:
    count = dict.fromkeys(_COUNTED, Fraction(0))
    for node in nodes:
        work = flops(node, sizes)
        count["attention" if node.target in ATTENTION else "products"] += work
        count["held" if work else "moved"] += touched_bytes(node, sizes)
    return count


def _kernels(program: Program) -> Iterator[fx.Node]:
    """Calls that compute on the device; collectives are counted by what they send."""
    parts = [part for name, part in program.parts.items() if name in PER_MICRO_BATCH]
    return (node for part in parts for node in part.graph.nodes if is_kernel(node))


def bytes_per_element(found: Communication, degree: int) -> Fraction:
    """Bytes that a rank sends for each element that it puts in."""
    one = replace(found, sent=TensorMeta((1,), found.sent.dtype))
    return Fraction(one.wire_bytes(degree, {})).limit_denominator(10**9)


def fitted(values: list[Fraction], tokens: int) -> Polynomial:
    """The polynomial with these values at `tokens`, twice and three times as many."""
    a, b, c = map(Fraction, values)
    linear, square = -5 * a + 8 * b - 3 * c, a - 2 * b + c
    return Polynomial(3 * a - 3 * b + c, linear / (2 * tokens), square / (2 * tokens * tokens))


class Sizes(SizesAt):
    """Sizes of local tensors with `k` times a base number of tokens in one row."""

    def __init__(self, program: Program, k: int) -> None:
        token = token_dim(program)
        self.tokens = 4096 * k * math.lcm(*program.divisors.values())
        super().__init__({d.symbol: self.tokens if d is token else base_rows(program, d) for d in program.dims})

    def numel(self, meta: TensorMeta) -> int:
        return math.prod(self(meta))


def token_dim(program: Program) -> Dim | None:
    """The dynamic dim that counts tokens: the last dim of the token ids; without such a batch, the first one."""
    by_symbol = {d.symbol: d for d in program.dims}
    batch = {i.fqn: i.meta for i in program.inputs if i.kind == "batch"}
    for key in TOKEN_KEYS:
        if key in batch and batch[key].shape and batch[key].shape[-1] in by_symbol:
            return by_symbol[batch[key].shape[-1]]  # type: ignore[index]
    return next(iter(program.dims), None)


def base_rows(program: Program, dim: Dim) -> int:
    """Size of a further dynamic dim: one packed row, or as few as the strategy can divide."""
    return max(dim.minimum, program.divisors.get(dim.name, 1))
