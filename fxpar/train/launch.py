"""Local ranks by torch's elastic launcher: start them, forward Ctrl-C, and say in one sentence what went wrong."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import elastic_launch

import fxpar
from fxpar import errors
from fxpar.errors import LaunchError, LauncherSignalError, RankFailedError
from fxpar.monitor.verdict import TEXTS
from fxpar.torch_api.since_2_13 import launch_config
from fxpar.train.preflight import make_writable
from fxpar.train.rank import Job, Outcome
from fxpar.train.worker import JOB, OUTCOME, STEPPING, STOP

# Errors that name another rank as the cause, or a broken connection: another error, if there is one, caused them.
_CONSEQUENCES = (
    "PeerLostError",
    "ConnectionLostError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "RuntimeError",
    "SharedCaptureError",
)


def launch(job: Job, say: Callable[[str], None]) -> Outcome:
    """Run the job on local ranks, one process each, until they end. No restarts.

    Ctrl-C lets the ranks finish their step and save; before the first step is done, and the second time, it ends them
    at once (KeyboardInterrupt).
    Raises RankFailedError with the first error of a rank, LaunchError for one that died without, LauncherSignalError if
    this process was told to end (the ranks have been ended then).
    """
    logs = job.config.folder / "logs"
    make_writable(logs, job.config)
    with tempfile.TemporaryDirectory(prefix="fxpar-") as name:
        folder = Path(name)
        (folder / JOB).write_text(json.dumps(job.to_json()))
        with _interrupts(folder, say):
            run_ranks(job.config.world, ("-m", "fxpar.train.worker", str(folder), str(os.getpid())), logs)
        return Outcome(**json.loads((folder / OUTCOME).read_text()))


def run_ranks(world: int, words: Sequence[str], logs: Path, *, quiet: bool = False) -> str:
    """Run `python WORDS` as `world` ranks on this machine, with the environment of torchrun; what they write to stderr,
    and what other ranks than 0 print, goes below the folder `logs`. With `quiet` rank 0 prints nothing either: it is
    returned. Raises as `launch` does.
    """
    # Ranks must not write over the view of rank 0.
    redirects = {rank: Std.ALL if rank or quiet else Std.ERR for rank in range(world)}
    config = launch_config(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id="ranks",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",  # SIGINT is ours
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=redirects),
        shutdown_timeout=2,  # ranks that hang in a kernel are killed then
    )
    entry = elastic_launch(config, sys.executable)
    try:
        with _importable(), _quiet_launcher():
            entry(*words)
    except ChildFailedError as error:
        rank, failure = first_failure(error.failures)
        raise describe_failure(rank, failure, logs) from None
    except SignalException as error:
        raise LauncherSignalError(signal.Signals(error.sigval).name) from None
    if not quiet:
        return ""
    (printed,) = logs.glob("ranks_*/attempt_0/0/stdout.log")
    return printed.read_text(encoding="utf-8")


def first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The failure that caused the others: not one that the launcher or another rank's end caused, then the earliest."""
    verdicts = [message for kind, message, _ in map(error_of, failures.values()) if kind == "PeerLostError"]
    # The launcher kills a rank that hangs; the others say that it hung, not that it died.
    hung = bool(verdicts) and not any(TEXTS["died"].format(who="") in verdict for verdict in verdicts)
    ended_by_launcher = (-signal.SIGTERM, -signal.SIGINT, *((-signal.SIGKILL,) if hung else ()))

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int, int]:
        rank, failure = item
        if failure.exitcode in ended_by_launcher:
            level = 2
        else:
            level = 1 if error_of(failure)[0] in _CONSEQUENCES else 0
        return level, failure.timestamp, rank

    return min(failures.items(), key=order)


def error_of(failure: ProcessFailure) -> tuple[str, str, str]:
    """(class, message, traceback) that a rank left; empty texts if it left nothing."""
    found = failure.error_file_data.get("message")
    if not isinstance(found, dict):
        return "", "", ""
    kind, _, message = str(found.get("message", "")).partition(": ")
    return kind, message, str(found.get("extraInfo", {}).get("py_callstack", ""))


def log_of(rank: int, logs: Path) -> str:
    """The file of what a rank of the latest run wrote to stderr; empty if it wrote nothing."""
    found = max(logs.glob(f"ranks_*/attempt_0/{rank}/stderr.log"), key=lambda path: path.stat().st_ctime, default=None)
    return str(found) if found is not None and found.stat().st_size else ""


def describe_failure(rank: int, failure: ProcessFailure, logs: Path) -> RankFailedError | LaunchError:
    """The error to show for a rank that failed."""
    kind, message, trace = error_of(failure)
    if kind:
        return RankFailedError(rank, kind, message, trace, ours=hasattr(errors, kind))
    if failure.exitcode < 0:
        why = " (out of memory?)" if failure.exitcode == -signal.SIGKILL else ""
        return LaunchError(rank, f"was ended by {failure.signal_name()}{why}", log_of(rank, logs))
    return LaunchError(rank, f"ended with status {failure.exitcode}", log_of(rank, logs))


@contextmanager
def _importable() -> Iterator[None]:
    """Let the ranks import the fxpar that is running, wherever it was imported from."""
    before = os.environ.get("PYTHONPATH")
    root = str(Path(fxpar.__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = root if not before else f"{root}{os.pathsep}{before}"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """The launcher's own log lines say less than the error that is shown."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _interrupts(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """First SIGINT while ranks step: make the file that they look for. Before that, and the second time:
    KeyboardInterrupt, on which the launcher ends them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(number: int, frame: FrameType | None) -> None:
        if (folder / STOP).exists() or not (folder / STEPPING).exists():
            raise KeyboardInterrupt
        (folder / STOP).touch()
        say("stopping after this step; Ctrl-C again ends at once")

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
