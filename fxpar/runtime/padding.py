"""Pad a batch so that its token count divides by what a strategy needs; padding changes neither loss nor gradients.

Padding goes to the end, as a document of its own that no real token sees, with labels that the loss ignores. Where a
strategy packs documents in bins, each bin is padded at its end. Where it cuts them over a ring, tokens then change
places; what a batch says of each goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fxpar.batching.documents import document_starts
from fxpar.batching.packing import SequenceItem, longest_first, spread
from fxpar.batching.ring_order import ring_order
from fxpar.errors import PadError
from fxpar.flow import padding_of
from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import DOCUMENTS, TOKENS, Dim, Input, dim_symbol


def _constant(value: int) -> Callable[[Tensor, int, int], Tensor]:
    def fill(x: Tensor, dim: int, count: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] = count
        return torch.full(shape, value, dtype=x.dtype, device=x.device)

    return fill


def _restart(x: Tensor, dim: int, count: int) -> Tensor:
    """Positions 0, 1, ... of a new document, and again from 0 where real ones end: a table has no more rows."""
    shape = [1] * x.dim()
    shape[dim] = count
    full = list(x.shape)
    full[dim] = count
    index = torch.arange(count, dtype=x.dtype, device=x.device) % (x.max() + 1).clamp_min(1)
    return index.view(shape).expand(full)


def _next_document(x: Tensor, dim: int, count: int) -> Tensor:
    """One id beyond all that there are."""
    return (x.amax(dim, keepdim=True) + 1).repeat_interleave(count, dim)


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
    *,
    hazard: str | None = None,
) -> dict[str, Tensor]:
    """`batch` with every dynamic dim padded to a multiple of its divisor.

    `hazard` is what in the model would see padding, in words. Raises PadError if there is one, or if the padded size
    exceeds what the model allows.
    """
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
            rule = _COUNTING.get(info.fqn) or _constant(padding_of(info.fqn, batch[info.fqn].dtype) or 0)
            so_far = padded[info.fqn]  # a [T, T] mask is padded twice
            padded[info.fqn] = torch.cat([so_far, rule(so_far, d, missing)], d)
    return padded


def pad(program: Program, batch: Mapping[str, Tensor], bins: Sequence[int] = ()) -> dict[str, Tensor]:
    """`batch` padded as `program` needs it. `bins` are the tokens of each bin, which follow each other in the row;
    by default a row's documents are put into as many as the program has. Raises PadError where the model would see the
    padding.
    """
    if program.bins > 1:
        batch = _pad_bins(program, *((batch, bins) if bins else _in_bins(program, batch)))
    padded = pad_batch(program.inputs, program.dims, program.divisors, batch, hazard=program.padding_hazard)
    return _spread(program, padded) if program.spread > 1 else padded


def _token_dims(program: Program, batch: Mapping[str, Tensor]) -> Iterator[tuple[str, int]]:
    """Each key of the batch that has tokens, with the dim that they are in."""
    token = dim_symbol(TOKENS)
    for info in program.inputs:
        if info.kind == "batch" and info.fqn in batch:
            yield from ((info.fqn, d) for d, size in enumerate(info.meta.shape) if size == token)


def _lengths(program: Program, batch: Mapping[str, Tensor]) -> tuple[list[int], list[int]]:
    """Where the documents of a row begin, and their lengths."""
    key, dim = next(_token_dims(program, batch))
    starts = document_starts(batch)
    begins = [0] if starts is None else torch.nonzero(starts).flatten().tolist()
    return begins, [end - begin for begin, end in pairwise([*begins, batch[key].shape[dim]])]


def _reordered(program: Program, batch: Mapping[str, Tensor], order: Tensor) -> dict[str, Tensor]:
    """A row with its tokens in another order."""
    found = dict(batch)
    for key, dim in _token_dims(program, batch):
        found[key] = found[key].index_select(dim, order.to(found[key].device))
    return found


def _spread(program: Program, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A padded row with its tokens so ordered that the ranks of a ring have as much to do."""
    order = ring_order(_lengths(program, batch)[1], program.spread)
    return _reordered(program, batch, torch.tensor(order, dtype=torch.int64))


def _in_bins(program: Program, batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[int]]:
    """A row with its documents in another order, bin by bin, and the tokens of each bin."""
    begins, lengths = _lengths(program, batch)
    documents = longest_first(SequenceItem(i, length, length) for i, length in enumerate(lengths))
    shares = [sorted(item.index for item in share) for share in spread(documents, program.bins)]
    places = [torch.arange(begins[i], begins[i] + lengths[i]) for share in shares for i in share]
    return _reordered(program, batch, torch.cat(places)), [sum(lengths[i] for i in share) for share in shares]


def _pad_bins(program: Program, batch: Mapping[str, Tensor], bins: Sequence[int]) -> dict[str, Tensor]:
    """A row whose bins have equal length, each padded with a document of its own."""
    multiple = program.divisors[TOKENS] // program.bins
    length = max(bins) + -max(bins) % multiple
    found = dict(batch)
    if program.padding_hazard is not None and any(tokens != length for tokens in bins):
        raise PadError("input_ids", f"bins of {', '.join(map(str, bins))} tokens become equal", program.padding_hazard)
    for key, dim in _token_dims(program, batch):
        value, begin, parts = found[key], 0, []
        rule = _COUNTING.get(key) or _constant(padding_of(key, value.dtype) or 0)
        for number, tokens in enumerate(bins):
            parts.append(value.narrow(dim, begin, tokens))
            if tokens < length:
                made = rule(value, dim, length - tokens)
                parts.append(made + number if key == DOCUMENTS else made)
            begin += tokens
        found[key] = torch.cat(parts, dim)
    return found
