"""Figures between and beyond what was measured."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fxpar.errors import PlanOptionError
from fxpar.search.galvatron import GalvatronCost
from fxpar.search.galvatron_files import Profiles
from fxpar.search.layered import search
from tests.search.profiles import GB, changed, llama, shipped, tiny_cost


@pytest.fixture(scope="module")
def profiles() -> Profiles:
    return shipped()


@pytest.fixture
def tiny(tmp_path) -> GalvatronCost:
    return tiny_cost(tmp_path)


def test_the_one_node_table_serves_two_nodes(profiles):
    assert llama(profiles).measured.notes == ()
    (note,) = llama(profiles, 16).measured.notes
    assert "no sp_time_2nodes_8gpus_per_node.json" in note
    without = dataclasses.replace(profiles, collectives={})
    assert {one.degree for one in llama(without).strategies(1, 1)} == {1}
    assert "neither tensor parallelism nor Ulysses" in llama(without).measured.notes[0]


def test_what_was_measured_at_other_lengths(tiny):
    """A quadratic of layers and a line of the ends through single samples; activations in proportion to the longest."""
    times = {(1, 64): 2.0, (1, 128): 5.0, (1, 256): 14.0}
    other = dataclasses.replace(changed(tiny, layer_ms=times, ends_ms={k: k[1] / 8 for k in times}), seq_len=512)
    assert other.measured.layer_line == pytest.approx((np.polyval(np.polyfit([64, 128, 256], [2, 5, 14], 2), 512), 0))
    assert other.measured.ends_line == pytest.approx((64, 0))
    assert other.measured.layer_memory.activation_mb == {1: 48, 2: 24}
    assert other.measured.layer_memory.remat_mb == 8
    assert other.measured.layer_memory.parameter_mb == 12
    assert other.measured.ends_memory("off").activation_mb == {1: 64, 2: 32}
    assert other.measured.ends_memory("off").states_mb == {1: 40, 2: 20.5}


def test_a_line_from_eight_batches_on(tiny):
    few = {(batch, 64): 3 + 2 / batch for batch in range(1, 8)}
    assert changed(tiny, layer_ms=few).measured.layer_line == (3 + 2 / 7, 0)
    assert changed(tiny, layer_ms={**few, (8, 64): 3.25}).measured.layer_line == pytest.approx((3, 2))


def test_a_group_that_was_not_measured(profiles):
    network = dataclasses.replace(profiles.networks[1, 8], reduce_mb_per_ms={(8, True): 1.0})
    with pytest.raises(PlanOptionError, match="no allreduce_size_4_consec_"):
        search(llama(dataclasses.replace(profiles, networks={(1, 8): network})), 38 * GB)


def test_of_two_clusters_that_of_fewer_nodes(profiles):
    """Both have eight devices."""
    networks = {(2, 4): profiles.networks[2, 8], (1, 8): profiles.networks[1, 8]}
    measured = llama(dataclasses.replace(profiles, networks=networks)).measured
    assert measured.network is networks[1, 8]
