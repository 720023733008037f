"""What of the weights stays in a rank's memory beside the activations, and whether gradients of two groups fit."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fxpar.batching import LengthGroup
from fxpar.batching.borders import overlap_pays
from fxpar.batching.lengths import LengthLimits
from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import FxparError, LayOutError, OrderError, StagingBytesError, nearest
from fxpar.ir.graph import Input
from fxpar.ir.pipeline_graph import TeamsGraph, TrainGraph, position_of
from fxpar.memory import Conditions, memory_over_time, steady_micro_batches
from fxpar.passes.share_weights import StoragePass, laid_out
from fxpar.runtime.options import ParallelizeOptions
from fxpar.schedule.mini_batch import staged_bytes
from fxpar.store import (
    MemoryReport,
    choose_resident,
    home_layout,
    memory_report,
    specs_of,
    wire_layout,
)
from fxpar.store.folder import Given, Read
from fxpar.store.home import ParamSpec
from fxpar.store.materialize import is_on_meta, materialize
from fxpar.store.weights import WeightStore
from fxpar.switch import ParamLayout, layout_of
from fxpar.switch.node_first import room_for_sums
from fxpar.switch.order import SwitchSchedule
from fxpar.transport.staging import aligned

T = TypeVar("T")


def open_storage(
    module: nn.Module,
    programs: Mapping[str, TrainGraph],
    rank: int,
    world: int,
    device: torch.device,
    cluster: ClusterSpec,
    options: ParallelizeOptions,
    activations: Callable[[], int],
    overlap: bool,
    sharing: StoragePass,
    params: Sequence[Input],
    given: Given | None = None,
    store: WeightStore | None = None,
    again: Collection[str] = (),
) -> tuple[WeightStore, SwitchSchedule, MemoryReport, bool]:
    """Decide what stays in memory, allocate it, and take the parameters home; the last result is whether groups
    overlap (where they may: if there is room). `activations()` are their bytes on this rank; they are only asked for if
    there is a budget, as predicting them takes about a tenth of the time of lowering. `params` are those of the model.
    Values that are `given` are read by this rank's slices. Several groups run what is in `again`. A `store` that
    has the parameters already is laid out anew. What another `sharing` than fxpar's lays out is checked first.
    Raises StagingBytesError.
    """
    specs = specs_of(programs.values(), params)
    if world > 1:
        check_staging(specs, options.staging_bytes)
    home = home_layout(specs, world, options.home)
    wire = wire_layout(home, specs)
    layouts = {name: layout_of(program, name) for name, program in programs.items()}

    staging = staging_for(layouts, options)
    if options.gradients == "home":
        staging += room_for_sums(home, cluster, options.staging_bytes)

    at_work = 0 if options.memory_budget_bytes is None else activations()

    def report(kept: tuple[str, ...], together: bool) -> MemoryReport:
        joined = options.memory_budget_bytes is None and set(kept) == set(programs)
        said = {"overlap": together, "joined": joined, "chained": options.gradients == "chain", "again": again}
        work = partial(memory_report, programs, home, [rank], kept, staging, at_work, sharing=sharing, **said)
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, _or_all_raise(sharing, rank, work))
        return max(everyone, key=lambda found: found.total_bytes)

    schedule = SwitchSchedule(layouts, wire, cluster, options.planner)

    def seconds(kept: tuple[str, ...]) -> float:
        return schedule.keeping(kept).least_s(list(programs))

    if options.resident is not None:
        kept = _named(options.resident, programs)
        overlap = overlap and _fits(report(kept, True), options)
    else:
        kept, overlap = choose_resident(programs, report, seconds, options.memory_budget_bytes, overlap)
    memory = report(kept, overlap)
    storage = _or_all_raise(sharing, rank, partial(laid_out, sharing, programs, rank, kept))
    if store is not None:
        store.lay_out(programs, storage)
        return store, schedule.keeping(kept), memory, overlap
    store = WeightStore(programs, home, storage, rank=rank, device=device)
    _take_home(module, store, params, options, given)
    return store, schedule.keeping(kept), memory, overlap


def check_staging(specs: Sequence[ParamSpec], staging_bytes: float) -> None:
    """See that two buckets hold a row of each parameter that is sent, and one that is received: messages are cut along
    the longest dim alone (`fxpar.transport.phases`). Raises StagingBytesError.
    """
    rows = {one.fqn: math.prod(one.shape) // max((*one.shape, 1)) * one.master.itemsize for one in specs}
    largest = max(rows, key=lambda fqn: rows[fqn], default="")
    least = 4 * aligned(rows.get(largest, 0))
    if staging_bytes < least:
        raise StagingBytesError(staging_bytes, largest, rows[largest], least)


def staging_for(layouts: Mapping[str, ParamLayout], options: ParallelizeOptions) -> int:
    """Bytes that messages of switches to these layouts, and of reductions, are packed into and received in."""
    return staged_bytes(max(layout.max_bytes() for layout in layouts.values()), options.staging_bytes)


def _or_all_raise(sharing: StoragePass, rank: int, work: Callable[[], T]) -> T:
    """What `work`, which asks a pass, gives. Where that raises on any rank, all raise the error of the first of those:
    the others would wait for it.
    """
    mine: list[T] = []
    error: FxparError | None = None
    cause: Exception | None = None
    try:
        mine.append(work())
    except Exception as raised:
        if isinstance(raised, FxparError) and _can_be_sent(raised):
            error = raised
        else:
            error, cause = LayOutError(sharing.name, rank, raised), raised
    everyone: list[FxparError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, error)
    for sender, found in enumerate(everyone):
        if found is not None:
            raise found from (cause if sender == rank else None)
    return mine[0]


def _can_be_sent(error: Exception) -> bool:
    """Not so a class made inside of a function, or one that holds what does not pickle."""
    try:
        pickle.dumps(error)
    except Exception:
        return False
    return True


def _named(resident: Collection[str], programs: Mapping[str, TrainGraph]) -> tuple[str, ...]:
    """Those that the user wants to stay. Raises OrderError for one that is no strategy."""
    for name in resident:
        if name not in programs:
            raise OrderError(f"resident: {name!r} is none of the strategies{nearest(name, programs)}")
    return tuple(name for name in programs if name in resident)


def _take_home(
    module: nn.Module, store: WeightStore, params: Sequence[Input], options: ParallelizeOptions, given: Given | None
) -> None:
    """Make the module's parameters those of the store, with their values or those that are made or given."""
    names = {info.fqn: (info.fqn, *info.aliases) for info in params}
    on_meta = is_on_meta(module)
    valued = {fqn for fqn in names if module.get_parameter(fqn).device.type != "meta"}
    store.adopt(module, names)
    if on_meta:
        taken = () if given is None else given.names
        materialize(module, store, names, options.initializer, options.meta_init == "whole", taken, valued)
    if given is not None:
        _read_home(given, module, store)


def _read_home(given: Given, module: nn.Module, store: WeightStore) -> None:
    """Masters by slice, all else (buffers, parameters that no graph has) whole."""
    others = module.state_dict(keep_vars=True)

    def put(name: str, read: Read) -> None:
        if name in store.home.params:
            store.fill_slice(name, read(store.home_box(name)))
        else:
            others[name].copy_(read([(0, size) for size in others[name].shape]))

    with torch.no_grad():
        given.fill(put)


def may_overlap(strategies: int, device: torch.device, group: Any, cluster: ClusterSpec) -> bool:
    """Whether groups of so many strategies may overlap: not where nobody has tried two threads on the network."""
    return overlap_pays(strategies, cluster) and device.type == "cpu" and dist.get_backend(group) == "gloo"


def _fits(memory: MemoryReport, options: ParallelizeOptions) -> bool:
    return options.memory_budget_bytes is None or memory.total_bytes <= options.memory_budget_bytes


def activation_bytes(
    programs: Sequence[TrainGraph],
    groups: Sequence[LengthGroup],
    packed: bool,
    lengths: LengthLimits,
    rank: int | None = None,
) -> int:
    """What the hungriest group holds above its accumulators, on `rank` (None: on the fullest one): its largest
    micro-batch, or as many as a pipeline has under way.
    """
    threads, found = torch.get_num_threads(), [0]
    for program, whole in zip(programs, groups, strict=True):
        teams = program.teams if isinstance(program, TeamsGraph) else (program,)
        for number, (team, group) in enumerate(zip(teams, whole.teams, strict=True)):
            if rank is not None and isinstance(program, TeamsGraph) and number != program.team_of(rank):
                continue
            tokens = group.token_budget if packed else min(group.limit, lengths.most or group.limit)
            one = memory_over_time(
                team,
                {dim.name: tokens for dim in team.dims if dim.name == "T"},
                micro_batches=steady_micro_batches(team.strategy),
                conditions=Conditions(threads, min(group.limit, tokens)),
                positions=None if rank is None else [position_of(team, rank)],
            ).prediction
            found.append(one.step_bytes - one.gradient_bytes)
    return max(found)
