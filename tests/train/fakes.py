"""A model with the face of `fxpar.parallelize` and no ranks behind it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fxpar.runtime.report import ExpertLoad


class FakeModel(nn.Module):
    """Bigrams; groups are invented: up to 8 tokens "dp4", longer ones "cp4" with a switch. `merged` and `rides` by
    step.
    """

    def __init__(
        self,
        vocab: int = 11,
        bad_steps: tuple[int, ...] = (),
        merged: dict[int, Any] | None = None,
        rides: dict[int, Any] | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.logits = nn.Embedding(vocab, vocab)
        self.bad_steps, self.steps, self.merged, self.rides = bad_steps, 0, merged or {}, rides or {}

    def train_step(self, sequences):
        self.steps += 1
        loss = sum(F.cross_entropy(self.logits(s[:-1]), s[1:], reduction="sum") for s in sequences)
        valid = sum(len(s) - 1 for s in sequences)
        (loss / valid).backward()
        skipped = self.steps in self.bad_steps
        if skipped:
            self.zero_grad()
        groups = []
        for limit, strategy, low, high in ((8, "dp4", 0, 8), (64, "cp4", 9, 64)):
            mine = [s for s in sequences if low <= len(s) <= high]
            if mine:
                groups.append(group_report(limit, strategy, mine))
        return SimpleNamespace(
            metrics={"accuracy": 0.5},
            tasks={},
            sequences=len(sequences),
            experts=(ExpertLoad("moe", (1.0, 3.0), (4.0,)),),
            loss=math.nan if skipped else float(loss.detach() / valid),
            tokens=valid + len(sequences),
            valid_tokens=valid,
            skipped=skipped,
            groups=tuple(groups),
            merged=self.merged.get(self.steps, ()),
            rides=self.rides.get(self.steps, ()),
            predicted_s=0.25,
        )


def group_report(limit, strategy, sequences):
    return SimpleNamespace(
        limit=limit,
        strategy=strategy,
        sequences=len(sequences),
        tokens=sum(map(len, sequences)),
        longest=max(map(len, sequences)),
        micro_batches=1,
        wall_s=0.5,
        switch_s=0.125 if strategy == "cp4" else 0.0,
        switch_bytes=2_000_000 if strategy == "cp4" else 0,
        reduce_s=0.0625,
        reduce_bytes=1000,
        predicted_s=0.25,
        predicted_switch_s=0.0625 if strategy == "cp4" else 0.0,
        predicted_reduce_s=0.03125,
        lengths=((8 if limit == 8 else 32, len(sequences)),),
        unit="tokens",
    )


def batches(count: int = 1000, vocab: int = 11, seed: int = 0):
    """Mini-batches of three sequences of 5 to 20 tokens in which each token decides the next."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        lengths = torch.randint(5, 21, (3,), generator=generator).tolist()
        yield [(torch.arange(n) * 3 + i) % vocab for i, n in enumerate(lengths)]
