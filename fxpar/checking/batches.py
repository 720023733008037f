"""What is looked at of a user's batch and loss before strategies are checked with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fxpar.batching.ids import id_limits
from fxpar.batching.lengths import length_limits
from fxpar.errors import BatchIdError, CheckedLengthError, RowMeanError
from fxpar.ir.graph import TOKENS, LogicalGraph
from fxpar.losses import LossFunction, with_metrics
from fxpar.runtime.padding import batch_dims

Batch = Mapping[str, Tensor]
_CLOSE = 1e-4  # relative: rounding of rows that are added up in another order


def check_values(logical: LogicalGraph, batches: Sequence[Batch]) -> None:
    """Raises BatchIdError for the first number of a batch that has no row in the table that it indexes."""
    limits = id_limits(logical)
    for batch in batches:
        for key, limit in limits.items():
            values = batch.get(key)
            if values is None or not values.numel():
                continue
            bad = values[limit.outside(values)]
            if bad.numel():
                raise BatchIdError(key, int(bad.reshape(-1)[0]), limit.rows, limit.table)


def check_length(logical: LogicalGraph, batch: Batch, error: RuntimeError) -> None:
    """Raise CheckedLengthError if the graph failed on a document that is too short or too long for it."""
    limits = length_limits(logical)
    length = batch_dims(logical.inputs, logical.dims, batch).get(TOKENS)
    if length is not None and not limits.hold(length):
        raise CheckedLengthError(length, str(limits)) from error


def unread_keys(logical: LogicalGraph, batch: Batch) -> list[str]:
    """Keys of the captured batch that nothing in the model and the loss reads."""
    pairs = zip(logical.placeholders, logical.inputs, strict=True)
    read = {info.fqn for node, info in pairs if info.kind == "batch" and node.users}
    return [key for key in batch if key not in read]


def check_rows_add_up(model: nn.Module, loss_fn: LossFunction, batch: Batch, unread: Sequence[str] = ()) -> None:
    """Raises RowMeanError where the loss of a batch of several rows is the mean of the losses of its rows.

    The loss runs once per row, without gradients. Keys with one row are for all of them; what is `unread` does not
    count. Nothing is said where the loss is neither the mean nor the sum, where a row does not run alone (a batch norm
    takes two), or where the batch has no common number of rows.
    """
    rows = {key: value.shape[0] if value.dim() else 1 for key, value in batch.items() if key not in unread}
    counts = {count for count in rows.values() if count != 1}
    if len(counts) != 1:
        return
    (count,) = counts
    buffers = {name: value.detach().clone() for name, value in model.named_buffers()}
    rows_alone = [
        {key: value[i : i + 1] if rows.get(key, 1) > 1 else value for key, value in batch.items()} for i in range(count)
    ]
    with torch.no_grad():
        try:
            whole, *each = (float(with_metrics(loss_fn(model, given))[0]) for given in (batch, *rows_alone))
        except Exception:  # of the user's code, which is checked with the whole batch
            return
        finally:
            for name, value in model.named_buffers():
                value.copy_(buffers[name])  # batch norms count their steps
    if whole and abs(sum(each) / count - whole) <= _CLOSE * abs(whole) < abs(sum(each) - whole):
        raise RowMeanError(count, whole, sum(each))
