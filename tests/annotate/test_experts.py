"""What is known of the experts of a model."""

from __future__ import annotations

import pytest

from fxpar.annotate.experts import balanced_routes, experts_of
from fxpar.ir.strategy import Strategy
from tests.captured import llama, odd


def logical():
    return odd("routed").graph


def test_degrees_divide_the_number_of_experts():
    assert (experts_of(logical()), experts_of(llama().graph)) == (5, 1)


@pytest.mark.parametrize(("texts", "want"), [(["ep5", "dp2.ep5"], 1), (["cp5[head: ep5]", "dp5"], 0)])
def test_predictions_say_what_they_assume_of_routes(texts, want):
    """Of two of five experts, each on a rank of its own, a token is on two ranks."""
    found = balanced_routes(logical, map(Strategy.parse, texts))
    assert len(found) == want
    assert all("the 2 of 5 experts of a token are on 2.00 of 5 ranks" in one for one in found)


def test_without_ep_no_graph_is_asked_for():
    def none():
        raise AssertionError

    assert balanced_routes(none, [Strategy.parse("dp2.tp2+sp"), Strategy.parse("tp4 | dp2")]) == ()
