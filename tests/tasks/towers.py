"""A small model with an image tower before a language model, and three tasks that read parts of it; captured once."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar import Task, losses
from fxpar.tasks import TaskStep, captured

DIM, WIDE = 8, 24


class Layer(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, wide), nn.Linear(wide, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Image(nn.Module):
    """Three equal layers and a wider one, none of whose names has a number."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Linear(12, DIM), nn.LayerNorm(DIM)
        self.alpha, self.beta, self.gamma, self.delta = (Layer(wide) for wide in (WIDE, WIDE, WIDE, 2 * WIDE))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.delta(self.gamma(self.beta(self.alpha(self.patches(x))))))


class Towers(nn.Module):
    """A language model whose layers take turns: narrow, wide."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.words, self.head = Image(), nn.Embedding(16, DIM), nn.Linear(DIM, 16)
        self.layers = nn.ModuleList(Layer(wide) for wide in (WIDE, 2 * WIDE) * 3)

    def read(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return losses.cross_entropy_sum(self.head(x), labels)


def caption(model: Towers, batch: dict[str, Tensor]) -> Tensor:
    seen = torch.cat([model.image(batch["pixels"]), model.words(batch["input_ids"])], 1)
    return model.read(seen, F.pad(batch["labels"], (4, 0), value=-100))


def text(model: Towers, batch: dict[str, Tensor]) -> Tensor:
    return model.read(model.words(batch["input_ids"]), batch["labels"])


def tapped(model: Towers, batch: dict[str, Tensor]) -> Tensor:
    """The loss reads what the second layer makes too."""
    image = model.image
    second = image.beta(image.alpha(image.patches(batch["pixels"])))
    return (image.delta(image.gamma(second)) - second).square().sum()


IDS = {"input_ids": torch.ones(1, 8, dtype=torch.long), "labels": torch.ones(1, 8, dtype=torch.long)}
PIXELS = {"pixels": torch.ones(1, 4, 12)}
TASKS = {
    "caption": (Task(caption, IDS | PIXELS), 2),
    "text": (Task(text, IDS), 4),
    "tapped": (Task(tapped, PIXELS, dynamic=None), 1),
}


@functools.cache
def step(name: str) -> TaskStep:
    task, batches = TASKS[name]
    with torch.device("meta"):
        model = Towers()
    return captured(model, task, batches)
