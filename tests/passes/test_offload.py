"""Offload: the same bits, fewer bytes on the device; what waits on the host goes once and comes back a block ahead."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import fx

from fxpar.checking import assign, run_world
from fxpar.errors import NothingToOffloadError, RuleConflictError, RuleGlobError, VerifyError
from fxpar.graph_files import load_graph, save_graph
from fxpar.ir.exec_graph import ExecGraph
from fxpar.ir.fqn import block_of
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.node_meta import is_backward, is_on_host
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.lowering import lower, lower_forward
from fxpar.lowering.needs import verify_needs
from fxpar.ops import layout
from fxpar.passes.global_to_local import GlobalToLocal
from fxpar.passes.offload import Offload
from fxpar.remat import saved_bytes, trace_storages
from fxpar.tracer import capture_forward
from tests.captured import Captured, gpt, llama, lowered, odd
from tests.forwards import case, check, truth
from tests.passes.sketch import Sketch
from tests.repeat import thinned

aten, own = torch.ops.aten, torch.ops.fxpar


def calls(graph: fx.Graph, target: object) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=target))


def moved(program: ExecGraph) -> list[fx.Node]:
    """What is copied to the host."""
    return [node.all_input_nodes[0] for node in calls(program.body.graph, own.to_host.default)]


def results(captured: Captured, strategy: str) -> list[dict]:
    program = lowered(captured, strategy)
    plan = assign(program.strategy, 2)
    return run_world(program, captured.params, captured.buffers, captured.batches, plan, 0.5)


# ------------------------------------------------------------------------------------------------------------- where
class Block:
    """x -> a = sin(x) -> b = cos(a) -> loss; the backward reads `saved(a)`, and the sum of that and of b's gradient."""

    def __init__(self, strategy: str = "dp1+offload") -> None:
        self.sketch = Sketch(strategy)
        self.w, self.x = (self.sketch.place(name, (4, 4), kind=kind) for name, kind in (("w", "param"), ("x", "batch")))
        self.a = self.call(aten.sin.default, self.x)
        self.b = self.call(aten.cos.default, self.a)
        self.loss = self.sketch.call(aten.sum.default, self.b, shape=())
        self.three = self.a  # [2, 4, 2] where a test makes it

    def call(self, target: object, *args: object, shape: tuple = (4, 4), **meta: object) -> fx.Node:
        return self.sketch.call(target, *args, shape=shape, **meta)

    def back(self, *args: object, module: str = "m") -> fx.Node:
        return self.call(aten.mul.Tensor, *args, fqn=module, backward=True)

    def done(self, grad: fx.Node, kind: str = "value") -> AnnotatedGraph:
        """With a loss outside, so that what is read first may go too."""
        graph = self.sketch.done(self.loss, grad, kinds=[(kind, "0"), ("grad", "w")])
        for step in (GlobalToLocal(), Offload()):
            step(graph)
        graph.graph.lint()
        return graph


SHORT = {own.to_host.default: "send", own.from_host.default: "fetch", aten.sin.default: "a", aten.cos.default: "b"}


def order(graph: AnnotatedGraph) -> str:
    """`a`, `b`, `loss`, then `back` for what the backward computes."""
    rest = {aten.sum.default: "loss", aten.mul.Tensor: "back", **SHORT}
    return " ".join(rest[node.target] for node in graph.graph.nodes if node.op == "call_function")


def test_a_value_goes_behind_its_last_reader_and_comes_back_for_the_backward():
    block = Block()
    first = block.back(block.w, block.w)
    graph = block.done(block.back(first, block.a))
    assert order(graph) == "a b send loss fetch back back"
    (sent,), (fetched,) = calls(graph.graph, own.to_host.default), calls(graph.graph, own.from_host.default)
    assert (sent.args, fetched.args) == ((block.a,), (sent,))
    assert block.a.users.keys() == {block.b, sent}


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (["layers.2", "layers.1", "layers.0"], "a b send loss send fetch back fetch back back"),
        (["layers.1", "layers.1.ffn", "layers.0"], "a b send loss send fetch back fetch back back"),
        (["layers.1", "layers.1", "layers.1.ffn"], "a b send loss send fetch fetch back back back"),
    ],
)
def test_what_a_block_reads_starts_to_come_where_the_block_before_begins(modules, expected):
    """The first op reads nothing that was saved, the second one b, the third one a."""
    block = Block()
    one = block.back(block.w, block.w, module=modules[0])
    two = block.back(one, block.b, module=modules[1])
    assert order(block.done(block.back(two, block.a, module=modules[2]))) == expected


def test_views_of_one_storage_move_once():
    block = Block()
    flat = block.call(aten.view.default, block.a, [16], shape=(16,))
    half = block.call(aten.slice.Tensor, flat, 0, 0, 8, shape=(8,))
    block.b = block.call(aten.cos.default, half, shape=(8,))
    halves = block.call(aten.sum.default, block.b, shape=())
    block.loss = block.call(aten.add.Tensor, block.loss, halves, shape=())
    whole = block.call(aten.mul.Tensor, block.w, block.a, backward=True)
    grad = block.call(aten.mul.Tensor, half, half, shape=(8,), backward=True)
    total = block.call(aten.sum.default, grad, shape=(), backward=True)
    graph = block.done(block.call(aten.mul.Tensor, whole, total, backward=True))
    (sent,), (fetched,) = calls(graph.graph, own.to_host.default), calls(graph.graph, own.from_host.default)
    assert (sent.args[0], sent._prev) == (block.a, block.b)
    assert not [user for node in (block.a, flat, half) for user in node.users if is_backward(user)]
    assert whole.args[1] is fetched
    assert grad.args[0].args[0].args[0] is fetched  # type: ignore[union-attr]


def saved_values(block: Block) -> dict[str, Callable[[], fx.Node]]:
    """What the forward makes and the backward reads, by why it stays; the last one has no reason to."""
    return {
        "param": lambda: block.w,
        "of a param": lambda: block.call(aten.sin.default, block.w),
        "input": lambda: block.call(aten.view.default, block.x, [4, 4]),
        "result": lambda: block.call(aten.sin.default, block.a),
        "written": lambda: block.call(aten.sin.default, block.a),
        "in larger memory": lambda: block.call(layout.unpack, block.three, 1, (), 3, shape=(4, 3)),
        "moves": lambda: block.call(aten.sin.default, block.a),
    }


@pytest.mark.parametrize("what", saved_values(Block()))
def test_what_must_stay_stays(what):
    block = Block()
    block.three = block.call(aten.view.default, block.a, [2, 4, 2], shape=(2, 4, 2))
    saved = saved_values(block)[what]()
    shape = saved.meta["tensor"].shape
    if what == "result":
        block.loss = saved
    else:
        reader = (aten.add_.Tensor, saved, block.w) if what == "written" else (aten.cos.default, saved)
        read = block.call(aten.sum.default, block.call(*reader, shape=shape), shape=())
        block.loss = block.call(aten.add.Tensor, block.loss, read, shape=())
    graph = block.done(block.call(aten.mul.Tensor, saved, saved, shape=shape, fqn="m", backward=True))
    assert len(calls(graph.graph, own.to_host.default)) == (what == "moves")


def test_what_is_made_in_the_forward_for_the_backward_alone_is_not_waited_for():
    """A stage would make it in its backward, of a value that it still needs there."""
    block = Block()
    mask = block.call(aten.cos.default, block.a)
    assert not calls(block.done(block.back(block.w, mask)).graph, own.to_host.default)


def test_values_of_the_loss_stay_where_the_graph_has_it():
    block = Block()
    graph = block.done(block.back(block.w, block.a), "loss")
    assert not calls(graph.graph, own.to_host.default)


def test_a_second_run_is_refused():
    block = Block()
    graph = block.done(block.back(block.w, block.a))
    with pytest.raises(VerifyError, match="needs values that are all on the device; in this graph offload has run"):
        verify_needs(graph, "offload")


# --------------------------------------------------------------------------------------------------------- same bits
ON_RANKS = [
    "dp1+offload",
    "dp1+remat+offload",
    "tp2+sp+remat(selective)+offload",
    "cp2+offload(0.5)",
    "dp2+zero3+offload",
    "tp2+sp[layers.0: +offload; layers.1: +remat]",
]


@pytest.mark.parametrize("strategy", thinned(ON_RANKS, [ON_RANKS[i] for i in (0, 2, 4, 5)]))
def test_same_bits(strategy):
    captured = llama(layers=2)
    plain = strategy.partition("[")[0].partition("+remat")[0].partition("+offload")[0]
    assert moved(lowered(captured, strategy))
    for mine, theirs in zip(results(captured, plain), results(captured, strategy), strict=True):
        assert torch.equal(mine["loss"], theirs["loss"])
        assert all(torch.equal(mine["grads"][name], theirs["grads"][name]) for name in theirs["grads"])


@pytest.mark.parametrize("name", thinned(["norms", "sizes", "experts"], ["norms"]))
def test_odd_models(name):
    assert moved(lowered(odd(name), "dp1+offload"))
    assert odd(name).check("dp1+offload").ok


@pytest.mark.parametrize(
    "strategy", ["pp2.tp2+sp+zb_h1+offload", "dp1+chunks(4)+offload", "tp2+offload > dp1+offload(0.5)"]
)
def test_stages_and_chunks(strategy):
    assert llama(layers=2).check(strategy).ok


def test_with_dropout():
    assert gpt().check("tp2+offload").ok


def test_a_forward_whose_loss_is_outside():
    """One without gradients has nothing to move, and is no error."""
    one = case("llama")
    forward = lower_forward(one.graph, "tp2+offload").forward
    assert any(map(is_on_host, forward.results))
    check(one.graph, "tp2+offload", one.params, one.buffers, one.batches, truth("llama", 1), one.keys)
    alone = capture_forward(one.model, (), {key: one.batches[0][key] for key in one.keys}, gradients=False)
    assert not lower_forward(alone, "tp2+offload").backward.results


# -------------------------------------------------------------------------------------------------------- what moves
def test_little_is_left_on_the_device():
    captured, at = llama(layers=2), 24

    def saved(strategy: str) -> int:
        program = lowered(captured, strategy)
        return saved_bytes(program.body.graph, trace_storages(program.body.graph, {d.symbol: at for d in program.dims}))

    whole = saved("dp1")
    assert saved("dp1+offload") < 0.15 * whole
    assert 0.4 * whole < saved("dp1+offload(0.5)") < 0.65 * whole


def test_the_earliest_go_first():
    blocks = {block_of(node.meta["fqn"]) for node in moved(lowered(llama(layers=2), "dp1+offload(0.3)"))}
    assert "layers.0" in blocks
    assert "layers.1" not in blocks


def test_rules():
    program = lowered(llama(layers=2), "dp1+offload[layers.1: +offload(none); layers.1.ffn: +offload]")
    modules = {".".join(node.meta["fqn"].split(".")[:3]) for node in moved(program)}
    assert "layers.0.attention" in modules
    assert {module for module in modules if module.startswith("layers.1")} == {"layers.1.ffn"}


def test_stages_copy_in_their_forward_and_fetch_in_their_backward():
    program = lowered(llama(layers=2), "pp2+zb_h1+offload")
    assert isinstance(program, PipelineGraph)
    for stage in program.stages:
        late: Sequence[fx.Graph] = [part.graph for part in (stage.backward, stage.input_part, stage.weight_part)]
        assert calls(stage.forward.graph, own.to_host.default)
        assert not [node for graph in late for node in calls(graph, own.to_host.default)]
        assert not calls(stage.forward.graph, own.from_host.default)
        assert calls(stage.backward.graph, own.from_host.default)


def test_programs_travel(tmp_path):
    program = lowered(llama(layers=2), "dp1+offload")
    save_graph(tmp_path / "g.fxpar", program)
    for copy in (pickle.loads(pickle.dumps(program)), load_graph(tmp_path / "g.fxpar")):
        assert copy.fingerprint() == program.fingerprint()
        assert copy.strategy == program.strategy
        assert len(moved(copy)) == len([node for node in copy.body.graph.nodes if is_on_host(node)]) > 10


@pytest.mark.parametrize(
    ("strategy", "error", "words"),
    [
        ("dp1[head: +offload]", NothingToOffloadError, "rule 'head: [+]offload' of strategy .* saves nothing that can"),
        ("pp2[head: +offload]", NothingToOffloadError, "rule 'head: [+]offload'"),
        ("dp1+offload > dp1[head: +offload]", NothingToOffloadError, "rule 'head: [+]offload'"),
        ("dp1[layers.9: +offload]", RuleGlobError, "rule 'layers.9' of the strategy matches no module"),
        ("dp1[layers.0: +offload; layers.*: +offload(0.2)]", RuleConflictError, "the offload of module 'layers.0'"),
    ],
)
def test_bad_rules(strategy, error, words):
    with pytest.raises(error, match=words):
        lower(llama(layers=2).graph, strategy)
