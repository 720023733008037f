"""Rows as means of clusters: the formulas, the budget, and what is exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from fxpar.errors import OpInputError
from fxpar.ops import compress, experts

own = torch.ops.fxpar
assert compress, experts
HASHES, COLUMNS, D, E = 4, 4, 8, 3


def _rows(N: int = 40, K: int = 2, dtype: torch.dtype = torch.float64, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens that are near to each other, and K experts of each."""
    draw = torch.Generator().manual_seed(seed)
    near = torch.randn(5, D, generator=draw, dtype=dtype)[torch.randint(5, (N,), generator=draw)]
    tokens = near + 0.3 * torch.randn(N, D, generator=draw, dtype=dtype)
    return tokens, torch.rand(N, E, generator=draw).topk(K).indices


def _clustered(x: Tensor, ids: Tensor, rate: float, least: int = E + 1) -> tuple[Tensor, Tensor, Tensor]:
    codes = own.hash_rows.default(x, HASHES, COLUMNS, 0)
    return own.cluster_rows.default(codes, ids, E, 2 * COLUMNS, HASHES, rate, least)


def _layer(tokens: Tensor, ids: Tensor, weights: tuple[Tensor, Tensor], rate: float | None) -> Tensor:
    """An MLP per expert, of each of a token's rows; on means where there is a rate."""
    x = tokens[:, None].expand(-1, ids.shape[1], -1)

    def mlp(rows: Tensor, of: Tensor) -> Tensor:
        return own.expert_mm.default(own.expert_mm.default(rows, weights[0], of).tanh(), weights[1], of)

    if rate is None:
        return mlp(x, ids)
    cluster, sizes, ids_of = _clustered(x.detach(), ids, rate)
    means = own.cluster_mean.default(x, cluster, sizes)
    return own.cluster_restore.default(mlp(means, ids_of), x, means, cluster, sizes)


def _weights() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(9)
    shapes = ((E, D, 12), (E, 12, D))
    one, two = (torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes)
    return one, two


def _by_hand(x: Tensor, ids: Tensor, weights: tuple[Tensor, Tensor], cluster: Tensor, g: Tensor) -> list[Tensor]:
    """Result, and gradients of rows and weights, one cluster after the other, by the formulas."""
    y, dx, dw = torch.zeros_like(x), torch.zeros_like(x), [torch.zeros_like(w) for w in weights]
    for c in cluster.unique():
        mine = cluster == c
        (e,) = ids[mine].unique()
        mean, gbar = x[mine].mean(0), g[mine].mean(0)
        one, two = weights[0][e].detach(), weights[1][e].detach()
        hidden = (mean @ one).tanh()
        y[mine] = hidden @ two + x[mine] - mean
        dh = (two @ gbar) * (1 - hidden**2)
        dx[mine] = one @ dh + g[mine] - gbar
        dw[0][e] += mine.sum() * torch.outer(mean, dh)
        dw[1][e] += mine.sum() * torch.outer(hidden, gbar)
    return [y, dx, *dw]


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.7])
def test_result_and_gradients_are_those_of_the_formulas(rate: float) -> None:
    tokens, ids = _rows()
    weights, g = _weights(), torch.randn(*ids.shape, D, dtype=torch.float64)
    x = tokens[:, None].expand(-1, 2, -1)
    cluster = _clustered(x, ids, rate)[0]
    tokens.requires_grad_()
    y = _layer(tokens, ids, weights, rate)
    found = [y.detach(), *torch.autograd.grad(y, (tokens, *weights), g)]
    y, dx, *dw = _by_hand(x, ids, weights, cluster, g)
    for one, other in zip(found, [y, dx.sum(1), *dw], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_gradients_of_each_op_are_those_of_its_formula() -> None:
    tokens, ids = _rows(10)
    cluster, sizes, _ = _clustered(tokens[:, None].expand(-1, 2, -1), ids, 0.4)
    x = torch.randn(10, 2, D, dtype=torch.float64, requires_grad=True)
    made = torch.randn(len(sizes), 1, D, dtype=torch.float64, requires_grad=True)
    means = torch.randn(len(sizes), 1, D, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: own.cluster_mean.default(x, cluster, sizes), (x,))
    assert gradcheck(lambda *a: own.cluster_restore.default(*a, cluster, sizes, 0.25), (made, x, means))


def test_a_budget_for_all_rows_is_exact() -> None:
    tokens, ids = _rows()
    weights = _weights()
    exact, full = (_layer(tokens, ids, weights, rate) for rate in (None, 1.0))
    torch.testing.assert_close(full, exact, rtol=0, atol=0)


def test_equal_tokens_are_one_row_per_expert() -> None:
    tokens, ids = _rows(50)
    x = torch.ones_like(tokens)[:, None].expand(-1, 2, -1)
    cluster, sizes, ids_of = _clustered(x, ids, 0.2)
    assert ids_of.flatten().tolist() == [0, 1, 2] + [-1] * 17
    assert sizes[:3].tolist() == torch.bincount(ids.flatten()).tolist()
    assert not sizes[3:].any()
    torch.testing.assert_close(own.cluster_mean.default(x, cluster, sizes)[:3, 0], torch.ones_like(tokens[:3]))


@pytest.mark.parametrize("rate", [0.05, 0.21, 0.5, 0.9])
def test_the_budget_is_used_up_and_no_cluster_has_two_experts(rate: float) -> None:
    ids = _rows(100)[1]
    x = torch.randn(100, D, dtype=torch.float64)[:, None].expand(-1, 2, -1)
    cluster, sizes, ids_of = _clustered(x, ids, rate)
    assert len(sizes) == compress.most_clusters(200, rate, E + 1) == round(rate * 200)
    assert sizes.sum() == 200
    codes = {(int(c), int(e)) for c, e in zip(own.hash_rows.default(x, 4, 4, 0).flatten(), ids.flatten(), strict=True)}
    assert int((sizes > 0).sum()) == min(len(codes), len(sizes))
    assert torch.equal(ids_of[cluster, 0], ids)
    used = ids_of[sizes > 0, 0]
    assert torch.equal(used, used.sort().values)


def test_the_largest_cluster_is_refined_first() -> None:
    """Codes of two digits: four rows that differ in the second, two in theirs, and budgets from one more to all."""
    codes, ids = torch.tensor([0, 1, 2, 3, 4, 5]), torch.zeros(6, dtype=torch.int64)

    def sizes(budget: int) -> list[int]:
        found = own.cluster_rows.default(codes, ids, 1, 4, 2, budget / 6, 2)[1]
        return sorted(found.tolist(), reverse=True)

    assert [sizes(budget) for budget in (2, 3, 4, 5)] == [[4, 2], [3, 2, 1], [2, 2, 1, 1], [2, 1, 1, 1, 1]]


@pytest.mark.parametrize("rank", [0, 2])
def test_near_rows_stay_as_they_are(rank: int) -> None:
    """Those of one of three experts, until there are more of them than the mean; far rows have their share."""
    ids = torch.arange(90)[:, None] % E
    x = torch.ones(90, 1, D, dtype=torch.float64)  # one code
    x[ids[:, 0] == (rank + 1) % E] = torch.randn(30, 1, D, dtype=torch.float64)
    codes = own.hash_rows.default(x, HASHES, COLUMNS, 0)
    for wanted in (ids, torch.where(torch.arange(90)[:, None] < 60, rank, ids)):
        found = own.cluster_rows.default(codes, wanted, E, 2 * COLUMNS, HASHES, 0.2, 2 * E + 1, rank, E)
        cluster, sizes, ids_of = found
        assert len(sizes) == compress.most_clusters(90, 0.2, 7, E) == 42  # 30, and a fifth of 60
        near = wanted == rank
        assert torch.equal(ids_of[cluster, 0], wanted)
        assert len(cluster[near].unique()) == min(int(near.sum()), 42 - len(cluster[~near].unique()))
        assert len(cluster[~near].unique()) <= max(E, int((~near).sum()) // 5)
    with pytest.raises(OpInputError, match="3 places for 3 experts, and 4 clusters"):
        own.cluster_rows.default(codes, ids, E, 2 * COLUMNS, HASHES, 0.2, E + 1, rank, E)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_bytes(dtype: torch.dtype) -> None:
    """A byte per number and a scale per row, zeros as zeros, and off by half a step of three bits."""
    rows = (torch.randn(9, 1, D) * 10.0 ** torch.arange(-4, 5)[:, None, None]).to(dtype)
    rows[..., 0] = rows.abs().amax(-1) / 300  # of the 448 that the format has
    rows[3] = 0
    packed = own.pack_rows.default(rows)
    assert (packed.shape, packed.dtype) == ((9, 1, D + 4), torch.uint8)
    back = own.unpack_rows.default(packed, dtype)
    largest = rows.abs().amax(-1, keepdim=True).float()
    assert (back.float() - rows.float()).abs().le(rows.abs().float() / 16 + largest / 2**14).all()
    assert not packed[3].any()
    assert back.dtype == dtype


@pytest.mark.parametrize("shape", [(0, 1, D), (1, 1, 5)])
def test_no_row_and_one_row_in_a_byte_per_number(shape: tuple[int, ...]) -> None:
    """Nobody chose the experts of a rank; one row, whose scale begins at any byte."""
    rows = torch.randn(shape)
    back = own.unpack_rows.default(own.pack_rows.default(rows), rows.dtype)
    assert torch.allclose(back, rows, rtol=1 / 16)
    assert back.shape == shape


def test_rows_of_no_expert_have_clusters_of_no_expert() -> None:
    tokens, ids = _rows()
    ids = torch.where(ids == 0, 7, ids)
    cluster, sizes, ids_of = _clustered(tokens[:, None].expand(-1, 2, -1), ids, 0.3)
    assert torch.equal(ids_of[cluster, 0], torch.where(ids == 7, -1, ids))
    assert sizes.sum() == ids.numel()


def test_few_rows_are_not_compressed() -> None:
    tokens, ids = _rows(6)
    assert _clustered(tokens[:, None].expand(-1, 2, -1), ids, 0.2, least=12)[1].tolist() == [1] * 12


def _stream(seed: int, count: int) -> list[float]:
    """SplitMix64 in plain integers, as published; the upper 31 bits of each output, as a number from -1 to 1."""
    mask, gamma = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int, last: int = 0) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31 if last else z

    begin = mix((seed + 1) * gamma & mask)
    found = [mix(begin + i * gamma & mask, 1) >> 33 for i in range(count)]
    return [(n - 2**31 if n >= 2**30 else n) / 2**30 for n in found]


def test_codes_are_those_of_the_published_numbers() -> None:
    numbers = _stream(7, D * 6)
    x = (torch.arange(4 * D).view(4, D) % 5 - 2).double()  # products are exact, in whatever order they are added
    codes = []
    for row in x.tolist():
        code = 0
        for h in range(3):
            turned = [sum(v * numbers[d * 6 + h * 2 + c] for d, v in enumerate(row)) for c in range(2)]
            axis = max(range(2), key=lambda c: abs(turned[c]))
            code = code * 4 + 2 * axis + (turned[axis] < 0)
        codes.append(code)
    assert own.hash_rows.default(x, 3, 2, 7).tolist() == codes


def test_means_of_bf16_rows_add_up_in_fp32() -> None:
    """257 is no number of bf16: rounded to 256 first, the mean would be 51.25."""
    x = torch.tensor([64, 64, 64, 64, 1], dtype=torch.bfloat16)[:, None]
    cluster, sizes = torch.zeros(5, dtype=torch.int64), torch.tensor([5])
    assert own.cluster_mean.default(x, cluster, sizes).item() == 51.5


def test_shapes_are_known_without_data() -> None:
    tokens, ids = _rows()
    x = tokens[:, None].expand(-1, 2, -1)
    with torch.device("meta"):
        real = _clustered(x, ids, 0.3)
        fake = _clustered(x.to("meta"), ids.to("meta"), 0.3)
    assert [t.shape for t in real] == [t.shape for t in fake]
    means = own.cluster_mean.default(x.to("meta"), fake[0], fake[1])
    assert means.shape == own.cluster_mean.default(x, *real[:2]).shape


@pytest.mark.parametrize(
    ("rate", "least", "hashes", "why"),
    [(0.0, 4, 4, "not a budget"), (1.1, 4, 4, "not a budget"), (0.2, 3, 4, "not a budget"), (0.2, 4, 30, "codes")],
)
def test_what_is_no_budget_is_refused(rate: float, least: int, hashes: int, why: str) -> None:
    ids = torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(OpInputError, match=why):
        own.cluster_rows.default(ids, ids, E, 8, hashes, rate, least)


def test_rows_that_do_not_fit_are_refused() -> None:
    x, ids = torch.ones(4, 2, D), torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(OpInputError, match="one for each"):
        own.cluster_rows.default(ids[:2], ids, E, 8, 4, 0.2, 4)
    with pytest.raises(OpInputError, match="one for each row"):
        own.cluster_mean.default(x, ids[:3], torch.tensor([8]))
    with pytest.raises(OpInputError, match="means"):
        own.cluster_restore.default(x[:1, :1, :3], x, x[:1, :1], ids, torch.tensor([8]))
