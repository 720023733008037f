"""What one rank of `fxpar train` does, from the process group to the summary."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fxpar.errors import (
    DeviceCountError,
    FxparWarning,
    OutputError,
    PeerLostError,
    RunInUseError,
    StartedRanksError,
    VizDependencyError,
)
from fxpar.monitor import Monitor, looks_like_peer_loss, print_and_exit, unwatched
from fxpar.runtime.planned import on_rank_0, parameters_of
from fxpar.runtime.report import merged_text, ride_text
from fxpar.search.plan_file import parse_plan
from fxpar.train.alone import faster_alone
from fxpar.train.auto import compared_with, plan_line, search_plan, with_plan
from fxpar.train.chosen_tasks import choose_on_rank_0
from fxpar.train.compare import Comparison, check_agreement, comparison_lines
from fxpar.train.config import TrainConfig, config_from_json
from fxpar.train.loop import Hooks, run_steps
from fxpar.train.metrics import EventsFile, MetricsFile, finite
from fxpar.train.model import shapes_for
from fxpar.train.preflight import lock_folders, preflight, unlock_folders
from fxpar.train.records import StepRecord, Totals
from fxpar.train.report import REPORT, ReportParts, collect, write_report
from fxpar.train.session import TrainSession, open_session, static_config
from fxpar.train.stop import StopRequest, agree
from fxpar.train.task_source import TaskLoader
from fxpar.train.tasks import chooses, texts_of
from fxpar.train.text import NOTHING, Prepared, describe, keep_tokenizer, prepare_once
from fxpar.train.view import open_view, summary_lines

SUMMARY = "summary.json"


@dataclass(frozen=True)
class Job:
    """What a rank is to do. `compare` is the strategy of the second run, or None; `plan` the file that strategies are
    of, and its text.
    """

    config: TrainConfig
    compare: str | None = None
    plan: tuple[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        return {"config": self.config.to_json(), "compare": self.compare, "plan": self.plan}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Job:
        plan = None if data["plan"] is None else (data["plan"][0], data["plan"][1])
        return cls(config_from_json(data["config"]), data["compare"], plan)

    def check_plan(self, vocab_size: int) -> None:
        """See that the plan is for a model with as many parameters as this one has with the tokenizer's vocabulary,
        before anything is allocated. Raises PlanFileError.
        """
        if self.plan is not None:
            path, text = self.plan
            module = shapes_for(self.config, vocab_size, {}).model
            parse_plan(text, path).check_module(path, parameters_of(module), self.config.world)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `status` is "done" or "interrupted"."""

    status: str
    step: int
    checkpoint: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class ThisRank:
    """This rank, its device, and how it speaks (rank 0 to the console, the others not at all)."""

    rank: int
    world: int
    local_rank: int
    device: torch.device
    console: Console
    monitor: Monitor
    stop: StopRequest

    def say(self, text: str, style: str | None = None) -> None:
        if self.rank == 0:
            self.console.print(text, markup=False, style=style)
            self.console.file.flush()


def run_rank(job: Job, stop: StopRequest) -> Outcome:
    """Train on this rank: RANK, WORLD_SIZE and the rest are set by torchrun, or by our launcher.

    Raises what is wrong with the input, PeerLostError for a rank that is gone.
    """
    config = job.config
    rank, world, local_rank = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if world != config.world:
        raise StartedRanksError(config.world, world, _why(config))
    torch.set_num_threads(config.run.threads)
    device = choose_device(config.run.device, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    if rank == 0:
        preflight(config)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    _join(backend, config.run.timeout_s, rank)
    try:
        _claim(config, rank)
        with Monitor.of_world(timeout_s=config.run.timeout_s, end=_record_and_exit) as monitor:
            console = Console(file=sys.stdout, highlight=False, emoji=False, soft_wrap=not sys.stdout.isatty())
            place = ThisRank(rank, world, local_rank, device, console, monitor, stop)
            outcome = _train(job, place)
            monitor.phase("end")
            dist.barrier()  # no rank leaves while another still writes
        return outcome
    finally:
        if rank == 0:
            unlock_folders(config)
        dist.destroy_process_group()


def _why(config: TrainConfig) -> str:
    """Why a run is for so many ranks."""
    if config.run.ranks is not None:
        return f"run.ranks = {config.run.ranks}"
    texts = [repr(text) for text in texts_of(config.tasks, config.strategies)]
    return ", ".join([*texts, *(f"task.{name}.ranks = {one.ranks}" for name, one in config.tasks.items() if one.ranks)])


def _claim(config: TrainConfig, rank: int) -> None:
    """Rank 0 locks the folders of the run. Raises RunInUseError, on every rank, if another run has them."""
    refusal: list[RunInUseError | None] = [None]
    if rank == 0:
        try:
            lock_folders(config)
        except RunInUseError as error:
            refusal = [error]
    dist.broadcast_object_list(refusal, src=0)
    if refusal[0] is not None:
        raise refusal[0]


def _join(backend: str, timeout_s: float, rank: int) -> None:
    """Make the process group. Raises PeerLostError if a rank does not come, or dies meanwhile."""
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        if not looks_like_peer_loss(error):
            raise
        raise unwatched(error, rank, "start of the process group", "absent") from error


def _record_and_exit(lost: PeerLostError) -> None:
    """Leave the error where torch's elastic launcher looks for it."""
    get_error_handler().record_exception(lost)
    print_and_exit(lost)


def choose_device(wanted: str, local_rank: int, local_world: int) -> torch.device:
    """A GPU per local rank if there are as many, else (or if asked for) the CPU. Raises DeviceCountError."""
    found = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cpu" or (wanted == "auto" and found < local_world):
        return torch.device("cpu")
    if found < local_world:
        raise DeviceCountError(local_world, found)
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _train(job: Job, place: ThisRank) -> Outcome:
    place.monitor.phase("prepare the data")
    if job.config.tasks:
        prepared = NOTHING
    else:
        place.say(f"preparing the data: {job.config.data.source}")
        prepared = prepare_once(job.config.data, place.local_rank, place.monitor.phase)
    job.check_plan(prepared.vocab_size)
    if not job.config.strategies and not job.config.tasks:
        job = _chosen(job, prepared, place)
    if chooses(job.config.tasks, job.config.strategies):
        place.monitor.phase("choose strategies")
        chosen, words = choose_on_rank_0(job.config)
        place.say(words)
        job = Job(chosen, job.compare)
    config = job.config
    place.monitor.phase("build the model")
    texts = texts_of(config.tasks, config.strategies)
    place.say(f"capturing {config.model.name} and lowering it for {', '.join(texts)}")
    with _noted_warnings(place):
        session = open_session(config, prepared, place.device, place.monitor)
    _introduce(session, prepared, place)
    if config.checkpoint.resume:
        place.monitor.phase("load the checkpoint")
        path = session.resume()
        place.say(f"resumed from {path}, after step {session.step}")
        if session.changed:
            place.say(f"note: {session.changed}")
    if place.rank == 0 and config.checkpoint.enabled and not config.tasks:
        keep_tokenizer(prepared, config)
    records: list[StepRecord] = []
    saved: list[Path] = []
    stopped = _run(session, place, records, saved)
    parts = None
    if config.run.report:
        place.monitor.phase("collect the report")
        parts = collect(session)
    last = str(saved[-1]) if saved else None
    if place.rank == 0 and records:
        totals = Totals.of(records)
        for line in summary_lines(totals, place.console.width if place.console.is_terminal else None):
            place.say(line)
        alone = faster_alone(session.model.fxpar_session.engine, list(session.training.recent))
        if alone is not None:
            place.say(alone.line())
        _write_summary(config.folder, {"run": totals.to_json()})
    comparison = None
    if job.compare is not None and not stopped:
        comparison = _compare(job, session, prepared, place, records)
    if parts is not None:
        _report(config, place, parts, comparison)
    if stopped:
        place.say(f"stopped after step {session.step}. " + _how_to_resume(last))
        return Outcome("interrupted", session.step, last)
    if comparison is not None:
        check_agreement(comparison)
    place.say(f"metrics  {config.folder / 'metrics.jsonl'}" + (f"\nweights  {last}" if last else ""))
    return Outcome("done", session.step, last)


def _chosen(job: Job, prepared: Prepared, place: ThisRank) -> Job:
    """The same with strategies, which rank 0 chooses. Raises as `on_rank_0` does."""
    place.monitor.phase("choose strategies")
    plan = on_rank_0(lambda: search_plan(job.config, prepared, place.device))
    place.say(plan_line(plan))
    return Job(with_plan(job.config, plan), compared_with(job.compare, plan))


def _introduce(session: TrainSession, prepared: Prepared, place: ThisRank) -> None:
    """What is about to be trained, and how long its sequences are."""
    config = session.config
    ranks = f"{place.world} rank{'s' * (place.world > 1)}"
    place.say(f"{config.model.name}, {session.size()}, on {ranks} ({place.device.type})")
    if isinstance(session.loader, TaskLoader):
        for line in session.loader.lines():
            place.say(line)
        place.say(f"set up in {session.setup_s:.1f} s")
        return
    for line in (*prepared.lines, *describe(session.loader)):
        place.say(line)
    chosen = ", ".join(f"<={limit} {text}" for limit, text in config.strategies)
    packed = session.model.fxpar_session.engine.options.packed  # if not, a warning has said why
    rows = "sequences packed in rows" if packed else "each sequence runs alone"
    place.say(f"strategies {chosen}; {rows}; set up in {session.setup_s:.1f} s")


def _run(
    session: TrainSession, place: ThisRank, records: list[StepRecord], saved: list[Path], *, files: bool = True
) -> bool:
    """Train to the last step; True if stopped early. `files`: with metrics and checkpoints."""
    config = session.config
    outputs = _outputs(config, session.step, place) if files else []
    title = "train" if files else f"static {config.strategies[0][1]}"
    every = config.checkpoint.every if files and config.checkpoint.enabled else 0
    told: set[str] = set()  # of groups that join others and sequences that ride: once each
    notes: list[str] = []  # for after the line of the step
    with open_view(place.console if place.rank == 0 else _silent(), config.run.steps, session.step, title) as view:

        def done(record: StepRecord) -> None:
            session.step = record.step
            place.stop.step_done()
            records.append(record)
            view.step(record)
            moved = [merged_text(*pair) for pair in record.merged] + [ride_text(*ride[:2]) for ride in record.rides]
            for text in moved:
                if text not in told:
                    told.add(text)
                    view.note(f"{text} (first in step {record.step})")
            if record.replanned:
                view.note(f"step {record.step}: {record.replanned}")
            while notes:
                view.note(notes.pop(0))
            for output in outputs:
                output.write(record)

        def save(step: int) -> None:
            if files and config.checkpoint.enabled:
                saved.append(session.save(step))
                notes.append(f"checkpoint {saved[-1]}")

        hooks = Hooks(
            done=done,
            sync=lambda cpu_s, wall_s: agree(place.stop.asked, cpu_s, wall_s, place.device),
            save=save,
            phase=place.monitor.phase,
            validate=session.validate,
        )
        try:
            return run_steps(session.training, session.step, config.run.steps, every, hooks)
        finally:
            for output in outputs:
                output.close()


def _outputs(config: TrainConfig, step: int, place: ThisRank) -> list[MetricsFile | EventsFile]:
    """The files that rank 0 writes each step to."""
    if place.rank != 0:
        return []
    found: list[MetricsFile | EventsFile] = [MetricsFile(config.folder, step)]
    if config.run.tensorboard:
        try:
            found.append(EventsFile(config.folder, step))
        except ImportError:
            place.say('no TensorBoard events: pip install "fxpar[train]", or set run.tensorboard = false', "dim")
    return found


def _compare(
    job: Job, session: TrainSession, prepared: Prepared, place: ThisRank, records: list[StepRecord]
) -> Comparison | None:
    """Train once more under one strategy, on the same batches from the same weights; None if that was stopped."""
    assert job.compare is not None
    config = static_config(job.config, job.compare)
    place.say(f"\nthe same {len(records)} steps under {job.compare} alone")
    place.monitor.phase(f"build the model for {job.compare}")
    session.release()
    with _noted_warnings(place):
        other = open_session(config, prepared, place.device, place.monitor)
    static: list[StepRecord] = []
    stopped = _run(other, place, static, [], files=False)
    if stopped or len(static) < 2:
        place.say("stopped: no comparison")
        return None
    comparison = Comparison.of(records, static, job.compare, config.precision.narrowest)
    if place.rank == 0:
        for line in comparison_lines(comparison):
            place.say(line)
        _write_summary(config.folder, {"run": Totals.of(records).to_json(), "comparison": comparison.to_json()})
    return comparison


def _report(config: TrainConfig, place: ThisRank, parts: ReportParts, comparison: Comparison | None) -> None:
    """Rank 0 writes `report.html` and `trace.json`; a run does not fail for want of plotly."""
    place.monitor.phase("write the report")
    try:
        path = write_report(config.folder, config.name, parts, None if comparison is None else comparison.to_json())
    except VizDependencyError as error:
        place.say(f"no {REPORT}: {error}", "dim")
    else:
        place.say(f"report   {path}")


def _how_to_resume(checkpoint: str | None) -> str:
    return f"Checkpoint {checkpoint}; go on with --resume" if checkpoint else "There is no checkpoint"


def _write_summary(folder: Path, data: dict[str, Any]) -> None:
    path = folder / SUMMARY
    try:
        path.write_text(json.dumps(finite(data), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(str(path), error) from error


def _silent() -> Console:
    return Console(file=open(os.devnull, "w"))


@contextmanager
def _noted_warnings(place: ThisRank) -> Iterator[None]:
    """fxpar's warnings are said by rank 0, each once; others are left to the rank's log."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    ours = [str(w.message) for w in caught if issubclass(w.category, FxparWarning)]
    for text in dict.fromkeys(ours):
        place.say(f"warning: {text}", "yellow")
    for other in caught:
        if not issubclass(other.category, FxparWarning):
            sys.stderr.write(warnings.formatwarning(other.message, other.category, other.filename, other.lineno))
