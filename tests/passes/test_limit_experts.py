"""Rows of experts up to a capacity: which are left out, what becomes of their tokens, and who is told."""

from __future__ import annotations

import functools

import pytest
import torch

from fxpar import losses
from fxpar.checking import assign, run_world
from fxpar.errors import CapacityError, NothingToCompressError, VerifyError
from fxpar.lowering import default_passes, lower
from fxpar.ops.copies import within_capacity
from fxpar.passes.pack_documents import pack_documents
from fxpar.runtime.expert_rows import expert_layers, expert_loads
from tests.captured import Captured, llama, lowered, take, tokens
from tests.passes.test_exchange_tokens import EXPERTS, SLOTS, Model, moe

LAYER, LENGTH = "layers.0.experts", 16


@functools.cache
def crowded() -> Captured:
    """Every token wants experts 0 and 1."""
    return take(Model("all to one", SLOTS), losses.causal_lm, tokens(31, LENGTH))


def results(found: Captured, strategy: str) -> list[dict]:
    program = lowered(found, strategy)
    return run_world(program, found.params, found.buffers, found.batches, assign(program.strategy, 1), 1.0)


def test_the_first_tokens_stay() -> None:
    ids = torch.tensor([[2, 0], [0, 2], [0, 1], [-1, 0], [2, 1]])
    kept, wanted = within_capacity(ids, 5, 1.0)  # two of each
    assert kept.tolist() == [[2, 0], [0, 2], [-1, 1], [-1, -1], [-1, 1]]
    assert wanted.tolist() == [4, 2, 3, 0, 0]
    assert within_capacity(torch.zeros(0, 2, dtype=torch.int64), 3, 1.0)[0].shape == (0, 2)


def test_tokens_beyond_the_capacity_go_past_their_experts() -> None:
    """The layer of one device, told to leave the same slots out."""
    found = crowded()
    model = Model("all to one", SLOTS).double()
    experts = model.layers[0]["experts"]
    kept = int(1.25 * LENGTH * SLOTS / EXPERTS)
    mask = (torch.arange(LENGTH) < kept).double()[:, None]  # both experts get the same tokens
    plain = experts.forward
    experts.forward = lambda x: (plain(x).flatten(0, 1) * mask).view_as(x)
    (row,) = found.batches
    loss = losses.causal_lm(model, row)
    loss.backward()
    torch.testing.assert_close(results(found, "tp2+sp+capacity(1.25)")[0]["loss"], loss.detach(), rtol=1e-10, atol=0)
    ranks = results(found, "dp1+capacity(1.25)+remat")
    torch.testing.assert_close(ranks[0]["loss"], loss.detach(), rtol=1e-10, atol=0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(ranks[0]["grads"][name], parameter.grad, rtol=0, atol=1e-10)


def test_ranks_of_experts_get_what_is_left() -> None:
    """Under ep each rank limits the rows of its own tokens, before they travel; the report says what share is gone, of
    all groups of a step.
    """
    found = crowded()
    capacity = "cp2+capacity(1.25)+remat[*.experts: ep2]"
    ranks, same = results(found, capacity), results(found, "cp2+capacity(1.25)")
    torch.testing.assert_close(ranks[0]["loss"], same[0]["loss"], rtol=1e-12, atol=0)
    layers = expert_layers([lowered(found, capacity)])
    (load,) = expert_loads([rank["experts"] for rank in ranks], layers, 0, 1, torch.device("cpu"), None)
    kept = 2 * int(1.25 * LENGTH / 2 * SLOTS / EXPERTS)
    assert load.wanted == (LENGTH, LENGTH, 0, 0)
    assert load.experts == (kept, kept, 0, 0)
    assert load.figures()["dropped"] == 1 - kept / LENGTH
    groups = [rank["experts"] for rank in (*ranks, *results(found, "dp1"))]
    (load,) = expert_loads(groups, layers, 0, 1, torch.device("cpu"), None)
    assert load.experts == (kept + LENGTH, kept + LENGTH, 0, 0)
    assert load.dropped == 1 - (kept + LENGTH) / (2 * LENGTH)


def test_check_says_how_far_off_it_is() -> None:
    result = crowded().check("dp1+capacity(1.25)")
    assert result.ok, result
    assert any(note.startswith("lossy: compared as dp1; as it is, it is off: loss by ") for note in result.notes)
    assert any("experts of 1 layer get at most 1.25 times the mean" in note for note in result.notes)


@pytest.mark.parametrize(
    ("captured", "strategy", "error", "says"),
    [
        (
            llama,
            "dp2+capacity(2)",
            NothingToCompressError,
            r"capacity\(...\) says which rows .* 'Llama' has none",
        ),
        (
            moe,
            "dp2[embedding: +capacity(2)]",
            NothingToCompressError,
            "that it is about have none",
        ),
        (lambda: moe("ones behind", 2), "dp2+capacity(2)", CapacityError, "without an expert, and .* reads it"),
        (moe, "dp2+capacity(2)+lsh(0.2)", CapacityError, "'layers.0.experts'.*has means of rows"),
    ],
)
def test_what_cannot_be_limited(captured, strategy: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        lower(pack_documents(captured().graph), strategy)


def test_a_ladder_in_another_order() -> None:
    limit, *_ = [step for step in default_passes() if step.name == "limit_experts"]
    ladder = [step for step in default_passes() if step is not limit]
    at = [step.name for step in ladder].index("sort_rows")
    with pytest.raises(VerifyError, match="'limit_experts' needs tokens where they are from"):
        lower(pack_documents(moe().graph), "ep2+capacity(2)", passes=[*ladder[:at], limit, *ladder[at:]])
