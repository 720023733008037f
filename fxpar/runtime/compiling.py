"""What `fxpar.parallelize` compiles before anything is allocated: a step captured, and lowered for each strategy."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from fxpar.batching import MicroBatch, length_groups
from fxpar.batching.collate import collate
from fxpar.batching.groups import check_strategies
from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import (
    DataDependentError,
    ExampleNeededError,
    LossError,
    MeanLossError,
    MetricError,
    MissingInputError,
    PassContractError,
    PositionTableError,
    StrategySyntaxError,
    TaskError,
    warn,
)
from fxpar.ir.collector import collector_paused
from fxpar.ir.graph import IS_TOKEN, LogicalGraph
from fxpar.ir.pass_base import GraphPass
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.ir.teams import formations
from fxpar.losses import LossFunction
from fxpar.lowering import default_passes, lower
from fxpar.lowering.ladder import checked_ladder
from fxpar.passes.casts import Casts
from fxpar.passes.narrow_gradients import NarrowGradients
from fxpar.passes.pack_documents import packed_if_proved
from fxpar.passes.reduce_gradients import ReduceGradients
from fxpar.passes.share_weights import ShareWeights, StoragePass
from fxpar.passes.zero_shard import ZeroShard
from fxpar.precision import Precision, with_precision
from fxpar.runtime.reading import is_row_of_tokens, reading_of
from fxpar.runtime.task import CompiledModel, Task
from fxpar.tracer import capture
from fxpar.tracer.dynamic import Dynamic
from fxpar.tracer.finish import without_unread

AnyPass = GraphPass | StoragePass
Ladder = Callable[[list[AnyPass]], Sequence[AnyPass]]
"""From the passes of the lowering, and behind them the one that shares weights, to those that run instead:
`lambda ladder: [*ladder, Mine()]`."""


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
        return CompiledModel(
            logical, programs, timings, as_precision(precision), rows.packing, unpacked, sharing_of(passes)
        )


def compile_again(
    before: CompiledModel,
    was: Task,
    task: Task,
    packed: bool | None = None,
    passes: Ladder | None = None,
    cluster: ClusterSpec | None = None,
) -> CompiledModel:
    """What a loss became, for the strategies of `task`: its step is not captured again, and programs are kept that it
    has with the token budget of before (`was`). Raises what `lower` raises.
    """
    given, had = task.strategies or {}, was.strategies or {}
    check_strategies(given)
    old = _budgets(had, was.token_budget)
    kept = {
        name: before.programs[name]
        for name, found in _budgets(given, task.token_budget).items()
        if old.get(name) == found
    }
    rows, _ = packed_if_proved(before.logical, force=bool(packed))
    with collector_paused():
        programs = _programs(rows, given, task.token_budget, before.precision, passes, cluster, kept)
    return replace(before, programs=programs, timings={})


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
        _warn_of_rows(logical)
    unit = reading_of(logical, of_task=True).unit
    programs = _programs(read, given, task.token_budget, as_precision(precision), passes, cluster, unit=unit)
    return CompiledModel(logical, programs, {}, as_precision(precision), read.packing, unpacked, sharing_of(passes))


def _warn_of_rows(logical: LogicalGraph) -> None:
    """Of a mean over tokens, or over all numbers, in a task whose batches have no labels, so that their rows count."""
    mean = logical.averaged
    if mean is not None and mean.fewer is not None and all(info.fqn != "labels" for info in logical.inputs):
        warn(
            f"the loss is {mean.words}, which divides by something else than rows. fxpar takes the sum and divides by "
            "the rows of the task's batches, as they have no labels: loss and gradients have another scale than on one "
            "device. Return a mean over rows, or pass train_step(denominator=...)"
        )


def on_ranks(strategies: Mapping[int, Strategy | str], ranks: Sequence[int]) -> dict[int, Strategy]:
    """Strategies whose ranks begin at the first of these."""
    parsed = {limit: Strategy.parse(one) if isinstance(one, str) else one for limit, one in strategies.items()}
    return {limit: replace(one, offset=ranks[0]) for limit, one in parsed.items()}


def _budgets(
    strategies: Mapping[int, Strategy | str], token_budget: int | Mapping[int, int] | None, unit: str = "tokens"
) -> dict[str, tuple[Strategy, int]]:
    """The strategies by name, each with the tokens of a micro-batch of the longest group that runs it."""
    parsed = [strategy for _, choice in sorted(strategies.items()) for strategy in formations(choice)]
    groups = length_groups(strategies, world=parsed[0].world, token_budget=token_budget, unit=unit)
    tokens = {group.strategy: group.token_budget for group in groups}
    return {name: (one, tokens[one]) for name, one in zip(strategy_names(parsed), parsed, strict=True)}


def _programs(
    rows: LogicalGraph,
    strategies: Mapping[int, Strategy | str],
    token_budget: int | Mapping[int, int] | None,
    how: Precision,
    passes: Ladder | None,
    cluster: ClusterSpec | None,
    kept: Mapping[str, TrainGraph] | None = None,
    unit: str = "tokens",
) -> dict[str, TrainGraph]:
    """A graph of rows, lowered for each strategy that is not `kept`; limits of strategies count `unit`."""
    computed = with_precision(rows, how)
    dtypes = {"accumulate": how.accumulate_dtype, "reduce": how.reduce_dtype}
    sizes = {dim.name for dim in rows.dims} & {"T"}
    programs = dict(kept or {})
    for name, (strategy, tokens) in _budgets(strategies, token_budget, unit).items():
        if name not in programs:
            at = dict.fromkeys(sizes, tokens)
            ladder = default_passes(for_store=True, sizes=at, cluster=cluster, **dtypes)
            given = ladder if passes is None else _given_passes(passes, ladder)
            programs[name] = lower(computed, strategy, passes=given)
    return programs


def _given_passes(passes: Ladder, ladder: list[GraphPass]) -> list[GraphPass]:
    """What the user makes of the ladder. Raises PassContractError for what is none, or was made for no weight store.

    Passes that say how weights come and gradients go are configured for the store and the precision: one of them with
    other options would lose these without a word.
    """
    if not callable(passes):
        raise PassContractError(type(passes).__name__, "passes= is a function: passes=lambda ladder: [*ladder, Mine()]")
    given = passes([*ladder, ShareWeights()])
    if isinstance(given, list | tuple):
        given = [step for step in given if not _lays_out(step)]
    found = checked_ladder(given)
    for known in ladder:
        for step in found:
            if isinstance(known, _OF_THE_STORE) and type(step) is type(known) and step != known:
                why = f"it stands in the place of {known}. Keep that one: passes=lambda ladder: [*ladder, Mine()]"
                raise PassContractError(str(step), why)
    return found


def sharing_of(passes: Ladder | None) -> StoragePass:
    """What lays out the weights of all strategies: the last of the user's passes that does, or fxpar's own."""
    given = [] if passes is None else passes([*default_passes(for_store=True), ShareWeights()])
    return next((step for step in reversed(given) if _lays_out(step)), ShareWeights())


def sharing_of_all(compiled: Sequence[CompiledModel]) -> StoragePass:
    """The one of all tasks, whose weights have one storage. Raises PassContractError where they were compiled with
    several.
    """
    first, *others = (one.sharing for one in compiled)
    for other in others:
        if other != first:
            why = (
                f"it lays out the weights of a task, and {first!r} those of another one; all tasks have one storage. "
                "Of a frozen dataclass two with equal options are equal"
            )
            raise PassContractError(repr(other), why)
    return first


def _lays_out(step: object) -> TypeGuard[StoragePass]:
    """Whether it is such a pass, and neither a class nor a pass on a graph."""
    return isinstance(step, StoragePass) and not isinstance(step, type | GraphPass)


_OF_THE_STORE = (Casts, NarrowGradients, ReduceGradients, ZeroShard)


def capture_step(
    module: nn.Module,
    loss: LossFunction,
    example: Mapping[str, Tensor] | None,
    dynamic: Dynamic = "auto",
    tell_unused: bool = True,
    gradients: bool = True,
) -> LogicalGraph:
    """The training step on `example`; by default on token ids and labels, and on positions if model or loss ask, and
    `is_token` if the loss does. `gradients` as in `capture`.

    A model that makes its own positions is left to: they need not begin at 0.
    """
    options: dict[str, Any] = {"name": type(module).__name__, "tell_unused": tell_unused, "gradients": gradients}
    if example is not None:
        return capture(module, loss, example, dynamic=dynamic, **options)
    known = inspect.signature(module.forward).parameters
    positional = [name for name, one in known.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    given = known.get("position_ids")
    asked, tokens = {"position_ids"} if given is not None and given.default is given.empty else set(), EXAMPLE_TOKENS
    while True:
        batch = example_batch(tokens, asked)
        try:
            return capture(module, loss, batch, **options)
        except MissingInputError as error:
            if error.key not in _IF_ASKED:
                raise ExampleNeededError(error.key, batch) from error
            asked.add(error.key)  # the loss function reads it
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


def example_batch(tokens: int, asked: Collection[str]) -> dict[str, Tensor]:
    """One sequence, with the keys that are asked for beside ids and labels; only shapes and dtypes are read."""
    keys = ("input_ids", "labels", *(key for key in _IF_ASKED if key in asked))
    return collate([torch.zeros(tokens, dtype=torch.int64)], MicroBatch((0,), tokens), keys)


_IF_ASKED = ("position_ids", IS_TOKEN)
EXAMPLE_TOKENS = 61  # a length that is no width of a model
