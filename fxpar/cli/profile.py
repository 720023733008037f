"""`fxpar profile`: what this machine sustains, as a cluster file, measured by one rank or by several."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from fxpar.cli.console import Work, print_table, stderr_console, stdout_console, working
from fxpar.cli.request import check_replaced, replace_output, to_json, write_output
from fxpar.cli.run_commands import ProfileRequest
from fxpar.cost.cluster import VERSION, ClusterSpec
from fxpar.cost.device import Device
from fxpar.errors import LauncherSignalError, ProfileError
from fxpar.profiling.kept import Kept
from fxpar.profiling.points import Point, measured
from fxpar.profiling.record import described, device_name, file_content
from fxpar.profiling.trials import device_series, link_series
from fxpar.train.launch import run_ranks
from fxpar.train.preflight import RANKS_PER_CORE
from fxpar.train.rank import choose_device

_COUNTED = re.compile(r"\d+ of \d+ \(round ")  # what `measured` says, beside warnings


def words_of(request: ProfileRequest) -> list[str]:
    """The same as words."""
    values = {f"--{one.name}": getattr(request, one.name) for one in fields(request) if one.name != "force"}
    return [*(word for pair in values.items() for word in map(str, pair)), *(["--force"] if request.force else [])]


def run_profile(request: ProfileRequest) -> None:
    """Do it. Raises OutputError, ProfileError, DeviceCountError, and what `run_ranks` raises."""
    try:
        _run(request)
    except KeyboardInterrupt:
        if advice := _how_to_go_on(request):
            stderr_console().print(advice, markup=False)
        raise


def _how_to_go_on(request: ProfileRequest) -> str:
    """With what was measured so far, if anything was; one rank says it."""
    part = _part_of(request) if os.environ.get("RANK", "0") == "0" else None
    return f"The same command goes on from {part}" if part is not None and part.is_file() else ""


def _part_of(request: ProfileRequest) -> Path | None:
    return None if request.output == "-" else Path(f"{request.output}.part")


def _run(request: ProfileRequest) -> None:
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not is_rank or os.environ["RANK"] == "0":
        check_target(request)
    if is_rank:
        record(_as_rank)(request)
    elif request.ranks > 1:
        check_ranks(request.ranks)
        logs = Path(tempfile.mkdtemp(prefix="fxpar-profile-"))  # stays if a rank fails: its error names the log
        begun = f"measuring with {request.ranks} ranks"
        with working(begun) as work, followed(logs, lambda text: work.update(f"{begun}: {text}")):
            try:
                said = run_ranks(request.ranks, ("-m", "fxpar", "profile", *words_of(request)), logs, quiet=True)
            except LauncherSignalError as error:
                raise LauncherSignalError(error.name, _how_to_go_on(request)) from None
        write_output("-", said)
        shutil.rmtree(logs, ignore_errors=True)
    else:
        _measure(request, choose_device(request.device, 0, 1), 0, 1, 1)


@contextmanager
def followed(logs: Path, say: Callable[[str], object], every_s: float = 0.2) -> Iterator[None]:
    """Meanwhile `say` which measurement rank 0 has last written to stderr, below the folder `logs` of `run_ranks`."""
    over = threading.Event()

    def follow() -> None:
        while not over.wait(every_s):
            for path in logs.glob("ranks_*/attempt_0/0/stderr.log"):
                whole = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
                counted = [line for line in whole if _COUNTED.match(line)]
                if counted:
                    say(counted[-1])

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def check_ranks(ranks: int) -> None:
    """Raises ProfileError for more ranks than this machine can mean."""
    most = max(RANKS_PER_CORE * (os.cpu_count() or 1), torch.cuda.device_count())
    if ranks > most:
        why = f"measures nothing with {ranks:,} ranks on {os.cpu_count()} cores"
        raise ProfileError(why, f"Start no more than {most}, or more nodes with torchrun")


def check_target(request: ProfileRequest) -> None:
    """Find out before anything is measured that the file cannot be written. Raises OutputError, ProfileError."""
    check_replaced(request.output)
    if request.output == "-":
        return
    if not request.output.endswith(".json"):
        raise ProfileError(f"writes JSON, and {request.output!r} would be read as TOML", "Call it FILE.json")
    if Path(request.output).exists() and not request.force:
        raise ProfileError(
            f"finds a file {request.output!r}", "Replace it with --force, or choose another name with -o"
        )


def _as_rank(request: ProfileRequest) -> None:
    rank, world, local_rank = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if request.ranks not in (1, world):
        raise ProfileError(f"runs on the {world} ranks of a launcher, not on {request.ranks}", "Leave out --ranks")
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % local_world:
        raise ProfileError(
            f"needs equal nodes, and {world} ranks are not a multiple of {local_world}", "Start as many on each node"
        )
    device = choose_device(request.device, local_rank, local_world)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        _measure(request, device, rank, world, world // local_world)
    finally:
        dist.destroy_process_group()


def _measure(request: ProfileRequest, device: torch.device, rank: int, world: int, nodes: int) -> None:
    torch.set_num_threads(request.threads)
    part = None if rank else _part_of(request)
    known = Kept.of(part, _settings(request, device, world, nodes))
    if part is not None and known.seconds:
        words = f"going on where it was interrupted: {known.path} has {len(known.seconds)} measurements"
        stdout_console().print(words, markup=False)
    with working("measuring") if rank == 0 else nullcontext(Work("")) as work:
        series = device_series(device) + (link_series(device, nodes) if world > 1 else [])

        def say(text: str) -> None:
            work.update(f"measuring {text}")
            if rank == 0 and world > 1 and not stderr_console().is_terminal:  # the launcher reads it, or a log keeps it
                stderr_console().print(text, markup=False)

        points = measured(series, device, request.seconds, say, known)
    if rank:
        return
    cluster = described(points, device, nodes, world, request.threads)
    replace_output(request.output, to_json(file_content(cluster, points, device, request.threads)))
    known.done()
    if request.output != "-":
        console = stdout_console()
        console.print(f"{request.output}: {world} x {device_name(device)}", markup=False)
        print_table(console, ("", "sustained", ""), shown(cluster, points))


def _settings(request: ProfileRequest, device: torch.device, world: int, nodes: int) -> dict[str, Any]:
    """With others a measurement begins anew."""
    asked = {"seconds": request.seconds, "threads": request.threads, "ranks": world, "nodes": nodes}
    return {"version": VERSION, "device": device_name(device), "torch": torch.__version__, **asked}


def shown(cluster: ClusterSpec, points: Sequence[Point]) -> list[tuple[str, str, str]]:
    """(what, how much, how it was found) for people."""
    device, levels = cluster.sustained, {point.of for point in points}
    widest = {point.of: point.size for point in points if point.kind == "product"}
    rows = [
        (
            f"products in {name}",
            " and ".join(_tflops(half, name) for half in (device, device.in_backward)) + " TFLOP/s",
            f"forward and backward, matrices up to {width:,} wide",
        )
        for name, width in widest.items()
    ]
    rows.append(("memory", f"{device.memory_gb_per_s:g} GB/s", f"copies and sums; {device.memory_gb:g} GB of it"))
    rows.append(("launch", f"{device.launch_us:g} µs", "per kernel"))
    for level, where in (("intra", "inside a node"), ("inter", "between nodes")):
        how = "messages, all-reduces, all-gathers" if level in levels else "usual figure, not measured"
        rows.append((f"links {where}", f"{getattr(cluster, f'{level}_gb_per_s'):g} GB/s", how))
    how = "per collective and message" if levels & {"intra", "inter"} else "usual figure, not measured"
    rows.append(("latency", f"{cluster.latency_us:g} µs", how))
    return rows


def _tflops(device: Device, name: str) -> str:
    return f"{float(device.flops_per_s(getattr(torch, name))) / 1e12:.4g}"
