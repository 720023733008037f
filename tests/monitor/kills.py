"""Worlds of forked gloo ranks that train as a user's script does, while some are killed; what the others said."""

from __future__ import annotations

import atexit
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fxpar.checkpoint import load_checkpoint, save_checkpoint
from fxpar.torch_api.fork import forget_parent_threads
from tests.runtime.hot import adamw, make_llama, parallel, precompile, sequences

TIMEOUT_S = 8.0
LIMIT_S = 20.0
ENDLESS = 10_000
STRATEGIES = {16: "dp{n}", 512: "tp{n}"}


@dataclass(frozen=True)
class Kill:
    """`victims` get `how` so many seconds after `phase` began on them."""

    phase: str
    victims: tuple[int, ...]
    delay_s: float
    world: int = 3
    how: signal.Signals = signal.SIGKILL
    abrupt: bool = False  # survivors end on their error without a word, as by os._exit


@dataclass
class Rank:
    """What the script of one rank has at hand; `begin` is called when the phase to be hit begins."""

    rank: int
    world: int
    folder: Path
    begin: Callable[[], None]
    model: Any = None
    optimizer: Any = None

    def open(self) -> None:
        strategies = {limit: text.format(n=self.world) for limit, text in STRATEGIES.items()}
        self.model = parallel(make_llama, strategies=strategies, monitor=True, timeout_s=TIMEOUT_S, resident=[])
        self.optimizer = adamw(self.model)

    def step(self, seed: int = 1) -> None:
        self.model.train_step(sequences(seed, (5, 40, 9)))
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def start(my: Rank) -> None:
    my.begin()
    my.open()
    for i in range(ENDLESS):
        my.step(i)


def first_step(my: Rank) -> None:
    my.open()
    my.begin()
    for i in range(ENDLESS):
        my.step(i)


def step(my: Rank) -> None:
    my.open()
    my.step()
    my.begin()
    for i in range(ENDLESS):
        my.step(i)


def inside(point: str) -> Callable[[Rank], None]:
    """Killed in the middle of a part of the step, where the others already wait for the victim."""

    def script(my: Rank) -> None:
        my.open()
        my.step()
        engine = my.model.fxpar_session.engine
        owner, name = {
            "forward": (engine.bound[f"tp{my.world}"], "run_all"),
            "switch": (engine.switching, "to"),
            "reduction": (engine.gradients, "add"),
        }[point]
        work = getattr(owner, name)

        def struck(*args: Any, **kwargs: Any) -> Any:
            my.begin()
            return work(*args, **kwargs)

        setattr(owner, name, struck)
        for i in range(ENDLESS):
            my.step(i)

    return script


def save(my: Rank) -> None:
    my.open()
    my.step()
    my.begin()
    for i in range(ENDLESS):
        save_checkpoint(my.folder / "checkpoints", i, my.model, my.optimizer, {"step": i})


def async_save(my: Rank) -> None:
    my.open()
    my.step()
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
    my.begin()
    for i in range(ENDLESS):
        state = get_model_state_dict(my.model)
        done = dcp.async_save(state, checkpoint_id=my.folder / f"async-{i % 2}", process_group=group)
        my.step(i)
        done.result()


def load(my: Rank) -> None:
    my.open()
    my.step()
    path = save_checkpoint(my.folder / "checkpoints", 1, my.model, my.optimizer, {"step": 1})
    my.begin()
    for _ in range(ENDLESS):
        load_checkpoint(path, my.model, my.optimizer)


def evaluate(my: Rank) -> None:
    my.open()
    my.begin()
    for i in range(ENDLESS):
        my.model.evaluate(sequences(i, (5, 40, 9)))


def plain(my: Rank) -> None:
    my.open()
    my.begin()
    for i in range(ENDLESS):
        ids = sequences(i, (12,))[0][None]
        my.model(ids, torch.arange(12)[None]).square().sum().backward()


def idle(my: Rank) -> None:
    my.open()
    my.step()
    my.begin()
    for i in range(ENDLESS):
        time.sleep(0.5)
        my.step(i)


PHASES: dict[str, tuple[Callable[[Rank], None], float]] = {
    "start": (start, 0.8),
    "first step": (first_step, 0.3),
    "step": (step, 0.3),
    "forward": (inside("forward"), 0.02),
    "switch": (inside("switch"), 0.01),
    "reduction": (inside("reduction"), 0.01),
    "save": (save, 0.5),
    "async save": (async_save, 0.5),
    "load": (load, 0.3),
    "evaluate": (evaluate, 0.2),
    "plain call": (plain, 0.3),
    "idle": (idle, 0.4),
}


def run(kill: Kill, folder: Path) -> list[dict[str, Any] | None]:
    """What each rank left, by rank: `{status, text, seconds}`, seconds from the kill; None for the killed ones."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("fork")
    ranks = [context.Process(target=_main, args=(rank, kill, folder, port)) for rank in range(kill.world)]
    began = time.monotonic()
    for process in ranks:
        process.start()
    struck = folder / "struck"
    while not struck.exists() and time.monotonic() - began < 60:
        time.sleep(0.02)
    end = time.monotonic() + LIMIT_S
    found: list[dict[str, Any] | None] = [None] * kill.world
    waiting = set(range(kill.world)) - set(kill.victims)
    at = float(struck.read_text() or time.monotonic()) if struck.exists() else began
    while waiting and time.monotonic() < end:
        for rank in sorted(waiting):
            code = ranks[rank].exitcode
            if code is not None:
                waiting.discard(rank)
                file = folder / f"{rank}.txt"
                found[rank] = {"status": code, "text": file.read_text(), "seconds": time.monotonic() - at}
        time.sleep(0.02)
    for rank in waiting:
        found[rank] = {"status": None, "text": "HANGS " + (folder / f"{rank}.txt").read_text(), "seconds": LIMIT_S}
    for process in ranks:
        process.kill()
        process.join()
    return found


def _main(rank: int, kill: Kill, folder: Path, port: int) -> None:
    """As a script under python: an error that nobody catches is printed, then what is due at exit runs."""
    forget_parent_threads()
    atexit._clear()
    output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    status = 0
    try:
        dist.init_process_group("gloo", rank=rank, world_size=kill.world, timeout=timedelta(seconds=TIMEOUT_S))
        PHASES[kill.phase][0](Rank(rank, kill.world, folder, _fuse(rank, kill, folder)))
    except BaseException as error:
        sys.last_value = error
        traceback.print_exc()
        status = 1
        if kill.abrupt:
            os._exit(status)
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status)


def _fuse(rank: int, kill: Kill, folder: Path) -> Callable[[], None]:
    lit: list[bool] = []

    (folder / f"{rank}.pid").write_text(str(os.getpid()))

    def strike() -> None:
        (folder / "struck").write_text(str(time.monotonic()))
        for victim in reversed(kill.victims):
            os.kill(int((folder / f"{victim}.pid").read_text()), kill.how)

    def begin() -> None:
        if rank != kill.victims[0] or lit:
            return
        lit.append(True)
        if kill.delay_s == 0:
            strike()
        timer = threading.Timer(kill.delay_s, strike)
        timer.daemon = True
        timer.start()

    return begin


def draw(count: int, seed: int, world: int = 3) -> list[Kill]:
    """`count` kills, all phases equally often."""
    chance = random.Random(seed)
    names = list(PHASES)
    kills = []
    for i in range(count):
        phase = names[i % len(names)]
        kills.append(Kill(phase, (chance.randrange(world),), chance.uniform(0, PHASES[phase][1]), world))
    return kills


def prepare(world: int) -> None:
    torch.set_num_threads(1)
    precompile(make_llama, {limit: text.format(n=world) for limit, text in STRATEGIES.items()})
