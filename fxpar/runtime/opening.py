"""From a module and its options to a session: capture, lowering, storage, engine, put together once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
from fxpar.runtime.decided import Decided, decide, tell
from fxpar.runtime.engine import Engine, EngineOptions
from fxpar.runtime.evaluate import Evaluation
from fxpar.runtime.gradients import Gradients
from fxpar.runtime.loss_scaler import LossScaler
from fxpar.runtime.options import (
    CostModel,
    LossFunction,
    ParallelizeOptions,
    capture_step,
)
from fxpar.runtime.session import Session
from fxpar.runtime.spans import Recorder
from fxpar.runtime.storage import activation_bytes, may_overlap, open_storage
from fxpar.runtime.switching import Switching, TransportOptions
from fxpar.store import MemoryReport
from fxpar.store.home import rules_by_fqn
from fxpar.store.weights import WeightStore
from fxpar.torch_api.hooks import hooked_modules
from fxpar.tracer.signature import autocast_dtype
from fxpar.transport import Staging
from fxpar.transport.groups import ProcessGroups


def open_session(
    module: nn.Module,
    strategies: Mapping[int, Strategy | str],
    loss: LossFunction,
    example: Mapping[str, Tensor] | None,
    options: ParallelizeOptions,
) -> Session:
    """Capture, lower, lay out, allocate, and take the module's parameters home. All ranks call it alike."""
    require_ranks()
    watcher = _watcher(options, dist.get_world_size())
    if watcher is None:
        with collector_paused():
            return _open(module, strategies, loss, example, options, None)
    try:
        with watcher.explained("start of the session"), collector_paused():
            _meet(watcher)
            return _open(module, strategies, loss, example, options, watcher)
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
    module: nn.Module,
    strategies: Mapping[int, Strategy | str],
    loss: LossFunction,
    example: Mapping[str, Tensor] | None,
    options: ParallelizeOptions,
    watcher: Monitor | None,
) -> Session:
    decided = decide(module, strategies, loss, example, options)
    compiled = decided.compiled
    require_backend(decided.device)
    if dist.get_rank() == 0:
        tell(decided, options)
    plain = _plain_strategy(options, decided.groups, decided.names)
    process_groups = ProcessGroups(options.timeout_s)
    world_group = process_groups.world()
    decided = replace(decided, cluster=agreed_cluster(decided.cluster, decided.device.type, world_group))
    homes = rules_by_fqn([info.fqn for info in compiled.logical.params()], options.home or {})
    check_same_options(_shared_options(decided, options), world_group, compared={"home": homes})
    check_same_programs(compiled.programs, world_group)
    check_same_values(module, world_group)
    engine, memory = _engine(module, decided, options, process_groups, world_group, watcher)
    captured = {info.fqn: info.meta.dtype for info in compiled.logical.params()}
    calls = _plain_calls(decided, engine, plain, captured, options, process_groups)
    store = engine.switching.store

    def capture_again(module: nn.Module) -> LogicalGraph:
        with store.shown_without_values(module, captured), calls.tracing():
            logical = capture_step(module, loss, example)
        if compiled.packing is not None:
            logical = pack_documents(logical, force=bool(options.packed))
        return with_precision(logical, compiled.precision)

    evaluation = Evaluation(engine, calls, loss, capture_again, tuple(decided.keys), compiled.logical.averaged)
    told = hooked_modules(module), plain_attributes(module)
    return Session(compiled, store, engine, memory, options, calls, evaluation, *told)


# Options that a rank may be given otherwise. All others are compared, new ones too.
_MAY_DIFFER = {
    *("cluster", "cost"),  # rank 0's hold
    *("strategies", "plan", "lengths", "tokens_per_step", "token_budget"),  # the groups that they lead to are compared
    *("example", "loss", "passes", "compiled"),  # the programs that they lead to are compared
    *("weights", "initializer"),  # a path on this rank's machine; a function, compared by its name
    *("monitor", "record", "timeout_s"),  # nothing of what ranks exchange
}


def _shared_options(decided: Decided, options: ParallelizeOptions) -> dict[str, object]:
    """What must be the same on every rank, by name: with other groups, orders or seeds a step would hang, or be wrong
    without a word.
    """
    groups = {f"{group} ({group.token_budget:,} tokens)": group.limit for group in decided.groups}
    own = {one.name: getattr(options, one.name) for one in fields(options) if one.name not in _MAY_DIFFER}
    # Ranks are asked for what rank 0's cost model said; values that are yet to be made are compared by who makes them.
    made = getattr(options.initializer, "__qualname__", type(options.initializer).__name__)
    given = {"whether there is a cost model": options.cost is not None, "initializer": made}
    return {"strategies (and token budgets)": groups, **given, **own}


def _engine(
    module: nn.Module,
    decided: Decided,
    options: ParallelizeOptions,
    process_groups: ProcessGroups,
    world_group: Any,
    watcher: Monitor | None,
) -> tuple[Engine, MemoryReport]:
    """Allocate, take the parameters home, and put together what runs mini-batches; makes process groups, in the same
    order on all ranks.
    """
    compiled, programs, device, cluster = decided.compiled, decided.programs, decided.device, decided.cluster

    def activations() -> int:
        return activation_bytes(programs, decided.groups, decided.packed, compiled.lengths)

    store, schedule, memory, overlap = open_storage(
        module,
        compiled.programs,
        dist.get_rank(),
        dist.get_world_size(),
        device,
        cluster,
        options,
        activations,
        options.overlap and may_overlap(len(programs), device, world_group, cluster),
        decided.given,
    )
    transport = _transport(options, process_groups, device, overlap)
    engine = Engine(
        groups=decided.groups,
        names=decided.names,
        bound=_bind_all(compiled.programs, process_groups, device, options),
        costs=_costs(programs, cluster, options),
        switching=Switching(store, schedule, transport),
        gradients=Gradients(store, compiled.programs, cluster, options.gradients, transport, options.planner),
        cluster=cluster,
        device=device,
        options=EngineOptions(
            packed=decided.packed,
            split=compiled.packing is None,
            lengths=compiled.lengths,
            merge=options.merge,
            order=decided.order,
            nan=options.nan,
            seed=options.seed,
            deterministic=options.deterministic,
            overlap=overlap,
            autocast=autocast_dtype(device),
        ),
        scaler=_scaler(store, options),
        recorder=Recorder(device) if options.record else None,
        watcher=watcher,
        world_group=world_group,
        id_limits=decided.id_limits,
        keys=decided.read_keys,
    )
    return engine, memory


def _plain_calls(
    decided: Decided,
    engine: Engine,
    plain: str,
    captured: Mapping[str, torch.dtype],
    options: ParallelizeOptions,
    process_groups: ProcessGroups,
) -> PlainCalls:
    """What `model(x)` runs."""
    return PlainCalls(
        {name: program.strategy for name, program in decided.compiled.programs.items()},
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
        noted={note.partition(" (")[0] for program in decided.programs for note in program.notes},
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
