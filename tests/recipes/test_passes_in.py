"""graph_trainer's passes in fxpar's ladder."""

from __future__ import annotations

import dataclasses
import functools
import operator
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import fx

pytest.importorskip("torchtitan", reason="torchtitan is an extra")

from torchtitan.experiments.graph_trainer import memory_policy, remove_noop_passes, selective_activation_remat
from torchtitan.experiments.graph_trainer.fsdp_passes import deduplicate_fsdp_unshard_chains_pass

from fxpar.checking import assign, run_world
from fxpar.errors import ForeignPassError
from fxpar.ir.exec_graph import ExecGraph
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.pass_base import GraphPass, Tier
from fxpar.lowering import default_passes, lower
from fxpar.lowering.ladder import run_passes
from fxpar.recipes.passes_in import as_fxpar_pass
from tests.captured import llama
from tests.repeat import thinned

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@dataclasses.dataclass(frozen=True)
class Dirty:
    """Makes work for passes that tidy up: double transposes, detaches and dead products."""

    name: ClassVar[str] = "dirty"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        for node in graph.graph.find_nodes(op="call_function", target=aten.mm.default):
            users, value = list(node.users), node
            meta = {key: known for key, known in node.meta.items() if key != "dist_in"}  # these have other operands
            with graph.graph.inserting_before(node.next):
                for target in (aten.t.default, aten.t.default, aten.detach.default):
                    value = graph.graph.call_function(target, (value,))
                    value.meta = dict(meta)
                dead = graph.graph.call_function(aten.mul.Scalar, (value, 2.0))
                dead.meta = dict(meta)
            for user in users:
                user.replace_input_with(node, value)


def ladder(*passes: GraphPass, behind: str = "lower_collectives") -> list[GraphPass]:
    steps = default_passes()
    at = [step.name for step in steps].index(behind) + 1
    return [*steps[:at], *passes, *steps[at:]]


def run(strategy: str, passes: list[GraphPass]) -> tuple[ExecGraph, list[dict[str, Any]]]:
    captured = llama(layers=2)
    program = lower(captured.graph, strategy, passes=passes)
    assert isinstance(program, ExecGraph)
    plan = assign(program.strategy, len(captured.batches))
    return program, run_world(program, captured.params, captured.buffers, captured.batches, plan, 1.0)


@functools.cache
def plain(strategy: str) -> tuple[ExecGraph, list[dict[str, Any]]]:
    return run(strategy, default_passes())


def assert_same_ranks(ranks: list[dict[str, Any]], strategy: str) -> None:
    for mine, theirs in zip(ranks, plain(strategy)[1], strict=True):
        assert torch.equal(mine["loss"], theirs["loss"])
        assert mine["grads"].keys() == theirs["grads"].keys()
        assert all(torch.equal(mine["grads"][fqn], theirs["grads"][fqn]) for fqn in theirs["grads"])


def calls(program: ExecGraph) -> Counter[str]:
    return Counter(str(node.target) for part in program.parts.values() for node in part.graph.nodes)


@pytest.mark.parametrize("strategy", thinned(["dp2", "tp2+sp"], ["tp2+sp"]))
def test_tidying_passes(strategy):
    theirs = [remove_noop_passes.canonicalize_graph_pass, remove_noop_passes.eliminate_dead_code_pass]
    program, ranks = run(strategy, ladder(Dirty(), *map(as_fxpar_pass, theirs)))
    assert_same_ranks(ranks, strategy)
    difference = calls(program)
    difference.subtract(calls(plain(strategy)[0]))
    assert {name: count for name, count in difference.items() if count} == {"aten.slice.Tensor": -1}
    names = [entry["name"] for entry in program.passes]
    assert names[names.index("dirty") + 1 :][:2] == ["canonicalize_graph_pass", "eliminate_dead_code_pass"]


def remat() -> list[GraphPass]:
    """graph_trainer's full recomputation: one pass puts tags on nodes, another one reads them."""
    tag = functools.partial(memory_policy.tag_sac_policy, policy_fn=memory_policy._make_full_memory_policy())
    return [as_fxpar_pass(tag), as_fxpar_pass(selective_activation_remat.selective_activation_remat_pass)]


@pytest.mark.parametrize("strategy", thinned(["dp2", "tp2+sp"], ["tp2+sp"]))
def test_recomputation(strategy):
    program, ranks = run(strategy, ladder(*remat()))
    assert_same_ranks(ranks, strategy)
    assert calls(program)["fxpar.attention.default"] == 2 * calls(plain(strategy)[0])["fxpar.attention.default"]
    assert pickle.loads(pickle.dumps(program)).fingerprint() == program.fingerprint()
    assert program.collective_bytes() >= plain(strategy)[0].collective_bytes()


def test_one_gather_instead_of_two():
    once = ladder(as_fxpar_pass(deduplicate_fsdp_unshard_chains_pass))
    program, ranks = run("dp2+zero3", once)
    assert_same_ranks(ranks, "dp2+zero3")
    assert program.collectives()["all_gather"] < plain("dp2+zero3")[0].collectives()["all_gather"]


def test_metadata_is_kept_and_new_nodes_have_it():
    seen: dict[str, dict[str, Any]] = {}

    def keep(name: str, graph: AnnotatedGraph) -> None:
        if name in ("lower_collectives", "selective_activation_remat_pass"):
            seen[name] = {node.name: node.meta for node in graph.graph.nodes}

    run_passes(llama().graph, "tp2+sp", ladder(*remat()), keep)
    before, after = seen.values()
    common = before.keys() & after.keys()
    for name in common:
        theirs = {k: v for k, v in after[name].items() if k != "graph_trainer"}
        assert theirs == {**before[name], **({"backward": theirs["backward"]} if "backward" in theirs else {})}
    copies = [name for name in after.keys() - before.keys() if name.endswith("_recomputed")]
    assert len(copies) > 50
    for name in copies:
        original = before[name.removesuffix("_recomputed")]
        assert after[name]["backward"] is True
        for key in ("tensor", "local", "fqn", "source", "comm", "sym"):
            assert after[name].get(key) == original.get(key)


def test_sizes_are_symbolic():
    """A pass sees that a local length is half of the global one, and integers as symbolic integers."""

    def look(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
        assert [tuple(v.shape) for v in example_inputs] == [
            tuple(n.meta["val"].shape) for n in gm.graph.find_nodes(op="placeholder")
        ]
        sizes = {
            str(s) for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor) for s in n.meta["val"].shape
        }
        assert any("//" in size or "/" in size for size in sizes), sizes
        assert any(isinstance(n.meta.get("val"), torch.SymInt) for n in gm.graph.nodes)
        return gm

    lower(llama().graph, "cp2", passes=ladder(as_fxpar_pass(look)))


def test_a_new_node_lies_as_its_value_says():
    def negate_twice(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
        for node in gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            users, value = list(node.users), node
            with gm.graph.inserting_before(node.next):
                for _ in range(2):
                    value = gm.graph.call_function(aten.neg.default, (value,))
                    value.meta = {"val": torch.empty_like(node.meta["val"])}
            for user in users:
                user.replace_input_with(node, value)
        return gm

    graphs: dict[str, AnnotatedGraph] = {}
    run_passes(
        llama().graph, "cp2", ladder(as_fxpar_pass(negate_twice)), lambda name, graph: graphs.update({name: graph})
    )
    (graph,) = {id(g): g for g in graphs.values()}.values()
    found = [
        n for n in graph.graph.nodes if n.target in (aten.neg.default, aten.neg_.default) and n.meta["source"] is None
    ]
    assert len(found) > 20
    for node in found:
        assert node.meta["local"] == node.all_input_nodes[0].meta["local"]
        assert node.meta.get("phase", "body") == "body"
    assert_same_ranks(run("cp2", ladder(as_fxpar_pass(negate_twice)))[1], "cp2")


def test_stages_take_them_too():
    program = lower(llama(layers=2).graph, "pp2", passes=ladder(*remat()))
    assert "selective_activation_remat_pass" in [entry["name"] for entry in program.stages[1].passes]  # type: ignore[union-attr]


def test_names_and_tiers():
    adapted = as_fxpar_pass(functools.partial(memory_policy.tag_sac_policy, policy_fn=None))
    assert (adapted.name, adapted.tier) == ("tag_sac_policy", "exact")
    assert isinstance(adapted, GraphPass)
    assert as_fxpar_pass(lambda gm, _: gm, "mine", tier="numeric").name == "mine"
    with pytest.raises(ForeignPassError, match="cannot be called"):
        as_fxpar_pass(3)  # type: ignore[arg-type]


def returns_nothing(gm, example_inputs):
    gm.graph.eliminate_dead_code()


def adds_an_input(gm, example_inputs):
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.placeholder("extra")
    return gm


def renames_an_input(gm, example_inputs):
    next(iter(gm.graph.nodes)).target = "other"
    return gm


def drops_a_result(gm, example_inputs):
    (output,) = gm.graph.find_nodes(op="output")
    output.args = (output.args[0][:-1],)
    return gm


def swaps_results(gm, example_inputs):
    (output,) = gm.graph.find_nodes(op="output")
    output.args = ((*output.args[0][1:], output.args[0][0]),)
    return gm


def calls_a_submodule(gm, example_inputs):
    (output,) = gm.graph.find_nodes(op="output")
    gm.add_submodule("inner", torch.nn.Identity())
    with gm.graph.inserting_before(output):
        first = gm.graph.call_module("inner", (output.args[0][0],))
    output.args = ((first, *output.args[0][1:]),)
    return gm


def gives_no_shape(gm, example_inputs):
    (output,) = gm.graph.find_nodes(op="output")
    with gm.graph.inserting_before(output):
        first = gm.graph.call_function(operator.add, (output.args[0][0], 1.0))
    output.args = ((first, *output.args[0][1:]),)
    return gm


def decides_on_a_length(gm, example_inputs):
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and any(isinstance(s, torch.SymInt) and s > 10 for s in value.shape):
            break
    return gm


def waits_twice(gm, example_inputs):
    wait = gm.graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)[0]
    with gm.graph.inserting_after(wait):
        gm.graph.node_copy(wait)
    return gm


BAD: list[tuple[Callable[..., Any], str]] = [
    (returns_nothing, "returned a NoneType"),
    (adds_an_input, "takes .* inputs"),
    (renames_an_input, "number 0 of which is 'other' instead of"),
    (drops_a_result, "has 12 results instead of 13"),
    (swaps_results, r"result loss 'loss' is f64\[.+\] instead of f64\[\]"),
    (calls_a_submodule, "it made %inner, a call_module"),
    (gives_no_shape, r"%add.* is new and has no meta\['val'\]"),
    (decides_on_a_length, "it decided on"),
    (waits_twice, "not waited for exactly once"),
]


@pytest.mark.parametrize(("bad", "message"), BAD, ids=[f.__name__ for f, _ in BAD])
def test_bad_passes(bad, message):
    graph: list[AnnotatedGraph] = []
    with pytest.raises(ForeignPassError, match=rf"graph_trainer pass '{bad.__name__}'.*{message}"):
        run_passes(llama().graph, "tp2+sp", ladder(as_fxpar_pass(bad)), lambda name, g: graph.append(g))
    text = str(graph[-1].graph)
    assert text == str(_lowered("tp2+sp").graph)  # left as it was


@functools.cache
def _lowered(strategy: str) -> AnnotatedGraph:
    steps = default_passes()
    at = [step.name for step in steps].index("lower_collectives") + 1
    return run_passes(llama().graph, strategy, steps[:at], None)[0]


def test_a_graph_that_is_not_lowered_yet():
    early = as_fxpar_pass(remove_noop_passes.eliminate_dead_code_pass)
    with pytest.raises(ForeignPassError, match=r"'eliminate_dead_code_pass'.*Put the pass behind lower_collectives"):
        lower(llama().graph, "tp2", passes=ladder(early, behind="cleanup"))
