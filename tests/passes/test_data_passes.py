"""reduce_gradients, zero_shard, casts, accumulate_gradients: what happens over the data axes and per micro-batch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fxpar.checking import TOLERANCE, assign, run_world
from fxpar.ir.dist_config import AxisShard
from fxpar.ir.exec_graph import ExecGraph, Part, compile_graph
from fxpar.ir.markers import vary
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.passes.accumulate_gradients import AccumulateGradients
from fxpar.passes.casts import Casts
from fxpar.passes.reduce_gradients import ReduceGradients
from fxpar.passes.zero_shard import ZeroShard
from tests.captured import Captured, llama, lowered, odd
from tests.passes.sketch import F64, Sketch, before, names, text
from tests.repeat import crossed, thinned

aten = torch.ops.aten
BF16, F32 = torch.bfloat16, torch.float32


# --------------------------------------------------------------------------------------------- reduce_gradients
def gradients(strategy: str) -> Sketch:
    """A parameter cut by tp and its gradient, as the annotation leaves them."""
    s = Sketch(strategy)
    w = s.place("w", (8, 4), ["tp" if "tp" in strategy else "", ""])
    x = s.place("x", (6, 4), kind="batch")
    s.w, s.x = w, x
    return s


def test_results_are_summed_over_replicas_in_the_epilogue():
    s = gradients("dp2.tp2")
    loss = s.call(aten.sum.default, s.x, shape=())
    dw = s.call(aten.mul.Tensor, s.w, loss, shape=(8, 4), dims=["tp", ""])
    stat = s.call(aten.mean.dim, s.x, [0], shape=(4,))
    graph = s.done(loss, dw, stat, kinds=[("loss", "loss"), ("grad", "w"), ("buffer", "stat")])
    ReduceGradients()(graph)
    assert [line for line in text(graph.graph).splitlines() if "vary" in line or "reshard" in line] == [
        "%vary : f64[] P(dp) = vary(%sum_default) @epilogue",
        "%reshard : f64[] = reshard(%vary) @epilogue",
        "%vary_1 : f64[8@tp, 4] P(dp) = vary(%mul_tensor) @epilogue",
        "%reshard_1 : f64[8@tp, 4] = reshard(%vary_1) @epilogue",
        "%vary_2 : f64[4] P(dp,avg) = vary(%mean_dim) @epilogue",
        "%reshard_2 : f64[4] = reshard(%vary_2) @epilogue",
    ]


def test_integer_buffers_keep_the_largest():
    """A step count of replicas that ran different numbers of micro-batches; a boolean is nobody's to reduce."""
    s = gradients("dp2")
    count = s.call(aten.add.Scalar, s.x, 1, shape=(), dtype=torch.int64)
    flag = s.call(aten.gt.Scalar, s.x, 1, shape=(), dtype=torch.bool)
    graph = s.done(count, flag, kinds=[("buffer", "count"), ("buffer", "flag")])
    ReduceGradients()(graph)
    assert names(graph.graph) == ["aten.add.Scalar", "aten.gt.Scalar", "vary", "reshard"]
    (term,) = graph.graph.find_nodes(op="call_function", target=vary)
    assert term.meta["dist"].partial == (("dp", "max"),)


def test_nothing_to_reduce_on_one_replica():
    s = gradients("tp2")
    dw = s.call(aten.neg.default, s.w, shape=(8, 4), dims=["tp", ""])
    graph = s.done(dw, kinds=[("grad", "w")])
    ReduceGradients()(graph)
    assert names(graph.graph) == ["aten.neg"]


@pytest.mark.parametrize("level", [1, 2, 3])
def test_gradients_are_reduced_early_from_level_two_on(level):
    graph = before(llama().graph, f"dp2+zero{level}", "reshard_to_collectives")
    results = dict(zip([(o.kind, o.fqn) for o in graph.outputs], graph.results, strict=True))
    assert results["loss", "loss"].meta["phase"] == "epilogue"
    node = results["grad", "layers.0.ffn.up_proj.weight"]
    assert node.meta["phase"] == ("epilogue" if level == 1 else "body")
    assert node.meta.get("bucket") == (None if level == 1 else "grads/layers.0")


# -------------------------------------------------------------------------------------------------- zero_shard
def params(program: ExecGraph) -> dict[str, tuple]:
    return {
        info.fqn: stored.dist.dims[0]
        for info, stored in zip(program.inputs, program.stored_inputs, strict=True)
        if info.kind == "param"
    }


def kinds(part: Part, axis: str | None = None) -> Counter:
    """Kinds of a part's collectives, counting fused ones each."""
    found: Counter = Counter()
    for node in part.graph.nodes:
        comm = node.meta.get("comm")
        if comm and axis in (None, comm[0]):
            name = str(node.target).split(".")[1].rstrip("_").removesuffix("_into_tensor").removesuffix("_tensor")
            found[name] += node.meta.get("fused", 1)
    return found


PARAMETERS = 12 + 9  # of the two-layer Llama: 9 per layer, embedding, norm, head


@pytest.mark.parametrize("level", [1, 2])
def test_zero_one_and_two_gather_once_per_mini_batch(level):
    program = lower(llama(layers=2).graph, f"dp4+zero{level}")
    assert set(params(program).values()) == {(AxisShard("dp"),)}
    assert kinds(program.prologue) == {"all_gather": PARAMETERS}
    assert "all_gather" not in kinds(program.body) + kinds(program.epilogue)
    scatters = {name: kinds(part)["reduce_scatter"] for name, part in program.parts.items()}
    assert scatters == {
        "prologue": 0,
        "body": 0 if level == 1 else PARAMETERS,
        "epilogue": PARAMETERS if level == 1 else 0,
    }
    assert kinds(program.epilogue)["all_reduce"] == 1  # the loss


def test_zero_three_gathers_in_the_body_and_again_in_the_backward():
    program = lowered(llama(layers=2), "dp4+zero3")
    assert program.prologue.is_empty
    body = kinds(program.body)
    assert body["reduce_scatter"] == 9 * 2 + 3
    assert body["all_gather"] > 9 * 2 + 3
    # every bucket is gathered in one call: the layers by themselves, norm and head together
    for kind in ("all_gather", "reduce_scatter"):
        calls = [c for c in program.communications() if c.kind == kind]
        assert sorted(c.fused for c in calls if not (c.backward and kind == "all_gather")) == [1, 2, 9, 9]
    calls = [c for c in program.communications() if c.kind == "all_gather"]
    assert len([c for c in calls if c.fused == 9 and not c.backward]) == 2


def test_zero_three_frees_a_block_between_forward_and_backward():
    """The last block goes straight into its backward and is gathered once."""
    program = lowered(llama(layers=2), "dp4+zero3")
    again = [c for c in program.communications() if c.kind == "all_gather" and c.fused == 9 and c.backward]
    assert {c.fqn.split(".")[1] for c in again} == {"0"}


@pytest.mark.parametrize("strategy", ["dp2.cp2+zero1", "dp2.cp2.tp2+zero3"])
def test_zero_cuts_over_all_data_axes_inside_of_tp(strategy):
    found = params(lower(llama().graph, strategy))
    tp = (AxisShard("tp"),) if "tp" in strategy else ()
    assert found["layers.0.ffn.up_proj.weight"] == (*tp, AxisShard("dp.cp"))
    assert found["layers.0.ffn.down_proj.weight"] == (AxisShard("dp.cp"),)
    assert found["norm.weight"] == (AxisShard("dp.cp"),)


def test_the_level_of_each_parameter_is_that_of_its_rule():
    """A level of another module computes the same, so only the places of parameters and sums show it."""
    program = lowered(llama(layers=2), "dp2[layers.0: +zero3; norm: +zero2; head: +zero1]")
    cut = {fqn for fqn, dim in params(program).items() if dim == (AxisShard("dp"),)}
    assert cut == {fqn for fqn in params(program) if fqn.startswith(("layers.0.", "norm.", "head."))}
    gathers = [c for c in program.communications() if c.kind == "all_gather"]
    assert {c.part for c in gathers if "layers.0" in c.fqn} == {"body"}
    assert {c.part for c in gathers if "layers.0" not in c.fqn} == {"prologue"}
    assert sum(c.fused for c in gathers if c.backward) == 9  # of the block with level 3, whose backward is far
    scatters = Counter(c.part for c in program.communications() if c.kind == "reduce_scatter" for _ in range(c.fused))
    assert scatters == {"body": 9 + 1, "epilogue": 1}  # from level 2 on a gradient leaves at once


def test_zero_without_data_axes_does_nothing():
    assert kinds(lower(llama().graph, "tp2+zero3").prologue) == {}
    s = Sketch("tp2+zero3")
    graph = s.done(s.call(aten.neg.default, s.place("w", (8,), ["tp"]), shape=(8,), dims=["tp"]))
    ZeroShard()(graph)
    assert names(graph.graph) == ["aten.neg"]


def test_zero_shard_by_hand():
    s = Sketch("dp2.tp2+zero1")
    w = s.place("up.weight", (8, 4), ["tp", ""])
    scalar = s.place("gain", ())
    y = s.call(aten.mul.Tensor, w, scalar, shape=(8, 4), dims=["tp", ""])
    graph = s.done(y)
    ZeroShard()(graph)
    assert text(graph.graph) == "\n".join(
        [
            "%reshard : f64[8@tp, 4] = reshard(%up_weight) @prologue #params",
            "%mul_tensor : f64[8@tp, 4] = aten.mul.Tensor(%reshard, %gain)",
        ]
    )
    assert w.meta["dist"] == s.dist(["tp dp", ""])
    assert scalar.meta["dist"] == s.dist([])


@pytest.mark.parametrize("strategy", ["dp2.tp2+sp+zero2", pytest.param("dp4+zero2", marks=pytest.mark.nightly)])
def test_zero_is_exact(strategy):
    result = llama().check(strategy)
    assert result.ok, result


# ------------------------------------------------------------------------------------------------------- casts
def test_casts_by_hand():
    s = Sketch("dp2")
    w = s.place("w", (8, 4), dtype=BF16)
    dw = s.call(aten.neg.default, w, shape=(8, 4), dtype=BF16)
    graph = s.done(dw, kinds=[("grad", "w")])
    Casts(F32)(graph)
    assert text(graph.graph) == "\n".join(
        [
            "%_to_copy_default : bf16[8, 4] = aten._to_copy(%w, dtype=bfloat16) @prologue",
            "%neg_default : bf16[8, 4] = aten.neg(%_to_copy_default)",
            "%_to_copy_default_1 : f32[8, 4] = aten._to_copy(%neg_default, dtype=float32)",
        ]
    )
    assert graph.inputs[0].meta.dtype == F32
    assert w.meta["dist"].dtype == F32


def test_nothing_is_cast_to_the_same_dtype():
    s = Sketch("dp2")
    w, count = s.place("w", (8, 4)), s.place("count", (3,), dtype=torch.int64)
    graph = s.done(s.call(aten.neg.default, w, shape=(8, 4)), count, kinds=[("grad", "w"), ("buffer", "count")])
    Casts(F64)(graph)
    Casts(None)(graph)
    assert names(graph.graph) == ["aten.neg"]


@pytest.fixture(scope="module")
def narrow() -> Captured:
    return llama(layers=1, dtype=BF16)


@pytest.mark.parametrize(
    "strategy", thinned(["dp2", "dp2+zero1", "dp2+zero3", "dp2.tp2+sp+zero2", "cp2"], ["dp2+zero3", "dp2.tp2+sp+zero2"])
)
def test_masters_in_fp32_around_a_bf16_graph(narrow, strategy):
    program = lower(narrow.graph, strategy, storage=F32)
    dtypes = {info.fqn: info.meta.dtype for info in program.inputs if info.kind == "param"}
    assert set(dtypes.values()) == {F32}
    grads = [stored for out, stored in zip(program.outputs, program.stored_outputs, strict=True) if out.kind == "grad"]
    assert {stored.dist.dtype for stored in grads} == {F32}
    # gathers move bf16, gradients are reduced in fp32
    for c in program.communications():
        if c.kind == "all_gather" and c.part == "prologue":
            assert c.sent.dtype == BF16
        if c.part == "epilogue" and c.kind in ("all_reduce", "reduce_scatter"):
            assert c.sent.dtype == F32


@pytest.mark.parametrize(
    ("strategy", "reduce"),
    [("dp2+zero2", None), *(pytest.param("dp2.tp2+sp+zero3", to, marks=pytest.mark.nightly) for to in (None, BF16))],
    ids=str,
)
def test_a_bf16_graph_for_the_store_scatters_what_adds_up_in_fp32(narrow, strategy, reduce):
    program = lower(narrow.graph, strategy, for_store=True, accumulate=F32, reduce=reduce)
    scattered = [c.sent.dtype for c in program.communications() if c.kind == "reduce_scatter"]
    assert set(scattered) <= {BF16, F32}
    assert F32 in scattered
    grads = [stored for out, stored in zip(program.outputs, program.stored_outputs, strict=True) if out.kind == "grad"]
    assert {stored.dist.dtype for stored in grads} == {reduce or F32}


@pytest.mark.parametrize("strategy", ["dp2", "dp2+zero2", "dp2+zero3"])
def test_fp32_masters_give_the_bf16_gradients(narrow, strategy):
    """Parameters whose fp32 value is a bf16 value: on one micro-batch the gradients are those of the bf16 graph."""
    batches = narrow.batches[:2]
    masters = {name: value.float() for name, value in narrow.params.items()}
    plan = assign(Strategy.parse(strategy), 2)
    plain = run_world(lower(narrow.graph, "dp2"), narrow.params, narrow.buffers, batches, plan, 1.0)
    program = lower(narrow.graph, strategy, storage=F32)
    wide = run_world(program, masters, narrow.buffers, batches, plan, 1.0)
    for out, stored in zip(program.outputs, program.stored_outputs, strict=True):
        if out.kind == "grad":
            expected = stored.dist.take(plain[0]["grads"][out.fqn].float(), 0)
            got = wide[0]["grads"][out.fqn]
            assert got.dtype == F32
            scale = float(plain[0]["grads"][out.fqn].abs().max()) or 1.0
            assert float((got - expected).abs().max()) <= TOLERANCE[BF16] * scale


# ------------------------------------------------------------------------------------------ accumulate_gradients
def test_accumulate_by_hand():
    s = Sketch("dp2")
    x = s.place("x", (4,), kind="batch")
    a = s.call(aten.neg.default, x, shape=(4,))
    b = s.call(aten.exp.default, x, shape=(4,))
    graph = s.done(a, b)
    AccumulateGradients(keep=(1,))(graph)
    assert [n.name for n in graph.placeholders] == ["x", "acc_0"]
    module = compile_graph(graph.graph)
    total = torch.ones(4)
    results = module(torch.arange(4.0), total)
    assert torch.equal(results[0], 1 - torch.arange(4.0))
    assert results[0] is total, "added in place"
    assert torch.equal(results[1], torch.arange(4.0).exp())


@pytest.mark.parametrize(
    ("strategy", "name"),
    crossed(["dp1", "dp2", "dp3", "tp2", "dp2+zero2", "dp3+zero3"], ["shared", "norms", "counter"]),
)
def test_micro_batches_add_up(name, strategy):
    """Unequal numbers of micro-batches; gradients that alias each other, an input or a scalar; written buffers."""
    captured = odd(name)
    assert len(captured.batches) == 5
    result = captured.check(strategy)
    assert result.ok, result


@pytest.mark.parametrize(
    ("strategy", "name"),
    crossed(["dp1", "dp2", "dp3+zero3", "tp2", "tp3", "dp2.tp2+zero2", "cp2"], ["norms", "counter"]),
)
def test_buffers_go_from_one_micro_batch_to_the_next(name, strategy):
    """What a replica's micro-batches leave one after the other; the mean over replicas, of a count the largest."""
    captured = odd(name)
    chosen = Strategy.parse(strategy)
    plan = assign(chosen, len(captured.batches))
    ranks = run_world(lower(captured.graph, chosen), captured.params, captured.buffers, captured.batches, plan, 1.0)
    ends = [_buffers_after(captured, indices) for indices in plan]
    for fqn in ends[0]:
        values = torch.stack([end[fqn] for end in ends])
        expected = values.mean(0) if values.is_floating_point() else values.amax(0)
        for rank, result in enumerate(ranks):
            assert torch.allclose(result["buffers"][fqn], expected, rtol=1e-12, atol=1e-12), (fqn, rank)


def _buffers_after(captured: Captured, indices: list[int]) -> dict[str, torch.Tensor]:
    """Buffers of one device after some micro-batches."""
    buffers, graph = dict(captured.buffers), captured.graph
    sources = {"param": captured.params, "buffer": buffers, "constant": graph.constants}
    numbers = {"scale": torch.ones((), dtype=F64), "seed": torch.tensor(0)}
    for index in indices:
        sources["batch"] = captured.batches[index]
        values = [numbers[i.kind] if i.kind in numbers else sources[i.kind][i.fqn] for i in graph.inputs]
        with torch.no_grad():
            results = graph.gm(*values)
        buffers |= {o.fqn: r for o, r in zip(graph.outputs, results, strict=True) if o.kind == "buffer"}
    return {o.fqn: buffers[o.fqn] for o in graph.outputs if o.kind == "buffer"}
