"""`python -m fxpar.train.worker FOLDER`: one local rank that `fxpar.train.launch` started.

The folder holds `job.json`; `stepping` appears in it with the first step, `stop` when the rank is to end after its
step; rank 0 leaves `outcome.json`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

JOB, STEPPING, STOP, OUTCOME = "job.json", "stepping", "stop", "outcome.json"


@record
def main() -> None:
    """Errors are left where torch's elastic launcher looks for them."""
    from fxpar.train.rank import Job, run_rank
    from fxpar.train.stop import StopRequest

    folder = Path(sys.argv[1])
    end_with_parent()
    job = Job.from_json(json.loads((folder / JOB).read_text()))
    with StopRequest(folder / STOP, folder / STEPPING) as stop:
        outcome = run_rank(job, stop)
    if os.environ["RANK"] == "0":
        (folder / OUTCOME).write_text(json.dumps(outcome.to_json()))


def end_with_parent(interval_s: float = 1.0) -> None:
    """End this process when the launcher is gone: killed, it cannot end its ranks."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(interval_s)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="fxpar-parent").start()


if __name__ == "__main__":
    main()
