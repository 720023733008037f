"""`lower` with pipeline stages: what each stage's ranks run, what goes between them, and what is refused."""

from __future__ import annotations

import functools
import itertools
import pickle
from collections import Counter
from dataclasses import replace

import pytest

from fxpar.errors import NotAChainError, OverrideError, RematGlobError, StageCountError, UnknownCutError
from fxpar.ir.exec_graph import Part, collective_kind
from fxpar.ir.pipeline_graph import PipelineGraph, StageProgram
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.runtime.arrivals import order_of_gradients
from fxpar.switch import layout_of
from tests.captured import llama
from tests.repeat import thinned
from tests.stages.models import loaded, odd

FOUR = "cut(layers.0.ffn_norm|layers.1|layers.1.ffn_norm)"  # stages of two layers
TURNS = f"interleaved_1f1b+{FOUR}"


@functools.cache
def lowered(strategy: str, **overrides: str) -> PipelineGraph:
    """Two layers."""
    program = lower(llama(layers=2).graph, Strategy.parse(strategy, overrides=overrides))
    assert isinstance(program, PipelineGraph)
    return program


def kinds(part: Part) -> dict[str, int]:
    return dict(Counter(kind for node in part.graph.nodes if (kind := collective_kind(node))))


# ------------------------------------------------------------------------------------------------------------ stages
def test_stages_of_ranks():
    """Stages are blocks of ranks wherever pp stands; interleaved ones take turns."""
    for text in ("pp2.dp2", "dp2.pp2"):
        program = lowered(text)
        assert [[s.index for s in program.stages_of(rank)] for rank in range(4)] == [[0], [0], [1], [1]]
        assert [stage.mesh.ranks for stage in program.stages] == [(0, 1), (2, 3)]
        assert [program.mesh.at("pp", index) for index in range(2)] == [stage.mesh for stage in program.stages]
        assert {str(stage.strategy) for stage in program.stages} == {"dp2"}
    program = lowered(f"pp2.tp2+sp+{TURNS}")
    assert [[s.index for s in program.stages_of(rank)] for rank in range(4)] == [[0, 2], [0, 2], [1, 3], [1, 3]]
    assert [stage.mesh.ranks for stage in program.stages] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    assert {str(stage.strategy) for stage in program.stages} == {"tp2+sp"}


def test_the_whole_model():
    graph, program = llama(layers=2).graph, lowered("dp2.pp2")
    assert (program.inputs, program.outputs, program.dims) == (graph.inputs, graph.outputs, graph.dims)
    assert [info.fqn for info, _ in program.params()] == [info.fqn for info in graph.params()]
    assert program.cuts == ("layers.1",)
    assert len(program.flops) == 2
    assert abs(program.flops[0] / program.flops[1] - 1) < 0.2
    assert list(program.parts) == [
        f"stage{k}.{name}" for k in (0, 1) for name in ("prologue", "forward", "backward", "epilogue")
    ]
    assert program.terms == {}
    assert {"cut_cpu_s", "annotate_cpu_s", "lower_cpu_s"} <= program.timings.keys()
    assert program.node_count == sum(stage.node_count for stage in program.stages)


def test_cuts_that_the_user_chose():
    program = lowered("pp3+cut(layers.1|layers.1.ffn)")
    assert program.cuts == ("layers.1", "layers.1.ffn")
    names = [sorted(stage.taken("param")) for stage in program.stages]
    assert names[1] == [
        "layers.1.attention.k_proj.weight",
        "layers.1.attention.o_proj.weight",
        "layers.1.attention.q_proj.weight",
        "layers.1.attention.v_proj.weight",
        "layers.1.attention_norm.weight",
        "layers.1.ffn_norm.weight",
    ]
    assert "layers.1.ffn.up_proj.weight" in names[2]


# ----------------------------------------------------------------------------------------------------- what crosses
CROSSING = {
    "pp2": "f64[2, T, 32]",
    "dp2.pp2": "f64[2, T, 32]",
    "pp2.tp2": "f64[2, T, 32]",
    "pp2.tp2+sp": "f64[2, T@tp, 32]",
    "cp2.pp2": "f64[2, T@cp, 32]",
    "cp2.pp2.tp2+sp": "f64[2, T@cp@tp, 32]",
}
DIVISORS = {"pp2.tp2+sp": 2, "cp2.pp2": 2, "cp2.pp2.tp2+sp": 4}


@pytest.mark.parametrize("strategy", CROSSING)
def test_one_activation_crosses_and_one_gradient(strategy):
    program = lowered(strategy)
    first, second = program.stages
    for kind, sender, receiver in (("received", first, second), ("received_grad", second, first)):
        given, taken = sender.given(kind.replace("received", "sent")), receiver.taken(kind)
        assert {fqn: stored.local for fqn, stored in given.items()} == {f: s.local for f, s in taken.items()}
        ((stored, other),) = zip(given.values(), taken.values(), strict=True)
        assert replace(stored.dist, mesh=receiver.mesh) == other.dist
        assert (stored.dist.mesh, stored.meta) == (sender.mesh, other.meta)
        assert stored.dist.describe(stored.meta.shape).replace(".", "@") in (
            CROSSING[strategy],
            CROSSING[strategy].replace("@cp@tp", "@(cp,tp)"),
        )
    assert [(each.stage, each.fqn) for each in program.handovers] == [
        (0, next(iter(first.given("sent")))),
        (1, next(iter(second.given("sent_grad")))),
    ]
    assert program.divisors.get("T", 1) == DIVISORS.get(strategy, 1)


def test_what_crosses_is_a_share_of_each_rank():
    """The bytes between stages: those of one rank's piece."""
    sizes = {}
    for strategy in ("pp2", "pp2.tp2+sp", "cp2.pp2.tp2+sp"):
        program = lowered(strategy)
        dims = {dim.symbol: 24 for dim in program.dims}
        sizes[strategy] = [each.given.local.numel(dims) for each in program.handovers]
    assert sizes == {"pp2": [2 * 24 * 32] * 2, "pp2.tp2+sp": [2 * 12 * 32] * 2, "cp2.pp2.tp2+sp": [2 * 6 * 32] * 2}


# ------------------------------------------------------------------------------------------------------- collectives
def test_each_stage_has_its_own_collectives():
    """Megatron's two all-reduces per layer and direction; the last stage's head and loss need one more in forward."""
    first, second = lowered("pp2.tp2").stages
    whole = lower(llama(layers=2).graph, "tp2")
    assert kinds(first.forward) == {"all_reduce": 1 + 2}  # the embedding is cut by rows
    assert kinds(first.backward) == {"all_reduce": 2}
    parts = [part for stage in (first, second) for part in stage.parts.values()]
    counted = sum((Counter(kinds(part)) for part in parts), Counter())
    assert counted == Counter(whole.collectives())
    collectives = lowered("pp2.tp2").collectives()
    assert {kind: collectives[kind] for kind in counted} == counted


def test_what_another_stage_sends_is_gathered_like_any_activation():
    """Stages of one layer, whose last product would else be cut otherwise than those of other layers, so as not to
    gather the gradient that comes in: both stages send what one program of two layers sends.
    """
    staged, whole = (lower(llama(layers=2).graph, strategy).collectives() for strategy in ("pp2.tp2+sp", "tp2+sp"))
    assert "all_to_all" not in staged
    assert staged["all_gather"] + staged["reduce_scatter"] == whole["all_gather"] + whole["reduce_scatter"]


def test_data_parallel_gradients_are_reduced_per_stage():
    for stage in lowered("dp2.pp2").stages:
        assert [kinds(part) for part in stage.parts.values()] == [{}, {}, {}, {"all_reduce": 1}]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_shards_parameters_over_the_replicas_of_a_stage(zero):
    program = lowered(f"dp2.pp2+zero{zero}")
    for stage in program.stages:
        for info, stored in zip(stage.inputs, stage.stored_inputs, strict=True):
            if info.kind == "param":
                assert stored.dist.shard_axes == ("dp",), info.fqn
        assert ("all_gather" in kinds(stage.prologue)) == (zero < 3)
        assert ("all_gather" in kinds(stage.forward)) == (zero == 3)
        assert ("reduce_scatter" in kinds(stage.epilogue)) == (zero == 1)
        assert ("reduce_scatter" in kinds(stage.backward)) == (zero > 1)


# ------------------------------------------------------------------------------------------------------------- globs
def stored(program: PipelineGraph, fqn: str) -> str:
    (place,) = {
        str(p.dist.describe(p.meta.shape)) for s in program.stages for n, p in s.taken("param").items() if n == fqn
    }
    return place.removeprefix("f64")


def test_overrides_of_one_stage():
    program = lowered("pp2.tp2", **{"layers.1.ffn.down_proj.weight": "R@tp", "embedding.*": "S(1)@tp"})
    assert stored(program, "layers.1.ffn.down_proj.weight") == "[32, 48]"
    assert stored(program, "layers.0.ffn.down_proj.weight") == "[32, 48@tp]"
    assert stored(program, "embedding.weight") == "[97, 32@tp]"
    assert [stage.strategy.overrides for stage in program.stages] == [
        (("embedding.*", "S(1)@tp"),),
        (("layers.1.ffn.down_proj.weight", "R@tp"),),
    ]


def test_an_override_of_both_stages():
    program = lowered("pp2.tp2", **{"*.down_proj.weight": "S(0)@tp"})
    assert {stored(program, f"layers.{i}.ffn.down_proj.weight") for i in range(2)} == {"[32@tp, 48]"}


def test_an_override_of_a_tied_weight_by_either_name():
    for name in ("lm_head.weight", "transformer.wte.weight"):
        program = lower(loaded("hf:gpt2", n_layer=2).graph, Strategy.parse("pp2.tp2", overrides={name: "S(1)@tp"}))
        assert stored(program, "transformer.wte.weight") == "[131, 64@tp]"


def test_an_override_that_matches_nowhere():
    with pytest.raises(OverrideError, match=r"'head.wieght': matches no parameter; did you mean 'head.weight'\?"):
        lowered("pp2.tp2", **{"head.wieght": "R@tp"})


def saved(stage: StageProgram) -> int:
    """What the backward takes of the forward."""
    return len([source for source, _ in stage.backward.sources if source == "forward"])


def test_recomputation_on_one_stage():
    plain, partial, full = lowered("pp2"), lowered("pp2+remat(layers.1.*)"), lowered("pp2+remat")
    assert saved(partial.stages[0]) == saved(plain.stages[0])
    assert saved(partial.stages[1]) < saved(plain.stages[1])
    assert saved(full.stages[0]) < saved(plain.stages[0])
    assert [stage.strategy.remat is None for stage in partial.stages] == [True, False]


def test_a_glob_of_recomputation_that_matches_nowhere():
    with pytest.raises(RematGlobError, match=r"\*\.fnn"):
        lowered("pp2+remat(layers.1.*|*.fnn)")


# -------------------------------------------------------------------------------------------------------------- ties
TIED = [
    ("hf:gpt2", {"n_layer": 2}, "transformer.wte.weight"),
    ("gpt", {"layers": 2, "dropout": 0.25}, "embedding.weight"),
    ("hf:qwen3", {"num_hidden_layers": 3, "tie_word_embeddings": True}, "model.embed_tokens.weight"),
]


@pytest.mark.parametrize(("spec", "options", "tied"), thinned(TIED, TIED[:2]))
def test_tied_embeddings_are_on_two_stages(spec, options, tied):
    """Each gives a term of the gradient; the head's is the first of the sum."""
    program = lower(loaded(spec, **options).graph, "pp2.dp2")
    assert isinstance(program, PipelineGraph)
    assert program.terms == {tied: (1, 0)}
    assert [tied in stage.taken("param") and tied in stage.given("grad") for stage in program.stages] == [True, True]
    layout = layout_of(program)
    assert next(iter(layout.params)) == tied  # the first stage needs it first
    assert [dist.mesh.ranks for dist in layout.params[tied].copies] == [(0, 1), (2, 3)]
    others = [fqn for stage in program.stages for fqn in stage.taken("param") if fqn != tied]
    assert len(others) == len(set(others)) == len(program.params()) - 1


def test_tied_by_interleaving_on_the_ranks_of_one_stage():
    inside = "transformer.h.0.mlp|transformer.h.1|transformer.h.1.mlp"
    program = lower(loaded("hf:gpt2", n_layer=2).graph, f"pp2.dp2+interleaved_1f1b+cut({inside})")
    assert program.terms == {"transformer.wte.weight": (3, 0)}


# ------------------------------------------------------------------------------------------------------------ layout
def test_layouts_are_blocks_of_ranks():
    layout = layout_of(lowered("dp2.pp2+zero1"), "mine")
    assert (layout.name, layout.world, len(layout.params)) == ("mine", 4, 2 + 2 * 9 + 1)
    for fqn, param in layout.params.items():
        (dist,) = param.copies
        late = fqn.startswith(("layers.1", "norm", "head"))
        assert dist.mesh.ranks == ((2, 3) if late else (0, 1))
        assert dist.shard_axes == ("dp",)
    assert layout.bytes_of_rank(0) == layout.bytes_of_rank(1)
    rest = layout_of(lower(llama(layers=2).graph, "pp2.dp2"))
    assert rest.bytes_of_rank(0) >= 2 * layout.bytes_of_rank(0) - 16 * len(rest.params)


@pytest.mark.parametrize("strategy", ["pp2", f"pp2+{TURNS}"])
def test_stages_get_weights_and_give_gradients_side_by_side(strategy):
    """Up to any place of the order all ranks have the same share of theirs, but for one parameter; of one rank the
    first stage has its weights first, and the last one its gradients.
    """
    program = lowered(strategy)
    weights, gradients = list(layout_of(program).params), order_of_gradients(program)
    sizes = {info.fqn: info.meta.numel({}) for info, _ in program.params()}
    assert sorted(weights) == sorted(gradients) == sorted(sizes)
    meshes = [[s for s in program.stages if s.mesh == mesh] for mesh in {stage.mesh for stage in program.stages}]
    for order, turn in ((weights, 1), (gradients, -1)):
        shares, largest = [], 0.0
        for stages in meshes:
            fqns = [list(stage.taken("param")) for stage in stages[::turn]]
            part = [sizes[fqn] * any(fqn in names for names in fqns) for fqn in order]
            shares.append([sum(part[:n]) / sum(part) for n in range(len(part) + 1)])
            largest = max(largest, max(part) / sum(part))
            places = [[order.index(fqn) for fqn in names] for names in fqns]
            assert all(max(one) < min(two) for one, two in itertools.pairwise(places))
        assert all(max(now) - min(now) <= largest + 1e-9 for now in zip(*shares, strict=True))


def test_layouts_of_interleaved_stages():
    layout = layout_of(lowered(f"pp2+{TURNS}"))
    names = [f"layers.{i}.{name}" for i in range(2) for name in ("attention.q_proj.weight", "ffn.up_proj.weight")]
    assert [layout.params[name].copies[0].mesh.ranks for name in names] == [(0,), (1,), (0,), (1,)]


# ------------------------------------------------------------------------------------------------------- plain data
STRATEGIES = ["pp2", "dp2.pp2+zero3+zb_h1", "cp2.pp2.tp2+sp", f"pp2+remat+{TURNS}"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_pickles(strategy):
    program = lowered(strategy)
    again = pickle.loads(pickle.dumps(program))
    assert again.fingerprint() == program.fingerprint()
    assert again.communications() == program.communications()
    assert again.handovers == program.handovers
    for field in ("strategy", "inputs", "outputs", "dims", "divisors", "notes", "cuts", "flops", "terms"):
        assert getattr(again, field) == getattr(program, field)
    for old, new in zip(program.stages, again.stages, strict=True):
        for field in ("strategy", "index", "inputs", "outputs", "stored_inputs", "stored_outputs", "divisors"):
            assert getattr(new, field) == getattr(old, field)
        for name in (*old.parts, "input_part", "weight_part"):
            first, second = getattr(old, name), getattr(new, name)
            assert second.sources == first.sources
            assert str(second.graph) == str(first.graph)
            for a, b in zip(first.graph.nodes, second.graph.nodes, strict=True):
                for key in ("tensor", "local", "dist", "sym", "fqn", "backward", "phase", "comm", "buffer"):
                    assert b.meta.get(key) == a.meta.get(key), (key, a)


def test_pickling_twice_is_the_same_bytes():
    once = pickle.dumps(lowered("dp2.pp2+zero1"))
    assert pickle.dumps(pickle.loads(once)) == pickle.dumps(pickle.loads(pickle.dumps(pickle.loads(once))))


def test_fingerprints_tell_programs_apart():
    texts = [
        "pp2",
        f"pp4+{FOUR}",
        "pp2+gpipe",
        "pp2+zb_h1",
        "pp2+cut(layers.1.ffn)",
        "pp2.dp2",
        "dp2.pp2",
        "dp2.pp2+zero1",
    ]
    assert len({lowered(text).fingerprint() for text in texts}) == len(texts)


def test_the_logical_graph_is_left_alone():
    graph = llama(layers=2).graph
    before = [(n.name, n.op, str(n.args), set(n.meta)) for n in graph.gm.graph.nodes]
    lower(graph, "dp2.pp2+zero3+remat")
    assert [(n.name, n.op, str(n.args), set(n.meta)) for n in graph.gm.graph.nodes] == before


def test_dumps_are_asked_for_each_stage():
    seen = Counter()
    lower(llama(layers=2).graph, "pp2", on_pass=lambda name, graph: seen.update([(graph.name, name)]))
    names = {name for name, _ in seen}
    assert len(names) == 2
    assert set(seen.values()) == {1}
    assert {name for stage, name in seen if stage == min(names)} >= {"annotate", "cleanup", "sink_waits"}


# ---------------------------------------------------------------------------------------------------------- mistakes
def test_more_stages_than_layers():
    with pytest.raises(StageCountError, match=r"8 stages need 8 layers, there are 2 \('layers\.0', 'layers\.1'\)\. "):
        lowered("pp8")
    with pytest.raises(StageCountError, match="6 stages need 6 layers, there are 2"):
        lowered("pp2+interleaved_1f1b(3)")


def test_a_cut_that_is_no_module():
    with pytest.raises(UnknownCutError, match=r"no module 'layer.2' runs .*did you mean 'layers.\d'"):
        lowered("pp2+cut(layer.2)")
    with pytest.raises(UnknownCutError, match=r"'layers\.0' does not run after 'layers\.1'"):
        lowered("pp3+cut(layers.1|layers.0)")


def test_layers_that_run_twice_are_no_chain():
    with pytest.raises(NotAChainError, match=r"module 'layers\.0' runs before and after the cut at 'layers\.1'"):
        lower(odd("twice").graph, "pp2+cut(layers.1)")
    with pytest.raises(NotAChainError, match="buffer 'average', which the forward writes, is used on stages"):
        lower(odd("counted late").graph, "pp2")
