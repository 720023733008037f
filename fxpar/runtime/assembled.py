"""From what was decided of a session's tasks to what runs them: storage, programs bound to this rank, engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fxpar.batching import GroupCost
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.group import kept_cost
from fxpar.cost.group_cost import Cost, TeamsCost
from fxpar.errors import CostContractError
from fxpar.ir.graph import LogicalGraph, Size
from fxpar.ir.pipeline_graph import TeamsGraph, TrainGraph
from fxpar.passes.pack_documents import pack_documents
from fxpar.precision import with_precision
from fxpar.runtime.attributes import plain_attributes
from fxpar.runtime.binding import Bound, bind_here
from fxpar.runtime.calls import PlainCalls
from fxpar.runtime.compiling import capture_step, sharing_of_all
from fxpar.runtime.decided import Decided
from fxpar.runtime.engine import Engine, EngineOptions
from fxpar.runtime.evaluate import Evaluation
from fxpar.runtime.gradients import Gradients
from fxpar.runtime.loss_scaler import LossScaler
from fxpar.runtime.options import CostModel, ParallelizeOptions
from fxpar.runtime.replica_loss import left_to_replicas
from fxpar.runtime.session import Ground, Session, SessionTask
from fxpar.runtime.spans import Recorder
from fxpar.runtime.storage import activation_bytes, may_overlap, open_storage, staging_for
from fxpar.runtime.switching import Switching, TransportOptions
from fxpar.store import MemoryReport
from fxpar.store.weights import WeightStore
from fxpar.switch.terms import accumulators_of
from fxpar.torch_api.hooks import hooked_modules
from fxpar.tracer.finish import without_unread
from fxpar.tracer.same_loss import is_same_loss
from fxpar.tracer.signature import autocast_dtype
from fxpar.transport import Staging
from fxpar.transport.groups import ProcessGroups


def put_together(
    module: nn.Module,
    decided: Mapping[str, Decided],
    plain: str,
    options: ParallelizeOptions,
    ground: Ground,
    before: Session | None = None,
) -> Session:
    """The session of these tasks; of one `before` the weights stay, and the count of steps. All ranks call it alike."""
    first = next(iter(decided.values()))
    programs = {name: program for one in decided.values() for name, program in one.compiled.programs.items()}
    engines, memory = _engines(module, decided, programs, options, ground, before)
    engine = next(iter(engines.values()))
    captured = {info.fqn: info.meta.dtype for info in first.compiled.logical.params()}
    calls = _plain_calls(programs, first, engine, plain, captured, options, ground)
    found = {
        name: SessionTask(
            one.task, one.compiled, engines[name], _evaluation(one, engines[name], calls, captured, options)
        )
        for name, one in decided.items()
    }
    told = hooked_modules(module), plain_attributes(module)
    return Session(found, engine.switching.store, memory, options, calls, ground, *told)


def _evaluation(
    decided: Decided,
    engine: Engine,
    calls: PlainCalls,
    captured: Mapping[str, torch.dtype],
    options: ParallelizeOptions,
) -> Evaluation:
    task, compiled, store = decided.task, decided.compiled, engine.switching.store

    def step_of(module: nn.Module, gradients: bool) -> LogicalGraph:
        with store.shown_without_values(module, captured), calls.tracing():
            return capture_step(module, task.loss, task.example, task.dynamic, gradients=gradients)

    def is_as_trained(module: nn.Module) -> bool:
        try:
            evaluated = step_of(module, gradients=False)
        except Exception:  # which all ranks find when they capture all of the step
            return False
        return is_same_loss(evaluated, compiled.logical)

    def capture_again(module: nn.Module) -> LogicalGraph:
        logical = step_of(module, gradients=True)
        logical = without_unread(logical) if decided.name else logical
        if compiled.packing is not None:
            logical = pack_documents(logical, force=bool(options.packed))
        return with_precision(logical, compiled.precision)

    keys, mean = tuple(decided.keys), compiled.logical.averaged
    return Evaluation(
        engine, calls, task.loss, capture_again, is_as_trained, keys, mean, captured_only=bool(decided.name)
    )


def _engines(
    module: nn.Module,
    decided: Mapping[str, Decided],
    programs: Mapping[str, TrainGraph],
    options: ParallelizeOptions,
    ground: Ground,
    before: Session | None,
) -> tuple[dict[str, Engine], MemoryReport]:
    """Allocate, take the parameters home, and put together what runs mini-batches of each task; makes process groups,
    in the same order on all ranks.
    """
    first, every = next(iter(decided.values())), tuple(decided.values())
    device, cluster = first.device, ground.cluster

    def activations() -> int:
        rank = dist.get_rank()
        return max(activation_bytes(one.programs, one.groups, one.packed, one.compiled.lengths, rank) for one in every)

    store, schedule, memory, overlap = open_storage(
        module,
        programs,
        dist.get_rank(),
        dist.get_world_size(),
        device,
        cluster,
        options,
        activations,
        options.overlap and may_overlap(len(_accumulators(programs)), device, ground.world_group, cluster),
        sharing_of_all([one.compiled for one in every]),
        tuple(first.compiled.logical.params()),
        first.given,
        None if before is None else before.store,
        [name for one in every for name, count in Counter(one.names).items() if count > 1],
    )
    staging = staging_for(schedule.layouts, options)
    transport = _transport(options, ground.process_groups, device, overlap, staging)
    bound = _bind_all(programs, ground.process_groups, device, options)
    switching = Switching(store, schedule, transport)
    gradients = Gradients(store, programs, cluster, options.gradients, transport, options.planner)
    scaler = _scaler(store, options) if before is None else before.engine.scaler
    recorder = Recorder(device) if options.record else None
    joined = options.memory_budget_bytes is None and set(schedule.resident) == set(programs)
    engines = {
        name: Engine(
            groups=one.groups,
            names=one.names,
            bound={each: bound[each] for each in one.compiled.programs},
            costs=_costs(one.programs, cluster, options),
            switching=switching,
            gradients=gradients,
            cluster=cluster,
            device=device,
            options=_engine_options(one, options, overlap, joined),
            scaler=scaler,
            recorder=recorder,
            watcher=ground.watcher,
            world_group=ground.world_group,
            reading=one.reading,
            task=name,
            steps=0 if before is None else before.engine.steps,
        )
        for name, one in decided.items()
    }
    return engines, memory


def _accumulators(programs: Mapping[str, TrainGraph]) -> set[Hashable]:
    """Those of the programs that do not add to each other's."""
    return {accumulators_of(program) or name for name, program in programs.items()}


def _engine_options(decided: Decided, options: ParallelizeOptions, overlap: bool, joined: bool) -> EngineOptions:
    compiled = decided.compiled
    return EngineOptions(
        packed=decided.packed,
        split=compiled.packing is None and not decided.is_whole,
        lengths=compiled.lengths,
        merge=options.merge,
        order=decided.order,
        nan=options.nan,
        seed=options.seed,
        deterministic=options.deterministic,
        overlap=overlap,
        autocast=autocast_dtype(decided.device),
        joined=joined,
    )


def _plain_calls(
    programs: Mapping[str, TrainGraph],
    decided: Decided,
    engine: Engine,
    plain: str,
    captured: Mapping[str, torch.dtype],
    options: ParallelizeOptions,
    ground: Ground,
) -> PlainCalls:
    """What `model(x)` runs."""
    return PlainCalls(
        {name: one.strategy for name, one in programs.items() if one.strategy.world == dist.get_world_size()},
        plain,
        engine.switching,
        ground.cluster,
        ground.process_groups,
        options.compile,
        options.seed,
        epoch=lambda: engine.steps,
        captured=captured,
        shapes=_batch_shapes(next(iter(decided.compiled.programs.values()))),
        precision=decided.compiled.precision,
        watched=lambda: engine.watched("backward of a plain call"),
        noted={note.partition(" (")[0] for program in programs.values() for note in program.notes},
    )


def _batch_shapes(program: TrainGraph) -> dict[str, tuple[Size, ...]]:
    """By key of the batch."""
    return {one.fqn: one.meta.shape for one in program.inputs if one.kind == "batch"}


def _bind_all(
    programs: Mapping[str, TrainGraph], process_groups: ProcessGroups, device: torch.device, options: ParallelizeOptions
) -> dict[str, Bound]:
    """This rank's programs; makes process groups, in the same order on all ranks."""
    return {
        name: bind_here(left_to_replicas(program), process_groups, device=device, compile=options.compile)
        for name, program in programs.items()
    }


def _scaler(store: WeightStore, options: ParallelizeOptions) -> LossScaler | None:
    """fp16 gradients need one."""
    if all(spec.dtype != torch.float16 for spec in store.specs):
        return None
    return LossScaler() if options.loss_scale is None else LossScaler(options.loss_scale)


def _transport(
    options: ParallelizeOptions, process_groups: ProcessGroups, device: torch.device, bucketed: bool, staging: int
) -> TransportOptions:
    return TransportOptions(
        options.execution,
        staging,
        options.checked,
        process_groups.world("transfers"),  # used beside those of the graphs
        options.timeout_s,
        bucketed,
        Staging(device),
        process_groups,
    )


def _costs(programs: Sequence[TrainGraph], cluster: ClusterSpec, options: ParallelizeOptions) -> list[Cost]:
    """What a micro-batch costs under each program: the same on all ranks.

    Raises CostContractError for a `cost` that returns something else.
    """
    if options.cost is not None:
        return _given_costs(programs, cluster, options.cost)
    return [kept_cost(program, cluster) for program in programs]


def _given_costs(programs: Sequence[TrainGraph], cluster: ClusterSpec, cost: CostModel) -> list[Cost]:
    """What the user's cost model says on rank 0, of teams one by one: it may measure, and ranks with other costs would
    make other plans.
    """
    each = [program.teams if isinstance(program, TeamsGraph) else (program,) for program in programs]
    found: list[Any] = [[cost(team, cluster) for team in teams] for teams in each]
    for teams, costs in zip(each, found, strict=True):
        for team, one in zip(teams, costs, strict=True):
            if not isinstance(one, GroupCost):
                raise CostContractError(str(team.strategy), one)
    dist.broadcast_object_list(found, src=0)
    pairs = zip(programs, found, strict=True)
    return [TeamsCost(tuple(one)) if isinstance(program, TeamsGraph) else one[0] for program, one in pairs]
