"""`fxpar.parallelize`: an `nn.Module` becomes one that trains under several strategies at once.

    model = fxpar.parallelize(model, strategies={512: "dp4", 4096: "dp2.tp2+sp"}, loss=fxpar.losses.causal_lm)
    report = model.train_step(sequences)          # `.grad` is filled
    optimizer.step(); optimizer.zero_grad()

From outside it is a sharded model like FSDP2's: parameters are DTensors in fp32 with unchanged names and shapes.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, Protocol

from torch import Tensor, nn

from fxpar.batching import BatchPlan
from fxpar.errors import ParallelizeError, nearest
from fxpar.errors.base import one_line
from fxpar.ir.strategy import Strategy
from fxpar.monitor import Monitor
from fxpar.runtime.ahead import DrawnAhead
from fxpar.runtime.notices import only_rank_0_warns
from fxpar.runtime.opening import change_session, open_session
from fxpar.runtime.options import ParallelizeOptions
from fxpar.runtime.planned import check_choice, chosen
from fxpar.runtime.report import Evaluated, StepReport
from fxpar.runtime.session import Session
from fxpar.runtime.task import Task
from fxpar.store import MemoryReport

_STATE = "_fxpar_session"
MiniBatch = Sequence[Tensor | Mapping[str, Tensor]]


Arguments = ParamSpec("Arguments")


class Parallelizes(Protocol[Arguments]):
    """A function of a module, or class of modules, and the options of `ParallelizeOptions`; without a target it returns
    the decorator.
    """

    def __call__(self, target: Any = ..., *args: Arguments.args, **options: Arguments.kwargs) -> Any: ...


def _with_options(
    kind: Callable[Arguments, ParallelizeOptions],
) -> Callable[[Callable[[Any, ParallelizeOptions], Any]], Parallelizes[Arguments]]:
    """Options are written once, as fields of `kind`: the function has them as keyword arguments, for type checkers,
    editors, `help` and `inspect.signature` alike.
    """

    def decorate(function: Callable[[Any, ParallelizeOptions], Any]) -> Parallelizes[Arguments]:
        @functools.wraps(function)
        def with_options(target: Any = ..., *args: Arguments.args, **options: Arguments.kwargs) -> Any:
            _check_names(kind, args, options)
            return function(target, kind(*args, **options))

        own = inspect.signature(with_options, follow_wrapped=False)
        given = inspect.signature(kind).parameters.values()
        with_options.__signature__ = own.replace(parameters=[own.parameters["target"], *given])  # type: ignore[attr-defined]
        return with_options

    return decorate


def _check_names(kind: Callable[..., ParallelizeOptions], args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Raise ParallelizeError for what is no option, and for one that has to be there and is not."""
    known = inspect.signature(kind).parameters
    if args:
        raise ParallelizeError(f"{one_line(repr(args[0]))} has no name. Options are given by name, strategies={{...}}")
    for name in options:
        if name not in known:
            raise ParallelizeError(f"there is no option {name!r}{nearest(name, known) or '.'}")


@_with_options(ParallelizeOptions)
def parallelize(target: Any, options: ParallelizeOptions) -> Any:
    """Make `target` (a module, or as a decorator a module class) train under `strategies`.

    `strategies` maps the longest sequence (tokens) that a strategy takes to the strategy; `train_step` refuses one
    beyond the last limit, and a limit beyond the positions of the model is a warning. Of `"rounds(cp8)"` all formations
    of those ranks are prepared, and each mini-batch runs the fastest ones (`fxpar.ir.teams.formations`). Every rank
    must call this with the same module and arguments inside an initialised `torch.distributed`. The module is changed
    in place and returned; its class becomes a subclass with `train_step`, `plan`, `plan_ahead`, `memory`, `using`,
    `engine_state`.

    - `plan`: a file that `fxpar plan` wrote, or a `fxpar.search.plan_file.Plan`. It says strategies, token budgets and
      the memory budget instead; a memory budget that is given goes first.
    - `strategies="auto"` searches for the best plan, on rank 0 for all: for mini-batches of `tokens_per_step` tokens,
      of sequences such as `lengths` (numbers of tokens, the longest among them; or a file or distribution, as
      `fxpar plan --lengths` takes it), and devices as `cluster` says. It is `model.fxpar_session.options.plan` then.
    - `loss(model, batch)`: sum over valid tokens (`fxpar.losses`). `example`: a batch to capture with; by default one
      packed row of `input_ids`, `labels`, `position_ids`.
    - `tasks`: several losses instead of `loss` and `example`, by name, each with batches and maybe strategies of its
      own (`fxpar.Task`). A mini-batch is `{name: mini-batch}`, its loss the weighted sum of the tasks' mean losses. A
      task without a batch is left out; with `absent_tasks="rescale"` the weights of the others add up to those of all.
    - `token_budget`: most tokens of one micro-batch of one replica, for all limits or by limit.
    - `packed`: several sequences per micro-batch. None: if it is proved that they do not see each other (else a line
      says what mixes them, and each runs alone); True: without a proof; False: never.
    - `length_multiple`: a promise that all lengths are multiples of this, for models that would see padding.
    - `order`: the strategies in order of running; by default the cheapest, by switch plans. `merge=False` runs every
      sequence in the first group that takes it: no group joins another, no sequence rides in a longer one.
    - `home`: placement of masters by FQN glob ("S(1)", "R", a DistConfig); by default dim 0 over all ranks.
    - `memory_budget_bytes`: per rank, for weights, gradients, staging and predicted activations, without the states of
      the optimizer; layouts that do not fit take turns. `resident` names the strategies that stay in memory instead.
    - `gradients`: "home" sums straight into the home layout, "chain" hands them from graph to graph as HotSPa does.
    - `overlap`: the next group's weights come, and the last one's gradients leave, while a group runs; a group begins
      before all of its weights are there, and its gradients leave as its last backward makes them: on ranks of CPUs
      with gloo, if the gradients of two groups fit into the memory budget. A session with one group does so only on
      several nodes. The results are the same, bit by bit.
    - `cluster`: the devices and links that costs are predicted for; what is not said of them is usual for the kind that
      it runs on. `cost(program, cluster)` returns the `GroupCost` of a micro-batch instead; every rank calls it, and
      what rank 0 returns counts on all.
    - `planner`, `execution`, `staging_bytes`, `checked`: see `fxpar.switch`, `fxpar.transport`. `nan`: what a loss that
      is no number does.
    - `precision`: what is computed, added up and sent in which dtype, such as "bf16" (`fxpar.precision.Precision`); by
      default as the model is. Masters stay fp32. With fp16 the loss is scaled, at first by `loss_scale` (2**16): an
      overflow on any rank, in any group, leaves the mini-batch out everywhere and halves the factor.
    - `deterministic`: only kernels that give the same bits every time, or an error that names the one which does not.
    - `compile`: "inductor" compiles the programs, "eager" runs them op by op. `seed`: of dropout.
    - `record`: what each rank does and when, in `report.trace` of every `train_step`.
    - `timeout_s`: how long a rank may be silent before the others end with an error that names it (`monitor=False`:
      no heartbeats, the error is torch's; a `fxpar.monitor.Monitor` that runs already: that one).
    - `plain`: the strategy of `model(x)`; by default that of the longest sequences.
    - `passes(ladder)` returns the passes that each strategy is lowered with, from the default ones: add, replace, leave
      out. The last one lays out the weights of all strategies. Plain calls and `evaluate` are lowered as ever.
    - `compiled`: what `fxpar.compile_strategies` returned for the same model, loss and strategies (made before forking
      ranks, or loaded), instead of compiling again.
    - `initializer(module)`: for a model on the meta device, fills what one module has itself; by default the module's
      `reset_parameters`. It is called on one module at a time, children first, on every rank alike. Parameters show
      their whole shape, but only this rank's slices are filled, by element number: values are the same for any world.
      `meta_init="whole"`: whole parameters by torch's generator instead, the values that one device draws.
    - `weights`: a local folder of safetensors, as Hugging Face writes it, that the model starts from: each rank reads
      its slices, so a model on the meta device is whole nowhere. `fxpar.Weights(folder, missing=["*.lora_*"])` lets the
      model have more than the folder.

    Raises ParallelizeError, PlanFileError, LengthsError, the errors of `length_groups`, `capture`, `lower`,
    HomeLayoutError, MemoryBudgetError.
    """
    check_choice(options)
    if target is ...:
        return functools.partial(_wrap, options)
    return _wrap(options, target)


def _wrap(options: ParallelizeOptions, target: Any) -> Any:
    if isinstance(target, nn.Module):
        return _convert(target, options)
    if not (isinstance(target, type) and issubclass(target, nn.Module)):
        raise ParallelizeError(f"the target is {target!r}, neither an nn.Module nor a class of modules")

    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        target.__init__(self, *args, **kwargs)
        if type(self) is made:
            _convert(self, options)

    functools.update_wrapper(init, target.__init__)
    made = type(
        target.__name__, (target,), {"__init__": init, "__module__": target.__module__, "__doc__": target.__doc__}
    )
    made.__qualname__ = target.__qualname__
    return made


def _convert(module: nn.Module, options: ParallelizeOptions) -> nn.Module:
    if isinstance(module, ParallelModule):
        raise ParallelizeError(f"this {type(module).__name__} is parallel already")
    with only_rank_0_warns():
        strategies, options = chosen(module, options)
        session = open_session(module, strategies, options)
    module.__class__ = _parallel_class(type(module))
    module.__dict__[_STATE] = session
    return module


@functools.cache
def _parallel_class(cls: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        session: Session | None = self.__dict__.get(_STATE)
        if session is not None and session.calls.is_tracing:
            return cls.forward(self, *args, **kwargs)
        return self._session().forward(self, args, kwargs)

    names = {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(f"Parallel{cls.__name__}", (ParallelModule, cls), names)


class ParallelModule(nn.Module):
    """What `parallelize` adds to a module."""

    def _session(self) -> Session:
        session = self.__dict__.get(_STATE)
        if session is None:
            raise ParallelizeError(
                "this is a copy: it has the weights but no engine. Load its state_dict into the model that was "
                "parallelized to run it"
            )
        return session

    def train_step(
        self, sequences: MiniBatch | Mapping[str, MiniBatch], *, denominator: float | Mapping[str, float] | None = None
    ) -> StepReport:
        """Forward and backward of one mini-batch: token sequences [T] of any lengths, the same on every rank.

        A sequence is a tensor of token ids, or a mapping with `input_ids` and further tensors [T] such as aligned
        `labels` (-100 where nothing is to be predicted); without them each token predicts the next one. Gradients of
        the mean over valid tokens are added to `.grad` of the parameters.

        `denominator`, a number above 0 and the same on every rank, takes the place of the number of valid tokens: the
        gradient is that of the summed loss divided by it. So a weighted mean is divided by its weights, and several
        calls before `optimizer.step()` add up to one mini-batch if each is given the valid tokens of all.

        With tasks both are dicts by their names: `train_step({"caption": sequences, "pairs": [batch, batch]})`.
        """
        return self._session().train_step(self, sequences, denominator)

    def evaluate(
        self, sequences: MiniBatch | Mapping[str, MiniBatch], *, denominator: float | Mapping[str, float] | None = None
    ) -> Evaluated | dict[str, Evaluated]:
        """Mean loss over the valid tokens of held-out sequences: evaluation mode, no gradients, each length group under
        its own strategy. A float, the same on every rank, which all pass the same sequences; its `metrics` are those
        that the loss function returns, as in the report of `train_step`. `denominator` as there. With tasks a dict of
        these, of each task that is given something.
        """
        return self._session().evaluate(self, sequences, denominator)

    def plan(self, sequences: MiniBatch | Mapping[str, MiniBatch]) -> BatchPlan | dict[str, BatchPlan]:
        """What `train_step` would run, without running it; of tasks by their names."""
        return self._session().plan(sequences)

    def plan_ahead(self, batches: Iterable[MiniBatch | Mapping[str, MiniBatch]]) -> DrawnAhead:
        """The mini-batches of `batches`, such as a loader, to iterate over. Before one is handed out the next one is
        drawn, and a thread begins with its plan, which the `train_step` takes that is given the same sequences.

        What is wrong with a mini-batch is raised in its step, what drawing it raises where it would be handed out. If
        `batches` has a `state_dict`, so has the result: that after the last mini-batch that was handed out.
        """
        return DrawnAhead(batches, lambda sequences: self._session().begin_plan(sequences))

    @property
    def fxpar_session(self) -> Session:
        """What is behind the module: its programs, engine, costs and storage."""
        return self._session()

    @property
    def fxpar_monitor(self) -> Monitor | None:
        """What watches the other ranks for this module; None with `monitor=False`, one rank, or on a copy."""
        session = self.__dict__.get(_STATE)
        watcher = None if session is None else session.engine.watcher
        return watcher if isinstance(watcher, Monitor) else None

    @property
    def memory(self) -> MemoryReport:
        """Bytes on the fullest rank: all layouts, gradients, messages, and predicted activations."""
        return self._session().memory

    @property
    def step_count(self) -> int:
        """Mini-batches so far."""
        return self._session().engine.steps

    def to_empty(self, *, device: Any, recurse: bool = True) -> ParallelModule:
        """Nothing to do: the storage was made, and filled, by `parallelize`. (Code for sharded models calls this.)"""
        return self

    def change_tasks(
        self, tasks: Mapping[str, Task], strategies: Mapping[int, Strategy | str] | None = None
    ) -> ParallelModule:
        """Train for these tasks from the next step on, as `parallelize(tasks=..., strategies=...)` takes them: tasks
        join, leave, or get other weights, strategies or ranks. Weights, gradients and the count of steps stay, an
        optimizer goes on; a task that is the same but for its weight is not captured again. All ranks call it alike.

        Raises what `parallelize` raises, and then nothing has changed.
        """
        session = self._session()
        if session.options.tasks is None:
            raise ParallelizeError("change_tasks: this model was parallelized with one loss, without tasks=")
        return self._changed(session, tasks=tasks, strategies=strategies)

    def change_strategies(
        self,
        strategies: Mapping[int, Strategy | str],
        *,
        token_budget: int | Mapping[int, int] | None = None,
        order: Sequence[str] | None = None,
        resident: Sequence[str] | None = None,
        plain: str | None = None,
    ) -> ParallelModule:
        """Run under these strategies from the next step on, with what else names strategies or their limits, as
        `parallelize` takes them (`token_budget` None: as before). Weights, gradients and the count of steps stay, an
        optimizer goes on; nothing is captured again, and strategies of before are not lowered again. All ranks call it
        alike.

        Raises what `parallelize` raises, and then nothing has changed.
        """
        session = self._session()
        if session.options.tasks is not None:
            raise ParallelizeError("change_strategies: this model was parallelized with tasks=; call change_tasks")
        budget = session.options.token_budget if token_budget is None else token_budget
        named = {"order": order, "resident": resident, "plain": plain}
        return self._changed(session, strategies=strategies, token_budget=budget, **named)

    def _changed(self, session: Session, **changed: Any) -> ParallelModule:
        said_before: dict[str, Any] = dict.fromkeys(("plan", "lengths", "tokens_per_step", "compiled", "weights"))
        options = replace(session.options, **(said_before | changed))
        check_choice(options)
        with only_rank_0_warns():
            self.__dict__[_STATE] = change_session(self, session, options)
        return self

    def using(self, strategy: str) -> Any:
        """Within `with model.using("dp2.tp2"):` plain calls `model(x)` run under this strategy."""
        return self._session().calls.using(strategy)

    def engine_state(self) -> dict[str, Any]:
        """What a resumed run needs beside weights and optimizer; plain data, the same on all ranks."""
        return self._session().state()

    def load_engine_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `engine_state`; strategies and number of ranks may have changed."""
        self._session().load_state(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A copy of weights and buffers without the engine, as averaging wrappers make it."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        for param in self.parameters():  # torch cannot deepcopy a DTensor that is a parameter
            memo[id(param)] = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
        kept = {key: value for key, value in self.__dict__.items() if key != _STATE}
        made.__dict__.update(copy.deepcopy(kept, memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != _STATE}
