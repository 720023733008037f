"""A loss function that returns exactly a mean is captured as the sum; other sums pass unchanged."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxpar.tracer import capture
from tests.tracer.helpers import check, difference, eager, run
from tests.tracer.models import MLP


def batch(B: int) -> dict[str, torch.Tensor]:
    return {
        "x": torch.randn(B, 8, dtype=torch.float64),
        "y": torch.randn(B, 4, dtype=torch.float64),
        "labels": torch.tensor([-100, *torch.randint(4, (B - 1,)).tolist()]),
    }


def smooth(m, b):
    return F.cross_entropy(m(b["x"]), b["labels"], label_smoothing=0.1)


def halved(m, b):
    loss = F.cross_entropy(m(b["x"]), b["labels"])
    loss *= 0.5
    return loss


def with_nan(m, b):
    return torch.where(b["y"] > 0, m(b["x"]), torch.nan).nanmean()


MEANS = {
    "cross_entropy": (
        lambda m, b: F.cross_entropy(m(b["x"]), b["labels"]),
        lambda b: (b["labels"] >= 0).sum(),
    ),
    "module": (lambda m, b: nn.CrossEntropyLoss()(m(b["x"]), b["labels"]), lambda b: (b["labels"] >= 0).sum()),
    "cast": (
        lambda m, b: -2.0 * F.cross_entropy(m(b["x"]), b["labels"]).view(1).squeeze().float().double() / 4,
        lambda b: (b["labels"] >= 0).sum(),
    ),
    "nll": (
        lambda m, b: F.nll_loss(m(b["x"]).log_softmax(-1), b["labels"]),
        lambda b: (b["labels"] >= 0).sum(),
    ),
    "smoothing": (smooth, lambda b: (b["labels"] >= 0).sum()),
    "probabilities": (lambda m, b: F.cross_entropy(m(b["x"]), b["y"].softmax(-1)), lambda b: b["y"].shape[0]),
    "mse": (lambda m, b: F.mse_loss(m(b["x"]), b["y"]), lambda b: b["y"].numel()),
    "mean": (lambda m, b: (m(b["x"]) - b["y"]).abs().mean(), lambda b: b["y"].numel()),
    "torch.mean": (lambda m, b: torch.mean((m(b["x"]) - b["y"]) ** 2), lambda b: b["y"].numel()),
    "huber": (lambda m, b: F.smooth_l1_loss(m(b["x"]), b["y"], beta=0.5), lambda b: b["y"].numel()),
    "in place": (halved, lambda b: (b["labels"] >= 0).sum()),
    "nanmean": (with_nan, lambda b: (b["y"] > 0).sum()),
    "kl": (
        lambda m, b: F.kl_div(m(b["x"]).log_softmax(-1), b["y"].softmax(-1), reduction="batchmean"),
        lambda b: b["y"].shape[0],
    ),
}


@pytest.mark.parametrize("name", MEANS)
def test_mean_becomes_the_sum(name):
    loss, count = MEANS[name]
    model = MLP().double()
    graph = capture(model, loss, batch(6))
    for B in (6, 3):
        b = batch(B)
        got = run(graph, model, b, scale=0.5)
        want = eager(model, loss, b, scale=0.5 * float(count(b)))
        assert difference(got, want) < (1e-6 if name == "cast" else 1e-12)


SUMS = {
    "cross_entropy": lambda m, b: F.cross_entropy(m(b["x"]), b["labels"], reduction="sum"),
    "none": lambda m, b: F.cross_entropy(m(b["x"]), b["labels"], reduction="none").sum(),
    "weighted": lambda m, b: F.cross_entropy(m(b["x"]), b["labels"], torch.ones(4).double(), reduction="sum"),
    "masked": lambda m, b: (F.mse_loss(m(b["x"]), b["y"], reduction="none") * (b["y"] > 0)).sum(),
    "mean over features": lambda m, b: (m(b["x"]) - b["y"]).pow(2).mean(-1).sum(),
    "constant": lambda m, b: (m(b["x"]) - b["y"]).pow(2).sum() / 7 + 0.1 * sum(p.pow(2).sum() for p in m.parameters()),
    "other dims": lambda m, b: F.cross_entropy(
        m(b["x"]).unflatten(1, (2, 2)), b["labels"][:, None].clamp(max=1).expand(-1, 2), reduction="sum"
    ),
    "norm": lambda m, b: (m(b["x"]) / m(b["x"]).norm()).sum(),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_taken_as_they_are(name):
    check(MLP().double(), SUMS[name], [batch(6), batch(3)])


def test_loss_in_bf16_is_summed_in_fp32():
    model = MLP().bfloat16()
    graph = capture(model, lambda m, b: F.cross_entropy(m(b["x"].bfloat16()), b["labels"]), batch(6))
    assert graph.results[0].meta["tensor"].dtype == torch.float32
    assert [i.meta.dtype for i in graph.inputs if i.kind == "scale"] == [torch.float32]
