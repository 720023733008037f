"""Loss functions in the form that `fxpar.capture` wants: `loss_fn(model, batch) -> sum over valid tokens`.

Conventions, for all of them:

- The result is a **sum** over valid tokens (elements), not a mean, in fp32 (fp64 for fp64 models). The captured graph
  multiplies it by its input `scale`, which the runtime sets to 1/(valid tokens of the whole mini-batch): micro-batches
  of any size then add up to the gradient of the mean.
- `batch["labels"]` are **aligned**: labels[b, t] is what the logits at position t must predict. For a language model
  that is the next token; `next_token_labels` makes them. A label of `ignore_index` (-100) is not valid, it adds 0.
- Beside the loss a function may return metrics, `(loss, {name: metric})`. A metric is a scalar, which is summed over
  the mini-batch, or a pair of scalars `(sum, count)`, of which the quotient of the two sums is reported.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar.errors import ModelOutputError
from fxpar.ops.cross_entropy import cross_entropy_loss

Metrics = Mapping[str, Tensor | tuple[Tensor, Tensor]]
"""By name: scalars that are summed, or pairs (sum, count)."""
LossFunction = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Metrics]]
IGNORE_INDEX = -100
_NOT_INPUTS = {"labels", "loss_mask"}


def causal_lm(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Sum of the token losses of a language model.

    Calls the model with those tensors of the batch that its forward accepts (all but the labels), and `use_cache=False`
    if it knows that. A forward without an argument `input_ids` gets the token ids as its first one. The model returns
    logits [..., V], a tuple that begins with them, or an object or a mapping with `logits`; labels [...] are aligned.
    Raises ModelOutputError if it returns anything else.
    """
    return cross_entropy_sum(_logits(model(**_model_inputs(model, batch))), batch["labels"])


def cross_entropy_sum(logits: Tensor, labels: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Sum over tokens of -log softmax(logits)[label]; logits [..., V], labels [...] int64 -> scalar.

    bf16 and fp16 logits are summed up in fp32 without a copy of them. Other labels outside [0, V) give NaN.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    return cross_entropy_loss(rows, labels.reshape(-1), ignore_index=ignore_index).sum()


def accuracy(logits: Tensor, labels: Tensor, ignore_index: int = IGNORE_INDEX) -> tuple[Tensor, Tensor]:
    """A metric: (correct, counted) of the valid labels [...], by the largest of the logits [..., V]; int64 scalars.

    A loss function returns it beside the loss: `return loss, {"accuracy": losses.accuracy(logits, labels)}`.
    """
    valid = labels != ignore_index
    correct = (logits.argmax(-1) == labels) & valid
    return correct.sum(), valid.sum()


def what_is_called(function: Any) -> Any:
    """The function behind `functools.partial`."""
    return what_is_called(function.func) if isinstance(function, functools.partial) else function


def with_metrics(found: Any) -> tuple[Any, Mapping[str, Any]]:
    """What a loss function returned as the loss and its metrics; none if it returned something else than the two."""
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping):
        return found[0], found[1]
    return found, {}


def mse_sum(prediction: Tensor, target: Tensor) -> Tensor:
    """Sum over elements of the squared difference, at least in fp32 -> scalar."""
    if prediction.dtype != torch.float64:
        prediction = prediction.float()
    return F.mse_loss(prediction, target.to(prediction.dtype), reduction="sum")


def next_token_labels(
    input_ids: Tensor,
    *,
    document_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Aligned labels of tokens [..., T]: the next token; `ignore_index` at the last one and at the end of a document.

    Documents packed into one row are given by their ids, or by positions that restart at 0; both are [..., T].
    """
    labels = torch.full_like(input_ids, ignore_index)
    labels[..., :-1] = input_ids[..., 1:]
    ends = torch.zeros_like(input_ids, dtype=torch.bool)
    if document_ids is not None:
        ends[..., :-1] |= document_ids[..., 1:] != document_ids[..., :-1]
    if position_ids is not None:
        ends[..., :-1] |= position_ids[..., 1:] == 0
    return labels.masked_fill(ends, ignore_index)


def _logits(outputs: Any) -> Tensor:
    found = outputs
    if hasattr(outputs, "logits"):
        found = outputs.logits
    elif isinstance(outputs, Mapping):
        found = outputs.get("logits")
    elif isinstance(outputs, tuple) and outputs:
        found = outputs[0]
    if not isinstance(found, Tensor):
        raise ModelOutputError("losses.causal_lm", outputs)
    return found


def _model_inputs(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keyword arguments of the model's forward that the batch has."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    inputs: dict[str, Any] = {
        key: value for key, value in batch.items() if key not in _NOT_INPUTS and (takes_any or key in parameters)
    }
    if "input_ids" in batch and "input_ids" not in inputs and parameters:
        inputs[next(iter(parameters))] = batch["input_ids"]
    if "use_cache" in parameters:
        inputs["use_cache"] = False
    return inputs
