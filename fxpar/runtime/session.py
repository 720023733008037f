"""Everything behind a parallel module: capture, lowering, storage, engine, put together once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpar.batching import GroupCost, LengthGroup, length_groups
from fxpar.batching.ids import id_limits
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.group import group_cost
from fxpar.errors import CostContractError, ParallelizeError, nearest, warn
from fxpar.flow import with_packing
from fxpar.ir.graph import TOKEN_NUMBERS, LogicalGraph
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering.ladder import collector_paused
from fxpar.monitor import Monitor
from fxpar.passes.pack_documents import DOCUMENTS, pack_documents
from fxpar.precision import with_precision
from fxpar.runtime.agree import check_same_programs, check_same_values
from fxpar.runtime.binding import Bound, bind_here
from fxpar.runtime.calls import PlainCalls
from fxpar.runtime.engine import Engine, EngineOptions
from fxpar.runtime.evaluate import Evaluation
from fxpar.runtime.gradients import Gradients
from fxpar.runtime.loss_scaler import LossScaler
from fxpar.runtime.notices import warn_of_carried, warn_of_limits
from fxpar.runtime.options import (
    CompiledModel,
    CostModel,
    LossFunction,
    ParallelizeOptions,
    as_precision,
    capture_step,
    cluster_here,
    compile_strategies,
    strategy_names,
)
from fxpar.runtime.report import StepReport
from fxpar.runtime.spans import Recorder
from fxpar.runtime.storage import activation_bytes, open_storage, overlapped
from fxpar.runtime.switching import Switching, TransportOptions
from fxpar.store import MemoryReport, WeightStore, check_order
from fxpar.store.folder import Given
from fxpar.torch_api.hooks import hooked_modules
from fxpar.transport import Staging
from fxpar.transport.groups import ProcessGroups


@dataclass
class Session:
    """The state of a parallel module on this rank."""

    compiled: CompiledModel
    store: WeightStore
    engine: Engine
    planned_memory: MemoryReport  # without a budget nobody has asked for activations
    options: ParallelizeOptions
    calls: PlainCalls
    evaluation: Evaluation
    hooks: dict[str, int] | None  # of modules, at the capture; None once a user was told

    @property
    def programs(self) -> Mapping[str, TrainGraph]:
        return self.compiled.programs

    @cached_property
    def memory(self) -> MemoryReport:
        """Bytes on the fullest rank, with activations as this rank predicts them."""
        if self.options.memory_budget_bytes is not None:
            return self.planned_memory
        engine = self.engine
        programs = [self.programs[name] for name in engine.names]
        needed = activation_bytes(programs, engine.groups, engine.options.packed, engine.options.lengths)
        return replace(self.planned_memory, activation_bytes=needed)

    def train_step(self, module: nn.Module, sequences: Sequence[Any], denominator: float | None = None) -> StepReport:
        """One mini-batch; buffers that the forward changes are written back to the module."""
        self.store.check_adopted(module, trained=True)
        self._warn_of_hooks(module)
        buffers = dict(module.named_buffers(remove_duplicate=False))
        before = dict(buffers)
        report = self.engine.step(sequences, buffers, denominator)
        if not report.skipped:
            with torch.no_grad():
                for fqn, value in buffers.items():
                    if value is not before[fqn]:
                        before[fqn].copy_(value)
        return report

    def _warn_of_hooks(self, module: nn.Module) -> None:
        """Once, of hooks that came after the capture: a step runs the captured graph, in which they are not."""
        if self.hooks is not None:
            new = [fqn for fqn, count in hooked_modules(module).items() if count > self.hooks.get(fqn, 0)]
            if new:
                where = f"module {new[0]!r}" if new[0] else "the model"
                self.hooks = None
                warn(
                    f"{where} has a hook on its forward or backward that came after fxpar.parallelize: train_step runs "
                    "what was captured and does not call it (plain calls and evaluate may). Register it before"
                )

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """`module(...)` under the plain strategy."""
        self.store.check_adopted(module, trained=False)
        with self.engine.watched("a plain call"):
            return self.calls.call(module, args, kwargs)

    def evaluate(self, module: nn.Module, sequences: Sequence[Any], denominator: float | None = None) -> float:
        """Mean loss of sequences without training on them."""
        self.store.check_adopted(module, trained=False)
        with self.engine.watched("evaluation"):
            return self.evaluation.run(module, sequences, denominator)

    def state(self) -> dict[str, Any]:
        scaler = self.engine.scaler
        found = {"steps": self.engine.steps, "seed": self.options.seed}
        return found if scaler is None else {**found, "loss_scaler": scaler.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or "steps" not in state:
            raise ParallelizeError("load_engine_state was not given what engine_state() returned")
        self.engine.steps = int(state["steps"])
        if self.engine.scaler is not None and "loss_scaler" in state:
            self.engine.scaler.load_state(state["loss_scaler"])


def open_session(
    module: nn.Module,
    strategies: Mapping[int, Strategy | str],
    loss: LossFunction,
    example: Mapping[str, Tensor] | None,
    options: ParallelizeOptions,
) -> Session:
    """Capture, lower, lay out, allocate, and take the module's parameters home. All ranks call it alike."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ParallelizeError(
            "torch.distributed is not initialised. Start the script with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
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


def _open(
    module: nn.Module,
    strategies: Mapping[int, Strategy | str],
    loss: LossFunction,
    example: Mapping[str, Tensor] | None,
    options: ParallelizeOptions,
    watcher: Monitor | None,
) -> Session:
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = length_groups(strategies, world=world, token_budget=options.token_budget)
    names = strategy_names([group.strategy for group in groups])
    device = _device(module)
    cluster = cluster_here(options.cluster, world, device)
    given = None if options.weights is None else Given.to(module, options.weights)
    compiled = options.compiled or compile_strategies(
        module, strategies, loss, example, options.token_budget, options.precision, options.packed, options.passes
    )
    programs = compiled.programs
    if options.precision is not None and as_precision(options.precision) != compiled.precision:
        raise ParallelizeError(f"compiled is for precision {compiled.precision}, not {options.precision}")
    if set(programs) != set(names):
        raise ParallelizeError(f"compiled is for strategies {', '.join(programs)}, not {', '.join(names)}")
    if options.compiled is not None and options.passes is not None:
        raise ParallelizeError("compiled is lowered already; give passes to fxpar.compile_strategies")
    if compiled.packing is not None:
        _check_packed(programs)
    order = None if options.order is None else check_order(options.order, list(programs))
    lowered = [programs[name] for name in names]
    groups = with_multiples(groups, lowered, options.length_multiple, compiled.unpacked)
    packed = compiled.packing is not None and options.packed is not False
    if rank == 0 and not packed and options.packed is None:
        warn(f"{compiled.logical.name}: {_alone(compiled)}")
    logical = compiled.logical
    limits = id_limits(logical)
    keys = {info.fqn: info.meta for info in logical.inputs if info.kind == "batch" and info.fqn != TOKEN_NUMBERS}
    read = {info.fqn for node, info in zip(logical.placeholders, logical.inputs, strict=True) if node.users}
    if rank == 0:
        warn_of_limits(groups, compiled.lengths.narrowed(limits.get("position_ids")))
        warn_of_carried(logical)
    plain = _plain_strategy(options, groups, names)
    process_groups = ProcessGroups(options.timeout_s)
    world_group = process_groups.world()
    check_same_programs(programs, world_group)
    check_same_values(module, world_group)
    ordered = [programs[name] for name in names]

    def activations() -> int:
        return activation_bytes(ordered, groups, packed, compiled.lengths)

    store, schedule, memory = open_storage(module, programs, rank, world, device, cluster, options, activations, given)
    memory, overlap = overlapped(memory, ordered, device, world_group, cluster, options)
    transport = _transport(options, process_groups, device, overlap)
    engine = Engine(
        groups=groups,
        names=names,
        bound=_bind_all(programs, process_groups, device, options),
        costs=_costs(ordered, cluster, options),
        switching=Switching(store, schedule, transport),
        gradients=Gradients(store, programs, cluster, options.gradients, transport, options.planner),
        cluster=cluster,
        device=device,
        options=EngineOptions(
            packed=packed,
            split=compiled.packing is None,
            lengths=compiled.lengths,
            merge=options.merge,
            order=order,
            nan=options.nan,
            seed=options.seed,
            deterministic=options.deterministic,
            overlap=overlap,
        ),
        scaler=_scaler(store, options),
        recorder=Recorder(device) if options.record else None,
        watcher=watcher,
        world_group=world_group,
        id_limits=limits,
        keys={key: meta for key, meta in keys.items() if key in read},
    )
    captured = {info.fqn: info.meta.dtype for info in compiled.logical.params()}
    calls = PlainCalls(
        {name: program.strategy for name, program in programs.items()},
        plain,
        engine.switching,
        cluster,
        process_groups,
        options.compile,
        options.seed,
        epoch=lambda: engine.steps,
        captured=captured,
        precision=compiled.precision,
        watched=lambda: engine.watched("backward of a plain call"),
        noted={note.partition(" (")[0] for program in ordered for note in program.notes},
    )

    def capture_again(module: nn.Module) -> LogicalGraph:
        with store.shown_without_values(module, captured), calls.tracing():
            logical = capture_step(module, loss, example)
        if compiled.packing is not None:
            logical = pack_documents(logical, force=bool(options.packed))
        return with_precision(logical, compiled.precision)

    evaluation = Evaluation(engine, calls, loss, capture_again, tuple(keys), compiled.logical.averaged)
    return Session(compiled, store, engine, memory, options, calls, evaluation, hooked_modules(module))


def _alone(compiled: CompiledModel) -> str:
    """What follows from rows that hold one sequence each, or none."""
    if any(info.fqn == "input_ids" for info in compiled.logical.inputs if info.kind == "batch"):
        return f"each sequence runs alone, since {compiled.unpacked}"
    return "its batch has no 'input_ids', so train_step and evaluate take nothing; train it by plain calls, model(x)"


def _check_packed(programs: Mapping[str, TrainGraph]) -> None:
    """Raise ParallelizeError for a program that was lowered from the graph of one sequence, though rows hold several:
    it would let them see each other.
    """
    for name, program in programs.items():
        if DOCUMENTS not in {info.fqn for info in program.inputs}:
            raise ParallelizeError(
                f"rows hold several sequences, but the program of {name!r} knows nothing of documents: it was lowered "
                "from the graph of one sequence. Name the passes that you want: fxpar.compile_strategies(passes=...)"
            )


def with_multiples(
    groups: Sequence[LengthGroup], programs: Sequence[TrainGraph], promised: int, unpacked: str = ""
) -> tuple[LengthGroup, ...]:
    """The groups, told what their lengths must be multiples of: where a program cuts tokens and would see padding.

    Raises ParallelizeError if some length would have no strategy, unless all lengths are `promised` to be multiples.
    The error also says why rows are `unpacked`.
    """
    found = [
        replace(group, multiple=program.divisors.get("T", 1) if program.padding_hazard else 1)
        for group, program in zip(groups, programs, strict=True)
    ]
    for g, (group, program) in enumerate(zip(found, programs, strict=True)):
        if all(promised % later.multiple for later in found[g:]):
            why = with_packing(program.padding_hazard or "", unpacked)
            raise ParallelizeError(
                f"sequences whose length is not a multiple of {group.multiple} cannot run under {group.strategy}: {why}"
                f". Add a strategy that does not cut tokens (without cp and sp) for up to {found[-1].limit} tokens, or "
                f"promise lengths that divide: length_multiple={group.multiple}"
            )
    return tuple(found)


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
    monitor = Monitor.of_world(timeout_s=options.timeout_s or 60.0).start()
    monitor.phase("the script's own code")
    monitor.stop_at_exit()
    return monitor


def _device(module: nn.Module) -> torch.device:
    types = {t.device.type for t in (*module.parameters(), *module.buffers()) if t.device.type != "meta"}
    if len(types) > 1:
        raise ParallelizeError(f"the module is on several devices: {', '.join(sorted(types))}")
    kind = next(iter(types), "cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _costs(programs: Sequence[TrainGraph], cluster: ClusterSpec, options: ParallelizeOptions) -> list[GroupCost]:
    """What a micro-batch costs under each program: the same on all ranks.

    Raises CostContractError for a `cost` that returns something else.
    """
    if options.cost is not None:
        return _given_costs(programs, cluster, options.cost)
    return [group_cost(program, cluster) for program in programs]


def _given_costs(programs: Sequence[TrainGraph], cluster: ClusterSpec, cost: CostModel) -> list[GroupCost]:
    """What the user's cost model says on rank 0: it may measure, and ranks with other costs would make other plans."""
    found: list[Any] = [cost(program, cluster) for program in programs]
    for program, one in zip(programs, found, strict=True):
        if not isinstance(one, GroupCost):
            raise CostContractError(str(program.strategy), one)
    dist.broadcast_object_list(found, src=0)
    return found
