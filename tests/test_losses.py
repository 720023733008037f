"""Loss functions are sums over valid tokens, and labels are aligned with the positions that predict them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxpar import losses
from fxpar.errors import ModelOutputError


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cross_entropy_sum(dtype):
    logits = torch.randn(2, 5, 11, dtype=dtype, requires_grad=True)
    labels = torch.randint(11, (2, 5))
    labels[0, :2] = -100
    total = losses.cross_entropy_sum(logits, labels)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert total.dtype == wide
    rows = logits.to(wide).flatten(0, 1)
    want = F.cross_entropy(rows, labels.flatten(), reduction="sum")
    torch.testing.assert_close(total, want)
    torch.testing.assert_close(*(torch.autograd.grad(t, logits, retain_graph=True)[0] for t in (total, want)))
    threes = labels.masked_fill(labels < 0, 3)
    want = F.cross_entropy(rows, threes.flatten(), ignore_index=3, reduction="sum")
    torch.testing.assert_close(losses.cross_entropy_sum(logits, threes, ignore_index=3), want)


def test_mse_sum():
    x, y = torch.randn(4, 3, dtype=torch.bfloat16), torch.randn(4, 3)
    torch.testing.assert_close(losses.mse_sum(x, y), ((x.float() - y) ** 2).sum())
    assert losses.mse_sum(x.double(), y).dtype == torch.float64


def test_next_token_labels():
    ids = torch.tensor([[5, 6, 7, 8, 9, 4]])
    assert losses.next_token_labels(ids).tolist() == [[6, 7, 8, 9, 4, -100]]
    assert losses.next_token_labels(ids[0], ignore_index=-1).tolist() == [6, 7, 8, 9, 4, -1]
    want = [[6, 7, -100, 9, 4, -100]]
    assert losses.next_token_labels(ids, document_ids=torch.tensor([[3, 3, 3, 1, 1, 1]])).tolist() == want
    assert losses.next_token_labels(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]])).tolist() == want
    both = losses.next_token_labels(
        ids, document_ids=torch.tensor([[1, 1, 1, 1, 1, 2]]), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]])
    )
    assert both.tolist() == [[6, 7, -100, 9, -100, -100]]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 11)

    def forward(self, input_ids):
        return self.table(input_ids)


class Host(Plain):
    def forward(self, input_ids, position_ids=None, use_cache=True, **others):
        assert not use_cache
        assert "labels" not in others
        self.seen = {"position_ids": position_ids, **others}
        return SimpleNamespace(logits=self.table(input_ids))


def test_causal_lm_calls_the_model_with_what_it_takes():
    ids = torch.randint(11, (2, 5))
    batch = {"input_ids": ids, "labels": losses.next_token_labels(ids), "position_ids": ids, "extra": ids}
    plain, host = Plain(), Host()
    host.load_state_dict(plain.state_dict())
    assert losses.causal_lm(plain, batch) == losses.causal_lm(host, batch)
    assert set(host.seen) == {"position_ids", "extra"}
    want = F.cross_entropy(plain.table(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(losses.causal_lm(plain, batch), want)


@pytest.mark.parametrize("wrap", [lambda x: {"logits": x, "hidden": 0}, lambda x: (x, 0), lambda x: x])
def test_outputs_that_hold_logits(wrap):
    class Wrapped(Plain):
        def forward(self, input_ids):
            return wrap(super().forward(input_ids))

    ids = torch.tensor([[3, 1, 4]])
    batch = {"input_ids": ids, "labels": ids}
    torch.manual_seed(1)
    want = losses.causal_lm(Plain(), batch)
    torch.manual_seed(1)
    assert torch.equal(losses.causal_lm(Wrapped(), batch), want)


@pytest.mark.parametrize(
    ("made", "said"),
    [({"scores": 1}, "returns a dict with the keys 'scores' without logits"), ((), "a tuple"), (None, "NoneType")],
)
def test_outputs_without_logits(made, said):
    class Odd(Plain):
        def forward(self, input_ids):
            return made

    ids = torch.tensor([[3, 1, 4]])
    with pytest.raises(ModelOutputError, match=said):
        losses.causal_lm(Odd(), {"input_ids": ids, "labels": ids})
