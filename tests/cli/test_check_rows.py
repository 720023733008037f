"""`fxpar check` of a model that mixes tokens: documents run alone; packing and padding show when they are forced."""

from __future__ import annotations

import pytest

from tests.cli.helpers import fxpar

MODEL = '''
import torch
import torch.nn.functional as F
from torch import nn

from fxpar import losses


class Mixing(nn.Module):
    """A causal convolution over tokens; `whole` adds a term of all tokens to the loss."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)
        self.kernel = nn.Parameter(torch.randn(8, 1, 3))

    def forward(self, input_ids):
        x = self.tokens(input_ids)
        return self.head(x + F.conv1d(F.pad(x.mT, (2, 0)), self.kernel, groups=8).mT)


def loss(model, batch):
    logits = model(batch["input_ids"])
    return losses.cross_entropy_sum(logits, batch["labels"]) + 0.1 * logits.logsumexp(-1).square().sum()


def make(second: int = 7):
    ids = torch.arange(6 + second)[None] % 31
    documents = torch.tensor([[1] * 6 + [2] * second])
    row = {"input_ids": ids, "labels": losses.next_token_labels(ids, document_ids=documents), "document_ids": documents}
    example = {key: row[key] for key in ("input_ids", "labels")}
    return {"model": Mixing(), "loss_fn": loss, "example_batch": example, "batches": [row]}
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "mixing.py"
    path.write_text(MODEL)
    return f"{path}:make"


def test_documents_run_alone(model):
    status, out, err = fxpar("check", model, "-s", "dp2,cp2", "--set", "second=6", "--dtype", "float64")
    assert status == 0, out + err
    assert "\neach document runs alone\nstrategy" in out
    assert "note (dp2): each document runs alone, since aten." in out
    assert "mixing.py:19 mixes tokens" in out
    assert "note (cp2): only lengths that are multiples of 2 run, since aten." in out


def test_forced_packing_is_a_miss(model):
    status, out, _ = fxpar("check", model, "-s", "dp2", "--dtype", "float64", "--force-packing")
    assert status == 1
    assert "MISS" in out


def test_forced_padding_is_a_miss(model):
    status, out, _ = fxpar("check", model, "-s", "cp2", "--dtype", "float64")
    assert status == 1
    assert "T=7 must be a multiple of 2" in out
    assert "use a strategy that does not cut tokens" in out
    assert "To see what padding would change, run `fxpar check` with --force-padding" in out
    status, out, _ = fxpar("check", model, "-s", "cp2", "--dtype", "float64", "--force-padding")
    assert status == 1
    assert "MISS" in out
