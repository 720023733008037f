"""What a session is, before anything is allocated: groups, programs, device, cluster; checked to belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpar.batching import LengthGroup, length_groups
from fxpar.batching.collate import ALIASES
from fxpar.batching.ids import IdLimit, id_limits
from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import BinsError, LimitBranchError, ParallelizeError, warn
from fxpar.flow import with_packing
from fxpar.ir.graph import DOCUMENTS, TOKEN_NUMBERS, TOKENS, TensorMeta
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.runtime.notices import warn_of_carried, warn_of_limits
from fxpar.runtime.options import (
    CompiledModel,
    LossFunction,
    ParallelizeOptions,
    as_precision,
    cluster_here,
    compile_strategies,
    strategy_names,
)
from fxpar.store import check_order
from fxpar.store.folder import Given
from fxpar.tracer.signature import model_device


@dataclass(frozen=True)
class Decided:
    """What is known before anything is allocated: the same on all ranks."""

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
    def read_keys(self) -> dict[str, TensorMeta]:
        """Those of `keys` that the graph reads."""
        logical = self.compiled.logical
        read = {info.fqn for node, info in zip(logical.placeholders, logical.inputs, strict=True) if node.users}
        return {key: meta for key, meta in self.keys.items() if key in read}


def decide(
    module: nn.Module,
    strategies: Mapping[int, Strategy | str],
    loss: LossFunction,
    example: Mapping[str, Tensor] | None,
    options: ParallelizeOptions,
) -> Decided:
    """Capture and lower, or take what was given, and check what belongs together."""
    world = dist.get_world_size()
    groups = length_groups(strategies, world=world, token_budget=options.token_budget)
    names = strategy_names([group.strategy for group in groups])
    device = model_device(module)
    cluster = cluster_here(options.cluster, world, device)
    given = None if options.weights is None else Given.to(module, options.weights)
    compiled = options.compiled or compile_strategies(
        module, strategies, loss, example, options.token_budget, options.precision, options.packed, options.passes
    )
    _check_compiled(compiled, names, options)
    # In the order of the groups: the order of a dict that was given may be another one on another rank.
    programs = {name: compiled.programs[name] for name in dict.fromkeys(names)}
    compiled = replace(compiled, programs=programs)
    order = None if options.order is None else check_order(options.order, list(programs))
    lowered = [programs[name] for name in names]
    packed = compiled.packing is not None and options.packed is not False
    for group in groups if not packed else ():
        if group.strategy.bins > 1:
            why = "packed=False runs each sequence alone, so all bins but one would be empty"
            raise BinsError(str(group.strategy), compiled.logical.name, why)
    decided = Decided(compiled, groups, names, device, cluster, order, packed, given)
    if not decided.takes_sequences:
        return decided
    _check_limits(compiled, groups)
    groups = with_multiples(groups, lowered, options.length_multiple, compiled.unpacked)
    return replace(decided, groups=groups)


def _check_compiled(compiled: CompiledModel, names: Sequence[str], options: ParallelizeOptions) -> None:
    """Raise ParallelizeError for what was compiled for something else."""
    programs = compiled.programs
    if options.precision is not None and as_precision(options.precision) != compiled.precision:
        raise ParallelizeError(f"compiled is for precision {compiled.precision}, not {options.precision}")
    if set(programs) != set(names):
        raise ParallelizeError(f"compiled is for strategies {', '.join(programs)}, not {', '.join(names)}")
    if options.compiled is not None and options.passes is not None:
        raise ParallelizeError("compiled is lowered already; give passes to fxpar.compile_strategies")
    if compiled.packing is not None:
        _check_packed(programs)


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
