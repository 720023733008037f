"""HotSPa's Table 3 from the prices of its five layouts, as `fxpar simulate hotspa-table3` works them out."""

from __future__ import annotations

import numpy as np
import pytest

from fxpar.cost.group_cost import GroupCost
from fxpar.search.published import COMBINATIONS, SPEEDUPS, STATIC_S, TOTALS
from fxpar.search.simulate_groups import Dataset, packed, table_3

COSTS = {
    "1.16.2": GroupCost(0.05276, 6.0535e-05, 3.808e-10, stages=2),
    "2.8.2": GroupCost(0.05125, 7.6800e-05, 6.272e-10, stages=2),
    "4.4.2": GroupCost(0.06484, 1.2752e-04, 1.2992e-09, stages=2),
    "4.2.4": GroupCost(0.04632, 1.1704e-04, 1.344e-09, stages=4),
    "8.4.1": GroupCost(0.13371, 2.6237e-04, 2.688e-09),
}
SWITCHES_S = {"C1": 1.09, "C2": 1.45, "C3": 2.30}
# Said in docs/simulate.md with the reason.
MISSED = {("GitHub", "0-1K"): 0.31, ("CommonCrawl", "8-16K"): 0.18}


@pytest.fixture(scope="module")
def found():
    datasets = [Dataset(name, seconds, COSTS) for name, seconds in STATIC_S.items()]
    return datasets, *table_3(datasets, SWITCHES_S)


def test_the_static_row_takes_its_seconds(found):
    for one in found[0]:
        assert sum(map(one.seconds, one.bands)) == pytest.approx(sum(one.static_s), rel=0.02)
        assert sum(map(sum, one.sample)) / len(one.sample) == pytest.approx(one.tokens, rel=0.1)


def test_gains_of_groups(found):
    datasets, groups, _ = found
    assert len(groups) == len(datasets) * len({band for bands in COMBINATIONS.values() for band in bands})
    errors = []
    for one in groups:
        published = SPEEDUPS[one.band, one.layout][list(STATIC_S).index(one.dataset)]
        errors.append(abs(one.speedup / published - 1))
        assert errors[-1] <= MISSED.get((one.dataset, one.band), 0.155), one
    assert np.mean(errors) < 0.12


def test_totals_are_within_a_tenth(found):
    for one in found[2]:
        published = TOTALS[one.combination][list(STATIC_S).index(one.dataset)]
        assert one.speedup == pytest.approx(published, rel=0.1), one


def test_rows_hold_all_documents():
    assert packed(np.array([5, 3, 3, 2, 6]), 8) == [8, 8, 3]
    assert packed(np.array([], dtype=np.int64), 8) == []
