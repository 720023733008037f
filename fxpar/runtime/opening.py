"""From a module and its options to a session: capture, lowering, storage, engine, put together once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fxpar.batching import LengthGroup
from fxpar.errors import ParallelizeError, nearest
from fxpar.ir.collector import collector_paused
from fxpar.ir.strategy import Strategy
from fxpar.monitor import Monitor, looks_like_peer_loss
from fxpar.runtime.agree import agreed_cluster, check_same_options, check_same_programs, check_same_values
from fxpar.runtime.assembled import put_together
from fxpar.runtime.compiling import compile_again
from fxpar.runtime.decided import Decided, decide, tasks_of, tell
from fxpar.runtime.notices import tell_of_tasks
from fxpar.runtime.options import ParallelizeOptions
from fxpar.runtime.session import Ground, Session
from fxpar.runtime.task import Task
from fxpar.store.home import rules_by_fqn
from fxpar.transport.groups import ProcessGroups


def open_session(
    module: nn.Module, strategies: Mapping[int, Strategy | str] | None, options: ParallelizeOptions
) -> Session:
    """Capture, lower, lay out, allocate, and take the module's parameters home. All ranks call it alike."""
    require_ranks()
    tasks = tasks_of(strategies, options)
    watcher = _watcher(options, dist.get_world_size())
    if watcher is None:
        with collector_paused():
            return _open(module, tasks, options, None)
    try:
        with watcher.explained("start of the session"), collector_paused():
            _meet(watcher)
            return _open(module, tasks, options, watcher)
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
    module: nn.Module, tasks: Mapping[str, Task], options: ParallelizeOptions, watcher: Monitor | None
) -> Session:
    decided = {name: decide(module, name, task, options) for name, task in tasks.items()}
    first = next(iter(decided.values()))
    require_backend(first.device)
    plain = _told(decided, options)
    process_groups = ProcessGroups(options.timeout_s)
    world_group = process_groups.world()
    cluster = agreed_cluster(first.cluster, first.device.type, world_group)
    _check_alike(decided, options, world_group)
    check_same_values(module, world_group)
    ground = Ground(process_groups, world_group, cluster, watcher)
    return put_together(module, decided, plain, options, ground)


def change_session(module: nn.Module, before: Session, options: ParallelizeOptions) -> Session:
    """The session with other tasks or strategies: weights, gradients and the count of steps stay. What a loss was
    captured as is kept where the loss is the same. All ranks call it alike.
    """
    given: Any = options.strategies
    ground, store = before.ground, before.store
    wanted = tasks_of(given, options)
    with before.engine.watched("change of strategies"), collector_paused():
        if options.tasks is None:
            was, how = before.first.task, (options.packed, options.passes, ground.cluster)
            again = compile_again(before.compiled, was, wanted[""], *how)
            wanted = {"": replace(wanted[""], compiled=again)}
        else:
            wanted = {name: before.kept(name, task) for name, task in wanted.items()}
        store.check_adopted(module, trained=False)
        dtypes = {info.fqn: info.meta.dtype for info in before.compiled.logical.params()}
        with store.shown_without_values(module, dtypes), before.calls.tracing():
            decided = {name: decide(module, name, task, options, store.device) for name, task in wanted.items()}
        plain = _told(decided, options)
        _check_alike(decided, options, ground.world_group)
        return put_together(module, decided, plain, options, ground, before)


def _told(decided: Mapping[str, Decided], options: ParallelizeOptions) -> str:
    """Warn of what a user may not expect; the strategy of plain calls."""
    if dist.get_rank() == 0:
        for one in decided.values():
            tell(one, options)
        tell_of_tasks({name: one.compiled.logical for name, one in decided.items()})
    everywhere = [one for one in decided.values() if one.task.ranks is None]  # what plain calls can run under
    groups = [group for one in everywhere for group in one.groups]
    return _plain_strategy(options, groups, [name for one in everywhere for name in one.names])


def _check_alike(decided: Mapping[str, Decided], options: ParallelizeOptions, world_group: Any) -> None:
    """Raise OptionMismatchError or ProgramMismatchError where a rank has decided something else."""
    first = next(iter(decided.values()))
    homes = rules_by_fqn([info.fqn for info in first.compiled.logical.params()], options.home or {})
    check_same_options(_shared_options(decided, options), world_group, compared={"home": homes})
    programs = {name: program for one in decided.values() for name, program in one.compiled.programs.items()}
    check_same_programs(programs, world_group)


# Options that a rank may be given otherwise. All others are compared, new ones too.
_MAY_DIFFER = {
    *("cluster", "cost"),  # rank 0's hold
    *("strategies", "plan", "lengths", "tokens_per_step", "token_budget"),  # the groups that they lead to are compared
    *("example", "loss", "passes", "compiled", "tasks"),  # the programs that they lead to are compared
    *("weights", "initializer"),  # a path on this rank's machine; a function, compared by its name
    *("monitor", "record", "timeout_s"),  # nothing of what ranks exchange
}


def _shared_options(decided: Mapping[str, Decided], options: ParallelizeOptions) -> dict[str, object]:
    """What must be the same on every rank, by name: with other groups, orders or seeds a step would hang, or be wrong
    without a word.
    """
    groups = {name: _limits(one.groups) for name, one in decided.items()}
    tasks = {name: (one.task.weight, list(one.task.ranks or ())) for name, one in decided.items()}
    own = {one.name: getattr(options, one.name) for one in fields(options) if one.name not in _MAY_DIFFER}
    # Ranks are asked for what rank 0's cost model said; values that are yet to be made are compared by who makes them.
    made = getattr(options.initializer, "__qualname__", type(options.initializer).__name__)
    given = {"whether there is a cost model": options.cost is not None, "initializer": made}
    told = groups if options.tasks is not None else groups[""]
    return {
        "tasks (and weights, and ranks)": list(tasks.items()),
        "strategies (and token budgets)": told,
        **given,
        **own,
    }


def _limits(groups: Sequence[LengthGroup]) -> list[str]:
    return [f"{group.limit}: {group.strategy} ({group.token_budget:,} tokens)" for group in groups]


def _plain_strategy(options: ParallelizeOptions, groups: Sequence[LengthGroup], names: Sequence[str]) -> str:
    """What `model(x)` runs under unless told otherwise: of the strategies that can (without stages), the one that takes
    the longest sequences.
    """
    if options.plain is None and not names:
        return ""
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
