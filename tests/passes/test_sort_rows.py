"""Rows of a layer of experts are sorted once: what stays sorted, what is put back, and the same bits either way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar import expert_mm, losses, weighted_sum
from fxpar.lowering import lower
from tests.captured import Captured, odd, take, tokens

DISPATCH = torch.ops.fxpar.dispatch.default


def count(captured: Captured, *names: str, strategy: str = "dp1") -> list[int]:
    program = lower(captured.graph, strategy)
    targets = [str(n.target) for n in program.body.graph.nodes]
    return [targets.count(f"fxpar.{name}.default") for name in names]


@pytest.mark.parametrize("strategy", ["dp1", "cp2"])
def test_a_layer_is_sorted_once(strategy):
    """The gate's bias is sorted too, and its gradient put back. Tokens are not copied for their slots before."""
    names = ("route_rows", "grouped_mm", "grouped_mm_backward", "dispatch", "combine", "combine_backward", "place_rows")
    assert count(odd("routed"), *names, strategy=strategy) == [1, 4, 2, 2, 2, 1, 1]
    assert count(odd("routed"), "expert_mm", "expert_mm_backward", "weighted_sum", strategy=strategy) == [0, 0, 0]
    first = next(iter(lower(odd("routed").graph, strategy).body.graph.find_nodes(op="call_function", target=DISPATCH)))
    assert len(first.args[0].meta["local"].shape) == 2


class Between(nn.Module):
    """Experts with `middle` between their products."""

    def __init__(self, middle) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.router, self.head = nn.Embedding(31, 8), nn.Linear(8, 4), nn.Linear(8, 31)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 6) * 0.2), nn.Parameter(torch.randn(4, 6, 8) * 0.2)
        self.middle = middle

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids).reshape(-1, 8)
        weights, ids = self.router(x).softmax(-1).topk(2, -1)
        rows = self.middle(expert_mm(x[:, None].expand(-1, 2, -1), self.up, ids))
        return self.head(weighted_sum(expert_mm(rows, self.down, ids), weights)).view(*input_ids.shape, 31)


# What is between -> how often the forward and the backward put rows back in the order of tokens.
MIDDLES = {
    "elementwise": (lambda rows: F.gelu(rows) * 2 + rows, 0),
    "a constant of the width": (lambda rows: rows * torch.arange(6.0), 0),
    "parts of the width": (lambda rows: torch.cat([rows[..., 3:].tanh(), rows[..., :3]], -1), 0),
    "over the slots": (lambda rows: rows - rows.mean(1, keepdim=True), 1),
    "over the width": (lambda rows: rows.softmax(-1), 2),
    "a slot": (lambda rows: torch.cat([rows[:, 1:], rows[:, :1]], 1), 2),
}


@pytest.mark.parametrize("name", MIDDLES)
def test_what_is_not_done_to_each_row_is_done_in_the_order_of_tokens(name):
    middle, placed = MIDDLES[name]
    batches = [{k: b[k] for k in ("input_ids", "labels")} for b in tokens(31, 8, 5, rows=2)]
    captured = take(Between(middle), losses.causal_lm, batches)
    assert count(captured, "place_rows") == [placed]
    result = captured.check("cp2")
    assert result.ok, result
