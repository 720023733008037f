"""Everything behind a parallel module: capture, lowering, storage, engine, put together once."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from fxpar.batching import LengthGroup, MicroBatch, length_groups
from fxpar.batching.collate import collate
from fxpar.batching.cost import group_cost
from fxpar.cluster import ClusterSpec
from fxpar.dist_config import DistConfig
from fxpar.errors import OrderError, ParallelizeError, nearest
from fxpar.exec_graph import ExecGraph
from fxpar.graph import LogicalGraph
from fxpar.lowering import lower
from fxpar.monitor import Monitor
from fxpar.passes.share_weights import share_weights
from fxpar.runtime.agree import check_same_programs
from fxpar.runtime.bound import Backend, bind
from fxpar.runtime.calls import PlainCalls
from fxpar.runtime.engine import Engine, EngineOptions
from fxpar.runtime.gradients import Gradients, Mode
from fxpar.runtime.groups import ProcessGroups
from fxpar.runtime.report import StepReport
from fxpar.runtime.switching import Switching, TransportOptions
from fxpar.store import (
    MemoryReport,
    SwitchSchedule,
    WeightStore,
    check_order,
    choose_resident,
    home_layout,
    memory_report,
    param_specs,
    wire_layout,
)
from fxpar.store.materialize import is_on_meta, materialize
from fxpar.strategy import Strategy
from fxpar.switch import layout_of
from fxpar.tracer import capture
from fxpar.transport import Staging, SubGroups

LossFunction = Callable[[nn.Module, Any], Tensor]

# (nodes, GB/s inside, GB/s between, latency in us, TFLOP/s of a device) where the user describes no cluster.
_DEFAULT_CLUSTER = {"cpu": (2.0, 1.0, 200.0, 0.03), "cuda": (200.0, 25.0, 20.0, 300.0)}


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `fxpar.parallelize`, see there."""

    token_budget: int | Mapping[int, int] | None = None
    packed: bool | None = None
    order: Sequence[str] | None = None
    merge: bool = True
    home: Mapping[str, str | DistConfig] | None = None
    resident: Sequence[str] | None = None
    memory_budget_bytes: int | None = None
    gradients: Mode = "home"
    cluster: ClusterSpec | None = None
    device_tflops: float | None = None
    planner: str = "auto"
    execution: str = "auto"
    staging_bytes: int = 64 << 20
    checked: bool = False
    nan: Literal["error", "skip"] = "error"
    compile: Backend = "eager"
    timeout_s: float | None = None
    monitor: bool = True
    plain: str | None = None
    compiled: Compiled | None = None
    seed: int = 0


@dataclass(frozen=True)
class Compiled:
    """A model captured once and lowered for each strategy (by its text); plain data, the same on every rank."""

    logical: LogicalGraph
    programs: Mapping[str, ExecGraph]
    timings: Mapping[str, float] = field(default_factory=dict)


def compile_strategies(
    module: nn.Module,
    strategies: Mapping[int, Strategy | str],
    loss: LossFunction,
    example: Mapping[str, Tensor] | None = None,
) -> Compiled:
    """Capture `module` and lower it for all strategies; no process group. Raises what `capture` and `lower` raise."""
    begun = time.process_time()
    logical = capture(module, loss, example_batch() if example is None else example, name=type(module).__name__)
    captured = time.process_time()
    parsed = [Strategy.parse(s) if isinstance(s, str) else s for _, s in sorted(strategies.items())]
    by_name = dict(zip(_names(parsed), parsed, strict=True))
    programs = {name: lower(logical, strategy, for_store=True) for name, strategy in by_name.items()}
    timings = {"capture_cpu_s": captured - begun, "lower_cpu_s": time.process_time() - captured}
    return Compiled(logical, programs, timings)


@dataclass
class Session:
    """The state of a parallel module on this rank."""

    logical: LogicalGraph
    programs: Mapping[str, ExecGraph]
    store: WeightStore
    engine: Engine
    memory: MemoryReport
    options: Options
    calls: PlainCalls
    timings: dict[str, float] = field(default_factory=dict)

    def train_step(self, module: nn.Module, sequences: Sequence[Any]) -> StepReport:
        """One mini-batch; buffers that the forward changes are written back to the module."""
        buffers = dict(module.named_buffers(remove_duplicate=False))
        before = dict(buffers)
        report = self.engine.step(sequences, buffers)
        if not report.skipped:
            with torch.no_grad():
                for fqn, value in buffers.items():
                    if value is not before[fqn]:
                        before[fqn].copy_(value)
        return report

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """`module(...)` under the plain strategy."""
        return self.engine.watched(lambda: self.calls.call(module, args, kwargs, self.engine.steps))

    def state(self) -> dict[str, Any]:
        return {"steps": self.engine.steps, "seed": self.options.seed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.engine.steps = int(state["steps"])


def open_session(
    module: nn.Module,
    strategies: Mapping[int, Strategy | str],
    loss: LossFunction,
    example: Mapping[str, Tensor] | None,
    options: Options,
) -> Session:
    """Capture, lower, lay out, allocate, and take the module's parameters home. All ranks call it alike."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ParallelizeError(
            "torch.distributed is not initialised. Start the script with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = length_groups(strategies, world=world, token_budget=options.token_budget)
    names = _names([group.strategy for group in groups])
    device = _device(module)
    cluster = options.cluster or default_cluster(world, device)
    compiled = options.compiled or compile_strategies(module, strategies, loss, example)
    logical, programs = compiled.logical, compiled.programs
    if set(programs) != set(names):
        raise ParallelizeError(f"compiled is for strategies {', '.join(programs)}, not {', '.join(names)}")
    order = None if options.order is None else check_order(options.order, list(programs))
    store, schedule, memory = _storage(module, programs, rank, world, device, cluster, options)
    process_groups = ProcessGroups(options.timeout_s)
    world_group = process_groups.world()
    transport = TransportOptions(
        options.execution,
        options.staging_bytes,
        options.checked,
        world_group,
        options.timeout_s,
        Staging(device),
        SubGroups(world_group),
    )
    bound = {}
    for name, program in programs.items():
        tokens = process_groups.names(program.strategy.mesh, program.axes())
        bound[name] = bind(program, rank, tokens, compile=options.compile)
    engine = Engine(
        groups=groups,
        names=names,
        bound={
            name: bind(
                program, rank, process_groups.names(program.strategy.mesh, program.axes()), compile=options.compile
            )
            for name, program in programs.items()
        },
        costs=[group_cost(programs[name], cluster, _tflops(options, device)) for name in names],
        switching=Switching(store, schedule, transport),
        gradients=Gradients(store, programs, cluster, options.gradients, transport),
        cluster=cluster,
        device=device,
        options=EngineOptions(
            packed=_can_pack(logical) if options.packed is None else options.packed,
            merge=options.merge,
            order=order,
            nan=options.nan,
            seed=options.seed,
        ),
        watcher=_watcher(options, world),
        world_group=world_group,
    )
    check_same_programs(programs, world_group)
    plain = _plain_strategy(options, groups, names)
    calls = PlainCalls(
        {name: program.strategy for name, program in programs.items()},
        plain,
        engine.switching,
        cluster,
        process_groups,
        options.compile,
        options.seed,
    )
    return Session(logical, programs, store, engine, memory, options, calls, dict(compiled.timings))


def _plain_strategy(options: Options, groups: Sequence[LengthGroup], names: Sequence[str]) -> str:
    """What `model(x)` runs under unless told otherwise: the strategy that takes the longest sequences."""
    if options.plain is None:
        return names[max(range(len(groups)), key=lambda g: groups[g].limit)]
    if options.plain not in names:
        raise ParallelizeError(f"plain={options.plain!r} is none of {', '.join(names)}{nearest(options.plain, names)}")
    return options.plain


def _watcher(options: Options, world: int) -> Monitor | None:
    """Beats until this process ends; an error that ends it is told to the other ranks."""
    if world == 1 or not options.monitor:
        return None
    monitor = Monitor.of_world(timeout_s=options.timeout_s or 60.0).start()
    atexit.register(lambda: monitor.stop(getattr(sys, "last_value", None)))
    return monitor


def _storage(
    module: nn.Module,
    programs: Mapping[str, ExecGraph],
    rank: int,
    world: int,
    device: torch.device,
    cluster: ClusterSpec,
    options: Options,
) -> tuple[WeightStore, SwitchSchedule, MemoryReport]:
    """Decide what stays in memory, allocate it, and take the parameters home."""
    specs = param_specs(next(iter(programs.values())))
    home = home_layout(specs, world, options.home)
    wire = wire_layout(home, specs)
    layouts = {name: layout_of(program, name) for name, program in programs.items()}

    # Messages of a switch, both ways, are no larger than what they fill.
    staging = min(options.staging_bytes, 2 * max(layout.max_bytes() for layout in layouts.values()))

    def report(kept: tuple[str, ...]) -> MemoryReport:
        mine = memory_report(programs, home, [rank], kept, staging)
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, mine)
        return max(everyone, key=lambda found: found.total_bytes)

    def schedule_of(kept: tuple[str, ...]) -> SwitchSchedule:
        return SwitchSchedule(layouts, wire, kept, cluster, options.planner)

    def seconds(kept: tuple[str, ...]) -> float:
        schedule = schedule_of(kept)
        return schedule.cost(schedule.order(list(programs)))[0]

    if options.resident is not None:
        for name in options.resident:
            if name not in programs:
                raise OrderError(f"resident: {name!r} is none of the strategies{nearest(name, programs)}")
        kept = tuple(name for name in programs if name in options.resident)
    else:
        kept = choose_resident(programs, report, seconds, options.memory_budget_bytes)
    memory = report(kept)
    store = WeightStore(programs, home, share_weights(programs, rank, kept), rank=rank, device=device)
    first = next(iter(programs.values()))
    names = {i.fqn: (i.fqn, *i.aliases) for i in first.inputs if i.kind == "param"}
    on_meta = is_on_meta(module)
    store.adopt(module, names)
    if on_meta:
        materialize(module, store, names)
    return store, schedule_of(kept), memory


def _names(strategies: Sequence[Strategy]) -> list[str]:
    """A name per strategy: its text; strategies that differ in overrides only are numbered."""
    names: list[str] = []
    known: dict[str, Strategy] = {}
    for strategy in strategies:
        name, number = str(strategy), 2
        while known.setdefault(name, strategy) != strategy:
            name, number = f"{strategy}#{number}", number + 1
        names.append(name)
    return names


def _device(module: nn.Module) -> torch.device:
    types = {t.device.type for t in (*module.parameters(), *module.buffers()) if t.device.type != "meta"}
    if len(types) > 1:
        raise ParallelizeError(f"the module lies on several devices: {', '.join(sorted(types))}")
    kind = next(iter(types), "cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def default_cluster(world: int, device: torch.device) -> ClusterSpec:
    """All ranks on nodes of equal size (a node is what the launcher calls one), with usual figures of the device."""
    inside, between, latency, _ = _DEFAULT_CLUSTER.get(device.type, _DEFAULT_CLUSTER["cuda"])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))  # set by torchrun
    local = local if 0 < local <= world else world
    return ClusterSpec(-(-world // local), local, inside, between, latency)


def _tflops(options: Options, device: torch.device) -> float:
    if options.device_tflops is not None:
        return options.device_tflops
    return _DEFAULT_CLUSTER.get(device.type, _DEFAULT_CLUSTER["cuda"])[3]


def example_batch() -> dict[str, Tensor]:
    """Two packed sequences; only shapes and dtypes are read."""
    return collate(
        [torch.zeros(37, dtype=torch.int64), torch.zeros(24, dtype=torch.int64)], MicroBatch((0, 1), 61), _KEYS
    )


_KEYS = ("input_ids", "labels", "position_ids")


def _can_pack(logical: LogicalGraph) -> bool:
    """Whether all attention of the model keeps documents apart; a model without attention may mix tokens otherwise."""
    calls = [n for n in logical.gm.graph.nodes if str(n.target).startswith("fxpar.attention.")]
    return bool(calls) and all(isinstance(n.args[3], fx.Node) for n in calls)
