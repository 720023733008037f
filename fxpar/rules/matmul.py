"""Rules of matrix products and convolution: parallel loops, and a sum over the contracted one."""

from __future__ import annotations

from fxpar.rules.option import ABSENT, Factor, OpView


def mm_factors(op: OpView) -> list[Factor]:
    """[M, K] @ [K, N] -> [M, N]."""
    return [Factor((0, None), (0,)), Factor((None, 1), (1,)), Factor((1, 0), ("sum",))]


def bmm_factors(op: OpView) -> list[Factor]:
    """[B, M, K] @ [B, K, N] -> [B, M, N]."""
    return [
        Factor((0, 0), (0,)),
        Factor((1, None), (1,)),
        Factor((None, 2), (2,)),
        Factor((2, 1), ("sum",)),
    ]


def mv_factors(op: OpView) -> list[Factor]:
    """[M, K] @ [K] -> [M]."""
    return [Factor((0, None), (0,)), Factor((1, 0), ("sum",))]


def dot_factors(op: OpView) -> list[Factor]:
    """[K] . [K] -> []."""
    return [Factor((0, 0), ("sum",))]


def convolution_factors(op: OpView) -> list[Factor]:
    """x [B, C, ...], weight [O, C/groups, ...] ([C, O/groups, ...] if transposed), bias [O] -> [B, O, ...].

    Channels are cut only without groups.
    """
    bias = len(op.inputs) == 3
    none = (None,) if bias else ()
    factors = [Factor((0, None, *none), (0,), pad=False)]
    if op.arg(8, "groups", 1) == 1:
        out, into = (1, 0) if op.arg(6, "transposed") else (0, 1)
        factors.append(Factor((None, out, *((0,) if bias else ())), (1,), pad=False))
        if not bias:
            factors.append(Factor((1, into), ("sum",), pad=False))
    return factors


def convolution_backward_factors(op: OpView) -> list[Factor]:
    """(grad [B, O, ...], x, weight) -> (dx, dweight, dbias), of which the mask keeps some."""
    mask = op.arg(10, "output_mask", (True, True, True))
    factors = [_masked((0, 0, None), (0, "sum", "sum"), mask)]
    if op.arg(9, "groups", 1) == 1:
        out = 1 if op.arg(7, "transposed") else 0
        factors.append(_masked((1, None, out), ("sum", out, 0), mask))
    return factors


def _masked(inputs: tuple, outputs: tuple, mask: tuple[bool, ...]) -> Factor:
    made = tuple(o if keep else ABSENT for o, keep in zip(outputs, mask, strict=True))
    return Factor(inputs, made, pad=False)
