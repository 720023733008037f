"""Copies of tokens: one for each rank that has one of a token's experts, and the sum over them."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from fxpar.ops.copies import copies, mean_copies, own_ids, sum_copies


def routes(tokens: int, slots: int, experts: int) -> torch.Tensor:
    return torch.rand(tokens, experts).argsort(1)[:, :slots]


@pytest.mark.parametrize(("slots", "experts", "ranks"), [(1, 4, 4), (2, 8, 4), (8, 8, 2), (6, 12, 3)])
def test_a_copy_for_each_rank_that_has_an_expert(slots: int, experts: int, ranks: int) -> None:
    torch.manual_seed(0)
    ids = routes(11, slots, experts)
    ids[3] = experts  # nobody's
    ids[4, 0] = -1
    tokens, sent = copies(ids, experts, ranks)
    wanted = [(r, t) for r in range(ranks) for t in range(11) if any(int(e) * ranks // experts == r for e in ids[t])]
    wanted = [
        (r, t) for r, t in wanted if any(0 <= int(e) < experts and int(e) * ranks // experts == r for e in ids[t])
    ]
    assert tokens.tolist() == [t for _, t in wanted]
    assert sent.tolist() == [sum(rank == r for rank, _ in wanted) for r in range(ranks)]


def test_no_tokens() -> None:
    tokens, sent = copies(torch.zeros(0, 2, dtype=torch.int64), 4, 2)
    assert (tokens.tolist(), sent.tolist()) == ([], [0, 0])
    assert sum_copies(torch.zeros(0, 3), tokens, sent, torch.zeros(0, 2, dtype=torch.int64)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_sum_over_copies(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ids = routes(9, 3, 8)
    tokens, sent = copies(ids, 8, 4)
    rows = torch.randn(len(tokens), 2, 5, dtype=torch.float64).to(dtype)
    wanted = torch.stack([rows[tokens == t].double().sum(0) for t in range(9)]).to(dtype)
    torch.testing.assert_close(sum_copies(rows, tokens, sent, ids), wanted, rtol=0, atol=1e-12)


def test_ids_of_a_rank() -> None:
    ids = torch.tensor([[0, 5], [2, 3], [-1, 8]])
    assert own_ids(ids, 2, 1, True).tolist() == [[-1, -1], [0, 1], [-1, -1]]
    assert own_ids(ids, 2, 1, False).tolist() == [[-1, -1], [2, 3], [-1, -1]]


@pytest.mark.parametrize(("slots", "experts", "ranks", "mean"), [(1, 4, 4, 1), (4, 4, 2, 2), (2, 4, 2, Fraction(5, 3))])
def test_copies_in_the_mean(slots: int, experts: int, ranks: int, mean: Fraction) -> None:
    assert mean_copies(slots, experts, ranks) == mean
