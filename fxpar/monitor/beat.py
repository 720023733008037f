"""What a rank writes about itself into the store, once per interval."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

RUN = "run"  # works, or waits for a peer
EXPLAIN = "explaining"  # an operation of it failed; it looks for the peer that is missing
LEFT = "left"  # ended because of another rank
FAILED = "failed"  # ended by an error of its own
DONE = "done"  # ended because its work is done
ENDED = (LEFT, FAILED, DONE)


@dataclass(frozen=True)
class Beat:
    """One heartbeat. Peers only see whether `count` and `progress` change: no clock is compared between machines."""

    rank: int
    count: int
    elapsed_s: float  # since the start of rank 0's monitor, by this rank's monotonic clock
    progress: int
    status: str
    phase: str
    where: str
    host: str
    pid: int
    door: str = ""  # address where others may try whether they reach this rank
    timed_out: bool = False  # an operation of this rank failed after its timeout, not because a peer closed
    knows: bool = False  # has read the verdict
    gone: Mapping[int, float] = field(default_factory=dict)  # ranks of this host that ended, and when it was seen
    unreachable: tuple[int, ...] | None = None  # ranks whose doors it tried in vain; None: it has not tried

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str | bytes) -> Beat:
        values: dict[str, Any] = json.loads(text)
        values["gone"] = {int(rank): at for rank, at in values["gone"].items()}
        if values["unreachable"] is not None:
            values["unreachable"] = tuple(values["unreachable"])
        return Beat(**values)
