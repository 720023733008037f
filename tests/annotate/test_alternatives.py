"""Forced alternatives never beat the search, what was chosen costs nothing more, and what is refused says why."""

from __future__ import annotations

import functools

import pytest
import torch

from fxpar.annotate import annotate
from fxpar.annotate.alternatives import AxisChoice, axis_choice, describe_option
from fxpar.annotate.driver import annotate_and_search
from fxpar.annotate.solve import AxisSearch, Search
from fxpar.ir.graph import AnnotatedGraph, LogicalGraph
from fxpar.ir.strategy import Strategy
from tests.captured import Mlp, llama, squared, take, vectors

Found = tuple[AnnotatedGraph, tuple[AxisSearch, ...]]


@functools.cache
def mlp() -> LogicalGraph:
    torch.manual_seed(0)
    return take(Mlp(torch.relu, (16, 24, 32, 8)), squared, vectors(16, 8, 12)).graph


STEP = {"llama": 37, "mlp": 3}
GRAPHS = {"llama": lambda: llama(layers=2).graph, "mlp": mlp}


@functools.cache
def found(model: str, strategy: str) -> Found:
    return annotate_and_search(GRAPHS[model](), Strategy.parse(strategy))


@functools.cache
def choices(model: str, strategy: str, axis: str) -> dict[int, AxisChoice]:
    """The choices on one axis, of a sample of the classes: each option is a search of its own."""
    (search,) = (s for s in found(model, strategy)[1] if s.axis == axis)
    return {e.index: axis_choice(search, e.nodes[0]) for e in search.problem.classes[:: STEP[model]]}


def choice_of(model: str, strategy: str, axis: str, name: str) -> AxisChoice:
    graph, searches = found(model, strategy)
    node = next(n for n, i in zip(graph.placeholders, graph.inputs, strict=True) if i.fqn == name)
    return axis_choice(next(s for s in searches if s.axis == axis), node)


CASES = [("llama", "tp2+sp", "tp"), ("llama", "cp2", "cp"), ("mlp", "tp4", "tp"), ("mlp", "cp2.tp2", "cp")]


@pytest.mark.parametrize(("model", "strategy", "axis"), CASES)
def test_no_alternative_beats_the_optimum(model, strategy, axis):
    for choice in choices(model, strategy, axis).values():
        for other in choice.alternatives:
            if other.price is not None:
                assert other.price.total_bytes >= 0, (choice.nodes[0], other)
            if other.alone is not None:  # with fewer liberties nothing gets cheaper
                assert other.price is not None
                assert other.alone.total_bytes >= other.price.total_bytes, (choice.nodes[0], other)


@pytest.mark.parametrize(("model", "strategy", "axis"), CASES)
def test_what_was_chosen_costs_nothing_more(model, strategy, axis):
    """Its price is not assumed: forced, it gives the optimum again."""
    (search,) = (s for s in found(model, strategy)[1] if s.axis == axis)
    for index, choice in choices(model, strategy, axis).items():
        (first, *others) = choice.alternatives
        assert first.chosen
        assert first.option == choice.chosen
        assert not any(other.chosen for other in others)
        if not choice.renames:
            again = search.search.forced({index: choice.chosen})
            assert again is not None
            assert again.cost.total_bytes == pytest.approx(search.solution.cost.total_bytes, rel=1e-9)


def test_a_forced_option_is_taken():
    (search,) = found("llama", "tp2")[1]
    forced = 0
    for entry in search.problem.classes[::15]:
        if entry.index not in search.search.aliases and len(entry.options) > 1:
            other = next(o for o in entry.options if o != search.solution.options[entry.index])
            solution = search.search.forced({entry.index: other})
            assert solution is None or solution.options[entry.index] == other
            forced += solution is not None
    assert forced > 3


def test_searching_changes_nothing():
    graph = llama(layers=2).graph
    plain, (searched, searches) = annotate(graph, Strategy.parse("cp2.tp2")), found("llama", "cp2.tp2")
    assert [s.axis for s in searches] == ["tp", "cp"]
    axis_choice(searches[0], searched.placeholders[0])
    for one, other in zip(plain.graph.nodes, searched.graph.nodes, strict=True):
        assert one.meta.get("dist") == other.meta.get("dist")
        assert one.meta.get("dist_in") == other.meta.get("dist_in")


def test_repeated_layers_decide_together():
    choice = choice_of("llama", "tp2", "tp", "layers.1.ffn.down_proj.weight")
    assert [node.meta["class"][1] for node in choice.nodes] == ["layers.*.ffn.down_proj.weight"] * 2
    assert str(choice.chosen.outputs[0]) == "S(1)"
    assert [describe_option(a.option) for a in choice.alternatives[1:]] == ["S(0)", "R"]
    whole = choice.alternatives[-1].price
    assert whole is not None
    assert whole.penalty_bytes > 100 * abs(whole.moved_bytes)  # not traffic, but work that is not cut


@pytest.mark.parametrize(("model", "of_rows"), [("mlp", True), ("llama", False)])
def test_whole_reshards_change_no_cost(model, of_rows):
    """They are declared so where rows may be cut as well as tokens; a row of tokens has one such dim."""
    search = found(model, "tp4" if model == "mlp" else "tp2+sp")[1][0].search
    assert search.of_rows == of_rows
    costs = [Search(search.problem, search.node_cost, search.demands, how).run().cost for how in (False, True)]
    assert costs[0].total_bytes == pytest.approx(costs[1].total_bytes, rel=1e-9)


# ---------------------------------------------------------------------------------------------------- what is refused
def refused(choice: AxisChoice) -> dict[str, str]:
    return {each.text: each.reason for each in choice.refused}


def attention(graph: LogicalGraph, strategy: str, axis: str = "tp") -> AxisChoice:
    annotated, searches = annotate_and_search(graph, Strategy.parse(strategy))
    node = next(n for n in annotated.graph.nodes if str(n.target) == "fxpar.attention.default")
    return axis_choice(next(s for s in searches if s.axis == axis), node)


def test_heads_that_do_not_divide():
    why = refused(attention(llama().graph, "tp3"))
    assert why["(S(1), S(1), S(1)) -> (S(1), S(1))"] == "4 (dim 1 of operand 0) is not divisible by tp=3"


def test_key_value_heads_that_do_not_divide():
    """Four query heads divide, two key and value heads do not: these are cut in two."""
    choice = attention(llama().graph, "tp4")
    assert refused(choice)["(S(1), S(1), S(1)) -> (S(1), S(1))"] == "2 (dim 1 of operand 1) is not divisible by tp=4"
    assert describe_option(choice.chosen) == "(S(1), S(1/2), S(1/2)) -> (S(1), S(1))"


def test_tokens_are_not_cut_without_sp():
    (search,) = found("llama", "tp2")[1]
    entry = next(e for e in search.problem.classes if str(e.view.target) == "aten.mm.default")
    assert refused(axis_choice(search, entry.nodes[0]))["(S(0), R) -> S(0)"] == (
        "it shards tokens, which tp does only with +sp"
    )
    batch = choice_of("llama", "tp2", "tp", "input_ids")
    assert refused(batch)["S(1)"] == "it shards tokens, which tp does only with +sp"


def test_context_parallelism_cuts_tokens_only():
    why = refused(choice_of("llama", "cp2", "cp", "head.weight"))
    assert set(why.values()) == {"cp shards tokens, and leaves this dim of a parameter whole"}
    (search,) = found("llama", "cp2")[1]
    entry = next(e for e in search.problem.classes if str(e.view.target) == "aten.mm.default")
    reason = refused(axis_choice(search, entry.nodes[0]))["(R, S(1)) -> S(1)"]
    assert reason == "it cuts another dim than the tokens, which cp does in attention only"


def test_an_override_leaves_no_choice():
    strategy = Strategy.parse("tp2", overrides={"*.down_proj.weight": "R@tp"})
    graph, (search,) = annotate_and_search(llama().graph, strategy)
    node = next(
        n for n, i in zip(graph.placeholders, graph.inputs, strict=True) if i.fqn == "layers.0.ffn.down_proj.weight"
    )
    choice = axis_choice(search, node)
    assert [describe_option(a.option) for a in choice.alternatives] == ["R"]
    assert refused(choice) == {"S(0)": "an override sets R", "S(1)": "an override sets R"}


def test_rules_are_named():
    (search,) = found("llama", "tp2+sp")[1]
    entry = next(e for e in search.problem.classes if str(e.view.target) == "aten.mm.default")
    rules = {a.rule for a in axis_choice(search, entry.nodes[0]).alternatives}
    assert rules == {"rules.matmul.mm_factors", "always possible"}
    entry = next(e for e in search.problem.classes if str(e.view.target) == "aten.view.default")
    assert "partial sums pass through" in {a.rule for a in axis_choice(search, entry.nodes[0]).alternatives}
