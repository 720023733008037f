"""`Switch`: carries out a SwitchPlan on one rank, compiled once and run in every mini-batch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fxpar.errors import ExecutionError
from fxpar.schedule.mini_batch import STAGING_BYTES
from fxpar.switch import AnySwitchPlan
from fxpar.transport.compiled import CompiledSwitch, Compiler, SwitchCounts, TransportOptions
from fxpar.transport.executions import resolve
from fxpar.transport.fingerprint import compare_fingerprints
from fxpar.transport.groups import ProcessGroups
from fxpar.transport.holding import Holding, Located
from fxpar.transport.staging import Staging, staging_on
from fxpar.transport.wire import PhaseOptions, run_pipeline


@dataclass(frozen=True)
class SwitchReport:
    """One run on one rank. On a GPU `wall_ms` is the time that the host needed to start it."""

    wall_ms: float
    sent_bytes: int
    received_bytes: int
    copied_bytes: int  # from the rank's own tensors
    skipped_bytes: int  # held and needed at the same place: nothing to do


class Switch:
    """Moves tensors from the layouts of `sources` to that of `target`, as `plan` says.

    plan: made for the layouts of `sources` (the first one, the others as further holders) and of `target`, in the
        dtypes of `target`, which are those on the wire. A source in another dtype is cast when it is packed.
    target: its tensors are written; padding is not touched.
    group: process group whose rank r is rank r of the plan; None: the default one.
    execution: "p2p", "a2a", "all_gather", or "auto": p2p; on GPUs all-gathers where a step is nothing else.
    staging_bytes: bound on the memory that messages are packed into and received in.
    checked: compare fingerprints in every run, and a checksum of every slice.
    add: what arrives is added to the target; so is what is copied at home. What lies at the same address in source
        and target is left as it is. Not for relayed plans.
    merge: one copy for equal slices of tensors at equal distances.
    bucketed: tensors come one bucket after the other even if staging holds all of them, for who waits for `arrived`.
    staging: memory shared with other switches that never run at the same time.
    process_groups: shared with other switches, within `group`.
    timeout_s: how long to wait for a transfer (None: as the process group does); on a GPU the host then waits, too.
    device: where the tensors lie; needed on GPUs if some ranks hold nothing.
    name: how errors call it; else "switch A -> B".

    Construct and run the same switches in the same order on all ranks of `group`.
    Raises HoldingError, ExecutionError; `run` raises FingerprintError, TransferError, ChecksumError.
    """

    def __init__(
        self,
        plan: AnySwitchPlan,
        rank: int,
        sources: Sequence[Holding],
        target: Holding,
        *,
        group: Any = None,
        execution: str = "auto",
        staging_bytes: int = STAGING_BYTES,
        checked: bool = False,
        add: bool = False,
        merge: bool = True,
        bucketed: bool = False,
        timeout_s: float | None = None,
        staging: Staging | None = None,
        process_groups: ProcessGroups | None = None,
        device: torch.device | str | None = None,
        name: str = "",
    ) -> None:
        if add and plan.steps > 1:
            raise ExecutionError(execution, "a relayed plan cannot add; plan the switch with planner 'hotspa'")
        device = torch.device(device) if device is not None else device_of((target, *sources))
        options = TransportOptions(resolve(execution, device, group), staging_bytes, checked, add, merge, bucketed)
        self.plan, self.rank, self.options = plan, rank, options
        self.name = name or f"switch {plan.problem.source} -> {plan.problem.target}"
        world = dist.get_world_size(group)
        if plan.problem.world > world:
            raise ExecutionError(
                execution, f"the plan is for {plan.problem.world} ranks, the process group has {world}"
            )
        timeout = timedelta(seconds=timeout_s) if timeout_s is not None else None
        self._wire = PhaseOptions(self.name, world, group, timeout, grouped=device.type == "cuda")
        located = [Located(holding, rank) for holding in sources]
        compiler = Compiler(plan, located, Located(target, rank), options, self.name)
        staging = staging_on(device, staging)
        groups = process_groups or ProcessGroups(timeout_s, within=group)
        self.compiled: CompiledSwitch = compiler.compile(self._wire, groups, staging)
        self._stream = SideStream(device)
        dtypes = [param.dtype for param in target.layout.params.values()]  # the plan knows their sizes only
        self._fingerprint = hashlib.sha256(f"{plan.fingerprint} {options} {dtypes}".encode()).digest()[:8]
        self._compared = False

    @property
    def counts(self) -> SwitchCounts:
        """Bytes and copies of every run on this rank."""
        return self.compiled.counts

    @torch.no_grad()
    def run(self, arrived: Callable[[Collection[str]], object] = lambda _: None) -> SwitchReport:
        """Carry it out; on a GPU the current stream waits for it, the host does not. `arrived` is called with the
        tensors that are complete (there, or queued on a GPU): first those of which nothing travels, then others as they
        come, in about the order of the plan.
        """
        begun = time.perf_counter()
        if not self._compared or self.options.checked:
            compare_fingerprints(self.name, self._fingerprint, self._wire, self._stream.device)
            self._compared = True
        arriving = self.compiled.arriving
        late = {fqn for names in arriving for fqn in names}

        def copy_at_home(number: int) -> None:
            if number == min(1, len(arriving)):  # beside the first phase
                for task in self.compiled.copies:
                    task()
                arrived([fqn for fqn in self.plan.problem.tensors if fqn not in late])

        with self._stream:
            for copy, original in self.compiled.snapshots:
                copy.copy_(original)
            run_pipeline(self.compiled.phases, copy_at_home, lambda number: arrived(arriving[number]))
        counts = self.compiled.counts
        return SwitchReport(
            (time.perf_counter() - begun) * 1e3,
            counts.sent_bytes,
            counts.received_bytes,
            counts.copied_bytes,
            counts.skipped_bytes,
        )


class SideStream:
    """A context in which work is queued beside the current stream, which waits for it at the end; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._context: Any = nullcontext()

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            self._context = torch.cuda.stream(self._stream)
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)


def device_of(holdings: Sequence[Holding]) -> torch.device:
    """Where the tensors lie; the CPU if there are none."""
    for holding in holdings:
        for tensor in holding.tensors.values():
            return tensor.device
    return torch.device("cpu")
