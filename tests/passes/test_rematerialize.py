"""Recomputation: the same bits, fewer bytes, as late as possible."""

from __future__ import annotations

import functools
import pickle
from collections import Counter

import pytest
import torch
from torch import fx

from fxpar.checking import assign, run_world
from fxpar.errors import RematBudgetError, RematGlobError
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.exec_graph import ExecGraph, collective_kind
from fxpar.lowering import lower, lower_forward
from fxpar.lowering.verify import verify
from fxpar.passes.global_to_local import GlobalToLocal
from fxpar.passes.rematerialize import Rematerialize
from fxpar.remat import saved_bytes, trace_storages
from fxpar.tracer import capture_forward
from tests.captured import Captured, gpt, llama, odd
from tests.captured import lowered as captured_lowered
from tests.forwards import case, check, truth
from tests.passes.sketch import Sketch

MODES = ("remat", "remat(selective)", "remat(*.ffn)", "remat(60kB)")


def lowered(captured: Captured, strategy: str) -> ExecGraph:
    """Of a strategy without stages."""
    program = captured_lowered(captured, strategy)
    assert isinstance(program, ExecGraph)
    return program


def saved(program: ExecGraph, tokens: int = 24) -> int:
    graph = program.body.graph
    return saved_bytes(graph, trace_storages(graph, {d.symbol: tokens for d in program.dims}))


@functools.cache
def results(captured: Captured, strategy: str) -> list[dict]:
    program = lowered(captured, strategy)
    plan = assign(program.strategy, 2)
    return run_world(program, captured.params, captured.buffers, captured.batches, plan, 0.5)


def same_bits(captured: Captured, plain: str, other: str) -> None:
    for mine, theirs in zip(results(captured, plain), results(captured, other), strict=True):
        assert torch.equal(mine["loss"], theirs["loss"])
        assert mine["grads"].keys() == theirs["grads"].keys()
        assert all(torch.equal(mine["grads"][name], theirs["grads"][name]) for name in mine["grads"])
        assert all(torch.equal(mine["buffers"][name], theirs["buffers"][name]) for name in mine["buffers"])


def again(program: ExecGraph) -> list[fx.Node]:
    return [n for part in program.parts.values() for n in part.graph.nodes if n.meta.get("again")]


# ------------------------------------------------------------------------------------------------------- same bits
@pytest.mark.parametrize("mode", MODES)
def test_same_bits_on_one_device(mode):
    same_bits(llama(layers=2), "dp1", f"dp1+{mode}")


ON_RANKS = ["tp2+sp+remat", "tp2+sp+remat(selective|redo_comm)", "cp2+remat(keep_comm)", "dp2+zero3+remat"]


@pytest.mark.parametrize("strategy", ON_RANKS)
def test_same_bits_on_all_ranks(strategy):
    same_bits(llama(layers=2), strategy.partition("+remat")[0], strategy)


@pytest.mark.parametrize("mode", ["remat", "remat(selective)"])
def test_same_bits_with_dropout(mode):
    assert any("dropout" in str(node.target) for node in again(lowered(gpt(), f"tp2+{mode}")))
    same_bits(gpt(), "tp2", f"tp2+{mode}")


@pytest.mark.parametrize("name", ["norms", "sizes", "adapted", "experts"])
def test_same_bits_of_odd_models(name):
    assert again(lowered(odd(name), "dp1+remat(selective)"))
    same_bits(odd(name), "dp1", "dp1+remat(selective)")


# ------------------------------------------------------------------------------------------------------- what is saved
def test_blocks_save_their_inputs_only():
    """Per block: one residual stream [2, T, 32] in fp64."""
    few, many = (saved(lowered(llama(layers=n), "dp1+remat")) for n in (1, 2))
    assert many - few == 2 * 24 * 32 * 8


def test_what_leaves_a_block_is_not_computed_again():
    """The last product of a block makes its result alone."""
    names = Counter(
        n.meta["fqn"] for n in again(lowered(llama(layers=2), "dp1+remat")) if n.target is torch.ops.aten.mm.default
    )
    assert names["layers.0.attention.o_proj"] == names["layers.1.ffn.gate_proj"] == 1
    assert names["layers.0.ffn.down_proj"] == names["layers.1.ffn.down_proj"] == 0


@pytest.mark.parametrize("strategy", ["tp2+sp+remat", "tp2+remat", "tp2+sp+remat(layers.0)", "tp2+sp+remat(selective)"])
def test_a_block_keeps_the_sum_that_it_reads_and_no_term_of_it(strategy):
    """Under sp the term of an embedding is tp times as large."""
    program = lowered(llama(layers=2), strategy)
    nodes = [n for n in program.body.graph.nodes if n.op == "call_function"]
    kept = {o for n in nodes if n.meta.get("backward") for o in n.all_input_nodes if not o.meta.get("backward")}
    assert not [n for n in kept if isinstance(n.meta.get("dist"), DistConfig) and n.meta["dist"].partial]
    assert not [n for n in again(program) if collective_kind(n) and n.meta["fqn"] == "embedding"]


def test_selective_runs_no_product_twice():
    program = lowered(llama(), "tp2+sp+remat(selective)")
    targets = {str(n.target) for n in again(program)}
    assert not targets & {"aten.mm.default", "fxpar.attention.default"}
    assert {"aten.mul.Tensor", "aten.silu.default"} <= targets
    assert program.collectives() == lowered(llama(), "tp2+sp").collectives()
    assert saved(program) < saved(lowered(llama(), "tp2+sp"))


def test_globs_choose_modules():
    program = lowered(llama(layers=2), "dp1+remat(layers.1.ffn|*.attention_norm)")
    modules = {n.meta["fqn"].removesuffix("_proj") for n in again(program)}
    assert {m for m in modules if not m.startswith("layers.1.ffn")} == {
        "layers.0.attention_norm",
        "layers.1.attention_norm",
    }
    assert any(m.startswith("layers.1.ffn.") for m in modules)


@pytest.mark.parametrize("share", [0.95, 0.5, 0.25])
def test_budget_is_kept(share):
    captured = llama(layers=2)
    size = next(iter(captured.graph.example_dims().values()))
    budget = int(saved(lowered(captured, "dp1"), size) * share)
    program = lowered(captured, f"dp1+remat({budget}B)")
    assert 0.9 * budget < saved(program, size) <= budget
    assert any(f"{budget}B" in note and "MB per rank are saved" in note for note in program.notes)


def test_a_smaller_budget_costs_more():
    captured = llama(layers=2)
    counts = [len(again(lowered(captured, f"dp1+remat({size}kB)"))) for size in (400, 150, 60)]
    assert counts[0] == 0 < counts[1] < counts[2]


def test_budget_at_other_sizes():
    """What is enough for the example is not enough for twice the tokens."""
    captured = llama(layers=2)
    (dim,) = captured.graph.dims
    program = lower(captured.graph, "dp1+remat(150kB)", sizes={dim.name: 2 * dim.example})
    assert saved(program, 2 * dim.example) <= 150_000 < saved(lowered(captured, "dp1+remat(150kB)"), 2 * dim.example)


def test_collectives_are_kept_on_demand():
    plain, redone, kept = (lowered(llama(), f"tp2+sp{flag}") for flag in ("", "+remat", "+remat(keep_comm)"))
    assert kept.collectives() == plain.collectives()
    assert redone.collectives()["all_gather"] > plain.collectives()["all_gather"]
    assert saved(redone) < saved(kept) < saved(plain)


def test_zero3_reads_what_the_backward_gathers():
    """No gather more than without; nothing gathered for a forward block lives on."""
    plain, full = (lowered(llama(layers=2), f"dp2+zero3{flag}") for flag in ("", "+remat"))
    assert full.collectives() == plain.collectives()
    for node in full.body.graph.nodes:
        if node.meta.get("backward"):
            for operand in node.all_input_nodes:
                assert operand.meta.get("backward") or "layers.0" not in operand.meta.get("bucket", "")


def test_gathered_parameters_are_no_activations():
    """They do not count against a budget: ZeRO-3 saves what plain data parallelism saves."""
    for flag in ("", "+remat", "+remat(selective)", "+remat(60kB)"):
        assert saved(lowered(llama(layers=2), f"dp2+zero3{flag}")) == saved(lowered(llama(layers=2), f"dp2{flag}"))


# -------------------------------------------------------------------------------------------------------- structure
@pytest.mark.parametrize("strategy", ["dp1", "dp2.tp2+sp+zero3"])
def test_copies_stand_right_before_their_first_use(strategy):
    """Between a copy and its first reader there are only other copies, gathers for the backward, and waits."""
    program = lowered(llama(layers=2), f"{strategy}+remat")
    order = {node: i for i, node in enumerate(program.body.graph.nodes)}
    nodes = list(order)
    for node in again(program):
        if collective_kind(node):
            continue  # waited for where it is used
        between = nodes[order[node] + 1 : min(order[u] for u in node.users)]
        late = [n for n in between if not n.meta.get("again") and "sym" not in n.meta and not n.meta.get("bucket")]
        assert not [n for n in late if collective_kind(n) is None and "wait" not in n.name], (node, late)


def test_programs_stay_plain_data():
    program = lowered(llama(), "tp2+remat")
    copy = pickle.loads(pickle.dumps(program))
    assert copy.fingerprint() == program.fingerprint() != lowered(llama(), "tp2").fingerprint()
    assert len(again(copy)) == len(again(program)) > 0
    assert copy.strategy == program.strategy


def test_solutions_are_the_same_every_time():
    texts = {lower(llama().graph, "tp2+sp+remat(30kB)").fingerprint() for _ in range(2)}
    assert len(texts) == 1


def test_a_forward_with_its_loss_outside_saves_less():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)) for _ in range(3))
    )
    logical = capture_forward(model, (torch.randn(6, 8),), {})
    plain, full = (lower_forward(logical, f"dp1{flag}") for flag in ("", "+remat"))
    assert len(full.forward.results) < len(plain.forward.results)
    assert len(again(full)) > 0 == len(again(plain))
    assert not any(n.meta.get("again") for n in full.forward.graph.nodes)


def test_random_and_in_place_ops_run_once():
    """Nor what reads memory that is written to later: it would find something else there."""
    aten = torch.ops.aten
    s = Sketch("dp1+remat")
    x = s.place("x", (4,), kind="batch")
    inside = {"shape": (4,), "fqn": "layers.0"}
    noise = s.call(aten.rand_like.default, x, **inside)
    base = s.call(aten.sin.default, x, **inside)
    early = s.call(aten.cos.default, base, **inside)
    written = s.call(aten.add_.Tensor, base, x, **inside)
    safe = s.call(aten.exp.default, x, **inside)
    out = s.call(aten.cat.default, [noise, early, written, safe], **inside)
    grads = [
        s.call(aten.mul.Tensor, value, value, shape=(4,), backward=True) for value in (noise, early, written, safe)
    ]
    loss = s.call(aten.sum.default, out, shape=())
    graph = s.done(loss, *grads)
    GlobalToLocal()(graph)
    Rematerialize()(graph)
    copies = [node for node in graph.graph.nodes if node.meta.get("again")]
    assert [node.target for node in copies] == [aten.exp.default]
    assert [g.args[0] for g in grads[:3]] == [noise, early, written]
    verify(graph, "rematerialize")


# ----------------------------------------------------------------------------------------------------------- mistakes
def test_a_glob_that_matches_nothing():
    with pytest.raises(RematGlobError, match=r"'\*\.fnn' matches no module of the model; did you mean '\*\.ffn'\?"):
        lowered(llama(), "dp1+remat(*.ffn|*.fnn)")
    with pytest.raises(RematGlobError, match=r"'zzz' matches no module of the model\. Modules are embedding, head"):
        lowered(llama(), "dp1+remat(zzz)")


def test_a_budget_that_cannot_be_met():
    with pytest.raises(
        RematBudgetError,
        match=r"under 'dp1\+remat\(2kB\)' .* at least \d+\.\d+ MB .* at T = \d+, and the budget is 0\.002 MB",
    ) as caught:
        lowered(llama(), "dp1+remat(2kB)")
    least = caught.value.least_bytes
    lowered(llama(), f"dp1+remat({least}B)")
    with pytest.raises(RematBudgetError):
        lowered(llama(), f"dp1+remat({least - 1}B)")


def test_no_repeated_blocks_is_said():
    program = lowered(odd("shared"), "dp1+remat")
    assert not again(program)
    assert any("no repeated blocks" in note for note in program.notes)


def test_a_forward_with_its_loss_outside_equals_the_model():
    one = case("llama")
    for strategy in ("tp2+sp+remat", "dp2+remat(selective)"):
        expected = truth("llama", 2 if strategy.startswith("dp2") else 1)
        check(one.graph, strategy, one.params, one.buffers, one.batches, expected, one.keys)
