"""The built-in examples by name: module, options, loss function and batches of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpar import losses
from fxpar.models.batches import ROWS, TOKENS, labelled_batches, token_batches
from fxpar.models.gpt import Gpt, GptOptions
from fxpar.models.llama import Llama, LlamaOptions
from fxpar.models.loaded import Batch, LoadedModel, perturb
from fxpar.models.mlp import Mlp, MlpOptions
from fxpar.models.options import with_options
from fxpar.models.vit import Vit, VitOptions
from fxpar.tracer.documents import document_ids_from_positions, packed


@dataclass(frozen=True)
class Example:
    """One built-in example; `batches(options, sizes, dtype, seed)` makes one micro-batch per size."""

    module: Callable[[Any], nn.Module]
    options: Any
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    sizes: tuple[int, ...]
    batches: Callable[[Any, Sequence[int], torch.dtype, int], tuple[Batch, ...]]


def packed_lm_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Sum of the token losses; attention stays inside the documents that restarting positions mark."""
    with packed(document_ids_from_positions(batch["position_ids"])):
        return losses.causal_lm(model, batch)


def image_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Sum of the losses of all images."""
    return losses.cross_entropy_sum(model(batch["pixel_values"]), batch["labels"])


def vector_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Sum of the losses of all rows."""
    return losses.cross_entropy_sum(model(batch["x"]), batch["labels"])


def _tokens(options: Any, sizes: Sequence[int], dtype: torch.dtype, seed: int) -> tuple[Batch, ...]:
    return token_batches(sizes, options.vocab, seed)


def _images(options: Any, sizes: Sequence[int], dtype: torch.dtype, seed: int) -> tuple[Batch, ...]:
    shape = (3, options.image, options.image)
    return labelled_batches("pixel_values", shape, options.classes, sizes, dtype, seed)


def _vectors(options: Any, sizes: Sequence[int], dtype: torch.dtype, seed: int) -> tuple[Batch, ...]:
    return labelled_batches("x", (options.inputs,), options.classes, sizes, dtype, seed)


EXAMPLES: dict[str, Example] = {
    "llama": Example(Llama, LlamaOptions(), packed_lm_loss, TOKENS, _tokens),
    "gpt": Example(Gpt, GptOptions(), packed_lm_loss, TOKENS, _tokens),
    "vit": Example(Vit, VitOptions(), image_loss, ROWS, _images),
    "mlp": Example(Mlp, MlpOptions(), vector_loss, ROWS, _vectors),
}


def load_example(
    name: str,
    given: Mapping[str, str],
    *,
    dtype: torch.dtype,
    device: str,
    seed: int,
    tokens: Sequence[int] | None,
    noise: bool = True,
) -> LoadedModel:
    """Build the example `name` with options as texts. Raises ModelOptionError."""
    example = EXAMPLES[name]
    options = with_options(example.options, given, f"the built-in {name!r}")
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        model = example.module(options).to(dtype)
    if noise and device != "meta":
        perturb(model, seed)
    batches = example.batches(options, tuple(tokens or example.sizes), dtype, seed)
    return LoadedModel(name, model, example.loss_fn, batches[0], batches)
