"""One call or more of every op that has a sharding rule, with the number of cuts that the rule must offer.

`at_least` counts the options beside the replicated one on 2 and on 3 ranks, over all cuts of all operands and results.
The numbers are what the algebra of the op allows, counted by hand for the plain cuts; a rule may offer more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import fxpar.ops  # noqa: F401 - registers torch.ops.fxpar

aten = torch.ops.aten
own = torch.ops.fxpar
F64 = torch.float64


@dataclass(frozen=True)
class Case:
    target: Any
    args: Callable[[], tuple[Any, ...]]
    at_least: tuple[int, int]
    kwargs: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    tolerance: float = 1e-12

    def __str__(self) -> str:
        name = str(self.target).removesuffix(".default")
        return f"{name}-{self.note}" if self.note else name


def x(*shape: int) -> Tensor:
    """Random reals."""
    return torch.randn(shape, dtype=F64)


def pos(*shape: int) -> Tensor:
    """Random reals in (0.1, 0.9)."""
    return torch.rand(shape, dtype=F64) * 0.8 + 0.1


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


def row_ids(count: int, padding: int = 0) -> Tensor:
    """1 + class of each row, 0 for padding rows."""
    return torch.cat([torch.arange(1, count + 1), torch.zeros(padding, dtype=torch.int64)])


def offsets(*shape: int) -> list[Tensor]:
    return [torch.arange(n) * math.prod(shape[d + 1 :]) for d, n in enumerate(shape)]


MATMUL = [
    Case(aten.mm.default, lambda: (x(6, 12), x(12, 18)), (3, 3)),
    Case(aten.mm.default, lambda: (x(7, 10), x(10, 11)), (3, 3), note="uneven"),
    Case(aten.bmm.default, lambda: (x(6, 4, 12), x(6, 12, 9)), (4, 3)),
    Case(aten.bmm.default, lambda: (x(1, 5, 7), x(1, 7, 8)), (3, 2), note="uneven"),
    Case(aten.mv.default, lambda: (x(6, 12), x(12)), (2, 2)),
    Case(aten.dot.default, lambda: (x(12), x(12)), (1, 1)),
    Case(
        aten.convolution.default,
        lambda: (x(6, 6, 5, 4), x(12, 6, 3, 3), None, [1, 2], [1, 1], [1, 1], False, [0, 0], 1),
        (3, 3),
    ),
    Case(
        aten.convolution.default,
        lambda: (x(6, 6, 5), x(12, 6, 3), x(12), [2], [0], [1], False, [0], 1),
        (2, 2),
        note="bias",
    ),
    Case(
        aten.convolution.default,
        lambda: (x(6, 6, 5), x(12, 3, 3), x(12), [1], [1], [1], False, [0], 2),
        (1, 1),
        note="groups",
    ),
    Case(
        aten.convolution.default,
        lambda: (x(6, 6, 5), x(6, 12, 3), None, [2], [1], [1], True, [1], 1),
        (3, 3),
        note="transposed",
    ),
    Case(
        aten.convolution.default,
        lambda: (x(6, 12, 5), x(12, 6, 3), x(6), [1], [1], [1], True, [0], 1),
        (2, 2),
        note="transposed bias",
    ),
    Case(
        aten.convolution_backward.default,
        lambda: (x(6, 12, 5), x(6, 6, 5), x(12, 6, 3), [12], [1], [1], [1], False, [0], 1, [True, True, True]),
        (2, 2),
    ),
    Case(
        aten.convolution_backward.default,
        lambda: (x(6, 12, 5), x(6, 6, 5), x(12, 6, 3), None, [1], [1], [1], False, [0], 1, [True, True, False]),
        (2, 2),
        note="no bias",
    ),
    Case(
        aten.convolution_backward.default,
        lambda: (x(6, 12, 5), x(6, 6, 5), x(12, 6, 3), [12], [1], [1], [1], False, [0], 1, [False, True, True]),
        (2, 2),
        note="first layer",
    ),
    Case(
        aten.convolution_backward.default,
        lambda: (x(6, 6, 5), x(6, 12, 5), x(12, 6, 3), [6], [1], [1], [1], True, [0], 1, [True, True, True]),
        (2, 2),
        note="transposed",
    ),
]

VIEWS = [
    Case(aten.view.default, lambda: (x(6, 4, 6), [6, 24]), (3, 2), note="merge"),
    Case(aten.view.default, lambda: (x(6, 4, 6), [24, 6]), (3, 2), note="merge first"),
    Case(aten.view.default, lambda: (x(6, 24), [6, 4, 6]), (3, 2), note="split"),
    Case(aten.view.default, lambda: (x(6, 36), [6, 6, -1]), (3, 3), note="split minus one"),
    Case(aten.view.default, lambda: (x(1, 6, 12), [6, 1, 12]), (3, 3), note="size one moves"),
    Case(aten.view.default, lambda: (x(6, 1, 12, 1), [6, 12]), (3, 3), note="size one goes"),
    Case(aten.view.default, lambda: (x(6, 12), [1, 6, 1, 12, 1]), (3, 3), note="size one comes"),
    Case(aten.view.default, lambda: (x(4, 6, 9), [8, 27]), (2, 2), note="regroup"),
    Case(aten.view.default, lambda: (x(12, 6), [4, 3, 2, 3]), (3, 3), note="two groups"),
    Case(aten.view.default, lambda: (x(5, 7), [1, 5, 7]), (3, 2), note="uneven"),
    Case(aten.view.default, lambda: (x(6), [1, 6, 1]), (2, 2), note="vector"),
    Case(aten.view.default, lambda: (x(1), []), (1, 1), note="to scalar"),
    Case(aten.view.default, lambda: (x(), [1, 1]), (1, 1), note="from scalar"),
    Case(aten.reshape.default, lambda: (x(6, 4, 6).transpose(0, 1), [4, 36]), (3, 2), note="of transposed"),
    Case(aten._unsafe_view.default, lambda: (x(12, 6), [2, 6, 6]), (3, 3)),
    Case(aten.permute.default, lambda: (x(6, 4, 12), [2, 0, 1]), (4, 3)),
    Case(aten.permute.default, lambda: (x(6, 4, 12), [-1, -3, -2]), (4, 3), note="negative"),
    Case(aten.transpose.int, lambda: (x(6, 4, 12), 0, 2), (4, 3)),
    Case(aten.transpose.int, lambda: (x(6, 4, 12), -1, -2), (4, 3), note="negative"),
    Case(aten.t.default, lambda: (x(6, 12),), (3, 3)),
    Case(aten.t.default, lambda: (x(6),), (2, 2), note="vector"),
    Case(aten.view_as_complex.default, lambda: (x(6, 12, 2),), (2, 2)),
    Case(aten.view_as_real.default, lambda: (torch.view_as_complex(x(6, 12, 2)),), (2, 2)),
    Case(aten._conj.default, lambda: (torch.view_as_complex(x(6, 12, 2)),), (2, 2)),
    Case(aten.resolve_conj.default, lambda: (torch.view_as_complex(x(6, 12, 2)).conj(),), (2, 2)),
    Case(aten.unsqueeze.default, lambda: (x(6, 12), 1), (3, 3)),
    Case(aten.unsqueeze.default, lambda: (x(6, 12), -1), (3, 3), note="negative"),
    Case(aten.unsqueeze.default, lambda: (x(6, 12), -3), (3, 3), note="in front"),
    Case(aten.squeeze.default, lambda: (x(6, 1, 12, 1),), (3, 3)),
    Case(aten.squeeze.dim, lambda: (x(6, 1, 12), 1), (3, 3)),
    Case(aten.squeeze.dim, lambda: (x(6, 1, 12), -2), (3, 3), note="negative"),
    Case(aten.squeeze.dim, lambda: (x(6, 1, 12), 0), (3, 3), note="does nothing"),
    Case(aten.squeeze.dims, lambda: (x(1, 6, 1, 12), [0, -2]), (3, 3)),
    Case(aten.expand.default, lambda: (x(6, 1, 4), [6, 12, 4]), (4, 3)),
    Case(aten.expand.default, lambda: (x(1, 4), [6, -1, 4]), (3, 2), note="new dim"),
    Case(aten.expand.default, lambda: (x(), [6, 4]), (3, 2), note="scalar"),
    Case(aten.repeat.default, lambda: (x(6, 4), [1, 3]), (2, 2)),
    Case(aten.repeat.default, lambda: (x(6, 4), [5, 1, 3]), (2, 2), note="new dim"),
    Case(aten.full.default, lambda: ([6, 12], 2.5), (2, 2), {"dtype": F64}),
    Case(aten.zeros.default, lambda: ([6, 7],), (2, 2), {"dtype": F64}),
    Case(aten.ones.default, lambda: ([6, 12],), (2, 2), {"dtype": F64}),
    Case(aten.empty.memory_format, lambda: ([6, 12],), (2, 2), {"dtype": F64}),
    Case(aten.new_zeros.default, lambda: (x(3), [6, 12]), (2, 2)),
    Case(aten.new_ones.default, lambda: (x(3), [6, 12]), (2, 2)),
    Case(aten.new_full.default, lambda: (x(3), [6, 12], 1.5), (2, 2)),
    Case(aten.new_empty.default, lambda: (x(3), [6, 12]), (2, 2)),
]

PARTS = [
    Case(aten.slice.Tensor, lambda: (x(6, 12), 1, 0, 6), (3, 3), note="first half"),
    Case(aten.slice.Tensor, lambda: (x(6, 12), 1, 6, 2**63 - 1), (3, 3), note="to the end"),
    Case(aten.slice.Tensor, lambda: (x(6, 12), -1, -6, None), (3, 3), note="negative start"),
    Case(aten.slice.Tensor, lambda: (x(6, 12), -1, None, -6), (3, 3), note="negative end"),
    Case(aten.slice.Tensor, lambda: (x(6, 24), 1, 6, 18), (3, 3), note="middle"),
    Case(aten.slice.Tensor, lambda: (x(6, 24), 1, 6, 12), (3, 3), note="third of sections"),
    Case(aten.slice.Tensor, lambda: (x(6, 12), 0, 0, 100), (3, 3), note="beyond"),
    Case(aten.slice.Tensor, lambda: (x(6, 7),), (3, 3), note="all, uneven"),
    Case(aten.slice.Tensor, lambda: (x(6, 12), 1, 0, 12, 2), (2, 2), note="step"),
    Case(aten.slice.Tensor, lambda: (x(6, 12), 1, 1, 4), (2, 2), note="no cut there"),
    Case(aten.slice_backward.default, lambda: (x(6, 6), [6, 12], 1, 0, 6, 1), (3, 3)),
    Case(aten.slice_backward.default, lambda: (x(6, 6), [6, 12], 1, 6, 2**63 - 1, 1), (3, 3), note="to the end"),
    Case(aten.slice_backward.default, lambda: (x(6, 6), [6, 12], -1, -6, 12, 1), (3, 3), note="negative"),
    Case(aten.slice_backward.default, lambda: (x(6, 12), [6, 24], 1, 6, 18, 1), (3, 3), note="middle"),
    Case(aten.slice_backward.default, lambda: (x(6, 12), [6, 12], 0, 0, 6, 1), (3, 3), note="all"),
    Case(aten.select.int, lambda: (x(6, 4, 12), 1, 2), (3, 3)),
    Case(aten.select.int, lambda: (x(6, 4, 12), -2, -1), (3, 3), note="negative"),
    Case(aten.select_backward.default, lambda: (x(6, 12), [6, 4, 12], 1, 2), (3, 3)),
    Case(aten.select_backward.default, lambda: (x(6, 12), [6, 12, 4], -1, -1), (3, 3), note="negative"),
    Case(aten.unbind.int, lambda: (x(6, 3, 12), 1), (3, 3)),
    Case(aten.unbind.int, lambda: (x(6, 12, 3), -1), (3, 3), note="negative"),
    Case(aten.split.Tensor, lambda: (x(6, 24), 12, 1), (3, 3)),
    Case(aten.split.Tensor, lambda: (x(6, 30), 12, -1), (3, 3), note="short last"),
    Case(aten.split.Tensor, lambda: (x(12, 6), 6), (3, 3), note="default dim"),
    Case(aten.split_with_sizes.default, lambda: (x(6, 24), [12, 6, 6], 1), (3, 3)),
    Case(aten.split_with_sizes.default, lambda: (x(6, 24), [6, 18], -1), (3, 3), note="unequal"),
    Case(aten.split_with_sizes.default, lambda: (x(6, 24), [5, 19], 1), (2, 2), note="odd parts"),
    Case(aten.split_with_sizes.default, lambda: (x(4, 7), [3, 4], 1), (2, 1), note="uneven"),
    Case(aten.cat.default, lambda: ([x(6, 12), x(6, 12)], 1), (3, 3)),
    Case(aten.cat.default, lambda: ([x(6, 6), x(6, 12), x(6, 6)], -1), (3, 3), note="unequal"),
    Case(aten.cat.default, lambda: ([x(6, 5), x(6, 7)], 1), (2, 2), note="odd parts"),
    Case(aten.cat.default, lambda: ([x(6, 4), x(12, 4)],), (3, 2), note="default dim"),
    Case(aten.stack.default, lambda: ([x(6, 12), x(6, 12)], 1), (3, 3)),
    Case(aten.stack.default, lambda: ([x(6, 12), x(6, 12), x(6, 12)], -1), (3, 3), note="last"),
    Case(aten.constant_pad_nd.default, lambda: (x(6, 12, 4), [1, 2, 0, 0]), (2, 2)),
    Case(aten.constant_pad_nd.default, lambda: (x(6, 12, 6), [0, -1, 0, 0], 3.0), (2, 2), note="crop"),
    Case(aten.roll.default, lambda: (x(6, 12), [2], [-1]), (2, 2)),
    Case(aten.roll.default, lambda: (x(6, 12), [2]), (1, 1), note="flat"),
    Case(aten.flip.default, lambda: (x(6, 12), [-1]), (2, 2)),
    Case(aten.tril.default, lambda: (x(6, 5, 7),), (2, 2)),
    Case(aten.triu.default, lambda: (x(6, 4, 5, 7), 1), (3, 2)),
    Case(aten.sort.default, lambda: (x(6, 12, 5),), (2, 2)),
    Case(aten.sort.default, lambda: (x(6, 12, 5), 0, True), (2, 1), note="first dim"),
    Case(aten.topk.default, lambda: (x(6, 12, 5), 2), (2, 2)),
    Case(aten.topk.default, lambda: (x(6, 12, 5), 2, 1), (2, 1), note="middle"),
]

INDEXING = [
    Case(aten.index.Tensor, lambda: (x(20, 12), [ids(20, 6, 4)]), (4, 3), note="rope cache"),
    Case(aten.index.Tensor, lambda: (x(6, 20, 12), [None, ids(20, 18)]), (4, 4), note="second dim"),
    Case(aten.index.Tensor, lambda: (x(6, 8, 12), [ids(6, 18), ids(8, 18)]), (3, 3), note="pairs"),
    Case(aten.index.Tensor, lambda: (x(6, 8, 12), [None, ids(8, 18), ids(12, 18)]), (3, 3), note="last two"),
    Case(aten.index.Tensor, lambda: (x(20, 6), [ids(20, 7)]), (3, 3), note="uneven"),
    Case(aten.index.Tensor, lambda: (x(6, 8, 12), [ids(6, 6, 1), ids(8, 1, 6)]), (1, 1), note="broadcast"),
    Case(aten.index_select.default, lambda: (x(6, 20), 1, ids(20, 12)), (3, 3)),
    Case(aten.index_select.default, lambda: (x(6, 20), -1, ids(20, 7)), (3, 3), note="uneven"),
    Case(aten.slice_scatter.default, lambda: (x(6, 12), x(6, 4), 1, 2, 6), (1, 1)),
    Case(aten.gather.default, lambda: (x(6, 12), 1, ids(12, 6, 5)), (2, 2)),
    Case(aten.gather.default, lambda: (x(6, 12, 7), -2, ids(12, 6, 5, 7)), (3, 3), note="uneven"),
    Case(aten.gather.default, lambda: (x(6, 12), 1, ids(12, 4, 5)), (1, 1), note="fewer rows"),
    Case(aten.scatter.src, lambda: (x(6, 12), 1, torch.arange(4).expand(6, 4), x(6, 4)), (1, 1)),
    Case(aten.scatter.value, lambda: (x(6, 12), -1, ids(12, 6, 4), 2.0), (1, 1)),
    Case(aten.scatter_add.default, lambda: (x(6, 12), 1, ids(12, 6, 4), x(6, 4)), (1, 1)),
    Case(aten.scatter_add.default, lambda: (x(6, 12), 1, ids(12, 3, 4), x(3, 4)), (0, 0), note="fewer rows"),
]

_SUM = 3  # keep the dim, cut the reduced one, pass a partial sum through
REDUCTIONS = [
    Case(aten.sum.dim_IntList, lambda: (x(6, 12), [1]), (_SUM, _SUM)),
    Case(aten.sum.dim_IntList, lambda: (x(6, 5, 12), [0, -1], True), (4, 3), note="keepdim"),
    Case(aten.sum.dim_IntList, lambda: (x(7, 5), [0]), (_SUM, _SUM - 1), note="uneven"),
    Case(aten.sum.dim_IntList, lambda: (x(6, 12), None), (_SUM, _SUM), note="all"),
    Case(aten.sum.dim_IntList, lambda: (x(6, 12), []), (_SUM, _SUM), note="none named"),
    Case(aten.sum.default, lambda: (x(6, 12),), (_SUM, _SUM)),
    Case(aten.mean.dim, lambda: (x(6, 12), [-1], True), (_SUM, _SUM)),
    Case(aten.mean.dim, lambda: (x(6, 7), [1]), (2, 2), note="uneven"),
    Case(aten.mean.default, lambda: (x(6, 12),), (_SUM, _SUM)),
    Case(aten.amax.default, lambda: (x(6, 12), [-1], True), (2, 2)),
    Case(aten.amax.default, lambda: (x(6, 12),), (2, 2), note="all"),
    Case(aten.amax.default, lambda: (x(6, 7) - 5, [1]), (1, 1), note="uneven"),
    Case(aten.max.default, lambda: (x(6, 12) - 5,), (2, 2)),
    Case(aten.amin.default, lambda: (x(6, 12), [1]), (1, 1)),
    Case(aten.min.default, lambda: (x(6, 12),), (0, 0)),
    Case(aten.any.dim, lambda: (x(6, 12) > 1, 1), (1, 1)),
    Case(aten.all.default, lambda: (x(6, 12) > -9,), (0, 0)),
    Case(aten.all.dim, lambda: (x(6, 12) > -1, -2, True), (1, 1)),
    Case(aten.argmax.default, lambda: (x(6, 12), 1), (1, 1)),
    Case(aten.max.dim, lambda: (x(6, 12), -1), (1, 1)),
    Case(aten.min.dim, lambda: (x(6, 12), 0, True), (1, 1), note="keepdim"),
    Case(aten.argmax.default, lambda: (x(6, 12), 0, True), (1, 1), note="keepdim"),
    Case(aten.argmax.default, lambda: (x(6, 12),), (0, 0), note="all"),
    Case(aten.var.correction, lambda: (x(6, 12), [0]), (1, 1)),
    Case(aten.var.correction, lambda: (x(6, 12), [0]), (1, 1), {"correction": 0, "keepdim": True}, "keepdim"),
    Case(aten.var.correction, lambda: (x(6, 12),), (0, 0), note="all"),
    Case(aten.var_mean.correction, lambda: (x(6, 12, 5), [0]), (2, 1), {"correction": 0}),
    Case(aten.std.correction, lambda: (x(6, 12), [-2]), (1, 1)),
    Case(aten.logsumexp.default, lambda: (x(6, 12), [1]), (2, 2)),
    Case(aten.logsumexp.default, lambda: (x(6, 12), [-1], True), (2, 2), note="keepdim"),
    Case(aten.logsumexp.default, lambda: (x(6, 7), [1]), (1, 1), note="uneven"),
    Case(aten.linalg_vector_norm.default, lambda: (x(6, 12), 2, [0]), (1, 1)),
    Case(aten.linalg_vector_norm.default, lambda: (x(6, 12), 2, [0], True), (1, 1), note="keepdim"),
    Case(aten.prod.dim_int, lambda: (x(6, 12), 0), (1, 1)),
    Case(aten.prod.dim_int, lambda: (x(6, 12), -2, True), (1, 1), note="keepdim"),
    Case(aten.cumsum.default, lambda: (x(6, 12), -1), (2, 2)),
    Case(aten.cumprod.default, lambda: (x(6, 12), 0), (1, 1)),
    Case(aten._softmax.default, lambda: (x(6, 4, 12), -1, False), (2, 1)),
    Case(aten._softmax.default, lambda: (x(7, 4), 1, False), (1, 1), note="uneven"),
    Case(aten._log_softmax.default, lambda: (x(6, 12), 1, False), (1, 1)),
    Case(aten._safe_softmax.default, lambda: (x(6, 12), -1), (1, 1)),
    Case(aten._softmax_backward_data.default, lambda: (x(6, 12), pos(6, 12), -1, F64), (1, 1)),
    Case(aten._log_softmax_backward_data.default, lambda: (x(6, 12), x(6, 12), 1, F64), (1, 1)),
    Case(aten.mse_loss.default, lambda: (x(6, 7), x(6, 7), 2), (2, 2), note="sum"),
    Case(aten.mse_loss.default, lambda: (x(6, 7), x(6, 7), 0), (2, 2), note="none"),
    Case(aten.mse_loss.default, lambda: (x(6, 12), x(6, 12)), (0, 0), note="mean"),
    Case(aten.mse_loss_backward.default, lambda: (x(), x(6, 7), x(6, 7), 2), (2, 2), note="sum"),
    Case(aten.mse_loss_backward.default, lambda: (x(6, 7), x(6, 7), x(6, 7), 0), (2, 2), note="none"),
    Case(aten.mse_loss_backward.default, lambda: (x(), x(6, 7), x(6, 7), 1), (0, 0), note="mean"),
    Case(aten.smooth_l1_loss.default, lambda: (x(6, 7), x(6, 7), 2, 0.5), (2, 2)),
    Case(aten.smooth_l1_loss_backward.default, lambda: (x(), x(6, 7), x(6, 7), 2, 0.5), (2, 2)),
    Case(aten.huber_loss.default, lambda: (x(6, 7), x(6, 7), 2, 0.5), (2, 2)),
    Case(aten.huber_loss_backward.default, lambda: (x(6, 7), x(6, 7), x(6, 7), 0, 0.5), (2, 2)),
    Case(aten.nll_loss_forward.default, lambda: (x(6, 7), ids(7, 6), None, 2, -100), (1, 1)),
    Case(aten.nll_loss_forward.default, lambda: (x(6, 7), ids(7, 6), pos(7), 0, 3), (1, 1), note="none, weight"),
    Case(aten.nll_loss_forward.default, lambda: (x(6, 7), ids(7, 6), None, 1, -100), (0, 0), note="mean"),
    Case(aten.nll_loss_backward.default, lambda: (x(), x(6, 7), ids(7, 6), None, 2, -100, x()), (1, 1)),
    Case(
        aten.nll_loss_backward.default,
        lambda: (x(6), x(6, 7), ids(7, 6), pos(7), 0, 3, x()),
        (1, 1),
        note="none, weight",
    ),
    Case(aten.nll_loss_backward.default, lambda: (x(), x(6, 7), ids(7, 6), None, 1, -100, x()), (0, 0), note="mean"),
    Case(aten.binary_cross_entropy.default, lambda: (pos(6, 12), pos(6, 12), None, 2), (2, 2)),
    Case(aten.binary_cross_entropy.default, lambda: (pos(6, 12), pos(6, 12), pos(6, 12), 2), (2, 2), note="weight"),
    Case(aten.binary_cross_entropy_backward.default, lambda: (x(), pos(6, 12), pos(6, 12), None, 2), (2, 2)),
]


def _layer_norm(mask: list[bool]) -> tuple[Any, ...]:
    value, weight, bias = x(6, 4, 8), x(8), x(8)
    _, mean, rstd = aten.native_layer_norm.default(value, [8], weight, bias, 1e-5)
    return x(6, 4, 8), value, [8], mean, rstd, weight, bias, mask


def _plain_layer_norm() -> tuple[Any, ...]:
    value = x(6, 4, 8)
    _, mean, rstd = aten.native_layer_norm.default(value, [8], None, None, 1e-5)
    return x(6, 4, 8), value, [8], mean, rstd, None, None, [True, False, False]


def _rms_norm(mask: list[bool]) -> tuple[Any, ...]:
    value, weight = x(6, 4, 8), x(8)
    _, rstd = aten._fused_rms_norm.default(value, [8], weight, 1e-5)
    return x(6, 4, 8), value, [8], rstd, weight, mask


NORMS = [
    Case(aten.native_layer_norm.default, lambda: (x(6, 4, 8), [8], x(8), x(8), 1e-5), (2, 1)),
    Case(aten.native_layer_norm.default, lambda: (x(6, 4, 8), [4, 8], None, None, 1e-5), (1, 1), note="two dims"),
    Case(aten.native_layer_norm.default, lambda: (x(7, 8), [8], x(8), None, 1e-5), (1, 1), note="uneven"),
    Case(aten.native_layer_norm_backward.default, lambda: _layer_norm([True, True, True]), (2, 1)),
    Case(aten.native_layer_norm_backward.default, lambda: _layer_norm([True, False, False]), (2, 1), note="frozen"),
    Case(aten.native_layer_norm_backward.default, lambda: _layer_norm([False, True, True]), (2, 1), note="input"),
    Case(aten.native_layer_norm_backward.default, _plain_layer_norm, (2, 1), note="no affine"),
    Case(aten._fused_rms_norm.default, lambda: (x(6, 4, 8), [8], x(8), 1e-5), (2, 1)),
    Case(aten._fused_rms_norm.default, lambda: (x(6, 4, 8), [8], None, None), (2, 1), note="no weight"),
    Case(aten._fused_rms_norm_backward.default, lambda: _rms_norm([True, True]), (2, 1)),
    Case(aten._fused_rms_norm_backward.default, lambda: _rms_norm([True, False]), (2, 1), note="frozen"),
]
