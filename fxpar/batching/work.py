"""What one micro-batch of a program does on one rank: arithmetic, memory traffic, collectives, as polynomials in T.

Read off the local shapes of the nodes that run per micro-batch; nothing runs. The square term is attention's, which
stays inside of documents: it is meant per document, c2 * sum(len**2). The other two are meant per row, c0 + c1 * T.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, cast

import torch
from torch import fx

import fxpar.ops  # noqa: F401  registers torch.ops.fxpar
from fxpar.exec_graph import Communication, Program, collective_kind
from fxpar.graph import Dim, Size, TensorMeta
from fxpar.mesh import Mesh

aten, own = torch.ops.aten, torch.ops.fxpar
TOKEN_KEYS = ("input_ids", "tokens", "labels", "position_ids")
ATTENTION = {own.attention.default: 0, own.attention_backward.default: 1}  # op -> position of q in its arguments
# Five products instead of two (Dao, "FlashAttention-2", arXiv 2307.08691, section 4.1).
BACKWARD_FACTOR = Fraction(5, 2)
PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.mv.default: 0, aten.dot.default: 0}
PRODUCTS |= {aten.addmm.default: 1, aten.baddbmm.default: 1}  # op -> position of the first factor
NO_KERNEL = {operator.getitem, aten.reshape.default, aten._unsafe_view.default}
NO_KERNEL |= {torch.ops._c10d_functional.wait_tensor.default}
# They read about as much as they return, not all of their first argument.
READS_ROWS = {own.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default}
Shape = tuple[int, ...]
SizesOf = Callable[[TensorMeta], Shape]


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


def product_flops(node: fx.Node, shape: SizesOf) -> int:
    """Operations (2 per multiply-add) of a matrix product or convolution; 0 for any other op."""
    target, args = node.target, cast(Any, node.args)
    if target in PRODUCTS:
        first = shape(_meta(args[PRODUCTS[target]]))
        return 2 * first[-1] * math.prod(shape(_meta(node)))
    if target is aten.convolution.default:
        result = args[0] if args[6] else node  # transposed: each input element meets the weights
        return 2 * math.prod(shape(_meta(result))) * math.prod(shape(_meta(args[1]))[1:])
    if target is aten.convolution_backward.default:
        result = args[1] if args[7] else args[0]
        products = sum(args[10][:2])  # dx and dweight, as the mask says
        return 2 * products * math.prod(shape(_meta(result))) * math.prod(shape(_meta(args[2]))[1:])
    return 0


def attention_flops(node: fx.Node, shape: SizesOf) -> Fraction:
    """Operations of `fxpar::attention` or its backward over one document; 0 for any other op.

    4 * B * H * Sq * Skv * E, half if causal (Dao, "FlashAttention-2", section 4.1). A window counts in full, so the
    prediction for documents shorter than the window is too high.
    """
    if node.target not in ATTENTION:
        return Fraction(0)
    args, first = cast(Any, node.args), ATTENTION[node.target]
    q, k, v = (shape(_meta(a)) for a in args[first : first + 3])
    causal, window = args[-4:-2]
    if window:
        keys = Fraction(window if causal else 2 * window)
    else:
        keys = Fraction(k[2], 2 if causal else 1)
    flops = 2 * math.prod(q[:3]) * keys * (q[3] + v[3])
    return flops * BACKWARD_FACTOR if first else flops


def touched_bytes(node: fx.Node, shape: SizesOf) -> int:
    """Bytes of the tensors that an op reads and writes."""

    def nbytes(value: Any) -> int:
        return sum(math.prod(shape(meta)) * meta.dtype.itemsize for meta in _metas(value))

    if node.target in READS_ROWS:
        return 2 * nbytes(node)
    return nbytes(node) + sum(map(nbytes, node.all_input_nodes))


def link_crosses_nodes(mesh: Mesh, axis: str, node_of: Callable[[int], int]) -> bool:
    """Whether any process group of `axis` has ranks on several nodes."""
    return any(len(set(map(node_of, group))) > 1 for group in mesh.groups(tuple(axis.split("."))))


_COUNTED = ("products", "attention", "moved", "held")


def _count(nodes: list[fx.Node], sizes: Sizes) -> dict[str, Fraction]:
    count = dict.fromkeys(_COUNTED, Fraction(0))
    for node in nodes:
        products, attention = product_flops(node, sizes), attention_flops(node, sizes)
        count["products"] += products
        count["attention"] += attention
        count["held" if products or attention else "moved"] += touched_bytes(node, sizes)
    return count


def _kernels(program: Program) -> Iterator[fx.Node]:
    """Calls that compute on the device; collectives are counted by what they send."""
    parts = [part for name, part in program.parts.items() if name in PER_MICRO_BATCH]
    return (node for part in parts for node in part.graph.nodes if is_kernel(node))


def is_kernel(node: fx.Node) -> bool:
    """Whether a call computes on the device: no view, no collective."""
    computes = node.op == "call_function" and any(True for _ in _metas(node))
    is_view = node.target in NO_KERNEL or getattr(node.target, "is_view", False)
    return computes and not is_view and not collective_kind(node)


def _metas(value: Any) -> Iterator[TensorMeta]:
    meta = value.meta.get("local", value.meta.get("tensor")) if isinstance(value, fx.Node) else None
    found = meta if isinstance(meta, tuple) else (meta,)
    return (one for one in found if isinstance(one, TensorMeta))


def _meta(value: Any) -> TensorMeta:
    return next(_metas(value))


def bytes_per_element(found: Communication, degree: int) -> Fraction:
    """Bytes that a rank sends for each element that it puts in."""
    one = replace(found, sent=TensorMeta((1,), found.sent.dtype))
    return Fraction(one.wire_bytes(degree, {})).limit_denominator(10**9)


def fitted(values: list[Fraction], tokens: int) -> Polynomial:
    """The polynomial with these values at `tokens`, twice and three times as many."""
    a, b, c = map(Fraction, values)
    linear, square = -5 * a + 8 * b - 3 * c, a - 2 * b + c
    return Polynomial(3 * a - 3 * b + c, linear / (2 * tokens), square / (2 * tokens * tokens))


class Sizes:
    """Sizes of local tensors with `k` times a base number of tokens in one row; called with a TensorMeta."""

    def __init__(self, program: Program, k: int) -> None:
        token = token_dim(program)
        self.tokens = 4096 * k * math.lcm(*program.divisors.values())
        self._dims = {d.symbol: self.tokens if d is token else base_rows(program, d) for d in program.dims}
        self._known: dict[Size, int] = {}

    def __call__(self, meta: TensorMeta) -> Shape:
        return tuple(size if isinstance(size, int) else self._size(size) for size in meta.shape)

    def numel(self, meta: TensorMeta) -> int:
        return math.prod(self(meta))

    def _size(self, size: Any) -> int:
        if size not in self._known:
            self._known[size] = int(size.subs(self._dims))
        return self._known[size]


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
