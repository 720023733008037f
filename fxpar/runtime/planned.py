"""Who says the strategies of a model: the user, a plan, or a search for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

import torch.distributed as dist
from torch import nn

from fxpar.errors import ParallelizeError, nearest
from fxpar.ir.collector import collector_paused
from fxpar.ir.strategy import Strategy
from fxpar.runtime.agree import check_same_options, on_rank_0
from fxpar.runtime.auto import Search, read_rows
from fxpar.runtime.opening import explained_before, require_ranks
from fxpar.runtime.options import ParallelizeOptions
from fxpar.search.chosen import whole_depth
from fxpar.search.lengths import as_lengths, mini_batches
from fxpar.search.plan_file import Plan, plan_of
from fxpar.tracer.signature import model_device

AUTO = "auto"
_OF_A_SEARCH = ("lengths", "tokens_per_step")
_OF_ONE_LOSS = ("loss", "example", "compiled", "plan", "order", *_OF_A_SEARCH)
_OF_STRATEGIES = ("token_budget", "order", "resident", "plain", "compiled")  # what names strategies that are not there


def check_choice(options: ParallelizeOptions) -> None:
    """Raise ParallelizeError unless strategies are said once."""
    given, plan = options.strategies, options.plan
    if options.tasks is not None:
        _check_beside_tasks(options)
        return
    if plan is None and given is None:
        raise ParallelizeError(
            "strategies= is missing, such as strategies={512: 'dp2', 4096: 'cp2'}; or plan=, a file of `fxpar plan`"
        )
    if isinstance(given, str) and given != AUTO:
        form = f"; a strategy is given with the longest length that it is for, such as {{4096: {given!r}}}"
        raise ParallelizeError(f"strategies={given!r} is not a dict of strategies{nearest(given, [AUTO]) or form}")
    if plan is not None:
        for name in ("strategies", "token_budget"):
            if getattr(options, name) is not None:
                raise ParallelizeError(f"plan= says {name} already: leave out {name}=, or edit the plan")
    for name in _OF_A_SEARCH:
        if given == AUTO and getattr(options, name) is None:
            raise ParallelizeError(
                f'strategies="auto" needs {name}=. Give both: lengths=[812, 4096, ...], those of your sequences, and '
                "tokens_per_step=65536, the tokens of a mini-batch"
            )
        if given != AUTO and getattr(options, name) is not None:
            raise ParallelizeError(f'{name}= is for strategies="auto"')
    for name in _OF_STRATEGIES:
        if given == AUTO and getattr(options, name) is not None:
            raise ParallelizeError(f'{name}= needs strategies that are known, not strategies="auto"')


def _check_beside_tasks(options: ParallelizeOptions) -> None:
    """Raise ParallelizeError for what is said of one loss, or not known of several."""
    defaults = {one.name: one.default for one in fields(ParallelizeOptions)}
    for name in _OF_ONE_LOSS:
        if getattr(options, name) is not defaults[name]:
            do = f"give fxpar.Task({name}=...)" if name in ("loss", "example", "compiled") else "give strategies={...}"
            if name == "order":
                do = "leave it out, as they run in the order in which they are given"
            raise ParallelizeError(f"{name}= is for one loss, and there are tasks=: {do}")
    if options.strategies == AUTO:
        why = 'strategies="auto" is for one loss, and there are tasks='
        raise ParallelizeError(f"{why}: give strategies={{...}}, which fxpar tasks plan finds")
    if options.gradients != "home":
        raise ParallelizeError(f"gradients={options.gradients!r} is for one loss, and there are tasks=: leave it out")


def chosen(
    module: nn.Module, options: ParallelizeOptions
) -> tuple[Mapping[int, Strategy | str] | None, ParallelizeOptions]:
    """The strategies (None: each task has its own), and the options with what a plan says of budgets; a memory budget
    of the options goes first. All ranks call it alike.

    Raises ParallelizeError, OptionMismatchError where ranks do not choose in the same way, PlanFileError for a plan
    that cannot be read or is not for this model and world, and for "auto" what the search raises: on rank 0,
    AutoStrategiesError on the others.
    """
    check_choice(options)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        # What else differs is told by `open_session`, where all ranks that chose alike meet.
        auto, monitor = options.strategies == AUTO, bool(options.monitor)
        with explained_before(options):
            check_same_options({'whether strategies="auto"': auto, "whether there is a monitor": monitor})
    if options.plan is None and options.strategies != AUTO:
        assert not isinstance(options.strategies, str)
        return options.strategies, options
    if options.plan is None:
        require_ranks()
        plan = on_rank_0(lambda: _searched(module, options))
    else:
        plan, path = plan_of(options.plan)
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else None
        plan.check_module(path, parameters_of(module), world)
    memory = options.memory_budget_bytes or plan.memory_budget_bytes or None
    return plan.strategies, replace(options, plan=plan, token_budget=plan.token_budgets, memory_budget_bytes=memory)


def parameters_of(module: nn.Module) -> int:
    """Numbers in all of its parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def _searched(module: nn.Module, options: ParallelizeOptions) -> Plan:
    assert options.lengths is not None
    assert options.tokens_per_step is not None
    lengths = as_lengths(options.lengths)
    with collector_paused():
        rows = read_rows(module, options.loss, options.example, options.precision, packed=options.packed)
        return Search(
            model=type(module).__name__,
            rows=lambda _: rows,
            depth=whole_depth(rows),  # a module has no option that makes it shallow
            batches=mini_batches(lengths, options.tokens_per_step),
            longest=int(lengths.max()),
            tokens_per_step=options.tokens_per_step,
            world=dist.get_world_size(),
            device=model_device(module),
            cluster=options.cluster,
            memory_budget_bytes=options.memory_budget_bytes,
            overlap=options.overlap,
            packed=options.packed is not False,
        ).plan()
