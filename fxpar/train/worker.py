"""`python -m fxpar.train.worker FOLDER LAUNCHER`: one local rank that a launcher (its process) started.

The folder holds `job.json`; `stepping` appears in it behind the first step, `stop` when the rank is to end after its
step; rank 0 leaves `outcome.json`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from fxpar.train.process import collect_seldom, end_process

JOB, STEPPING, STOP, OUTCOME = "job.json", "stepping", "stop", "outcome.json"


def main() -> None:
    """Errors are left where torch's elastic launcher looks for them."""
    collect_seldom()
    end_with_launcher(int(sys.argv[2]))  # before torch is imported: that alone takes seconds
    from torch.distributed.elastic.multiprocessing.errors import record

    record(_run)(Path(sys.argv[1]))
    end_process(0)


def _run(folder: Path) -> None:
    from fxpar.train.rank import Job, run_rank
    from fxpar.train.stop import StopRequest

    job = Job.from_json(json.loads((folder / JOB).read_text()))
    with StopRequest(folder / STOP, folder / STEPPING) as stop:
        outcome = run_rank(job, stop)
    if os.environ["RANK"] == "0":
        (folder / OUTCOME).write_text(json.dumps(outcome.to_json()))


def end_with_launcher(launcher: int, interval_s: float = 1.0) -> None:
    """End this process when its launcher (a process number) is gone: killed, it cannot end its ranks."""

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(interval_s)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="fxpar-launcher").start()


if __name__ == "__main__":
    main()
