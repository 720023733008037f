"""What a session is, before anything is allocated: groups, programs, device, cluster; checked to belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn

from fxpar.batching import LengthGroup, length_groups
from fxpar.batching.collate import ALIASES
from fxpar.batching.groups import SIZES
from fxpar.batching.ids import IdLimit, id_limits
from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import BinsError, LimitBranchError, ParallelizeError, TaskError, naming_task, warn
from fxpar.flow import with_packing
from fxpar.ir.graph import DOCUMENTS, TOKEN_NUMBERS, TOKENS, TensorMeta
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.runtime.compiling import as_precision, compile_strategies, compile_task, on_ranks, strategy_names
from fxpar.runtime.notices import warn_of_carried, warn_of_limits
from fxpar.runtime.options import ParallelizeOptions, cluster_here
from fxpar.runtime.reading import Reading, is_row_of_tokens, reading_of
from fxpar.runtime.task import CompiledModel, Task, check_ranks
from fxpar.store.folder import Given
from fxpar.switch.order import check_order
from fxpar.tracer.signature import model_device


@dataclass(frozen=True)
class Decided:
    """What is known of a task before anything is allocated: the same on all ranks. Names of its strategies begin with
    its own, which is empty if there is one loss only.
    """

    name: str
    task: Task
    compiled: CompiledModel
    groups: tuple[LengthGroup, ...]
    names: list[str]  # of the strategies, by group
    device: torch.device
    cluster: ClusterSpec
    order: tuple[str, ...] | None
    packed: bool
    given: Given | None

    @property
    def programs(self) -> list[TrainGraph]:
        """By group."""
        return [self.compiled.programs[name] for name in self.names]

    @cached_property
    def id_limits(self) -> Mapping[str, IdLimit]:
        return id_limits(self.compiled.logical)

    @property
    def keys(self) -> dict[str, TensorMeta]:
        """What a batch has for the captured graph."""
        infos = self.compiled.logical.inputs
        return {info.fqn: info.meta for info in infos if info.kind == "batch" and info.fqn != TOKEN_NUMBERS}

    @property
    def takes_sequences(self) -> bool:
        """Whether `train_step` can train it; else the keys of `strategies` are no lengths, they tell them apart."""
        return any(ALIASES.get(key, key) == "input_ids" for key in self.keys)

    @property
    def is_whole(self) -> bool:
        """Whether a mini-batch is a list of batches like the example."""
        return bool(self.name) and not is_row_of_tokens(self.compiled.logical)

    @property
    def reading(self) -> Reading:
        """How a mini-batch is read."""
        return reading_of(self.compiled.logical, of_task=bool(self.name))


def tasks_of(strategies: Mapping[int, Strategy | str] | None, options: ParallelizeOptions) -> dict[str, Task]:
    """The tasks with their strategies, or the one loss, which has no name. Raises TaskError for a task without."""
    if options.tasks is None:
        assert strategies is not None
        budget, compiled = options.token_budget, options.compiled
        return {"": Task(options.loss, options.example, 1.0, strategies, budget, compiled=compiled)}
    found = {}
    for name, task in options.tasks.items():
        own = strategies if task.strategies is None else task.strategies
        if own is None:
            raise TaskError(name, "has no strategies: give Task(strategies={512: 'dp2'}), or strategies= for all tasks")
        budget = options.token_budget if task.token_budget is None else task.token_budget
        found[name] = replace(task, strategies=own, token_budget=budget)
    return found


def decide(
    module: nn.Module, name: str, task: Task, options: ParallelizeOptions, device: torch.device | None = None
) -> Decided:
    """Capture and lower, or take what was given, and check what belongs together. `device`: where the weights are, by
    default where the module has them.
    """
    strategies, world = task.strategies, dist.get_world_size()
    assert strategies is not None
    if task.ranks is not None:
        check_ranks(name, task.ranks, world)
        strategies, world = on_ranks(strategies, task.ranks), len(task.ranks)
    with naming_task(name):
        unit = SIZES if name else "tokens"
        groups = length_groups(strategies, world=world, token_budget=task.token_budget, unit=unit)
    names = strategy_names([group.strategy for group in groups])
    device = device or model_device(module)
    cluster = cluster_here(options.cluster, dist.get_world_size(), device)
    given = None if options.weights is None else Given.to(module, options.weights)
    compiled = task.compiled or _compile(module, name, task, options, cluster)
    _check_compiled(compiled, names, task, options)
    _check_placed(name, task, compiled)
    before = f"{name}: " if name else ""
    # In the order of the groups: the order of a dict that was given may be another one on another rank.
    programs = {before + each: compiled.programs[each] for each in dict.fromkeys(names)}
    compiled = replace(compiled, programs=programs)
    order = None if options.order is None else check_order(options.order, list(programs))
    names = [before + each for each in names]
    lowered = [programs[each] for each in names]
    packed = compiled.packing is not None and options.packed is not False
    for group in groups if not packed else ():
        if group.strategy.bins > 1:
            why = "packed=False runs each sequence alone, so all bins but one would be empty"
            raise BinsError(str(group.strategy), compiled.logical.name, why)
    decided = Decided(name, task, compiled, groups, names, device, cluster, order, packed, given)
    if decided.is_whole:
        dim = decided.reading.length_dim
        return replace(decided, groups=tuple(_with_multiples(groups, lowered, dim)))
    if not decided.takes_sequences:
        return decided
    _check_limits(compiled, groups)
    groups = with_multiples(groups, lowered, options.length_multiple, compiled.unpacked)
    return replace(decided, groups=groups)


def _compile(
    module: nn.Module, name: str, task: Task, options: ParallelizeOptions, cluster: ClusterSpec
) -> CompiledModel:
    if name:
        with naming_task(name):
            return compile_task(module, task, None, options.precision, options.packed, options.passes, cluster)
    assert task.strategies is not None
    budget, how = task.token_budget, (options.precision, options.packed, options.passes, cluster)
    return compile_strategies(module, task.strategies, task.loss, task.example, budget, *how)


def _check_compiled(compiled: CompiledModel, names: Sequence[str], task: Task, options: ParallelizeOptions) -> None:
    """Raise ParallelizeError for what was compiled for something else."""
    programs = compiled.programs
    if options.precision is not None and as_precision(options.precision) != compiled.precision:
        raise ParallelizeError(f"compiled is for precision {compiled.precision}, not {options.precision}")
    if set(programs) != set(names):
        raise ParallelizeError(f"compiled is for strategies {', '.join(programs)}, not {', '.join(names)}")
    if task.compiled is not None and options.passes is not None:
        raise ParallelizeError("compiled is lowered already; give passes to fxpar.compile_strategies")
    if compiled.packing is not None:
        _check_packed(programs)


def _check_placed(name: str, task: Task, compiled: CompiledModel) -> None:
    """Raise TaskError for a task on some ranks whose step writes buffers, which the others would not have; and for
    programs that were compiled for other ranks.
    """
    if task.ranks is None:
        return
    written = [out.fqn for out in compiled.logical.outputs if out.kind == "buffer"]
    if written:
        raise TaskError(name, f"writes {', '.join(written)} on some ranks only, so that the others would not have it")
    for program in compiled.programs.values():
        if program.mesh.ranks != tuple(task.ranks):
            raise TaskError(name, f"was compiled for ranks {program.mesh.ranks}, and is to run on {list(task.ranks)}")


def _check_limits(compiled: CompiledModel, groups: Sequence[LengthGroup]) -> None:
    """Raise LimitBranchError for a limit on the other side of a branch of the model, or below all that it takes."""
    lengths = compiled.lengths
    most = lengths.most if lengths.most_at else None
    for group in groups:
        if group.limit < lengths.least or (most is not None and group.limit > most):
            example = next(dim.example for dim in compiled.logical.dims if dim.name == TOKENS)
            raise LimitBranchError(group.limit, str(group.strategy), example, str(lengths))


def tell(decided: Decided, options: ParallelizeOptions) -> None:
    """Warn of what a user may not expect."""
    compiled = decided.compiled
    if decided.is_whole:
        warn_of_carried(compiled.logical)
        return
    if not decided.packed and options.packed is None:
        warn(f"{compiled.logical.name}: {_alone(decided)}")
    if decided.takes_sequences:
        warn_of_limits(decided.groups, compiled.lengths.narrowed(decided.id_limits.get("position_ids")))
    elif staged := [name for name, program in compiled.programs.items() if program.strategy.pipeline_size > 1]:
        warn(
            f"{compiled.logical.name}: plain calls do not run under {', '.join(staged)}, and train_step does not take "
            "its batch. Give it strategies without pp"
        )
    warn_of_carried(compiled.logical)


def _alone(decided: Decided) -> str:
    """What follows from rows that hold one sequence each, or none."""
    if decided.takes_sequences:
        return f"each sequence runs alone, since {decided.compiled.unpacked}"
    return (
        f"its batch is {', '.join(decided.keys)}, without 'input_ids', the tokens of sequences that train_step and "
        "evaluate take; train it by plain calls, model(x)"
    )


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
    found = _with_multiples(groups, programs, TOKENS)
    for g, (group, program) in enumerate(zip(found, programs, strict=True)):
        if all(promised % later.multiple for later in found[g:]):
            why = with_packing(program.padding_hazard or "", unpacked)
            raise ParallelizeError(
                f"sequences whose length is not a multiple of {group.multiple} cannot run under {group.strategy}: {why}"
                f". Add a strategy that does not cut tokens (without cp and sp) for up to {found[-1].limit} tokens, or "
                f"promise lengths that divide: fxpar.parallelize(..., length_multiple={group.multiple}), or in the "
                f"configuration of a run engine.length_multiple = {group.multiple}, which cuts sequences to that"
            )
    return tuple(found)


def _with_multiples(groups: Sequence[LengthGroup], programs: Sequence[TrainGraph], dim: str) -> list[LengthGroup]:
    return [
        replace(group, multiple=program.divisors.get(dim, 1) if program.padding_hazard else 1)
        for group, program in zip(groups, programs, strict=True)
    ]
