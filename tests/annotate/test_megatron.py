"""On a plain Llama the search finds Megatron's collectives, and nothing else of the size of an activation."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from fxpar import losses
from fxpar.annotate import annotate
from fxpar.annotate.driver import annotate_and_search
from fxpar.ir.exec_graph import Communication, ExecGraph
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.models.llama import Llama, LlamaOptions
from fxpar.tracer import capture
from tests.captured import Routed, llama, take, tokens
from tests.repeat import thinned

DIM, VOCAB, ROWS = 32, 97, 2


def elements(c: Communication, tokens: int = 60) -> int:
    """Elements that a rank puts in, with T = 60."""
    (symbol,) = {s for size in c.sent.shape if not isinstance(size, int) for s in size.free_symbols} or {None}
    return c.sent.numel({symbol: tokens} if symbol else {})


def activations(graph: LogicalGraph, strategy: str, whole: int = ROWS * 60 * DIM) -> Counter:
    """(kind, forward or backward) of the collectives in the body that work on [B, T, D], as counted on all ranks."""
    program = lower(graph, strategy)
    mesh = program.strategy.mesh
    found: Counter = Counter()
    for c in program.communications():
        gathered = elements(c) * (mesh.degree(c.axis) if c.kind == "all_gather" else 1)
        if c.part == "body" and gathered * mesh.degree("cp") >= whole:
            assert gathered * mesh.degree("cp") == whole, f"{c} is larger than [B, T, D]"
            found[c.kind, "backward" if c.backward else "forward"] += 1
    return found


def sizes_of_others(graph: LogicalGraph, strategy: str) -> list[int]:
    """Elements of the body's collectives that work on less than [B, T, D]."""
    program = lower(graph, strategy)
    whole = ROWS * 60 * DIM // program.strategy.mesh.degree("cp")
    return sorted(n for c in program.communications() if c.part == "body" and (n := elements(c)) * 4 < whole)


@pytest.mark.parametrize(("layers", "degree"), [(2, 2), (1, 4)])
def test_tensor_parallel(layers, degree):
    """Two all-reduces per layer and direction, one behind the embedding, one in front of the head's input."""
    found = activations(llama(layers=layers, kv_heads=degree).graph, f"tp{degree}")
    assert found == {("all_reduce", "forward"): 2 * layers + 1, ("all_reduce", "backward"): 2 * layers + 1}


@pytest.mark.parametrize("layers", [1, 2])
def test_sequence_parallel(layers):
    """An all-gather and a reduce-scatter where an all-reduce was, and one more gather in the backward for each."""
    found = activations(llama(layers=layers).graph, "tp2+sp")
    assert found == {
        ("all_gather", "forward"): 2 * layers + 1,
        ("reduce_scatter", "forward"): 2 * layers + 1,
        ("all_gather", "backward"): 2 * layers,
        ("reduce_scatter", "backward"): 2 * layers + 1,
    }


@pytest.mark.parametrize(("layers", "degree"), [(1, 4), (2, 2)])
def test_context_parallel(layers, degree):
    """Ulysses: four all-to-alls per layer and direction, and no other traffic but the loss and the gradients."""
    program = lower(llama(layers=layers, kv_heads=degree).graph, f"cp{degree}")
    body = Counter((c.kind, c.backward) for c in program.communications() if c.part == "body")
    assert body == {("all_to_all", False): 4 * layers, ("all_to_all", True): 4 * layers, ("all_reduce", False): 1}
    assert [elements(c) for c in program.communications() if c.kind == "all_reduce" and c.part == "body"] == [1]


def test_context_and_tensor_parallel_do_not_mix():
    """Under both, each axis does what it does alone."""
    program = lower(llama(kv_heads=4).graph, "cp2.tp2")
    body = Counter((c.kind, c.axis) for c in program.communications() if c.part == "body")
    assert body["all_to_all", "cp"] == 8
    assert body["all_reduce", "tp"] == 2 * (2 * 1 + 1) + 1  # and one for the loss
    assert ("all_to_all", "tp") not in body
    assert ("all_gather", "cp") not in body


@pytest.mark.parametrize("strategy", ["tp2", "tp3", "tp4", "tp2+sp", "cp2.tp2+sp"])
def test_logits_are_never_moved(strategy):
    """No tensor with the vocabulary travels in the forward, and what the loss exchanges is one number per token."""
    program = lower(llama().graph, strategy)
    cut = {VOCAB, math.ceil(VOCAB / program.strategy.degree("tp"))}
    moved = [c for c in program.communications() if c.part == "body" and not c.backward]
    assert moved
    assert not [str(c.sent) for c in moved if cut & set(c.sent.shape)]


@pytest.mark.parametrize("strategy", ["tp2", "cp2", "tp2+sp"])
def test_the_rest_is_small(strategy):
    assert all(n <= ROWS * 60 for n in sizes_of_others(llama().graph, strategy))


def test_data_parallel_touches_the_results_only():
    program = lower(llama().graph, "dp3")
    assert {c.part for c in program.communications()} == {"epilogue"}
    assert {c.kind for c in program.communications()} == {"all_reduce"}


def test_weights_lie_as_in_megatron():
    program = lower(llama().graph, "tp2")
    lies = {
        info.fqn: stored.dist.describe(info.meta.shape).removeprefix("f64")
        for info, stored in zip(program.inputs, program.stored_inputs, strict=True)
        if info.kind == "param" and ("layers.0" in info.fqn or "layers" not in info.fqn)
    }
    assert lies == {
        "embedding.weight": "[97@tp, 32]",
        "layers.0.attention_norm.weight": "[32]",
        "layers.0.attention.q_proj.weight": "[32@tp, 32]",
        "layers.0.attention.k_proj.weight": "[16@tp, 32]",
        "layers.0.attention.v_proj.weight": "[16@tp, 32]",
        "layers.0.attention.o_proj.weight": "[32, 32@tp]",
        "layers.0.ffn_norm.weight": "[32]",
        "layers.0.ffn.gate_proj.weight": "[48@tp, 32]",
        "layers.0.ffn.up_proj.weight": "[48@tp, 32]",
        "layers.0.ffn.down_proj.weight": "[32, 48@tp]",
        "norm.weight": "[32]",
        "head.weight": "[97@tp, 32]",
    }


# --------------------------------------------------------------------------- nothing depends on sizes or lengths
def meta_llama(length: int, dim: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> LogicalGraph:
    """A bf16 Llama of one layer on no device, captured on one row."""
    with torch.device("meta"):
        model = Llama(LlamaOptions(1, dim, heads, kv_heads, ffn, vocab)).bfloat16()
    row = torch.zeros(1, length, dtype=torch.int64)
    return capture(model, losses.causal_lm, {"input_ids": row, "labels": row, "position_ids": row})


EIGHT_B = {"dim": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256}
TINY = {"dim": 32, "heads": 8, "kv_heads": 4, "ffn": 48, "vocab": 96}


GRAPHS = {"short": (5, TINY), "8B": (2048, EIGHT_B), "8B short": (7, EIGHT_B)}


class Graphs(dict[str, LogicalGraph]):
    """Captured when first asked for."""

    def __missing__(self, name: str) -> LogicalGraph:
        length, options = GRAPHS[name]
        return self.setdefault(name, meta_llama(length, **options))


@pytest.fixture(scope="module")
def graphs() -> Graphs:
    return Graphs()


def placements(graph: LogicalGraph, strategy: str) -> list[tuple[str, str]]:
    """Op and placement of every value; sizes left out."""
    annotated = annotate(graph, Strategy.parse(strategy))
    calls = [n for n in annotated.graph.nodes if n.op == "call_function" and "dist" in n.meta]
    return [(str(n.target), str(n.meta["dist"])) for n in calls]


def traffic(program: ExecGraph) -> list[tuple[str, str, bool]]:
    return [(c.kind, c.axis, c.backward) for c in program.communications() if c.part == "body"]


@pytest.mark.parametrize("strategy", thinned(["tp4", "cp2.tp2+sp"], []))
def test_placements_do_not_depend_on_the_length(graphs, strategy):
    assert placements(graphs["8B"], strategy) == placements(graphs["8B short"], strategy)


@pytest.mark.parametrize("strategy", thinned(["tp2", "tp4", "cp2", "cp4", "cp2.tp2"], ["tp4", "cp2", "cp2.tp2"]))
def test_placements_do_not_depend_on_the_widths(graphs, strategy):
    small, large = lower(graphs["short"], strategy), lower(graphs["8B"], strategy)
    assert [s.dist.dims for s in small.stored_inputs] == [s.dist.dims for s in large.stored_inputs]
    assert traffic(small) == traffic(large)


@pytest.mark.parametrize(("strategy", "gathers"), [("tp2+sp", 2 * 1 + 1), ("tp8+sp", 2 * 1 + 1)])
def test_sequence_parallel_at_8b(graphs, strategy, gathers):
    """The embedding's gradient needs the tokens of all ranks, not a table of 128256 rows."""
    program = lower(graphs["8B"], strategy)
    large = [c for c in program.communications() if 4096 in c.sent.shape and c.part == "body"]
    assert Counter((c.kind, c.backward) for c in large) == {
        ("all_gather", False): gathers,
        ("reduce_scatter", False): gathers,
        ("all_gather", True): gathers,
        ("reduce_scatter", True): gathers,
    }
    assert not [c for c in program.communications() if 128256 in c.sent.shape]


def test_repeated_layers_are_solved_once():
    """The number of classes does not grow with the layers."""
    strategy = Strategy.parse("cp2.tp2")
    counts = []
    for layers in (1, 2):
        _, searches = annotate_and_search(llama(layers=layers).graph, strategy)
        counts.append([len(search.problem.classes) for search in searches])
    assert len(counts[0]) == 2
    assert counts[0] == counts[1]


def test_experts_are_cut_in_their_width():
    """Biases as the products that they are added to; ranks add up what tokens get, and not each of their rows."""
    torch.manual_seed(0)
    batches = [{k: b[k] for k in ("input_ids", "labels")} for b in tokens(31, 8, rows=2)]
    graph = take(Routed(hidden=64), losses.causal_lm, batches).graph
    placed = annotate(graph, Strategy.parse("tp2"))
    dims = {i.fqn: n.meta["dist"].dims for n, i in zip(placed.placeholders, placed.inputs, strict=True)}
    cut = {name: [d for d, entries in enumerate(dims[name]) if entries] for name in ("up", "bias", "down")}
    assert cut == {"up": [2], "bias": [1], "down": [1]}
    whole = max(elements(c) for c in lower(graph, "tp2").communications() if c.part == "body")
    assert whole <= ROWS * 60 * 16
