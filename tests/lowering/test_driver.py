"""`lower`: the ladder as one list, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from fxpar.annotate.driver import search_placements
from fxpar.checking import check
from fxpar.errors import (
    GivenPassesError,
    NoExpertsError,
    NotCapturedError,
    OverrideError,
    PassContractError,
    StrategySyntaxError,
    VerifyError,
)
from fxpar.ir.dist_config import DistConfig, P
from fxpar.ir.exec_graph import ExecGraph, compile_graph
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.pass_base import Tier
from fxpar.ir.pass_names import LADDER
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import default_passes, ladder, lower
from fxpar.passes.bucket_collectives import BucketCollectives
from fxpar.passes.casts import Casts
from tests.captured import llama, mlp


def test_ladder():
    assert [step.name for step in default_passes()] == list(LADDER)
    (casts,) = [step for step in default_passes(torch.float32) if isinstance(step, Casts)]
    assert casts.storage == torch.float32


def test_a_model_in_place_of_its_graph():
    for given, what in ((torch.nn.Linear(2, 2), "a Linear"), ("llama", "a str")):
        with pytest.raises(NotCapturedError, match=rf"^{what} is not a captured graph.*fxpar\.capture\(model, loss_fn"):
            lower(given, "tp2")
        with pytest.raises(NotCapturedError, match=f"^{what} is not a captured graph"):
            check(given, ["tp2"], {}, {}, [])


def test_strategy_as_text_or_value():
    assert lower(llama().graph, "tp2").fingerprint() == lower(llama().graph, Strategy.parse("tp2")).fingerprint()


def test_lowering_is_deterministic():
    texts = [lower(llama().graph, "cp2.tp2+sp").fingerprint() for _ in range(3)]
    assert len(set(texts)) == 1


def test_lowering_leaves_the_logical_graph_alone():
    graph = llama().graph
    before = str(graph.gm.graph)
    lower(graph, "dp2.cp2.tp2+sp+zero3")
    assert str(graph.gm.graph) == before


def test_stages_are_another_kind_of_program():
    assert isinstance(lower(llama(layers=2).graph, "dp2.pp2"), PipelineGraph)
    assert isinstance(lower(llama().graph, "dp2.pp1"), ExecGraph)


def test_other_passes():
    without = [step for step in default_passes() if step.name != "bucket_collectives"]
    plain, bucketed = lower(llama(layers=2).graph, "dp2", passes=without), lower(llama(layers=2).graph, "dp2")
    assert plain.collectives() == {"all_reduce": 22}
    assert bucketed.collectives() == {"all_reduce": 1}
    tiny = [BucketCollectives(0.01) if step.name == "bucket_collectives" else step for step in default_passes()]
    assert 1 < lower(llama().graph, "dp2", passes=tiny).collectives()["all_reduce"] < 22


@dataclass(frozen=True)
class EverythingWhole:
    """Another pass in the place of `annotate`: nothing is cut."""

    name: ClassVar[str] = "everything_whole"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        search_placements(replace(graph, strategy=Strategy.parse("dp1")))
        mesh = graph.strategy.mesh

        def whole(dist: DistConfig | tuple | None) -> DistConfig | tuple | None:
            if isinstance(dist, tuple):
                return tuple(map(whole, dist))
            return dist and DistConfig.replicated(mesh, dist.ndim, dist.dtype)

        for node in graph.graph.nodes:
            node.meta |= {key: whole(node.meta[key]) for key in ("dist", "dist_in") if key in node.meta}


def test_placements_of_another_pass():
    program = lower(llama().graph, "tp2", passes=[EverythingWhole(), *default_passes()[1:]])
    assert program.collectives() == {}
    captured = llama()
    (result,) = check(captured.graph, [program], captured.params, captured.buffers, captured.batches)
    assert result.ok


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ([], "an empty list"),
        (["annotate"], "'annotate' does not behave like a pass: it has no `name`"),
        ([EverythingWhole], "'EverythingWhole' .* it is a class; make an instance"),
        ([print], "has no `name`, no `tier`"),
    ],
    ids=["none", "text", "class", "function"],
)
def test_what_is_no_pass(passes, message):
    with pytest.raises(PassContractError, match=message):
        lower(llama().graph, "tp2", passes=passes)


@dataclass(frozen=True)
class Spoiled:
    """`annotate`, and then another value under one key of the weight of the first layer's query."""

    key: str
    value: object
    name: ClassVar[str] = "spoiled"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        search_placements(graph)
        weight = next(
            n for n, i in zip(graph.placeholders, graph.inputs, strict=True) if i.fqn.endswith("q_proj.weight")
        )
        mesh = graph.strategy.mesh
        values = {
            "few dims": DistConfig.replicated(mesh, 1, weight.meta["tensor"].dtype),
            "a sum": DistConfig.replicated(mesh, 2, weight.meta["tensor"].dtype).with_placement("tp", P),
        }
        node = weight if self.key == "dist" else next(iter(weight.users))
        node.meta[self.key] = values.get(str(self.value), self.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dist", "few dims", r"q_proj.* is not a placement of f64\[32, 32\]"),
        ("dist", "a sum", r"q_proj.* not as terms of a sum"),
        ("dist", None, r"q_proj.* None is not a placement of"),
        ("dist_in", None, r"needs a tuple of \d placements in `dist_in`"),
        ("dist_in", (), r"needs a tuple of \d placements in `dist_in`"),
        ("dist_in", (None,), r"None is not a placement of|needs a tuple of 2"),
    ],
)
def test_placements_that_cannot_be(key, value, message):
    with pytest.raises(VerifyError, match=f"after pass 'spoiled': .*{message}"):
        lower(llama().graph, "tp2", passes=[Spoiled(key, value), *default_passes()[1:]])


def test_a_ladder_that_attaches_no_placements():
    with pytest.raises(VerifyError, match=r"after pass 'cleanup'.*no placement.*as `annotate` does"):
        lower(llama().graph, "tp2", passes=[step for step in default_passes() if step.name == "cleanup"])


@pytest.mark.parametrize(
    "option",
    [
        {"storage": torch.float32},
        {"for_store": True},
        {"sizes": {"T": 8}},
        {"accumulate": torch.float64},
        {"reduce": torch.bfloat16},
    ],
    ids=lambda option: next(iter(option)),
)  # fmt: skip
def test_passes_have_their_options_already(option):
    with pytest.raises(GivenPassesError, match=rf"cannot be combined with {next(iter(option))}= which"):
        lower(llama().graph, "dp2", passes=default_passes(), **option)


@pytest.mark.parametrize(
    ("strategy", "error"), [("tp", StrategySyntaxError), ("dp2.ep2", NoExpertsError), ("pp2.ep2", NoExpertsError)]
)
def test_errors(strategy, error):
    with pytest.raises(error):
        lower(llama(layers=2).graph, strategy)
    with pytest.raises(OverrideError):
        lower(llama().graph, Strategy.parse("tp2", overrides={"nothing": "R"}))


def test_a_single_rank_has_no_collectives():
    program = lower(llama().graph, "dp1.tp1.cp1+sp+zero3")
    assert program.collectives() == {}
    assert program.axes() == ()
    assert program.collective_bytes() == 0


def test_body_runs_as_a_plain_module():
    """For one rank the body is the captured graph."""
    captured = llama()
    program = lower(captured.graph, "dp1")
    tables = {"param": captured.params, "buffer": captured.buffers, "batch": captured.batches[1]}
    tables["constant"] = captured.graph.constants
    numbers = {"scale": torch.tensor(0.5, dtype=torch.float64), "seed": torch.tensor(0)}
    values = [numbers[i.kind] if i.kind in numbers else tables[i.kind][i.fqn] for i in program.inputs]
    with torch.no_grad():
        whole = captured.graph.gm(*values)
        body = compile_graph(program.body.graph)(*(values[i] for _, i in program.body.sources))
    order = {id(node): i for i, node in enumerate(program.body.results)}
    assert len(order) == len(body)
    assert any(torch.equal(body[0], value) for value in whole)


def test_a_program_that_is_not_verified_is_the_same(monkeypatch):
    verified = lower(mlp().graph, "tp2", for_store=True)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("verified")

    for name in ("verify_needs", "verify", "verify_kept", "verify_placements", "verify_end"):
        monkeypatch.setattr(ladder, name, refuse)
    assert lower(mlp().graph, "tp2", for_store=True, verified=False).fingerprint() == verified.fingerprint()
    with pytest.raises(AssertionError, match="verified"):
        lower(mlp().graph, "tp2", for_store=True)
