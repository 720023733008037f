"""A rank that dies or stops in the middle of a mini-batch: the others end in time and name it."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fxpar.errors import PeerLostError
from fxpar.runtime.forked import reserved_port
from fxpar.torch_api.fork import forget_parent_threads
from tests.runtime.hot import parallel, precompile, sequences, small

VICTIM, TIMEOUT_S = 2, 8.0


def rank_main(rank: int, port: int, folder: Path, where: str, how: signal.Signals) -> None:
    forget_parent_threads()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=4, timeout=timedelta(seconds=TIMEOUT_S))
    model = parallel(small, monitor=True, timeout_s=TIMEOUT_S, resident=[])
    model.train_step(sequences(1))
    engine = model._session().engine
    if rank == VICTIM:
        hit_during(engine, where, how)
    begun, ended_by = time.perf_counter(), None
    try:
        model.train_step(sequences(2))
        found = {"error": "none"}
    except PeerLostError as error:
        found, ended_by = {"error": str(error), "ranks": list(error.ranks), "kind": error.kind}, error
    except Exception as error:
        found, ended_by = {"error": f"{type(error).__name__}: {error}"}, error
    engine.watcher.stop(ended_by)  # as at the end of any process
    found["seconds"] = time.perf_counter() - begun
    (folder / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)


def hit_during(engine, where: str, how: signal.Signals) -> None:
    """Let this process be struck when its second switch (or run of a graph) has begun."""
    if where == "switch":
        compiled = engine.switching._compiled
        switch = list(compiled.values())[1]
        switch.compiled.copies.append(lambda: os.kill(os.getpid(), how))  # sends are posted, receives are awaited
    else:
        bound = engine.bound["dp2.tp2+sp"]
        run = bound.run

        def struck(*args, **kwargs):
            run(*args, **kwargs)
            os.kill(os.getpid(), how)

        bound.run = struck


@pytest.mark.parametrize(("where", "how"), [("graph", signal.SIGKILL), ("switch", signal.SIGSTOP)], ids=str)
def test_the_others_name_the_rank_that_is_gone(tmp_path, where, how):
    precompile(small)
    torch.set_num_threads(1)
    context = mp.get_context("fork")
    survivors = [r for r in range(4) if r != VICTIM]
    with reserved_port() as port:
        ranks = [context.Process(target=rank_main, args=(r, port, tmp_path, where, how)) for r in range(4)]
        for process in ranks:
            process.start()
        for rank in survivors:
            ranks[rank].join(60)
    alive = [rank for rank in survivors if ranks[rank].is_alive()]
    for process in ranks:
        process.kill()
        process.join(5)
    assert not alive, f"ranks {alive} hang"
    for rank in survivors:
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found.get("ranks") == [VICTIM], found
        assert "step 2" in found["error"]
        assert found["seconds"] < 2 * TIMEOUT_S + 10
