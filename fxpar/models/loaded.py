"""What a model loader returns: a module with everything that `capture` and `check` need of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fxpar.losses import IGNORE_INDEX

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class LoadedModel:
    """A model, its summed loss, the batch to capture with, and micro-batches to check with: rows, whose documents may
    be marked by `document_ids` [1, T].

    `loss_fn(model, batch)` returns the sum over valid tokens (rows of a model that has no tokens). Without `has_values`
    the batches are zeros of the right shapes, as a function that makes them on the meta device gives no others.
    `weights` is the folder that a model on the meta device is to be filled from, `files` what it was made from beside
    Python code, `initializer` fills what one module has itself (see `fxpar.parallelize`).
    """

    name: str
    model: nn.Module
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    example_batch: Batch
    batches: tuple[Batch, ...]
    has_values: bool = True
    weights: str | None = None
    files: tuple[Path, ...] = ()
    initializer: Callable[[nn.Module], object] | None = None

    def params(self) -> dict[str, Tensor]:
        """Parameters by FQN, a tied one once, detached."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        return dict(self.model.named_buffers())

    def scale(self) -> float:
        """1/(valid tokens of all micro-batches): with it, the sum of the losses is the mean."""
        return mean_scale(self.batches)


def folder_of(spec: str) -> Path | None:
    """The folder that MODEL stands for, `hf:./FOLDER`: it has a slash, or begins with a dot or a tilde."""
    name = spec.removeprefix("hf:")
    is_folder = name != spec and ("/" in name or name.startswith((".", "~")))
    return Path(name).expanduser() if is_folder else None


def mean_scale(batches: Sequence[Batch]) -> float:
    """1/(valid tokens of all micro-batches)."""
    return 1.0 / max(1, sum(valid_count(batch) for batch in batches))


def valid_count(batch: Batch) -> int:
    """Labels that count; without labels, the size of dim 0 of the first tensor."""
    labels = batch.get("labels")
    if labels is None:
        return next(iter(batch.values())).shape[0]
    return int((labels != IGNORE_INDEX).sum()) if not labels.dtype.is_floating_point else labels.shape[0]


def cast_batch(batch: Batch, dtype: torch.dtype) -> dict[str, Tensor]:
    """The floating-point tensors of a batch in `dtype`."""
    return {k: v.to(dtype) if v.dtype.is_floating_point else v for k, v in batch.items()}


def perturb(model: nn.Module, seed: int) -> None:
    """Add noise to all parameters, in place.

    WHY: fresh models have norm weights of one, biases of zero and projections so small that attention is uniform; a
    bias added twice or a gradient that was not reduced would hardly change the result. Matrices [.., D] get noise of
    standard deviation 0.5/sqrt(D), vectors of 0.1.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            size = 0.1 if parameter.dim() < 2 else 0.5 / max(1, parameter.shape[-1]) ** 0.5
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_((size * noise).to(parameter))
