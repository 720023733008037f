"""What a loss function may return beside the loss, and what is said of anything else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxpar import errors, losses
from fxpar.checking.eager import compare_with_eager
from fxpar.ir.graph import Output
from fxpar.tracer import capture
from tests.tracer.helpers import run
from tests.tracer.models import MLP

BATCH = {"x": torch.randn(6, 8), "labels": torch.randint(0, 4, (6,))}


def loss_with(metrics):
    """A loss function that returns `metrics(logits, labels)` too."""

    def loss(model, batch):
        logits = model(batch["x"])
        return losses.cross_entropy_sum(logits, batch["labels"]), metrics(logits, batch["labels"])

    return loss


def several(logits, labels):
    return {"accuracy": losses.accuracy(logits, labels), "largest": logits.amax(-1).sum()}


def test_metrics_are_results_of_the_graph_and_need_no_scale():
    model = MLP()
    graph = capture(model, loss_with(several), BATCH)
    names = ["loss", "accuracy", "accuracy:count", "largest"]
    assert list(graph.outputs[:4]) == [Output("loss", name) for name in names]
    found, idle = run(graph, model, BATCH, scale=0.25), run(graph, model, BATCH, scale=0.0)
    logits = model(BATCH["x"])
    assert found["loss", "accuracy"] == (logits.argmax(-1) == BATCH["labels"]).sum()
    assert found["loss", "accuracy:count"] == 6
    assert float(found["loss", "largest"]) == pytest.approx(float(logits.amax(-1).sum()), rel=1e-6)
    assert all(idle["loss", name] == 0 for name in names)  # an idle micro-batch counts nothing
    assert compare_with_eager(graph, model, loss_with(several), BATCH).grad_max_rel_err < 1e-5


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (lambda a, b: {"acc": (a.argmax(-1) == b).float().mean()}, "'acc' .* is a mean"),
        (lambda a, b: {"ce": F.cross_entropy(a, b)}, "'ce' .* is a mean"),
        (lambda a, b: {"acc": a.argmax(-1)}, r"has 1 dim\(s\)"),
        (lambda a, b: {"acc": 0.5}, "is a float"),
        (lambda a, b: {"acc": (a.sum(),)}, "not of two"),
        (lambda a, b: {"acc": (a.sum(), 3)}, "is an int"),
        (lambda a, b: {"loss": a.sum()}, "another name"),
        (lambda a, b: {3: a.sum()}, "another name"),
    ],
)
def test_what_is_no_metric(metrics, message):
    with pytest.raises(errors.MetricError, match=message):
        capture(MLP(), loss_with(metrics), BATCH)
