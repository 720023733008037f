"""Worlds of forked gloo ranks that train as a user's script does, while some are killed; what the others said.

`python -m tests.monitor.kills 100` kills a hundred at random and prints a table.
"""

from __future__ import annotations

import atexit
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from fxpar.runtime.forked import reserved_port
from fxpar.torch_api.fork import forget_parent_threads
from tests.runtime.hot import adamw, parallel, precompile, sequences, small

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


@dataclass(frozen=True)
class Survivor:
    """How a rank ended that nobody killed: exit status (None: it did not), seconds since the kill, what it printed."""

    rank: int
    status: int | None
    seconds: float
    printed: str

    @property
    def named(self) -> set[int]:
        """The ranks that its last error blames."""
        errors = [line for line in self.printed.splitlines() if re.match(r"[\w.]+(Error|Exception): ", line)]
        found = re.match(r"fxpar\.errors\.PeerLostError: ranks? ([\d, ]*\d)", errors[-1] if errors else "")
        return set(map(int, found[1].split(", "))) if found else set()


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
        self.model = parallel(small, strategies=strategies, monitor=True, timeout_s=TIMEOUT_S, resident=[])
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


# What ranks do when one is struck, and within how many seconds of its beginning.
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


def run(kill: Kill, folder: Path) -> list[Survivor]:
    """Train in `kill.world` processes until the victims are struck; the others, by rank. `prepare` comes before."""
    folder.mkdir(parents=True, exist_ok=True)
    context = mp.get_context("fork")
    with reserved_port() as port:
        ranks = [context.Process(target=_main, args=(rank, kill, folder, port)) for rank in range(kill.world)]
        for process in ranks:
            process.start()
        struck, waiting = folder / "struck", set(range(kill.world)) - set(kill.victims)
        while not struck.exists() and all(process.exitcode is None for process in ranks):
            time.sleep(0.02)
        assert struck.exists(), "a rank ended before: " + "".join(file.read_text() for file in folder.glob("*.txt"))
        at, ended = float(struck.read_text() or time.monotonic()), {}
        while waiting and time.monotonic() < at + LIMIT_S:
            for rank in [rank for rank in waiting if ranks[rank].exitcode is not None]:
                waiting.discard(rank)
                ended[rank] = time.monotonic() - at
            time.sleep(0.02)
    statuses = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    texts = {rank: (folder / f"{rank}.txt").read_text() for rank in range(kill.world)}
    survivors = [rank for rank in range(kill.world) if rank not in kill.victims]
    return [
        Survivor(rank, statuses[rank] if rank in ended else None, ended.get(rank, LIMIT_S), texts[rank])
        for rank in survivors
    ]


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
        dist.barrier()  # a rank that is lost while torch still connects is torch's to tell
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
    """What the first victim calls when its phase begins: it takes the others with it."""
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


def draw(count: int, seed: int, world: int = 3, victims: int = 1) -> list[Kill]:
    """`count` kills at random moments, all phases equally often."""
    chance, names = random.Random(seed), list(PHASES)
    kills = []
    for i in range(count):
        phase = names[i % len(names)]
        struck = tuple(chance.sample(range(world), victims))
        kills.append(Kill(phase, struck, chance.uniform(0, PHASES[phase][1]), world))
    return kills


def prepare(world: int) -> None:
    """Capture and lower once, before processes are forked."""
    torch.set_num_threads(1)
    precompile(small, {limit: text.format(n=world) for limit, text in STRATEGIES.items()})


def table(results: list[tuple[Kill, list[Survivor]]]) -> str:
    """Per phase: kills, survivors, how many of those named the victims (some of several), the slowest's seconds."""
    lines = [f"{'phase':12} {'kills':>5} {'survivors':>9} {'right':>5} {'slowest':>8}"]
    for phase in dict.fromkeys(kill.phase for kill, _ in results):
        mine = [(kill, ranks) for kill, ranks in results if kill.phase == phase]
        all_ranks = [(kill, rank) for kill, ranks in mine for rank in ranks]
        right = sum(bool(rank.named) and rank.named <= set(kill.victims) for kill, rank in all_ranks)
        slowest = max(rank.seconds for _, rank in all_ranks)
        lines.append(f"{phase:12} {len(mine):5} {len(all_ranks):9} {right:5} {slowest:6.1f} s")
    return "\n".join(lines)


def main(count: int, seed: int, world: int, victims: int, how: str) -> None:
    prepare(world)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for i, kill in enumerate(draw(count, seed, world, victims)):
            kill = replace(kill, abrupt=how == "abrupt", how=signal.SIGSTOP if how == "stop" else signal.SIGKILL)
            results.append((kill, run(kill, Path(folder) / str(i))))
            print(
                i,
                kill.phase,
                kill.victims,
                [(r.rank, r.named, round(r.seconds, 1)) for r in results[-1][1]],
                flush=True,
            )
            for rank in results[-1][1]:
                if not rank.named or not rank.named <= set(kill.victims) or rank.status != 1:
                    print(f"kill {i}, {kill}: rank {rank.rank} ended with {rank.status} after {rank.seconds:.1f} s")
                    print(rank.printed[-2000:], flush=True)
    print(table(results))


if __name__ == "__main__":
    count, seed, world, victims, how = (sys.argv[1:] + ["100", "0", "3", "1", "kill"][len(sys.argv) - 1 :])[:5]
    main(int(count), int(seed), int(world), int(victims), how)
