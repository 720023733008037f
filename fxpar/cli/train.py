"""`fxpar train`: a configuration becomes a run on local ranks, or on the ranks of torchrun."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from fxpar.cli.console import INTERRUPTED, show_notes, stderr_console, stdout_console
from fxpar.cli.names import EXAMPLE_NAMES
from fxpar.cli.request import check_output, write_output
from fxpar.cli.run_commands import TrainRequest
from fxpar.errors import (
    CompareError,
    FxparError,
    LaunchError,
    LauncherSignalError,
    NoConfigError,
    PlanFileError,
    RankFailedError,
)
from fxpar.ir.strategy import Strategy
from fxpar.search.plan_file import Plan, parse_plan, read_plan
from fxpar.train.config import TrainConfig, parse_config, read_config
from fxpar.train.strategies import STATIC
from fxpar.train.tasks import chooses, has_tasks

if TYPE_CHECKING:
    from fxpar.train.rank import Job


def run_train(request: TrainRequest) -> None:
    """Raises what is wrong with the input; typer.Exit(130) after Ctrl-C."""
    config = configured(request)
    compare = compared(request, config)
    from fxpar.train.rank import SUMMARY, Job

    check_output(request.json)
    plan = None
    if request.plan is not None:
        read = read_plan(request.plan)
        plan = (request.plan, read.to_toml())
        if os.environ.get("RANK", "0") == "0":
            show_notes(read.other_batches(request.plan, config.data.batch_tokens))
    job = Job(config, compare, plan)
    with _stdout_on_stderr() if request.json == "-" else nullcontext():
        interrupted = _as_rank(job) if _is_rank() else _locally(job, request)
    if request.json is not None and os.environ.get("RANK", "0") == "0":
        write_output(request.json, (config.folder / SUMMARY).read_text(encoding="utf-8"))
    if interrupted:
        raise typer.Exit(INTERRUPTED)


@contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """What this process and its ranks print meanwhile goes to stderr: stdout is for the JSON."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def configured(request: TrainRequest) -> TrainConfig:
    """The configuration that the words ask for. Raises NoConfigError, PlanFileError and what `read_config` raises."""
    if (request.config is None) != request.demo:
        raise NoConfigError
    plan = None if request.plan is None else read_plan(request.plan)
    if request.plan is not None and request.config is not None and has_tasks(request.config):
        do = "Leave --plan out, and give tasks strategies of their own, or [strategies]"
        raise PlanFileError(request.plan, "a plan is for one loss, and this configuration has tasks", do)
    if request.plan is not None:
        _check_beside(request.plan, request.assignments)
    words = [*(plan.assignments() if plan else ()), *request.assignments]
    if request.steps is not None:
        words.append(f"run.steps={request.steps}")
    if request.ranks is not None:
        words.append(f"run.ranks={request.ranks}")
    if request.resume:
        words.append("checkpoint.resume=true")
    launched = int(os.environ["WORLD_SIZE"]) if _is_rank() else None
    config = read_config(request.config, words, launched) if request.config is not None else _demo(words, launched)
    if plan is not None and request.plan is not None:
        from fxpar.train.model import decided_by_data, texts_of

        model = config.model.name
        options = [f"{key}={text}" for key, text in texts_of(config).items()]
        plan.check(request.plan, model, options, config.run.ranks, partial(_resolved, model), decided_by_data(model))
        _check_vocabulary(request.plan, plan)
        config = config.planned()
    return config


def _check_beside(path: str, assignments: Iterable[str]) -> None:
    """Raise PlanFileError if words say what the plan says."""
    for one in assignments:
        key = one.partition("=")[0].strip()
        if key.partition(".")[0] == "strategies" or key.startswith("engine.token_budgets"):
            raise PlanFileError(path, f"it says what --set {one} says too", "Leave one of them out, or edit the plan")


def _resolved(model: str, options: Sequence[str]) -> Mapping[str, Any]:
    from fxpar.models.options import parse_assignments
    from fxpar.models.resolved import resolved_options

    return resolved_options(model, parse_assignments(options))


def _check_vocabulary(path: str, plan: Plan) -> None:
    """A built-in model, or one of transformers without a folder, gets the tokenizer's: a plan for the tiny default is
    for a far smaller model. Raises PlanFileError.
    """
    from fxpar.models.loaded import folder_of

    named = any(option.partition("=")[0].startswith("vocab") for option in plan.options)
    if not named and (plan.model in EXAMPLE_NAMES or plan.model.startswith("hf:")) and folder_of(plan.model) is None:
        key = "vocab" if plan.model in EXAMPLE_NAMES else "vocab_size"
        do = f"Plan with --set {key}=N: the size of your tokenizer, or data.vocab"
        raise PlanFileError(path, f"it does not say how many tokens the vocabulary of {plan.model} has", do)


def _is_rank() -> bool:
    """Whether torchrun, or what sets the same variables, has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _demo(words: list[str], launched: int | None) -> TrainConfig:
    from fxpar.train.demo import DEMO

    config = parse_config(DEMO, "--demo", "demo", words, launched)
    if config.run.folder is None:
        folder = f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}"
        config = replace(config, run=replace(config.run, folder=folder))
    return config


def compared(request: TrainRequest, config: TrainConfig) -> str | None:
    """The strategy of the second run, or None; STATIC if it is yet to be chosen.

    Raises CompareError, StrategySyntaxError, WorldSizeError.
    """
    if request.compare is None:
        return None
    if config.tasks:
        raise CompareError("it is for one loss, and this configuration has tasks: leave it out")
    strategy = request.compare
    if strategy == STATIC and config.strategies:
        strategy = config.strategies[-1][1]
    if strategy != STATIC:  # else it is yet to be chosen
        Strategy.parse(strategy, world=config.world)
    if config.checkpoint.resume:
        raise CompareError("both runs start at step 0, so it cannot be combined with --resume")
    if config.run.steps < 2:
        raise CompareError("needs run.steps = 2 or more: the first step is left out of the times")
    return strategy


def how_to_go_on(request: TrainRequest, config: TrainConfig) -> str:
    """What to do after a rank was lost: the command that resumes from the last checkpoint, if there is one."""
    from fxpar.checkpoint.load import read_extra
    from fxpar.train.session import latest

    try:
        checkpoint = latest(config)
    except FxparError:
        return "There is no checkpoint to go on from: start the run again"
    with suppress(FxparError):
        if read_extra(checkpoint).get("step", 0) >= config.run.steps:
            return f"All {config.run.steps} steps are done, and saved in {checkpoint}"
    words = ["fxpar", "train", request.config or "--demo"]
    assignments = list(request.assignments)
    if request.demo:
        assignments.append(f"run.folder={config.folder}")  # the name of its folder is of the time of its start
    words += [word for text in assignments for word in ("--set", text)]
    for name, value in (("--steps", request.steps), ("--ranks", request.ranks), ("--plan", request.plan)):
        words += [] if value is None else [name, str(value)]
    return f"Go on from {checkpoint} with: {shlex.join([*words, '--resume'])}"


def _as_rank(job: Job) -> bool:
    from torch.distributed.elastic.multiprocessing.errors import record

    from fxpar.train.rank import run_rank
    from fxpar.train.stop import StopRequest

    with StopRequest() as stop:
        outcome = record(run_rank)(job, stop)
    return outcome is not None and outcome.status == "interrupted"


def _locally(job: Job, request: TrainRequest) -> bool:
    from fxpar.train.launch import launch
    from fxpar.train.preflight import (
        check_free,
        check_parts,
        check_planned_model,
        check_ranks,
        check_resumed_model,
        preflight,
    )

    console = stderr_console() if request.json == "-" else stdout_console()

    def say(text: str) -> None:
        console.print(text, markup=False)
        console.file.flush()  # a file's reader follows the run

    check_ranks(job.config)
    check_free(job.config)
    if chooses(job.config.tasks, job.config.strategies):
        from fxpar.train.chosen_tasks import choose_tasks

        chosen, words = choose_tasks(job.config)
        say(words)
        job = replace(job, config=chosen)
    check_parts(job.config)  # ranks would find it out too, all of them and seconds later
    if job.plan is not None:
        check_planned_model(job.config, parse_plan(job.plan[1], job.plan[0]), job.plan[0])
    preflight(job.config)  # makes folders, so it comes after what needs none
    check_resumed_model(job.config)
    say(f"starting {job.config.world} rank{'s' * (job.config.world > 1)}")
    try:
        outcome = launch(job, say)
    except KeyboardInterrupt:
        console.print(f"interrupted; finished checkpoints, if any, are in {job.config.checkpoints}", markup=False)
        return True
    except LaunchError as error:
        raise LaunchError(error.rank, error.how, error.log, how_to_go_on(request, job.config)) from None
    except LauncherSignalError as error:
        saved = "They saved nothing more (Ctrl-C saves a checkpoint)"
        raise LauncherSignalError(error.name, f"{saved}. {how_to_go_on(request, job.config)}") from None
    except RankFailedError as error:
        if request.debug and error.trace:
            stderr_console().print(error.trace, markup=False)
        raise
    return outcome.status == "interrupted"
