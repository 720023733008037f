"""Passes of fxpar on a graph as graph_trainer traces it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import ClassVar

import pytest
import torch
from torch import fx

from fxpar.errors import ForeignGraphPassError, UnknownPassError
from fxpar.ir.exec_graph import collective_kind
from fxpar.ir.fqn import block_of
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.pass_base import Tier
from fxpar.passes.bucket_collectives import BucketCollectives
from fxpar.passes.cleanup import Cleanup
from fxpar.passes.sink_waits import SinkWaits
from fxpar.passes.zero_shard import ZeroShard
from fxpar.recipes.passes_out import FITTING, for_graph_trainer, resolve
from tests.recipes import traced

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
PASSES = ("bucket_collectives", "reuse_buffers", "sink_waits", "write_in_place")


def counts(gm: fx.GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in gm.graph.nodes)


def collectives(gm: fx.GraphModule) -> Counter[str | None]:
    return Counter(kind for node in gm.graph.nodes if (kind := collective_kind(node)))


@pytest.fixture
def gm() -> fx.GraphModule:
    return traced.traced()


@pytest.fixture(scope="module")
def expected() -> list[list[torch.Tensor]]:
    return traced.run_on_ranks(traced.traced())


def assert_same_results(gm: fx.GraphModule, expected: list[list[torch.Tensor]]) -> None:
    for mine, theirs in zip(traced.run_on_ranks(gm), expected, strict=True):
        assert len(mine) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("name", FITTING)
def test_a_pass_keeps_every_bit(gm, expected, name):
    before = str(gm.graph)
    assert for_graph_trainer(resolve(name))(gm, ()) is gm
    assert str(gm.graph) != before
    assert_same_results(gm, expected)


def test_all_passes_in_turn(gm, expected):
    for name in ("cleanup", *PASSES):
        gm = for_graph_trainer(resolve(name))(gm, ())
    assert_same_results(gm, expected)
    found = counts(gm)
    assert collectives(gm) == {"all_gather": 5, "reduce_scatter": 3, "all_reduce": 1}
    assert found["_c10d_functional.all_reduce_.default"] == 1
    assert found["aten.mul_.Tensor"] + found["aten.add_.Tensor"] > 3


def test_buckets_are_blocks_forward_and_backward(gm):
    assert collectives(gm) == {"all_gather": 7, "reduce_scatter": 5, "all_reduce": 1}
    for_graph_trainer(BucketCollectives())(gm, ())
    assert collectives(gm) == {"all_gather": 5, "reduce_scatter": 3, "all_reduce": 1}
    order = [node.meta["custom"]["module_fqn"] for node in gm.graph.nodes if collective_kind(node) == "all_gather"]
    assert [block_of(fqn) or fqn for fqn in order] == [
        "layers.0",
        "layers.1",
        "lm_head",
        "layers.1",
        "layers.0",
    ]


def test_a_small_bucket_takes_less(gm, expected):
    for_graph_trainer(BucketCollectives(bucket_mb=1e-9))(gm, ())
    assert collectives(gm) == {"all_gather": 7, "reduce_scatter": 5, "all_reduce": 1}
    assert_same_results(gm, expected)


def test_nodes_have_the_metadata_of_graph_trainer_afterwards(gm):
    kinds = {key for node in gm.graph.nodes for key in node.meta}
    for name in PASSES:
        gm = for_graph_trainer(resolve(name))(gm, ())
    assert {key for node in gm.graph.nodes for key in node.meta} <= kinds
    fused = [node for node in gm.graph.nodes if collective_kind(node) == "all_gather"]
    assert [tuple(n.meta["val"].shape) for n in fused] == [(2, 36), (2, 36), *[(2, 4, 8)] * 3]
    late = [n for n in gm.graph.nodes if collective_kind(n) == "reduce_scatter"]
    assert all(n.meta["autograd_backward"] and n.meta["custom"]["module_fqn"] for n in late)


def test_what_writes_is_kept(gm, expected):
    assert counts(gm)["aten.copy_.default"] == 3
    for_graph_trainer(Cleanup())(gm, ())
    assert counts(gm)["aten.copy_.default"] == 3
    assert counts(gm)["aten.mul.Tensor"] == counts(traced.traced())["aten.mul.Tensor"] - 2  # dead ones
    assert_same_results(gm, expected)


def test_a_wait_does_not_sink_past_a_write_to_what_is_sent():
    def step(x):
        y = x * 2
        received = c10d.wait_tensor(c10d.all_gather_into_tensor(y, 2, "dp"))
        y.add_(1)
        return received * 2, y

    with pytest.raises(ForeignGraphPassError, match=r"'sink_waits'.*at another time.*Leave 'sink_waits' out"):
        for_graph_trainer(SinkWaits())(traced.small(step), ())


@dataclasses.dataclass(frozen=True)
class Drops:
    """Erases what writes, though it has been made a result."""

    name: ClassVar[str] = "drops"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        for node in graph.graph.find_nodes(op="call_function", target=aten.copy_.default):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


def test_a_dropped_write_is_found(gm):
    with pytest.raises(ForeignGraphPassError, match=r"dropped %copy_.*writes to memory"):
        for_graph_trainer(Drops())(gm, ())


def test_graphs_that_cannot_be_taken():
    def unwaited(x):
        return c10d.all_reduce(x, "sum", "dp") + 1

    with pytest.raises(ForeignGraphPassError, match=r"'bucket_collectives'.*not waited for exactly once"):
        for_graph_trainer(BucketCollectives())(traced.small(unwaited), ())
    compiled = fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with pytest.raises(ForeignGraphPassError, match=r"'sink_waits'.*calls a submodule"):
        for_graph_trainer(SinkWaits())(compiled, ())


def test_passes_that_carry_out_a_strategy_are_refused():
    with pytest.raises(ForeignGraphPassError, match=r"'zero_shard'.*fxpar.lower.*bucket_collectives"):
        resolve(ZeroShard())
    with pytest.raises(ForeignGraphPassError, match="'insert_reshards'"):
        resolve("insert_reshards")
    with pytest.raises(UnknownPassError):
        resolve("sink_wait")
    assert resolve(Drops()) == Drops()
