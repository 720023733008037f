"""Calls of fxpar's own ops and of element-wise ops, as in `cases`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.rules.cases import F64, Case, aten, ids, offsets, own, pos, row_ids, x


def _qkv(B: int, H: int, Hkv: int, S: int, E: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return x(B, H, S, E), x(B, Hkv, S, E), x(B, Hkv, S, E)


def forward(B: int, H: int, Hkv: int, extras: tuple[Any, Any] = (None, None), causal: bool = True) -> tuple[Any, ...]:
    """Arguments of `attention` for 5 tokens."""
    return *_qkv(B, H, Hkv, 5), *extras, causal, 0, 0.5, 0.0


def backward(B: int, H: int, Hkv: int, extras: tuple[Any, Any] = (None, None), causal: bool = True) -> tuple[Any, ...]:
    """Arguments of `attention_backward` for 5 tokens."""
    q, k, v, *rest = forward(B, H, Hkv, extras, causal)
    out, lse = own.attention.default(q, k, v, *rest)
    return x(*out.shape), q, k, v, out, lse, *rest


def documents(B: int) -> tuple[Tensor, None]:
    return torch.randint(3, (B, 5)).sort(1).values, None


def mask(B: int, H: int) -> tuple[None, Tensor]:
    return None, (torch.rand(B, H, 5, 5) > 0.3) | torch.eye(5, dtype=torch.bool)


def bias(B: int, H: int) -> tuple[None, Tensor]:
    return None, x(B, H, 5, 5)


ATTENTION = ((own.attention.default, forward), (own.attention_backward.default, backward))
# (note, arguments of `forward` and `backward`, options on 2 and 3 ranks: batch, heads or groups of heads)
_SHAPES: list[tuple[str, tuple[Any, ...], tuple[int, int]]] = [
    ("plain", (6, 6, 6), (2, 2)),
    ("gqa", (6, 12, 6), (2, 2)),
    ("gqa groups", (1, 12, 2), (1, 1)),
    ("gqa three groups", (1, 12, 3), (1, 1)),
    ("mqa", (1, 6, 1), (1, 1)),
    ("heads do not divide", (1, 5, 5), (0, 0)),
    ("batch only", (6, 5, 5), (1, 1)),
]


def _attention() -> list[Case]:
    cases = []
    for note, sizes, at_least in _SHAPES:
        for target, make in ATTENTION:
            cases.append(Case(target, lambda make=make, sizes=sizes: make(*sizes), at_least, note=note))
    extras = {
        "documents": lambda: documents(6),
        "one row of documents": lambda: documents(1),
        "mask of batch": lambda: mask(6, 1),
        "mask of heads": lambda: mask(1, 12),
        "mask of both": lambda: mask(6, 12),
        "bias": lambda: bias(6, 12),
        "mask of all": lambda: mask(1, 1),
    }
    for note, extra in extras.items():
        for kv_heads in (6, 3, 1):
            for target, make in ATTENTION:
                cases.append(
                    Case(
                        target,
                        lambda make=make, extra=extra, kv=kv_heads: make(6, 12, kv, extra(), False),
                        (2, 2),
                        note=f"{note} kv{kv_heads}",
                    )
                )
    return cases


def _labels(N: int, V: int) -> Tensor:
    labels = ids(V, N)
    labels[1] = -100
    return labels


def _ce_backward(V: int, padding: int) -> tuple[Any, ...]:
    logits, target, classes = x(12, V + padding), _labels(12, V), row_ids(V, padding)
    lse, _ = own.cross_entropy.default(logits, target, classes)
    return x(12), x(12), logits, target, classes, lse


OWN = [
    *_attention(),
    Case(own.cross_entropy.default, lambda: (x(12, 18), _labels(12, 18), row_ids(18)), (2, 2)),
    Case(own.cross_entropy.default, lambda: (x(12, 17), _labels(12, 17), row_ids(17)), (2, 2), note="uneven"),
    Case(own.cross_entropy.default, lambda: (x(7, 18), _labels(7, 15), row_ids(15, 3)), (2, 2), note="padding columns"),
    Case(own.cross_entropy_backward.default, lambda: _ce_backward(18, 0), (2, 2)),
    Case(own.cross_entropy_backward.default, lambda: _ce_backward(17, 0), (2, 2), note="uneven"),
    Case(own.cross_entropy_backward.default, lambda: _ce_backward(15, 3), (2, 2), note="padding columns"),
    Case(own.dropout.default, lambda: (x(6, 12), torch.tensor(7), offsets(6, 12), 0.5, 3), (2, 2)),
    Case(own.dropout.default, lambda: (x(5, 7, 6), torch.tensor(7), offsets(5, 7, 6), 0.25, 1), (3, 2), note="uneven"),
    Case(own.embedding.default, lambda: (x(18, 4), ids(18, 6, 12), row_ids(18)), (3, 3)),
    Case(own.embedding.default, lambda: (x(17, 4), ids(17, 7), row_ids(17)), (2, 2), note="uneven"),
    Case(own.embedding_backward.default, lambda: (x(6, 12, 4), ids(18, 6, 12), row_ids(18), -1), (3, 3)),
    Case(own.embedding_backward.default, lambda: (x(7, 4), ids(17, 7), row_ids(17), 3), (2, 2), note="padding index"),
    Case(own.expert_mm.default, lambda: (x(6, 12, 6), x(5, 6, 12), ids(5, 6, 12)), (4, 4)),
    Case(own.expert_mm.default, lambda: (x(7, 5), x(3, 5, 7), ids(4, 7)), (3, 3), note="uneven"),
    Case(own.expert_mm_backward.default, lambda: (x(6, 12, 6), x(6, 12, 12), ids(5, 6, 12), 5), (4, 4)),
    Case(own.expert_mm_backward.default, lambda: (x(7, 5), x(7, 7), ids(4, 7), 3), (3, 3), note="uneven"),
    Case(own.weighted_sum.default, lambda: (x(12, 6, 6), x(12, 6)), (4, 4)),
    Case(own.weighted_sum.default, lambda: (x(7, 7, 7), x(7, 7)), (4, 4), note="uneven"),
    Case(own.weighted_sum_backward.default, lambda: (x(12, 6), x(12, 6, 6), x(12, 6)), (4, 4)),
    Case(own.weighted_sum_backward.default, lambda: (x(7, 7), x(7, 7, 7), x(7, 7)), (4, 4), note="uneven"),
]


def _b(*shape: int) -> Tensor:
    return torch.rand(*shape) > 0.5


def names(text: str) -> list[str]:
    return text.split()


_UNARY = names("""
    abs acos asin atan ceil cos cosh digamma erf erfc exp exp2 expm1 floor frac hardshrink hardsigmoid hardtanh
    isfinite isinf isnan lgamma log log10 log1p log2 logical_not mish neg positive reciprocal relu relu6 round rsqrt
    selu sgn sigmoid sign silu sin sinh softplus sqrt square tan tanh trunc gelu leaky_relu elu celu clone alias logit
    nan_to_num zeros_like ones_like empty_like signbit sinc rad2deg
""")
_BINARY = names("""
    maximum minimum atan2 fmax fmin hypot logaddexp logical_and logical_or logical_xor copysign.Tensor fmod.Tensor
    remainder.Tensor pow.Tensor_Tensor eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor add.Tensor
    sub.Tensor mul.Tensor div.Tensor xlogy.Tensor floor_divide copy max.other min.other
""")
_OF_SCALAR = names("""
    add.Tensor sub.Tensor mul.Tensor div.Tensor mul.Scalar div.Scalar add.Scalar sub.Scalar rsub.Scalar
    pow.Tensor_Scalar pow.Scalar eq.Scalar ne.Scalar lt.Scalar gt.Scalar le.Scalar ge.Scalar fmod.Scalar
    remainder.Scalar clamp clamp_min clamp_max xlogy.Scalar_Other
""")


def op(name: str) -> Any:
    """`aten.` overload by name."""
    base, _, overload = name.partition(".")
    return getattr(getattr(aten, base), overload or "default")


def _with_scalar(name: str) -> tuple[Any, Any]:
    return (2.0, pos(6, 7)) if name == "pow.Scalar" else (pos(6, 7), 2.0)


LINEAR = {"neg", "clone", "alias"}  # a partial sum passes through
_BOTH = {"add.Tensor", "sub.Tensor"}
_FIRST = {"div.Tensor"}
_OF_FIRST = {"mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar"}

POINTWISE = [
    *(Case(op(n), lambda: (pos(6, 7),), (2 + (n in LINEAR),) * 2, note="unary") for n in _UNARY),
    *(Case(op(n), lambda: (pos(6, 12), pos(6, 12)), (2 + (n in _BOTH | _FIRST),) * 2, note="binary") for n in _BINARY),
    *(Case(op(n), lambda: (pos(4, 1, 7), pos(6, 7)), (3, 2), note="broadcast") for n in _BINARY if n != "copy"),
    *(
        Case(
            op(n), lambda n=n: (2.0, pos(6, 7)) if n == "pow.Scalar" else (pos(6, 7), 2.0), (2 + (n in _OF_FIRST),) * 2
        )
        for n in _OF_SCALAR
    ),
    Case(aten.add.Tensor, lambda: (x(6, 12), x(6, 12)), (3, 3), {"alpha": 3}, "alpha"),
    Case(aten.add.Tensor, lambda: (x(6, 12), x()), (3, 3), note="scalar tensor"),
    Case(aten.mul.Tensor, lambda: (x(6, 12), x()), (3, 3), note="scalar tensor"),
    Case(aten.mul.Tensor, lambda: (x(), x(6, 12)), (3, 3), note="scalar tensor first"),
    Case(aten.mul.Tensor, lambda: (x(), x()), (2, 2), note="scalars"),
    Case(aten.div.Tensor, lambda: (x(6, 12), pos(12)), (3, 3), note="row"),
    Case(aten.div.Tensor_mode, lambda: (x(6, 12), pos(12)), (2, 2), {"rounding_mode": "floor"}),
    Case(aten.where.self, lambda: (_b(6, 12), x(6, 12), x(6, 12)), (2, 2)),
    Case(aten.where.self, lambda: (_b(6, 1), x(12), x()), (2, 2), note="broadcast"),
    Case(aten.masked_fill.Scalar, lambda: (x(6, 12), _b(12), -1.0), (2, 2)),
    Case(aten.lerp.Scalar, lambda: (x(6, 12), x(6, 12), 0.3), (2, 2)),
    Case(aten.lerp.Tensor, lambda: (x(6, 12), x(6, 12), x(12)), (2, 2)),
    Case(aten.addcmul.default, lambda: (x(6, 12), x(6, 12), x(12)), (2, 2)),
    Case(aten.addcdiv.default, lambda: (x(6, 12), x(6, 12), pos(12)), (2, 2)),
    Case(aten.clamp.Tensor, lambda: (x(6, 12), x(12), None), (2, 2)),
    Case(aten._to_copy.default, lambda: (x(6, 7),), (3, 3), {"dtype": torch.float32}, "narrow", 1e-6),
    Case(aten._to_copy.default, lambda: (x(6, 7) * 5,), (2, 2), {"dtype": torch.int64}, "integers"),
    Case(aten._to_copy.default, lambda: (_b(6, 7),), (2, 2), {"dtype": F64}, "from bool"),
    Case(aten.full_like.default, lambda: (x(6, 7), 2.0), (2, 2)),
    Case(aten.bitwise_and.Tensor, lambda: (_b(6, 12), _b(12)), (2, 2)),
    Case(aten.bitwise_or.Tensor, lambda: (_b(6, 12), _b(12)), (2, 2)),
    Case(aten.bitwise_not.default, lambda: (_b(6, 7),), (2, 2)),
    Case(aten.gelu.default, lambda: (x(6, 7),), (2, 2), {"approximate": "tanh"}, "tanh"),
    Case(aten.gelu_backward.default, lambda: (x(6, 7), x(6, 7)), (2, 2)),
    Case(aten.silu_backward.default, lambda: (x(6, 7), x(6, 7)), (2, 2)),
    Case(aten.tanh_backward.default, lambda: (x(6, 7), x(6, 7)), (2, 2)),
    Case(aten.sigmoid_backward.default, lambda: (x(6, 7), x(6, 7)), (2, 2)),
    Case(aten.threshold_backward.default, lambda: (x(6, 7), x(6, 7), 0), (2, 2)),
    Case(aten.hardtanh_backward.default, lambda: (x(6, 7), x(6, 7), -1, 1), (2, 2)),
    Case(aten.elu_backward.default, lambda: (x(6, 7), 1.0, 1.0, 1.0, False, x(6, 7)), (2, 2)),
    Case(aten.leaky_relu_backward.default, lambda: (x(6, 7), x(6, 7), 0.1, False), (2, 2)),
    Case(aten.softplus_backward.default, lambda: (x(6, 7), x(6, 7), 1, 20), (2, 2)),
    Case(aten.hardsigmoid_backward.default, lambda: (x(6, 7), x(6, 7)), (2, 2)),
    Case(aten.hardswish_backward.default, lambda: (x(6, 7), x(6, 7)), (2, 2)),
    Case(aten.log_sigmoid_backward.default, lambda: (x(6, 7), x(6, 7), x(6, 7)), (2, 2)),
    Case(aten.logit_backward.default, lambda: (x(6, 7), pos(6, 7)), (2, 2)),
    Case(aten.logit.default, lambda: (pos(6, 7), 1e-3), (2, 2), note="eps"),
    Case(aten.round.decimals, lambda: (x(6, 7),), (2, 2), {"decimals": 1}),
]
