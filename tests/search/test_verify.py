"""Factors of predictions, fitted to made-up measurements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.search.verify import StepSeconds, VerifiedPlan, order_of, refit

PARTS = [[(1.0, 0.1), (2.0, 0.3)], [(1.5, 0.6), (1.2, 0.9)]]


def plans(compute=1.0, link=1.0, parts=PARTS):
    """Whose mini-batches take just so many times the predicted seconds."""
    return [
        VerifiedPlan(tuple(StepSeconds(own, sent, compute * own + link * sent) for own, sent in one)) for one in parts
    ]


@given(st.floats(0.1, 1000), st.floats(0.1, 1000))
def test_factors_are_found_again(compute, link):
    found = refit(plans(compute, link))
    assert (found.compute, found.link) == pytest.approx((compute, link), rel=1e-6)
    assert found.fitted == ("compute", "link")
    for plan in plans(compute, link):
        assert plan.refitted_s(found) == pytest.approx(plan.measured_s)


@pytest.mark.parametrize(
    "parts",
    [
        [[(1.0, 0.0), (2.0, 0.0)]],  # nothing on links
        [[(1.0, 0.5), (2.0, 1.0)], [(4.0, 2.0)]],  # always the same share
        [[(1.0, 0.5)]],  # one mini-batch
    ],
)
def test_kinds_that_cannot_be_told_apart_have_one_factor(parts):
    found = refit(plans(3.0, 3.0, parts))
    assert (found.compute, found.link) == pytest.approx((3.0, 3.0))
    assert found.fitted == ("compute and link alike",)


def test_no_kind_takes_less_than_nothing():
    """Links that seem to save time are noise."""
    found = refit(plans(3.0, -1.0))
    assert found.compute == found.link > 0


def test_means_and_order():
    first, second = plans(2.0, 4.0)
    assert (first.predicted_s, second.predicted_s) == pytest.approx((1.7, 2.1))
    assert (first.measured_s, second.measured_s) == pytest.approx((3.8, 5.7))
    assert order_of([3.0, 1.0, 2.0, 1.0]) == [1, 3, 2, 0]
