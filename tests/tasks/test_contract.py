"""MetaOps of several tasks."""

from __future__ import annotations

import pytest

from fxpar.tasks.contract import SUM_BYTES, contract
from tests.tasks.towers import DIM, WIDE, step

LAYER = 2 * DIM + DIM * WIDE + WIDE + WIDE * DIM + DIM  # parameters: norm, up, down
WIDER = 2 * DIM + 2 * DIM * 2 * WIDE + 2 * WIDE + DIM


@pytest.fixture(scope="module")
def both():
    return {one.chain.metaop: one for one in contract({"caption": step("caption"), "text": step("text")})}


def test_metaops_have_the_names_of_task_and_module(both):
    assert {name: one.layers for name, one in both.items()} == {
        "caption.image": 3,
        "caption.layers": 3,
        "text.layers": 3,
    }


def test_edges_go_from_tower_to_language_model(both):
    assert [one.reads for one in both.values()] == [(), (0,), ()]


def test_what_two_tasks_read_has_one_name_and_the_larger_state(both):
    caption, text = both["caption.layers"], both["text.layers"]
    assert caption.weights == text.weights == "layers"
    assert both["caption.image"].weights == "image"
    layers, ends = 3 * (LAYER + WIDER), 16 * DIM + DIM * 16 + 16  # embedding and head
    beside = WIDER + 2 * DIM  # the last layer of the image tower and its norm, which run with this MetaOp
    assert caption.state_bytes == text.state_bytes == (4 + SUM_BYTES) * (layers + ends + beside) / 3
    assert caption.gradient_bytes == text.gradient_bytes == SUM_BYTES * (layers + ends + beside) / 3


def test_bytes_are_those_of_all_batches(both):
    assert both["caption.image"].output_bytes == 2 * 4 * DIM * 4  # batches, patches, width, fp32
    assert both["caption.layers"].output_bytes == 2 * (4 + 8) * DIM * 4
    assert both["text.layers"].output_bytes == 4 * 8 * DIM * 4


def test_activations_that_the_backward_reads_are_counted_once(both):
    tokens = 2 * 4
    # x, its norm (mean and rstd beside), the input of gelu and its result
    assert both["caption.image"].saved_bytes == pytest.approx(tokens * 4 * (2 * DIM + 2 + 2 * WIDE), rel=0.15)


def test_a_chain_is_cut_where_another_task_has_a_part_of_it():
    found = [one for one in contract({"caption": step("caption"), "tapped": step("tapped")})]
    weights = {one.chain.metaop: (one.weights, one.layers) for one in found if "image" in one.chain.metaop}
    assert weights["caption.image"] == weights["tapped.image"] == ("image", 2)
    assert weights["caption.image.gamma"] == weights["tapped.image.gamma"] == ("image.gamma", 1)
    cut = {one.chain.metaop: one for one in found}
    assert cut["caption.image"].chain.before == ("image.patches",)
    assert cut["caption.image.gamma"].reads == (0,)
    assert cut["caption.layers"].reads == (1,)
