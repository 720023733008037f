"""`lower(logical, strategy)`: from a logical graph to what the ranks run.

The ladder of passes is in `fxpar.lowering.ladder`, pipeline stages in `fxpar.lowering.pipeline`. `lower_forward` is for
a forward whose loss is outside.
"""

from __future__ import annotations

import inspect
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import fx

from fxpar.annotate.bins import check_bins
from fxpar.annotate.experts import check_expert_chunks, check_experts
from fxpar.annotate.module_rules import check_rules
from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import GivenPassesError, NotCapturedError, NothingToOffloadError, NotYetError, VerifyError
from fxpar.errors.base import a_type
from fxpar.flow import padding_hazard
from fxpar.ir.axes import RING
from fxpar.ir.exec_graph import ExecGraph, Outline, Part, PlainGraph, Program, cut_part
from fxpar.ir.graph import AnnotatedGraph, ForwardGraph, LogicalGraph
from fxpar.ir.node_meta import fqn_of, is_on_host, phase_of
from fxpar.ir.pass_base import GraphPass, ancestors, whole_forward
from fxpar.ir.pipeline_graph import PipelineGraph, TeamsGraph, TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.ir.teams import lowered_for
from fxpar.lowering.ladder import (
    PLACED,
    OnPass,
    checked_ladder,
    climb,
    common_fields,
    default_passes,
    remaining,
    run_passes,
)
from fxpar.lowering.pipeline import cut, fields_of_blocks, lower_pipeline, strategy_of_stage
from fxpar.lowering.teams import ladder_of_team, lower_teams
from fxpar.ops.traits import ATTENTION, RING_STEPS
from fxpar.passes.compress_dispatch import check_compressed
from fxpar.passes.offload import Offload
from fxpar.passes.pack_documents import packed_if_proved
from fxpar.passes.reduce_gradients import ReduceGradients
from fxpar.passes.reuse_buffers import SAME_STORAGE
from fxpar.passes.zero_shard import ZeroShard

PHASES = ("prologue", "body", "epilogue")
P = TypeVar("P", ExecGraph, PipelineGraph)


def lower(
    logical: LogicalGraph,
    strategy: Strategy | str,
    *,
    storage: torch.dtype | None = None,
    for_store: bool = False,
    sizes: Mapping[str, int] | None = None,
    accumulate: torch.dtype = torch.float32,
    reduce: torch.dtype | None = None,
    cluster: ClusterSpec | None = None,
    passes: list[GraphPass] | None = None,
    on_pass: OnPass | None = None,
    verified: bool = True,
) -> TrainGraph:
    """Place and lower `logical` for `strategy`; no process group, no device, no weights.

    `storage` is the dtype in which parameters are kept (masters); by default the one the model was captured in. With
    `for_store` a `fxpar.store.WeightStore` keeps them: they come in as the body computes with them, without casts and
    gathers of their own (ZeRO-3 still gathers layer by layer), and gradients leave as partial sums, which add up in
    `accumulate` at least and leave in `reduce` at most (by default as they add up).
    `sizes` are the dynamic dims of a micro-batch (of the largest team) by name, by default the example's; a budget of
    `remat(200MB)` is meant at these. On a `cluster` of several nodes tokens go to their experts' nodes first where that
    pays. `on_pass` is called with each pass' name and the graph after it (dumps). The graph
    is verified after every pass, unless `verified` is False: for what is priced and never run. `passes` stand in for
    `default_passes`, which then takes those options; the first attaches the placements.

    A strategy with pp gives a `PipelineGraph`, teams side by side a `TeamsGraph`, any other an `ExecGraph`.

    Raises NotCapturedError, StrategySyntaxError, NotYetError, OverrideError, RematGlobError, RematBudgetError,
    NothingToOffloadError, GivenPassesError, RuleGlobError, RuleConflictError, RuleHeadsError, BinsError,
    TeamsBufferError, TeamsGatherError, PassContractError for what is no pass, the errors of `fxpar.stages.cut_stages`;
    VerifyError for a bug in a pass.
    """
    check_captured(logical)
    strategy = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
    options: dict[str, Any] = {"storage": storage, "for_store": for_store, "sizes": sizes}
    options |= {"accumulate": accumulate, "reduce": reduce, "cluster": cluster}
    signature = inspect.signature(lower)
    given = [option for option, value in options.items() if value != signature.parameters[option].default]
    if passes is not None and given:
        raise GivenPassesError(given)
    ladder = default_passes(**options) if passes is None else checked_ladder(passes)
    if strategy.teams:

        def lower_team(team: Strategy) -> TrainGraph:
            passes = ladder_of_team(ladder, strategy, team)
            return lower(logical, team, passes=passes, on_pass=on_pass, verified=verified)

        return lower_teams(logical, strategy, lower_team)
    check_strategy(logical, strategy)
    if strategy.pipeline_size > 1:
        return finished(logical, lower_pipeline(logical, strategy, ladder, on_pass, verified), ladder)
    started = time.process_time()
    graph, report = run_passes(logical, strategy, ladder, on_pass, verified=verified)
    result = split_phases(graph)
    result.timings["lower_cpu_s"] = _since(started, result)
    result.passes = report
    return finished(logical, result, ladder)


def check_captured(logical: object) -> None:
    """Raise NotCapturedError for what `fxpar.capture` has not made, such as a model or its name."""
    if not isinstance(logical, LogicalGraph | ForwardGraph):
        raise NotCapturedError(a_type(logical))


def check_strategy(logical: LogicalGraph, strategy: Strategy) -> None:
    """What is asked of a graph before its first pass, by all that lower: has it the modules, experts and bins that the
    strategy (without teams) is about? Raises as `check_rules`, `check_experts`, `check_expert_chunks`, `check_bins` and
    `check_compressed` do.
    """
    check_rules(logical, strategy)
    check_experts(logical, strategy)
    check_expert_chunks(logical, strategy)
    check_bins(logical, strategy)
    check_compressed(logical, strategy)


def finished(logical: LogicalGraph, program: P, ladder: Sequence[GraphPass]) -> P:
    """The program (not of teams) as `lower` gives it. Raises NothingToOffloadError."""
    _check_moved(program, program.strategy, ladder)
    return _spread_evenly(logical, program)


def _spread_evenly(logical: LogicalGraph, program: P) -> P:
    """With tokens spread over the ranks of a ring where they may lie in any order, and all attention is in steps that
    are told the positions; else with a note of why not.
    """
    if program.strategy.ring == 1:
        return program
    calls = [node for part in program.parts.values() for node in part.graph.nodes]
    why = "its rows are one sequence each" if logical.packing is None else logical.packing.order_hazard
    if any(node.target in ATTENTION for node in calls):
        why = why or "some attention is not over the ring"
    if any(node.target in RING_STEPS and node.args[RING_STEPS[node.target] + 5] is None for node in calls):
        why = why or "the model makes the documents itself"
    if why is None:
        return replace(program, spread=program.strategy.ring)
    return replace(program, notes=(*program.notes, f"{RING} leaves the last ranks most of the attention: {why}"))


def graphs_after(
    logical: LogicalGraph,
    strategy: Strategy,
    last: str,
    ladder: list[GraphPass],
    *,
    on_pass: OnPass | None = None,
    verified: bool = True,
) -> Iterator[AnnotatedGraph]:
    """The graph behind the pass of `ladder` that is called `last`, of stages and teams that of each in turn.

    Arguments and errors are those of `lower`, whose `passes` are the ladder.
    """
    if strategy.teams:
        for number in range(len(strategy.teams)):
            team = lowered_for(strategy, number)
            yield from graphs_after(logical, team, last, ladder, on_pass=on_pass, verified=verified)
        return
    check_strategy(logical, strategy)
    if strategy.pipeline_size == 1:
        yield run_passes(logical, strategy, ladder, on_pass, last, verified)[0]
        return
    for stage in cut(logical, strategy).stages:
        yield run_passes(stage, strategy_of_stage(stage, strategy), ladder, on_pass, last, verified)[0]


def outline(
    logical: LogicalGraph, strategy: Strategy | str, *, passes: list[GraphPass] | None = None, verified: bool = True
) -> Outline:
    """How the parameters lie that `lower(logical, strategy, for_store=True)` takes, and the gradients that it gives, in
    a fraction of its time: the ladder is climbed as far as they are placed. Arguments and errors are those of `lower`.
    """
    strategy = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
    ladder = default_passes(for_store=True) if passes is None else passes
    graphs = graphs_after(logical, strategy, PLACED, ladder, verified=verified)
    parts = tuple(Outline(**common_fields(graph)) for graph in graphs)
    if len(parts) == 1:
        return parts[0]
    return Outline(**fields_of_blocks(logical, strategy, parts), stages=parts)


def finish(graph: AnnotatedGraph) -> ExecGraph:
    """What the ranks run of a graph on its way through the ladder: the passes that are left, then the cut in phases.

    `graph` is changed in place. Raises VerifyError for a pass that has left it as no later one can take it.
    """
    started = time.process_time()
    report = climb(graph, remaining(graph, default_passes()))
    result = split_phases(graph)
    result.timings["lower_cpu_s"] = time.process_time() - started
    result.passes = report
    return result


def lower_forward(
    logical: ForwardGraph,
    strategy: Strategy | str,
    *,
    whole: bool = False,
    on_pass: OnPass | None = None,
) -> PlainGraph | TeamsGraph:
    """Annotate and lower a forward for `strategy`, and cut it in forward and backward.

    Parameters come in as the body computes with them. Gradients leave in fp32 at least, as partial sums (`lower` with
    `for_store`), or with `whole` as data parallelism has them: whole on every rank, the mean over replicas. Values
    leave whole on every rank of their replica; tangents come in whole. Teams side by side give a `TeamsGraph` of such
    graphs.

    Raises as `lower` does, and NotYetError for pipeline stages.
    """
    strategy = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
    if strategy.teams:
        return lower_teams(logical, strategy, lambda team: lower_forward(logical, team, whole=whole, on_pass=on_pass))
    logical = _with_room_for_padding(logical)
    if strategy.pipeline_size > 1:
        raise NotYetError(f"a forward whose loss is outside, under '{strategy}'", "Name a strategy without pp for it.")
    check_strategy(logical, strategy)
    ladder = default_passes(for_store=not whole)
    if whole:
        ladder = [_WITHOUT_STORE.get(step.name, step) for step in ladder]
    started = time.process_time()
    graph, report = run_passes(logical, strategy, ladder, on_pass)
    result = split_forward(graph, logical)
    _check_moved(result, strategy, ladder)
    result.timings["lower_cpu_s"] = _since(started, result)
    result.passes = report
    return result


def _since(started: float, result: ExecGraph | PlainGraph) -> float:
    """CPU seconds without the search for placements, which is counted apart."""
    return time.process_time() - started - result.timings.get("annotate_cpu_s", 0.0)


def _check_moved(program: Program, strategy: Strategy, ladder: Sequence[GraphPass]) -> None:
    """Raises NothingToOffloadError where a strategy, a rule of it, or a stage of its own moves nothing to the host
    although there is a backward.
    """
    has_backward = any(out.kind == "grad" for out in program.outputs)
    if not (strategy.most("offload") and has_backward and any(step.name == Offload.name for step in ladder)):
        return
    if strategy.by_stage:
        for stage, own in zip(program.placed, strategy.by_stage, strict=True):
            _check_moved(stage, own, ladder)
        return
    nodes = (node for part in program.parts.values() for node in part.graph.nodes)
    moves = {strategy.rule_of(fqn_of(node), "offload") for node in nodes if is_on_host(node)}
    wanted = [
        rule for rule in (None, *range(len(strategy.rules))) if strategy.share_of("offload", rule) and rule not in moves
    ]
    if wanted:
        rule = "" if wanted[0] is None else str(strategy.rules[wanted[0]])
        raise NothingToOffloadError(str(strategy), rule, program.name)


def _with_room_for_padding(logical: ForwardGraph) -> ForwardGraph:
    """The graph, with padding as a document of its own if it would be seen otherwise, and that can be done."""
    return logical if padding_hazard(logical) is None else cast(ForwardGraph, packed_if_proved(logical)[0])


# Parameters come in whole and gradients leave whole, whatever the ZeRO level.
_WITHOUT_STORE: dict[str, GraphPass] = {
    ZeroShard.name: ZeroShard(params_from=4),
    ReduceGradients.name: ReduceGradients(whole=True),
}


def split_phases(graph: AnnotatedGraph) -> ExecGraph:
    """Cut the lowered graph in prologue, body and epilogue; what a part needs of an earlier one is a result of that."""
    phase = {n: phase_of(n) for n in graph.graph.nodes if n.op == "call_function"}
    needed: dict[str, dict[fx.Node, None]] = {name: {} for name in PHASES}
    for node, name in phase.items():
        for operand in node.all_input_nodes:
            if operand.op == "call_function" and phase[operand] != name:
                needed[phase[operand]][operand] = None
    position = {node: i for i, node in enumerate(graph.placeholders)}
    slots: dict[str, dict[fx.Node, int]] = {}
    parts: dict[str, Part] = {}
    for name in PHASES:
        if name == "epilogue":
            results = list(graph.results)
        else:
            later = [n for n in graph.results if name == "body" and phase.get(n) == "body"]
            results = list(dict.fromkeys([*needed[name], *later]))
        members = [n for n, p in phase.items() if p == name]
        parts[name] = cut_part(members, results, position, slots)
        slots[name] = {node: i for i, node in enumerate(results)}
    return ExecGraph(**common_fields(graph), prologue=parts["prologue"], body=parts["body"], epilogue=parts["epilogue"])


def split_forward(graph: AnnotatedGraph, logical: ForwardGraph) -> PlainGraph:
    """Cut the lowered graph in what values and new buffers need, and the rest.

    Raises VerifyError if a pass has made a value depend on a tangent, or lets the backward write into what it was given
    (it would be wrong the second time that the same backward runs).
    """
    finals = list(zip(graph.results, graph.outputs, strict=True))
    returned = [node for node, out in finals if out.kind in ("value", "buffer")]
    gradients = [node for node, out in finals if out.kind not in ("value", "buffer")]
    calls = [n for n in graph.graph.nodes if n.op == "call_function"]
    early = whole_forward(ancestors(returned), calls)
    # One result of an op with several cannot be computed without the others.
    early.update(n for n in calls if n.target is operator.getitem and n.args[0] in early)
    tangents = {n for n, i in zip(graph.placeholders, graph.inputs, strict=True) if i.kind == "tangent"}
    if early & tangents:
        raise VerifyError(f"a value depends on the tangent {min(early & tangents).name!r}")
    first = [n for n in calls if n in early]
    second = [n for n in calls if n not in early]
    if any(_writes_into(n, early) for n in second):
        raise VerifyError("the backward writes into a result of the forward")
    crossing = dict.fromkeys(o for n in second for o in n.all_input_nodes if o in early and o.op == "call_function")
    crossing |= dict.fromkeys(g for g in gradients if g in early and g.op == "call_function")
    saved = [n for n in crossing if n not in set(returned)]
    position = {node: i for i, node in enumerate(graph.placeholders)}
    forward = cut_part(first, [*returned, *saved], position, {})
    slots = {"forward": {node: i for i, node in reversed(list(enumerate([*returned, *saved]))) if node not in position}}
    backward = cut_part(second, gradients, position, slots)
    return PlainGraph(
        **common_fields(graph),
        forward=forward,
        backward=backward,
        structure=logical.structure,
        tangents=_tangents_of(logical),
    )


def _tangents_of(logical: ForwardGraph) -> dict[tuple[str, str], frozenset[str]]:
    """The tangents that each gradient depends on, by its kind and FQN."""
    reached = {
        node: frozenset((info.fqn,) if info.kind == "tangent" else ())
        for node, info in zip(logical.placeholders, logical.inputs, strict=True)
    }
    for node in logical.gm.graph.nodes:
        if node not in reached:
            reached[node] = frozenset().union(*(reached[operand] for operand in node.all_input_nodes))
    pairs = zip(logical.results, logical.outputs, strict=True)
    return {(out.kind, out.fqn): reached[node] for node, out in pairs if out.kind not in ("value", "buffer")}


def _writes_into(node: fx.Node, early: set[fx.Node]) -> bool:
    """Whether a node works in place on memory that was there before the backward."""
    if node.target is not torch.ops._c10d_functional.all_reduce_.default:
        return False
    value: Any = node.args[0]
    while value not in early and value.target in SAME_STORAGE:
        value = value.args[0]
    return value in early or value.op == "placeholder"


__all__ = [
    "PHASES",
    "OnPass",
    "check_strategy",
    "default_passes",
    "finish",
    "finished",
    "graphs_after",
    "lower",
    "lower_forward",
    "outline",
    "split_forward",
    "split_phases",
]
