"""Rows of each expert and rank: the same sums however tokens and experts are cut."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from fxpar import losses
from fxpar.checking import assign, run_world
from fxpar.runtime.expert_rows import expert_layers, expert_loads
from fxpar.runtime.report import ExpertLoad
from tests.captured import Captured, lowered, take, tokens
from tests.passes.test_exchange_tokens import EXPERTS, SLOTS, Model

LAYER, LENGTHS = "layers.0.experts", (8, 16)


@functools.cache
def routed() -> tuple[Captured, list[float]]:
    """A model, and how many tokens of the two rows its router sends to each expert."""
    model = Model()
    found = take(model, losses.causal_lm, tokens(31, *LENGTHS))
    chosen: list[Tensor] = []
    router = model.layers[0]["experts"].router
    router.register_forward_hook(lambda *call: chosen.append(call[2].topk(SLOTS, -1).indices))
    for row in found.batches:
        model(row["input_ids"], row["position_ids"])
    return found, torch.bincount(torch.cat(chosen).flatten(), minlength=EXPERTS).tolist()


@pytest.mark.parametrize(
    "strategy",
    [
        "dp2+zero3",
        "tp4+sp+remat[*.experts: ep2.tp2]",
        "cp2.pp2+cut(layers.0.experts)[*.experts: ep2]",
    ],
)
def test_each_row_counts_once_for_its_expert(strategy: str) -> None:
    found, want = routed()
    program = lowered(found, strategy)
    ranks = run_world(program, found.params, found.buffers, found.batches, assign(program.strategy, 2), 1.0)
    rows = [rank["experts"].get(LAYER, torch.zeros(2 * EXPERTS + 1)) for rank in ranks]
    assert sum(rows)[:EXPERTS].tolist() == want
    assert expert_layers([program]) == {LAYER: EXPERTS}
    together = sum(LENGTHS) * SLOTS
    assert sum(rows)[-1] == together * (2 if ".tp2" in strategy else 1)


def test_loads_of_several_groups() -> None:
    device = torch.device("cpu")
    groups = [{"b": torch.tensor([1.0, 3, 1, 3, 4])}, {"b": torch.tensor([2.0, 0, 2, 0, 2])}, {}]
    (load,) = expert_loads(groups, {"a": 3, "b": 2}, 0, 1, device, None)
    assert load == ExpertLoad("b", (3.0, 3.0), (6.0,))
    assert ExpertLoad("b", (1.0, 3.0), (4.0, 0.0, 2.0)).expert_balance == 1.5
    assert ExpertLoad("b", (1.0, 3.0), (4.0, 0.0, 2.0)).rank_balance == pytest.approx(4 / 3)
