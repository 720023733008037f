"""From a module and its options to a session: capture, lowering, storage, engine, put together once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fxpar.batching import GroupCost, LengthGroup
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.group import program_cost
from fxpar.cost.group_cost import Cost, TeamsCost
from fxpar.errors import CostContractError, ParallelizeError, nearest
from fxpar.ir.collector import collector_paused
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.pipeline_graph import TeamsGraph, TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.monitor import Monitor, looks_like_peer_loss
from fxpar.passes.pack_documents import pack_documents
from fxpar.precision import with_precision
from fxpar.runtime.agree import agreed_cluster, check_same_options, check_same_programs, check_same_values
from fxpar.runtime.attributes import plain_attributes
from fxpar.runtime.binding import Bound, bind_here
from fxpar.runtime.calls import PlainCalls
from fxpar.runtime.decided import Decided, decide, tasks_of, tell
from fxpar.runtime.engine import Engine, EngineOptions
from fxpar.runtime.evaluate import Evaluation
from fxpar.runtime.gradients import Gradients
from fxpar.runtime.loss_scaler import LossScaler
from fxpar.runtime.notices import tell_of_tasks
from fxpar.runtime.options import CostModel, ParallelizeOptions, capture_step
from fxpar.runtime.session import Session, SessionTask
from fxpar.runtime.spans import Recorder
from fxpar.runtime.storage import activation_bytes, may_overlap, open_storage
from fxpar.runtime.switching import Switching, TransportOptions
from fxpar.runtime.task import Task
from fxpar.store import MemoryReport
from fxpar.store.home import rules_by_fqn
from fxpar.store.weights import WeightStore
from fxpar.torch_api.hooks import hooked_modules
from fxpar.tracer.finish import without_unread
from fxpar.tracer.signature import autocast_dtype
from fxpar.transport import Staging
from fxpar.transport.groups import ProcessGroups


def open_session(
    module: nn.Module, strategies: Mapping[int, Strategy | str] | None, options: ParallelizeOptions
) -> Session:
    """Capture, lower, lay out, allocate, and take the module's parameters home. All ranks call it alike."""
    require_ranks()
    tasks = tasks_of(strategies, options)
    watcher = _watcher(options, dist.get_world_size())
    if watcher is None:
        with collector_paused():
            return _open(module, tasks, options, None)
    try:
        with watcher.explained("start of the session"), collector_paused():
            _meet(watcher)
            return _open(module, tasks, options, watcher)
    except BaseException as error:
        if watcher is not options.monitor:
            watcher.stop(error)
        raise


@contextmanager
def explained_before(options: ParallelizeOptions) -> Iterator[None]:
    """In the block, before `open_session` starts a monitor, an error that a lost peer caused is explained by one that
    begins now.
    """
    try:
        yield
    except Exception as error:
        if not options.monitor or not looks_like_peer_loss(error):
            raise
        if isinstance(options.monitor, Monitor):
            raise options.monitor.explain(error) from error
        with _new_monitor(options) as watcher:
            watcher.phase("start of the session")
            raise


def require_ranks() -> None:
    """Raise ParallelizeError outside of a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ParallelizeError(
            "torch.distributed is not initialised. Start the script with torchrun and call "
            "torch.distributed.init_process_group() first"
        )


def require_backend(device: torch.device) -> None:
    """Raise ParallelizeError for several ranks with GPU tensors on gloo, which sends none from one rank to another."""
    if device.type == "cuda" and dist.get_world_size() > 1 and "cuda:gloo" in str(dist.get_backend_config()):
        raise ParallelizeError(
            "the model is on a GPU, and the process group sends GPU tensors with gloo, which cannot. Call "
            "torch.distributed.init_process_group() without a backend, or with 'cpu:gloo,cuda:nccl'"
        )


def _open(
    module: nn.Module, tasks: Mapping[str, Task], options: ParallelizeOptions, watcher: Monitor | None
) -> Session:
    decided = {name: decide(module, name, task, options) for name, task in tasks.items()}
    first = next(iter(decided.values()))
    require_backend(first.device)
    if dist.get_rank() == 0:
        for one in decided.values():
            tell(one, options)
        tell_of_tasks({name: one.compiled.logical for name, one in decided.items()})
    everywhere = [one for one in decided.values() if one.task.ranks is None]  # what plain calls can run under
    groups = [group for one in everywhere for group in one.groups]
    plain = _plain_strategy(options, groups, [name for one in everywhere for name in one.names])
    process_groups = ProcessGroups(options.timeout_s)
    world_group = process_groups.world()
    cluster = agreed_cluster(first.cluster, first.device.type, world_group)
    homes = rules_by_fqn([info.fqn for info in first.compiled.logical.params()], options.home or {})
    check_same_options(_shared_options(decided, options), world_group, compared={"home": homes})
    programs = {name: program for one in decided.values() for name, program in one.compiled.programs.items()}
    check_same_programs(programs, world_group)
    check_same_values(module, world_group)
    decided = {name: replace(one, cluster=cluster) for name, one in decided.items()}
    engines, memory = _engines(module, decided, programs, options, process_groups, world_group, watcher)
    engine = next(iter(engines.values()))
    captured = {info.fqn: info.meta.dtype for info in first.compiled.logical.params()}
    calls = _plain_calls(programs, first, engine, plain, captured, options, process_groups)
    found = {
        name: SessionTask(
            one.task.weight, one.compiled, engines[name], _evaluation(one, engines[name], calls, captured, options)
        )
        for name, one in decided.items()
    }
    told = hooked_modules(module), plain_attributes(module)
    return Session(found, engine.switching.store, memory, options, calls, *told)


def _evaluation(
    decided: Decided,
    engine: Engine,
    calls: PlainCalls,
    captured: Mapping[str, torch.dtype],
    options: ParallelizeOptions,
) -> Evaluation:
    task, compiled, store = decided.task, decided.compiled, engine.switching.store

    def capture_again(module: nn.Module) -> LogicalGraph:
        with store.shown_without_values(module, captured), calls.tracing():
            logical = capture_step(module, task.loss, task.example, task.dynamic)
        logical = without_unread(logical) if decided.name else logical
        if compiled.packing is not None:
            logical = pack_documents(logical, force=bool(options.packed))
        return with_precision(logical, compiled.precision)

    keys, mean = tuple(decided.keys), compiled.logical.averaged
    return Evaluation(engine, calls, task.loss, capture_again, keys, mean, captured_only=bool(decided.name))


# Options that a rank may be given otherwise. All others are compared, new ones too.
_MAY_DIFFER = {
    *("cluster", "cost"),  # rank 0's hold
    *("strategies", "plan", "lengths", "tokens_per_step", "token_budget"),  # the groups that they lead to are compared
    *("example", "loss", "passes", "compiled", "tasks"),  # the programs that they lead to are compared
    *("weights", "initializer"),  # a path on this rank's machine; a function, compared by its name
    *("monitor", "record", "timeout_s"),  # nothing of what ranks exchange
}


def _shared_options(decided: Mapping[str, Decided], options: ParallelizeOptions) -> dict[str, object]:
    """What must be the same on every rank, by name: with other groups, orders or seeds a step would hang, or be wrong
    without a word.
    """
    groups = {name: _told(one.groups) for name, one in decided.items()}
    tasks = {name: (one.task.weight, list(one.task.ranks or ())) for name, one in decided.items()}
    own = {one.name: getattr(options, one.name) for one in fields(options) if one.name not in _MAY_DIFFER}
    # Ranks are asked for what rank 0's cost model said; values that are yet to be made are compared by who makes them.
    made = getattr(options.initializer, "__qualname__", type(options.initializer).__name__)
    given = {"whether there is a cost model": options.cost is not None, "initializer": made}
    told = groups if options.tasks is not None else groups[""]
    return {
        "tasks (and weights, and ranks)": list(tasks.items()),
        "strategies (and token budgets)": told,
        **given,
        **own,
    }


def _told(groups: Sequence[LengthGroup]) -> dict[int, str]:
    return {group.limit: f"{group.strategy} ({group.token_budget:,} tokens)" for group in groups}


def _engines(
    module: nn.Module,
    decided: Mapping[str, Decided],
    programs: Mapping[str, TrainGraph],
    options: ParallelizeOptions,
    process_groups: ProcessGroups,
    world_group: Any,
    watcher: Monitor | None,
) -> tuple[dict[str, Engine], MemoryReport]:
    """Allocate, take the parameters home, and put together what runs mini-batches of each task; makes process groups,
    in the same order on all ranks.
    """
    first = next(iter(decided.values()))
    device, cluster = first.device, first.cluster
    runs = sum(len(one.groups) for one in decided.values())

    def activations() -> int:
        return max(
            activation_bytes(one.programs, one.groups, one.packed, one.compiled.lengths) for one in decided.values()
        )

    store, schedule, memory, overlap = open_storage(
        module,
        programs,
        dist.get_rank(),
        dist.get_world_size(),
        device,
        cluster,
        options,
        activations,
        options.overlap and may_overlap(runs, device, world_group, cluster),
        tuple(first.compiled.logical.params()),
        first.given,
    )
    transport = _transport(options, process_groups, device, overlap)
    bound = _bind_all(programs, process_groups, device, options)
    switching = Switching(store, schedule, transport)
    gradients = Gradients(store, programs, cluster, options.gradients, transport, options.planner)
    scaler, recorder = _scaler(store, options), Recorder(device) if options.record else None
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
            options=_engine_options(one, options, overlap),
            scaler=scaler,
            recorder=recorder,
            watcher=watcher,
            world_group=world_group,
            reading=one.reading,
            task=name,
        )
        for name, one in decided.items()
    }
    return engines, memory


def _engine_options(decided: Decided, options: ParallelizeOptions, overlap: bool) -> EngineOptions:
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
    )


def _plain_calls(
    programs: Mapping[str, TrainGraph],
    decided: Decided,
    engine: Engine,
    plain: str,
    captured: Mapping[str, torch.dtype],
    options: ParallelizeOptions,
    process_groups: ProcessGroups,
) -> PlainCalls:
    """What `model(x)` runs."""
    return PlainCalls(
        {name: one.strategy for name, one in programs.items() if one.mesh.ranks == tuple(range(dist.get_world_size()))},
        plain,
        engine.switching,
        decided.cluster,
        process_groups,
        options.compile,
        options.seed,
        epoch=lambda: engine.steps,
        captured=captured,
        precision=decided.compiled.precision,
        watched=lambda: engine.watched("backward of a plain call"),
        noted={note.partition(" (")[0] for program in programs.values() for note in program.notes},
    )


def _bind_all(
    programs: Mapping[str, TrainGraph], process_groups: ProcessGroups, device: torch.device, options: ParallelizeOptions
) -> dict[str, Bound]:
    """This rank's programs; makes process groups, in the same order on all ranks."""
    return {
        name: bind_here(program, process_groups, device=device, compile=options.compile)
        for name, program in programs.items()
    }


def _scaler(store: WeightStore, options: ParallelizeOptions) -> LossScaler | None:
    """fp16 gradients need one."""
    if all(spec.dtype != torch.float16 for spec in store.specs):
        return None
    return LossScaler() if options.loss_scale is None else LossScaler(options.loss_scale)


def _transport(
    options: ParallelizeOptions, process_groups: ProcessGroups, device: torch.device, bucketed: bool
) -> TransportOptions:
    return TransportOptions(
        options.execution,
        options.staging_bytes,
        options.checked,
        process_groups.world("transfers"),  # used beside those of the graphs
        options.timeout_s,
        bucketed,
        Staging(device),
        process_groups,
    )


def _plain_strategy(options: ParallelizeOptions, groups: Sequence[LengthGroup], names: Sequence[str]) -> str:
    """What `model(x)` runs under unless told otherwise: of the strategies that can (without stages), the one that takes
    the longest sequences.
    """
    if options.plain is None and not names:
        return ""
    if options.plain is None:
        return names[max(range(len(groups)), key=lambda g: (groups[g].strategy.stages == 1, groups[g].limit))]
    if options.plain not in names:
        raise ParallelizeError(f"plain={options.plain!r} is none of {', '.join(names)}{nearest(options.plain, names)}")
    return options.plain


def _meet(watcher: Monitor) -> None:
    """Wait for all ranks on the connections that there are: they tell of a rank that is gone at once, whereas making
    new groups waits for it.
    """
    if "gloo" in str(dist.get_backend_config()):
        dist.all_reduce(torch.zeros(1))
        watcher.all_are_here()


def _watcher(options: ParallelizeOptions, world: int) -> Monitor | None:
    """The monitor that was given, or one that beats until this process ends."""
    if isinstance(options.monitor, Monitor):
        return options.monitor
    if world == 1 or not options.monitor:
        return None
    monitor = _new_monitor(options).start()
    monitor.phase("the script's own code")
    monitor.stop_at_exit()
    return monitor


def _new_monitor(options: ParallelizeOptions) -> Monitor:
    return Monitor.of_world(timeout_s=options.timeout_s or 60.0)


def _costs(programs: Sequence[TrainGraph], cluster: ClusterSpec, options: ParallelizeOptions) -> list[Cost]:
    """What a micro-batch costs under each program: the same on all ranks.

    Raises CostContractError for a `cost` that returns something else.
    """
    if options.cost is not None:
        return _given_costs(programs, cluster, options.cost)
    return [program_cost(program, cluster) for program in programs]


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
