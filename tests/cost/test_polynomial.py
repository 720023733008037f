"""Counts that grow with the tokens: exact up to a square, and a bound from above for what grows faster."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from fxpar import losses
from fxpar.cost.calls import node_costs
from fxpar.cost.group import group_cost
from fxpar.cost.ops import SizesAt, flops
from fxpar.cost.polynomial import MOST_TOKENS, Polynomial, Sizes, fitted, sizes_of
from fxpar.ir.counts import run_count
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.lowering import lower
from fxpar.tracer import capture
from tests.captured import tokens
from tests.cost.programs import NODE, program

LENGTHS = (1, 2, 64, 1000, 4096, 5000, 9999, MOST_TOKENS)


class TwiceMixed(nn.Module):
    """Multiplies a T x T matrix by itself: T**3."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        scores = torch.softmax(x @ x.transpose(1, 2), -1)
        return self.head(scores @ scores @ x)


@pytest.fixture(scope="module")
def cubic() -> TrainGraph:
    return lower(capture(TwiceMixed(), losses.causal_lm, tokens(32, 13)[0]), "dp4")


@functools.cache  # not at import: every worker of a test run imports this file
def samples() -> list[Sizes]:
    return sizes_of(program("dp4"))


def fit(count):
    return fitted([count(one.tokens) for one in samples()], samples()[0].tokens, samples()[0].most)


@pytest.mark.parametrize("c", [(7, 3, 2), (-5, 3, 0), (0, 0, 0), (-2, -3, 4)])
def test_what_is_a_square_is_met_exactly(c):
    assert fit(lambda n: c[0] + c[1] * n + c[2] * n * n) == Polynomial(*c)


@pytest.mark.parametrize("c", [(0, 0, 0, 2), (7, 3, 2, 1), (-7, -3, 2, 1), (0, 10**9, 0, 1), (5, 0, -3, 1)])
def test_a_cube_is_bounded_up_to_the_longest_sequence(c):
    found = fit(lambda n: c[0] + c[1] * n + c[2] * n * n + c[3] * n**3)
    assert min(found.c0, found.c1, found.c2) >= 0
    assert all(found.at(n) >= c[0] + c[1] * n + c[2] * n * n + c[3] * n**3 for n in LENGTHS)
    assert found.c2 <= c[3] * MOST_TOKENS + max(c[2], 0)


@pytest.mark.parametrize(
    "count", [lambda n: n**4, lambda n: int(n * math.log2(n)), lambda n: math.isqrt(n**3), lambda n: -(-n // 3000)]
)
def test_other_counts_have_no_term_below_zero(count):
    found = fit(count)
    assert min(found.c0, found.c1, found.c2) >= 0
    assert all(found.at(n) >= count(n) for n in LENGTHS)


def test_a_model_with_a_product_of_square_matrices_has_a_price(cubic):
    """No less than its operations, and it can be planned with."""
    cost = group_cost(cubic, NODE)
    assert min(cost.fixed_s, cost.per_token_s, cost.per_square_s) >= 0
    predicted = sum((one.flops for one in node_costs(cubic, NODE)), Polynomial())
    (dim,) = cubic.dims
    nodes = [node for node in cubic.parts["body"].graph.nodes if "tensor" in node.meta]
    for length in LENGTHS:
        exact = sum(flops(node, SizesAt({dim.symbol: length})) for node in nodes)
        assert exact <= predicted.at(length)
    assert exact > 4 * MOST_TOKENS**3  # there is a cube in it


def test_a_mean_is_not_rounded():
    """A line through rounded values may begin below 0."""
    sizes = Sizes(program("dp4"), 1)
    (symbol,) = sizes.dims
    assert sizes.size(run_count(Fraction(1, 3), 2, symbol, 0)) == Fraction(sizes.tokens, 3) != sizes.tokens // 3
    assert sizes.size(symbol) == sizes.tokens
