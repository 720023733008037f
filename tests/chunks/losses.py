"""Loss functions as users write them, and some that cannot run in chunks of tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar import losses
from fxpar.models.llama import Llama, LlamaOptions
from tests.captured import Captured, take, tokens

VOCAB = 61


def logits_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return model(batch["input_ids"], batch["position_ids"])


def smoothed(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Label smoothing; the mean over classes is of tokens without a label too, so that it cannot be padded."""
    rows, labels = logits_of(model, batch).reshape(-1, VOCAB), batch["labels"].reshape(-1)
    return F.cross_entropy(rows, labels, reduction="sum", label_smoothing=0.1)


def z_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    logits, labels = logits_of(model, batch), batch["labels"]
    valid = labels != losses.IGNORE_INDEX
    return losses.cross_entropy_sum(logits, labels) + 1e-3 * (torch.logsumexp(logits, -1).square() * valid).sum()


def written(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy with a mask of labels that is as large as the logits, and not made of them."""
    picked = batch["labels"][..., None] == torch.arange(VOCAB)
    return -(torch.log_softmax(logits_of(model, batch), -1) * picked).sum()


def focal(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Written out, with gather."""
    logits, labels = logits_of(model, batch), batch["labels"]
    log_p = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return (-((1 - log_p.exp()) ** 2) * log_p * (labels != losses.IGNORE_INDEX)).sum()


def capped(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
    """A soft cap as in Gemma 2, and metrics."""
    logits, labels = 30 * torch.tanh(logits_of(model, batch) / 30), batch["labels"]
    counted = (labels != losses.IGNORE_INDEX).sum()
    return losses.cross_entropy_sum(logits, labels), {"accuracy": losses.accuracy(logits, labels), "counted": counted}


MIX = torch.sin(torch.arange(VOCAB * VOCAB, dtype=torch.float64)).view(VOCAB, VOCAB) / 8
WIDEN = torch.sin(torch.arange(VOCAB * (VOCAB + 9), dtype=torch.float64)).view(VOCAB, VOCAB + 9) / 8


def mixed(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """A product behind the logits makes as many again, and the loss reads both."""
    logits = logits_of(model, batch)
    return losses.cross_entropy_sum(logits + torch.tanh(logits) @ MIX, batch["labels"])


def widened(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """A product behind the logits makes more of them, and the loss reads both."""
    logits = torch.tanh(logits_of(model, batch))
    return losses.cross_entropy_sum(F.pad(logits, (0, 9)) * (logits @ WIDEN), batch["labels"])


def shifted(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The logits of a token belong to the label of the next one."""
    return losses.cross_entropy_sum(logits_of(model, batch)[:, :-1], batch["labels"][:, 1:])


def centered(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Each token sees the logits of all."""
    logits = logits_of(model, batch)
    return losses.cross_entropy_sum(logits - logits.mean((0, 1)), batch["labels"])


def scaled_by_all(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The gradient needs a sum over all tokens."""
    logits = logits_of(model, batch)
    return losses.cross_entropy_sum(logits, batch["labels"]) + torch.logsumexp(logits, -1).sum().square()


@functools.cache
def with_loss(loss: Callable, rows: int = 1, dtype: torch.dtype = torch.float64) -> Captured:
    """A Llama of one layer; 12 divides by all numbers of chunks here."""
    torch.manual_seed(0)
    model = Llama(LlamaOptions(1, 32, 4, 2, 48, VOCAB))
    return take(model, loss, tokens(VOCAB, 12, 24, rows=rows), dtype)
