"""Pad a batch so that its token count divides by what a strategy needs; padding changes neither loss nor gradients.

Padding goes to the end, as a document of its own that no real token sees, with labels that the loss ignores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fxpar.errors import PadError
from fxpar.flow import padding_of
from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import Dim, Input


def _constant(value: int) -> Callable[[Tensor, int, int], Tensor]:
    def fill(x: Tensor, dim: int, count: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] = count
        return torch.full(shape, value, dtype=x.dtype, device=x.device)

    return fill


def _restart(x: Tensor, dim: int, count: int) -> Tensor:
    """Positions 0, 1, ... of a new document."""
    shape = [1] * x.dim()
    shape[dim] = count
    full = list(x.shape)
    full[dim] = count
    return torch.arange(count, dtype=x.dtype, device=x.device).view(shape).expand(full)


def _next_document(x: Tensor, dim: int, count: int) -> Tensor:
    """One id beyond the last."""
    return (x.narrow(dim, x.shape[dim] - 1, 1) + 1).repeat_interleave(count, dim)


# Batch keys whose padding counts up; in all others it is one number, which the flow of tokens reckons with.
_COUNTING: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "position_ids": _restart,
    "positions": _restart,
    "document_positions": _restart,
    "document_ids": _next_document,
}


def batch_dims(inputs: tuple[Input, ...], dims: tuple[Dim, ...], batch: Mapping[str, Tensor]) -> dict[str, int]:
    """Size of every dynamic dim in `batch`."""
    names = {d.symbol: d.name for d in dims}
    found: dict[str, int] = {}
    for info in inputs:
        if info.kind != "batch":
            continue
        for d, size in enumerate(info.meta.shape):
            if size in names:
                found[names[size]] = batch[info.fqn].shape[d]
    return found


def pad_batch(
    inputs: tuple[Input, ...],
    dims: tuple[Dim, ...],
    divisors: Mapping[str, int],
    batch: Mapping[str, Tensor],
    rules: Mapping[str, Callable[[Tensor, int, int], Tensor]] | None = None,
    *,
    hazard: str | None = None,
) -> dict[str, Tensor]:
    """`batch` with every dynamic dim padded to a multiple of its divisor.

    `rules` wins over what is known of a key. `hazard` is what in the model would see padding, in words. Raises PadError
    if there is one, or if the padded size exceeds what the model allows.
    """
    known = {**_COUNTING, **(rules or {})}
    symbols = {d.symbol: d for d in dims}
    padded = dict(batch)
    for info in inputs:
        if info.kind != "batch":
            continue
        for d, size in enumerate(info.meta.shape):
            dim = symbols.get(size)  # type: ignore[call-overload]
            if dim is None:
                continue
            have = batch[info.fqn].shape[d]
            missing = -have % divisors.get(dim.name, 1)
            if not missing:
                continue
            if dim.maximum is not None and have + missing > dim.maximum:
                raise PadError(info.fqn, f"padding {dim.name}={have} to {have + missing} exceeds {dim.maximum}")
            if hazard is not None:
                why = f"{dim.name}={have} must be a multiple of {divisors[dim.name]}"
                raise PadError(info.fqn, why, hazard)
            rule = known.get(info.fqn) or _constant(padding_of(info.fqn, batch[info.fqn].dtype) or 0)
            so_far = padded[info.fqn]  # a [T, T] mask is padded twice
            padded[info.fqn] = torch.cat([so_far, rule(so_far, d, missing)], d)
    return padded


def pad(program: Program, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`batch` padded as `program` needs it. Raises PadError where the model would see the padding."""
    return pad_batch(program.inputs, program.dims, program.divisors, batch, hazard=program.padding_hazard)
