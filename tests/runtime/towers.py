"""A small model of two towers and a decoder, with losses on parts of it, and plain torch on one device for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpar
from fxpar import losses

Batch = Mapping[str, Tensor]
WIDTH, VOCAB = 16, 37
ROWS = {"pixels": {0: "B"}, "ids": {0: "B"}}


class Mixer(nn.Module):
    """A residual layer with attention of one head."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.norm, self.causal = nn.LayerNorm(WIDTH), causal
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (y.view(B, T, 4, WIDTH // 4).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, WIDTH))
        return x + self.down(F.gelu(self.up(x)))


class Vision(nn.Module):
    """Images [B, 3, 8, 8] -> patches [B, 4, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.layer = nn.Conv2d(3, WIDTH, 4, stride=4), Mixer()

    def forward(self, pixels: Tensor) -> Tensor:
        return self.layer(self.patches(pixels).flatten(2).transpose(1, 2))


class Towers(nn.Module):
    """An image encoder, a text tower, and a language model that shares the text tower's embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.vision, self.embedding = Vision(), nn.Embedding(VOCAB, WIDTH)
        self.text, self.decoder = Mixer(), Mixer(causal=True)
        self.head, self.classes = nn.Linear(WIDTH, VOCAB, bias=False), nn.Linear(WIDTH, 5)
        self.never = nn.Linear(3, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.decoder(self.embedding(input_ids)))


def caption(model: Any, batch: Batch) -> Tensor:
    """A language model of text alone: sequences of tokens."""
    return losses.causal_lm(model, batch)


def pairs(model: Any, batch: Batch) -> Tensor:
    """Contrastive: every image against every text of the batch, both ways; a sum over rows."""
    images = F.normalize(model.vision(batch["pixels"]).mean(1), dim=-1)
    texts = F.normalize(model.text(model.embedding(batch["ids"])).mean(1), dim=-1)
    scores, right = 5.0 * images @ texts.T, torch.arange(batch["pixels"].shape[0])
    ways = (F.cross_entropy(scores, right, reduction="sum"), F.cross_entropy(scores.T, right, reduction="sum"))
    return (ways[0] + ways[1]) / 2


def classify(model: Any, batch: Batch) -> Tensor:
    """The mean over images, some of which have no label."""
    return F.cross_entropy(model.classes(model.vision(batch["pixels"]).mean(1)), batch["labels"])


def describe(model: Any, batch: Batch) -> Tensor:
    """A vision-language model: the patches of an image before its text, a loss on the text."""
    images, texts = model.vision(batch["pixels"]), model.embedding(batch["input_ids"])
    hidden = model.decoder(torch.cat([images.reshape(1, -1, WIDTH), texts], 1))
    return losses.cross_entropy_sum(model.head(hidden[:, -batch["input_ids"].shape[1] :]), batch["labels"])


def draw(seed: int, *shape: int, most: int = 0) -> Tensor:
    """Numbers, or (`most`) ids below it."""
    generator = torch.Generator().manual_seed(seed)
    if most:
        return torch.randint(0, most, shape, generator=generator)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def text(seed: int, length: int) -> Tensor:
    return draw(seed, length, most=VOCAB)


def pair(seed: int, rows: int) -> dict[str, Tensor]:
    return {"pixels": draw(seed, rows, 3, 8, 8), "ids": draw(seed, rows, 6, most=VOCAB)}


def labelled(seed: int, rows: int) -> dict[str, Tensor]:
    labels = draw(seed, rows, most=5)
    labels[0] = -100
    return {"pixels": draw(seed, rows, 3, 8, 8), "labels": labels}


def described(seed: int, length: int, images: int = 1) -> dict[str, Tensor]:
    ids = draw(seed, 1, length, most=VOCAB)
    return {
        "pixels": draw(seed, images, 3, 8, 8),
        "input_ids": ids,
        "labels": losses.next_token_labels(ids),
    }


def row(ids: Tensor) -> dict[str, Tensor]:
    """A sequence as a batch."""
    return {"input_ids": ids[None], "labels": losses.next_token_labels(ids[None])}


def tasks(**changes: Mapping[str, Any]) -> dict[str, fxpar.Task]:
    """All four; `changes` are fields by task."""
    known: dict[str, dict[str, Any]] = {
        "caption": {"loss": caption, "example": row(text(0, 23)), "weight": 0.5},
        "pairs": {"loss": pairs, "example": pair(0, 7), "weight": 2.0, "dynamic": ROWS},
        "classify": {"loss": classify, "example": labelled(0, 7)},
        "describe": {"loss": describe, "example": described(0, 19), "weight": 1.5},
    }
    return {name: fxpar.Task(**{**fields, **changes.get(name, {})}) for name, fields in known.items()}


def count(task: str, batch: Batch) -> int:
    """What the summed loss of a batch is divided by."""
    if "labels" in batch:
        return int((batch["labels"] != -100).sum())
    return len(next(iter(batch.values())))


def one_device(
    model: nn.Module, chosen: Mapping[str, fxpar.Task], mini_batch: Mapping[str, Sequence[Any]], rescaled: float = 1.0
) -> dict[str, Any]:
    """The weighted sum of the mean losses, one sequence and batch at a time; gradients are added to."""
    found: dict[str, Any] = {"losses": {}}
    for name, items in mini_batch.items():
        if not items:
            continue
        batches = [row(item) if isinstance(item, Tensor) else item for item in items]
        whole, mean = sum(count(name, batch) for batch in batches), 0.0
        for batch in batches:
            loss = chosen[name].loss(model, batch)
            loss = loss * (count(name, batch) if name == "classify" else 1) / whole
            (loss * chosen[name].weight * rescaled).backward()
            mean += loss.item()
        found["losses"][name] = mean
    found["loss"] = sum(chosen[name].weight * rescaled * mean for name, mean in found["losses"].items())
    found["grads"] = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return found
