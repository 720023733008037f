"""Which way each phase of a plan is carried out; decided from the plan alone, so all ranks agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fxpar.errors import ExecutionError, nearest
from fxpar.switch.collectives import Collective, find_collectives
from fxpar.switch.problem import SwitchProblem
from fxpar.transport.phases import TransferPhase

EXECUTIONS = ("p2p", "a2a", "all_gather", "auto")
COLLECTIVES_ONLY = ("threaded",)  # process groups without send and recv


def resolve(execution: str, device: torch.device, group: Any) -> str:
    """The execution meant by `execution`: "auto" becomes "p2p", "a2a" or "gather".

    "gather" is all-gathers where a step is nothing else, and p2p elsewhere. On the CPU p2p is better throughout:
    gloo's ring needs 2.3 times the CPU time of messages that are packed once for all peers (32 MB to 4 ranks).
    Raises ExecutionError.
    """
    if execution not in EXECUTIONS:
        raise ExecutionError(execution, f"is unknown{nearest(execution, EXECUTIONS) or '.'} Use one of {EXECUTIONS}")
    if execution != "auto":
        return execution
    if device.type != "cpu":
        return "gather"
    return "a2a" if dist.get_backend(group) in COLLECTIVES_ONLY else "p2p"


def choose(
    problem: SwitchProblem, table: np.ndarray, phase: TransferPhase, execution: str
) -> tuple[str, list[Collective]]:
    """How a phase runs ("p2p", "a2a" or "all_gather"), and its all-gathers. Raises ExecutionError."""
    if execution in ("p2p", "a2a"):
        return execution, []
    found = find_collectives(problem, table[phase.rows])
    covered = sum(len(one.transfers) for one in found)
    if covered == len(phase.rows) and all(one.kind == "all_gather" for one in found):
        return "all_gather", found
    if execution == "all_gather":
        raise ExecutionError(
            execution,
            f"step {phase.step} of the plan is not a set of equal all-gathers; use 'auto' or 'p2p'",
        )
    return "p2p", []
