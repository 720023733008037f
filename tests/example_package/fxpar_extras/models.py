"""A front end: models called `extras:NAME`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxpar_extras.ops  # noqa: F401 - the op and its rules
from fxpar import losses
from fxpar.errors import ModelOptionError, ModelTypeError
from fxpar.models import LoadedModel
from fxpar.models.batches import token_batches
from fxpar.models.loaded import perturb


class Relu2(nn.Module):
    """input_ids [B, T] -> logits [B, T, vocab]; each token by itself."""

    def __init__(self, dim: int, width: int = 96, vocab: int = 131) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.up = nn.Parameter(torch.randn(dim, width) / dim**0.5)
        self.down = nn.Linear(width, dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.head(x + self.down(torch.ops.extras.relu2(self.norm(x), self.up)))


SIZES = {"small": 24, "large": 512}


def load(name, given, *, dtype, device, seed, tokens, noise) -> LoadedModel:
    """The model of size `name`."""
    if name not in SIZES:
        raise ModelTypeError(name, f"is none of {', '.join(SIZES)}")
    if given:
        raise ModelOptionError.unknown(next(iter(given)), f"extras:{name}", [])
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        model = Relu2(SIZES[name]).to(dtype)
    if noise and device != "meta":
        perturb(model, seed)
    batches = token_batches(tokens or (61, 37), 131, seed, positions=False)
    return LoadedModel(f"extras:{name}", model, losses.causal_lm, batches[0], batches)
