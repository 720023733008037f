"""What `fxpar.parallelize` is told, and what it compiles before anything is allocated."""

from __future__ import annotations

import inspect
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from fxpar.batching import GroupCost, MicroBatch, length_groups
from fxpar.batching.collate import collate
from fxpar.batching.groups import check_strategies
from fxpar.cost.cluster import ClusterSpec, usual_cluster
from fxpar.errors import (
    DataDependentError,
    ExampleNeededError,
    LossError,
    MeanLossError,
    MetricError,
    MissingInputError,
    ParallelizeError,
    PassContractError,
    PlannerError,
    PositionTableError,
    StrategySyntaxError,
    TaskError,
    nearest,
    warn,
)
from fxpar.ir.collector import collector_paused
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.pass_base import GraphPass
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.ir.teams import formations
from fxpar.losses import LossFunction, causal_lm
from fxpar.lowering import default_passes, lower
from fxpar.lowering.ladder import checked_ladder
from fxpar.monitor import Monitor
from fxpar.passes.casts import Casts
from fxpar.passes.narrow_gradients import NarrowGradients
from fxpar.passes.pack_documents import packed_if_proved
from fxpar.passes.reduce_gradients import ReduceGradients
from fxpar.passes.zero_shard import ZeroShard
from fxpar.precision import Precision, with_precision
from fxpar.runtime.gradients import Mode
from fxpar.runtime.reading import is_row_of_tokens
from fxpar.runtime.runner import Backend
from fxpar.runtime.task import CompiledModel, Task, check_tasks
from fxpar.search.plan_file import Plan
from fxpar.store.folder import Weights
from fxpar.switch.by_turns import TURNS
from fxpar.switch.planners import planner_names
from fxpar.tracer import capture
from fxpar.tracer.dynamic import Dynamic
from fxpar.tracer.finish import without_unread
from fxpar.transport.executions import EXECUTIONS

Ladder = Callable[[list[GraphPass]], list[GraphPass]]
"""From the passes of the lowering to those that run instead: `lambda ladder: [*ladder, Mine()]`."""
CostModel = Callable[[Program, ClusterSpec], GroupCost]
"""What a micro-batch of a program takes on a cluster."""


def cluster_here(described: ClusterSpec | None, world: int, device: torch.device) -> ClusterSpec:
    """What was described, else all ranks on nodes of equal size (a node is what the launcher calls one). What is not
    said of devices and links is usual for `device`.
    """
    if described is not None:
        return described.on(device.type)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))  # set by torchrun
    return usual_cluster(world, local if 0 < local <= world else world, device.type)


def _only(kinds: Any, meant: str) -> dict[str, Any]:
    """Of a field whose kind of value is looked at: what it may be, and in words. Numbers are above 0."""
    return {"kinds": kinds, "meant": meant}


@dataclass(frozen=True, kw_only=True)
class ParallelizeOptions:
    """The keyword arguments of `fxpar.parallelize`, which says what they mean: each with its type, its default, and the
    values that it takes (those of a `Literal`, of `words`, or of the kinds that are looked at).

    Raises ParallelizeError for another value, PlannerError for a planner that nobody has.
    """

    strategies: Mapping[int, Strategy | str] | Literal["auto"] | None = None
    plan: Plan | str | os.PathLike[str] | None = field(
        default=None, metadata=_only(Plan | str | os.PathLike | None, "file of `fxpar plan`, or a Plan")
    )
    lengths: Sequence[int] | str | None = None
    tokens_per_step: int | None = field(default=None, metadata=_only(int | None, "number of tokens above 0"))
    loss: LossFunction = field(
        default=causal_lm,
        metadata=_only(Callable, "function of a model and a batch, such as fxpar.losses.causal_lm"),
    )
    example: Mapping[str, Tensor] | None = None
    token_budget: int | Mapping[int, int] | None = None
    packed: bool | None = None
    length_multiple: int = field(default=1, metadata=_only(int, "whole number of 1 or more"))
    order: Sequence[str] | None = field(
        default=None, metadata=_only(list | tuple | None, 'list of strategies, such as ["cp2", "dp2"]')
    )
    merge: bool = True
    home: Mapping[str, str | DistConfig] | None = field(
        default=None, metadata=_only(Mapping | None, 'dict from globs to placements, such as {"*.norm.*": "R"}')
    )
    resident: Sequence[str] | None = field(
        default=None, metadata=_only(list | tuple | None, 'list of strategies, such as ["dp2"]')
    )
    memory_budget_bytes: int | None = field(
        default=None, metadata=_only(int | float | None, "number of bytes above 0, such as 8e9")
    )
    gradients: Mode = "home"
    overlap: bool = True
    cluster: ClusterSpec | None = field(
        default=None, metadata=_only(ClusterSpec | None, "ClusterSpec; a file is read with fxpar.ClusterSpec.from_file")
    )
    cost: CostModel | None = field(default=None, metadata=_only(Callable | None, "function of a program and a cluster"))
    planner: str = field(default="auto", metadata=_only(str, 'name of a planner, such as "auto"'))
    execution: str = field(default="auto", metadata={"words": EXECUTIONS})
    staging_bytes: int = field(
        default=64 << 20, metadata=_only(int | float, "number of bytes above 0, such as 64 << 20")
    )
    checked: bool = False
    nan: Literal["error", "skip"] = "error"
    compile: Backend = "eager"
    precision: Precision | str | None = field(
        default=None, metadata=_only(str | Precision | None, 'precision; write its text, such as "bf16"')
    )
    loss_scale: float | None = field(default=None, metadata=_only(int | float | None, "number above 0, such as 2**16"))
    deterministic: bool = False
    record: bool = False
    timeout_s: float | None = field(default=None, metadata=_only(int | float | None, "number of seconds above 0"))
    monitor: bool | Monitor = True
    plain: str | None = field(default=None, metadata=_only(str | None, 'strategy, such as "dp2"'))
    passes: Ladder | None = None
    compiled: CompiledModel | None = field(
        default=None, metadata=_only(CompiledModel | None, "result of fxpar.compile_strategies")
    )
    initializer: Callable[[nn.Module], object] | None = field(
        default=None, metadata=_only(Callable | None, "function of a module")
    )
    meta_init: Literal["slice", "whole"] = "slice"
    weights: Weights | str | os.PathLike[str] | None = field(
        default=None, metadata=_only(Weights | str | os.PathLike | None, "folder of weights, such as './llama-8b'")
    )
    tasks: Mapping[str, Task] | None = field(
        default=None, metadata=_only(Mapping | None, 'dict of tasks, such as {"caption": fxpar.Task(loss, example)}')
    )
    absent_tasks: Literal["count", "rescale"] = "count"
    seed: int = field(default=0, metadata={"kinds": int, "meant": "whole number", "signed": True})

    def __post_init__(self) -> None:
        hints = get_type_hints(ParallelizeOptions)
        for one in fields(self):
            value, hint = getattr(self, one.name), hints[one.name]
            if isinstance(value, Integral) and not isinstance(value, int):  # a numpy integer
                value = int(value)
                object.__setattr__(self, one.name, value)
            words = get_args(hint) if get_origin(hint) is Literal else one.metadata.get("words")
            if words and value not in words:
                wanted = f"none of {', '.join(words)}{nearest(str(value), words)}"
                raise ParallelizeError(f"{one.name}={value!r} is {wanted}")
            if bool in (hint, *get_args(hint)) and not isinstance(value, hint):  # else "no" would be yes
                raise ParallelizeError(f"{one.name}={value!r} must be True or False")
            if "kinds" in one.metadata:
                fits = isinstance(value, one.metadata["kinds"]) and not isinstance(value, bool)
                if not fits or (
                    isinstance(value, int | float) and not ("signed" in one.metadata or 0 < value < math.inf)
                ):
                    raise ParallelizeError(f"{one.name}={value!r} is not a {one.metadata['meant']}")
        for key in ("order", "resident"):
            if (named := getattr(self, key)) is not None:
                object.__setattr__(self, key, type(named)(map(as_printed, named)))
        if self.plain is not None:
            object.__setattr__(self, "plain", as_printed(self.plain))
        for glob, placement in (self.home or {}).items():
            if not isinstance(glob, str) or not isinstance(placement, str | DistConfig):
                raise ParallelizeError(
                    f'home={{{glob!r}: {placement!r}}} is not a glob and placement, such as {{"*.norm.*": "R"}}'
                )
        if self.tasks is not None:
            check_tasks(self.tasks)
        planners = (*planner_names(), TURNS)
        if self.planner not in planners:
            raise PlannerError(self.planner, planners)


def compile_strategies(
    module: nn.Module,
    strategies: Mapping[int, Strategy | str],
    loss: LossFunction,
    example: Mapping[str, Tensor] | None = None,
    token_budget: int | Mapping[int, int] | None = None,
    precision: Precision | str | None = None,
    packed: bool | None = None,
    passes: Ladder | None = None,
    cluster: ClusterSpec | None = None,
) -> CompiledModel:
    """Capture `module` and lower it for all strategies; no process group. Raises what `capture`, `with_precision` and
    `lower` raise.

    A strategy's budget for saved activations (`+remat(200MB)`) is meant at `token_budget`; `packed`, `passes` and
    `cluster` as in `parallelize`.
    """
    check_strategies(strategies)
    with collector_paused():
        begun = time.process_time()
        logical = capture_step(module, loss, example)
        rows, unpacked = packed_if_proved(logical, force=bool(packed))
        captured = time.process_time()
        programs = _programs(rows, strategies, token_budget, as_precision(precision), passes, cluster)
        timings = {"capture_cpu_s": captured - begun, "lower_cpu_s": time.process_time() - captured}
        return CompiledModel(logical, programs, timings, as_precision(precision), rows.packing, unpacked)


def compile_task(
    module: nn.Module,
    task: Task,
    strategies: Mapping[int, Strategy | str] | None = None,
    precision: Precision | str | None = None,
    packed: bool | None = None,
    passes: Ladder | None = None,
    cluster: ClusterSpec | None = None,
) -> CompiledModel:
    """`compile_strategies` for a task, whose own strategies go first; programs have only the parameters that it reads.

    Raises TaskError without strategies, and what `compile_strategies` raises.
    """
    given = strategies if task.strategies is None else task.strategies
    if given is None:
        raise TaskError("", "has no strategies: give some to the task, or to all")
    check_strategies(given)
    with collector_paused():
        logical = capture_step(module, task.loss, task.example, task.dynamic, tell_unused=False)
        return lower_task(logical, replace(task, strategies=given), precision, packed, passes, cluster)


def lower_task(
    logical: LogicalGraph,
    task: Task,
    precision: Precision | str | None = None,
    packed: bool | None = None,
    passes: Ladder | None = None,
    cluster: ClusterSpec | None = None,
) -> CompiledModel:
    """The captured step of a task, lowered for the strategies that the task has. Raises what `lower` raises."""
    given = task.strategies or {}
    given = given if task.ranks is None else on_ranks(given, task.ranks)
    read, unpacked = without_unread(logical), "its batches are whole"
    if is_row_of_tokens(logical):
        read, unpacked = packed_if_proved(read, force=bool(packed))
    else:
        _warn_of_tokens(logical)
    programs = _programs(read, given, task.token_budget, as_precision(precision), passes, cluster)
    return CompiledModel(logical, programs, {}, as_precision(precision), read.packing, unpacked)


def _warn_of_tokens(logical: LogicalGraph) -> None:
    """Of a mean over tokens in a task whose batches have no labels, so that their rows count."""
    mean = logical.averaged
    if mean is not None and mean.fewer is not None and all(info.fqn != "labels" for info in logical.inputs):
        warn(
            f"the loss is {mean.words}, which divides by tokens. fxpar takes the sum and divides by the rows of the "
            "task's batches, as they have no labels: loss and gradients have another scale than on one device. Return "
            "a mean over rows, or pass train_step(denominator=...)"
        )


def on_ranks(strategies: Mapping[int, Strategy | str], ranks: Sequence[int]) -> dict[int, Strategy]:
    """Strategies whose ranks begin at the first of these."""
    parsed = {limit: Strategy.parse(one) if isinstance(one, str) else one for limit, one in strategies.items()}
    return {limit: replace(one, offset=ranks[0]) for limit, one in parsed.items()}


def _programs(
    rows: LogicalGraph,
    strategies: Mapping[int, Strategy | str],
    token_budget: int | Mapping[int, int] | None,
    how: Precision,
    passes: Ladder | None,
    cluster: ClusterSpec | None,
) -> dict[str, TrainGraph]:
    """A graph of rows, lowered for each strategy."""
    computed = with_precision(rows, how)
    dtypes = {"accumulate": how.accumulate_dtype, "reduce": how.reduce_dtype}
    parsed = [strategy for _, choice in sorted(strategies.items()) for strategy in formations(choice)]
    by_name = dict(zip(strategy_names(parsed), parsed, strict=True))
    groups = length_groups(strategies, world=parsed[0].world, token_budget=token_budget)
    tokens = {group.strategy: group.token_budget for group in groups}  # of the longest group with this strategy
    sizes = {dim.name for dim in rows.dims} & {"T"}
    programs = {}
    for name, strategy in by_name.items():
        at = dict.fromkeys(sizes, tokens[strategy])
        ladder = default_passes(for_store=True, sizes=at, cluster=cluster, **dtypes)
        programs[name] = lower(computed, strategy, passes=ladder if passes is None else _given_passes(passes, ladder))
    return programs


def _given_passes(passes: Ladder, ladder: list[GraphPass]) -> list[GraphPass]:
    """What the user makes of the ladder. Raises PassContractError for what is none, or was made for no weight store.

    Passes that say how weights come and gradients go are configured for the store and the precision: one of them with
    other options would lose these without a word.
    """
    if not callable(passes):
        raise PassContractError(type(passes).__name__, "passes= is a function: passes=lambda ladder: [*ladder, Mine()]")
    found = checked_ladder(passes(list(ladder)))
    for known in ladder:
        for step in found:
            if isinstance(known, _OF_THE_STORE) and type(step) is type(known) and step != known:
                why = f"it stands in the place of {known}. Keep that one: passes=lambda ladder: [*ladder, Mine()]"
                raise PassContractError(str(step), why)
    return found


_OF_THE_STORE = (Casts, NarrowGradients, ReduceGradients, ZeroShard)


def capture_step(
    module: nn.Module,
    loss: LossFunction,
    example: Mapping[str, Tensor] | None,
    dynamic: Dynamic = "auto",
    tell_unused: bool = True,
) -> LogicalGraph:
    """The training step on `example`; by default on token ids and labels, and on positions if model or loss ask.

    A model that makes its own positions is left to: they need not begin at 0.
    """
    name = type(module).__name__
    if example is not None:
        return capture(module, loss, example, dynamic=dynamic, name=name, tell_unused=tell_unused)
    known = inspect.signature(module.forward).parameters
    positional = [name for name, one in known.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    given = known.get("position_ids")
    positions, tokens = given is not None and given.default is given.empty, EXAMPLE_TOKENS
    while True:
        batch = example_batch(tokens)
        if not positions:
            del batch["position_ids"]
        try:
            return capture(module, loss, batch, name=name, tell_unused=tell_unused)
        except MissingInputError as error:
            if error.key != "position_ids":
                raise ExampleNeededError(error.key, batch) from error
            positions = True  # the loss function reads them
        except PositionTableError as error:
            tokens = error.rows
        except (LossError, MeanLossError, MetricError, DataDependentError, KeyError):  # in the code, whatever is given
            raise
        except Exception as error:
            if positional and not known.keys() & batch.keys():
                raise ExampleNeededError(positional[0], batch, error) from error
            error.add_note(f"captured on a batch of text of {tokens} tokens, as fxpar makes one; give your own if the")
            error.add_note("model takes fewer, or if you train on other data: fxpar.parallelize(..., example=batch)")
            raise


def as_precision(given: Precision | str | None) -> Precision:
    """What `precision=` means: a `Precision`, its text, or None for what was captured."""
    return Precision.parse(given) if isinstance(given, str) else given or Precision()


def as_printed(name: Any) -> Any:
    """The name of a strategy as `strategy_names` has it, from any of its spellings (`tp2|dp2` is `tp2 | dp2`); what is
    no strategy as it is, for whoever looks it up to tell.
    """
    try:
        return str(Strategy.parse(name)) if isinstance(name, str) else name
    except StrategySyntaxError:
        return name


def strategy_names(strategies: Sequence[Strategy]) -> list[str]:
    """A name per strategy: its text; strategies that differ in overrides only are numbered."""
    names: list[str] = []
    known: dict[str, Strategy] = {}
    for strategy in strategies:
        name, number = str(strategy), 2
        while known.setdefault(name, strategy) != strategy:
            name, number = f"{strategy}#{number}", number + 1
        names.append(name)
    return names


def example_batch(tokens: int) -> dict[str, Tensor]:
    """One sequence; only shapes and dtypes are read."""
    return collate([torch.zeros(tokens, dtype=torch.int64)], MicroBatch((0,), tokens), _KEYS)


_KEYS = ("input_ids", "labels", "position_ids")
EXAMPLE_TOKENS = 61  # a length that is no width of a model
