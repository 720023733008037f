"""Ladders and passes of the user's own that leave something undone: refused, and the pass that did it is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import fx

from fxpar.checking import check
from fxpar.errors import PassContractError, VerifyError
from fxpar.ir import collectives as c
from fxpar.ir.dist_config import DistConfig, P, Shard
from fxpar.ir.exec_graph import collective_kind
from fxpar.ir.graph import AnnotatedGraph, Output
from fxpar.ir.markers import vary
from fxpar.ir.pass_base import GraphPass, Tier
from fxpar.lowering import default_passes, lower
from fxpar.passes.bucket_collectives import BucketCollectives
from fxpar.runtime.compiling import _given_passes, compile_strategies
from tests.captured import llama, lowered, mlp
from tests.runtime.hot import make_llama, packed_lm_loss

aten = torch.ops.aten
Change = Callable[[AnnotatedGraph], object]


@dataclass(frozen=True)
class Mine:
    change: Change
    name: ClassVar[str] = "mine"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        return self.change(graph)  # type: ignore[return-value]


def behind(name: str, change: Change, **options) -> list[GraphPass]:
    """The ladder with a pass of one's own behind the one called `name`."""
    ladder = default_passes(**options)
    at = [step.name for step in ladder].index(name) + 1
    return [*ladder[:at], Mine(change), *ladder[at:]]


def calls(graph: AnnotatedGraph, target: object) -> list[fx.Node]:
    return list(graph.graph.find_nodes(op="call_function", target=target))


def drop(graph: AnnotatedGraph, node: fx.Node) -> None:
    node.replace_all_uses_with(node.all_input_nodes[0])
    graph.graph.erase_node(node)


def drop_sum(axis: str) -> Change:
    """Remove an all-reduce over `axis` and its wait."""

    def change(graph: AnnotatedGraph) -> None:
        sums = (n for n in graph.graph.nodes if collective_kind(n) == "all_reduce" and n.meta["comm"][0] == axis)
        node = next(sums)
        (wait,) = node.users
        drop(graph, wait)
        drop(graph, node)

    return change


def lie_whole(graph: AnnotatedGraph) -> None:
    """Say of sums over tp that are reduced right away that they are whole."""
    for node in (n for n in graph.graph.nodes if n.users and all(u.target is c.reshard for u in n.users)):
        if node.op != "call_function" or not node.meta["dist"].partial:
            continue
        config: DistConfig = node.meta["dist"]
        node.meta["dist"] = DistConfig.replicated(config.mesh, config.ndim, config.dtype)


def shift(graph: AnnotatedGraph) -> None:
    """Say that the result of a reduce-scatter is still a sum."""
    node = next(n for n in calls(graph, c.reduce_scatter) if any("dist_in" in u.meta for u in n.users))
    node.meta["dist"] = node.args[0].meta["dist"]


def in_place(graph: AnnotatedGraph) -> None:
    for node in calls(graph, aten.add.Tensor):
        node.target = aten.add_.Tensor


def more_inputs(graph: AnnotatedGraph) -> None:
    first = graph.placeholders[0]
    with graph.graph.inserting_before(first):
        graph.graph.placeholder("extra").meta = dict(first.meta)


def an_attribute(graph: AnnotatedGraph) -> None:
    node = calls(graph, aten.mm.default)[0]
    with graph.graph.inserting_before(node):
        made = graph.graph.get_attr("weight")
    made.meta = dict(node.args[0].meta)
    node.args = (made, node.args[1])


def no_shape(graph: AnnotatedGraph) -> None:
    calls(graph, aten.mm.default)[0].meta["tensor"] = None


# --------------------------------------------------------------------------------------------------- what a pass broke
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize(
    ("where", "change", "message"),
    [
        ("insert_reshards", lambda g: drop(g, calls(g, c.reshard)[-1]), "needs .* as .*, but it is"),
        ("reduce_gradients", lambda g: drop(g, calls(g, c.reshard)[-1]), "needs .* as .*, but it is"),
        ("zero_shard", lie_whole, "cannot run on axis tp as"),
        ("reduce_gradients", lie_whole, "cannot run on axis tp as"),
        ("reshard_to_collectives", shift, "but it is"),
        ("write_in_place", drop_sum("tp"), "needs .* as .*, but it is"),
        ("annotate", in_place, r"aten.add_.Tensor.* writes in place.*Use the op that returns its result"),
        ("cleanup", in_place, r"aten.add_.Tensor.* writes in place"),
        ("write_in_place", more_inputs, r"\d+ placeholders for \d+ inputs"),
        ("write_in_place", an_attribute, "is a get_attr"),
        ("annotate", no_shape, "aten.mm.default.* has no shape"),
    ],
)
def test_what_a_pass_breaks_is_said_behind_it(where, change, message):
    with pytest.raises(VerifyError, match=f"after pass 'mine': .*{message}"):
        lower(llama().graph, "dp2.tp2+sp", passes=behind(where, change))


def test_what_writes_in_place_comes_behind_what_moves_calls():
    with pytest.raises(VerifyError, match="pass 'chunk_loss' needs ops that write over nothing"):
        lower(llama().graph, "tp2", passes=behind("lower_collectives", in_place))


def test_a_pass_returns_nothing():
    with pytest.raises(PassContractError, match=r"'mine' .* it returned a Graph; a pass changes the graph in place"):
        lower(llama().graph, "tp2", passes=behind("cleanup", lambda graph: fx.Graph()))


@pytest.mark.parametrize("op", [aten.alias.default, aten.clone.default])
def test_a_copy_may_stand_behind_every_op(op):
    """Of terms of a logsumexp too (the cross entropy of a cut vocabulary)."""
    kinds = set()

    def copies(graph: AnnotatedGraph) -> None:
        for node in list(graph.graph.nodes):
            dist = node.meta.get("dist")
            if node.op != "call_function" or not isinstance(dist, DistConfig):
                continue
            kinds.update(kind for _, kind in dist.partial)
            with graph.graph.inserting_after(node):
                copy = graph.graph.call_function(op, (node,))
            copy.meta = {**node.meta, "dist_in": (dist,)}
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)

    captured = llama()
    program = lower(captured.graph, "tp2+sp", passes=behind("annotate", copies))
    assert kinds == {"sum", "logsumexp"}
    (result,) = check(captured.graph, [program], captured.params, captured.buffers, captured.batches)
    assert result.ok


# ------------------------------------------------------------------------------------------------------------- ladders
STORED = {"for_store": True}


def without(name: str, **options) -> list[GraphPass]:
    return [step for step in default_passes(**options) if step.name != name]


def twice(name: str, **options) -> list[GraphPass]:
    return [again for step in default_passes(**options) for again in ([step] * (2 if step.name == name else 1))]


@pytest.mark.parametrize(
    ("ladder", "message"),
    [
        (without("insert_reshards"), "pass 'zero_shard' needs operands that are placed as .*Run insert_reshards"),
        (without("reshard_to_collectives"), "pass 'mask_padding' needs a graph without reshards.*Run reshard_to"),
        (without("global_to_local"), "pass 'ring_attention' needs local shapes.*Run global_to_local before it"),
        (without("lower_collectives"), "pass 'chunk_loss' needs collectives that are calls"),
        (without("reduce_gradients"), "the loss 'loss' .* is that of one replica. Run reduce_gradients once"),
        (without("reduce_gradients", **STORED), "the loss 'loss' .* is that of one replica"),
        (default_passes()[:8], "at the end of the ladder: a program needs local shapes; .*Run global_to_local"),
        (twice("annotate"), "pass 'annotate' needs a graph without placements"),
        (twice("zero_shard"), "pass 'zero_shard' needs parameters that every replica has; .*zero_shard has run"),
        (twice("reduce_gradients"), "pass 'reduce_gradients' needs gradients of one replica; .*has run"),
        (twice("reduce_gradients", **STORED), "pass 'reduce_gradients' needs gradients of one replica"),
        (twice("chunk_loss"), "pass 'chunk_loss' needs a loss of all tokens at once; .*chunk_loss has run"),
        (twice("global_to_local"), "pass 'global_to_local' needs global shapes.*global_to_local has run"),
    ],
)
def test_a_pass_that_is_missing_or_runs_twice(ladder, message):
    with pytest.raises(VerifyError, match=message):
        lower(llama().graph, "dp2.tp2+zero1+chunks(2)", passes=ladder)


def test_uneven_dims_need_their_padding_masked():
    with pytest.raises(VerifyError, match=r"needs zeros in the padding .* Run mask_padding"):
        lower(llama().graph, "tp3", passes=without("mask_padding"))
    even = lower(mlp().graph, "dp2", passes=without("mask_padding"))
    assert even.collectives() == lowered(mlp(), "dp2").collectives()


def not_deferred(graph: AnnotatedGraph) -> None:
    graph.deferred.clear()


def deferred_otherwise(graph: AnnotatedGraph) -> None:
    for fqn, config in graph.deferred.items():
        graph.deferred[fqn] = DistConfig.replicated(config.mesh, config.ndim, config.dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (not_deferred, "the grad .* is that of one replica|the grad .* is a partial sum that is never reduced"),
        (deferred_otherwise, "the grad .* is to be summed as .*, but is placed as"),
        (drop_sum("dp"), "the loss .* is that of one replica"),
    ],
)
def test_results_that_are_not_summed_up(change, message):
    with pytest.raises(VerifyError, match=f"at the end of the ladder: {message}"):
        lower(mlp().graph, "dp2.tp2", passes=behind("write_in_place", change, **STORED))


@pytest.mark.parametrize(
    ("kind", "placement", "message"),
    [
        ("loss", P, "a partial sum that is never reduced"),
        ("buffer", Shard(0), "must be whole on every rank of a replica"),
    ],
)
def test_results_that_lie_as_nobody_takes_them(kind, placement, message):
    def change(graph: AnnotatedGraph) -> None:
        graph.outputs = (*graph.outputs[:-1], Output(kind, "mine"))
        config: DistConfig = graph.results[-1].meta["dist"]
        config = DistConfig.replicated(config.mesh, config.ndim, config.dtype).with_placement("tp", placement)
        graph.results[-1].meta["dist"] = config
        (output,) = graph.graph.find_nodes(op="output")
        output.meta["dist_in"] = (*output.meta["dist_in"][:-1], config)

    with pytest.raises(VerifyError, match=f"at the end of the ladder: the {kind} .* {message}"):
        lower(mlp().graph, "tp2", passes=behind("write_in_place", change))


def test_a_sum_is_not_taken_twice():
    """What reduces a gradient in the graph must not leave it to be reduced behind it as well."""

    def defer(graph: AnnotatedGraph) -> None:
        for node, out in zip(graph.results, graph.outputs, strict=True):
            if out.kind == "grad":
                graph.deferred[out.fqn] = node.meta["dist"].with_placement("dp", P)

    with pytest.raises(VerifyError, match="is summed over dp already, and would be summed again"):
        lower(mlp().graph, "dp2", passes=behind("write_in_place", defer))


def moved(graph: fx.Graph) -> None:
    """A user in front of its operand; no node is another."""
    node = next(n for n in graph.nodes if n.op == "call_function" and n.users)
    next(iter(node.users)).append(node)


def unwaited(graph: fx.Graph) -> None:
    """Nobody waits for a collective any more; it is as it was."""
    node = next(iter(graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.wait_tensor.default)))
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def renamed(graph: fx.Graph) -> None:
    first, second, *_ = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    second.name = first.name


@pytest.mark.parametrize(
    ("change", "message"),
    [(moved, "is malformed: .* before it has been"), (unwaited, "not waited for"), (renamed, "redefined name")],
)
def test_what_a_late_pass_breaks_without_a_new_node_is_seen(change, message):
    """Behind a pass only what has changed is looked at one by one."""
    with pytest.raises(VerifyError, match=f"after pass 'mine': .*{message}"):
        lower(mlp().graph, "tp2", passes=behind("write_in_place", lambda graph: change(graph.graph)))


# --------------------------------------------------------------------------------- what `passes=` makes of the ladder
@pytest.mark.parametrize(
    ("passes", "message"),
    [
        (lambda ladder: ladder.append(Mine(print)), "'None' .* no NoneType"),
        (lambda ladder: (step for step in ladder), "generator"),
        (lambda ladder: 5, "'5' .* no int"),
        (lambda ladder: "abc", "'abc' .* no str"),
        (5, "'int' .* passes= is a function"),
        (lambda ladder: default_passes(), r"'ZeroShard\(.* stands in the place of ZeroShard\(params_from=3\)"),
        (lambda ladder: default_passes(for_store=True, accumulate=torch.float64), "stands in the place of Casts"),
    ],
)
def test_what_is_no_ladder(passes, message):
    with pytest.raises(PassContractError, match=message):
        _given_passes(passes, default_passes(for_store=True))


def test_other_options_of_what_is_nobody_elses():
    given = default_passes(for_store=True)
    tiny = BucketCollectives(0.01)
    mine = _given_passes(lambda ladder: [tiny if s.name == tiny.name else s for s in ladder], given)
    assert [a == b for a, b in zip(mine, given, strict=True)].count(False) == 1


@pytest.mark.parametrize("name", ["reduce_gradients", "reshard_to_collectives", "mask_padding"])
def test_a_copy_may_stand_behind_a_term_of_a_sum(name):
    """Cleanup takes the marker away that the copy is of."""

    def copied(graph: AnnotatedGraph) -> None:
        terms = calls(graph, vary)
        assert terms
        for node in terms:
            with graph.graph.inserting_after(node):
                copy = graph.graph.call_function(aten.clone.default, (node,))
            copy.meta = {**node.meta, "dist_in": (node.meta["dist"],)}
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)

    captured = mlp()
    program = lower(captured.graph, "dp2", passes=behind(name, copied))
    (result,) = check(captured.graph, [program], captured.params, captured.buffers, captured.batches)
    assert result.ok


def test_the_ladder_of_a_run_is_looked_at():
    with pytest.raises(PassContractError, match=r"'None' .* no NoneType"):
        compile_strategies(make_llama(), {512: "dp1"}, packed_lm_loss, passes=lambda ladder: ladder.append(Mine(print)))
