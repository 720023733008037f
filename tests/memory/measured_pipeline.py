"""The true peak of a pipeline's rank over a whole group: every allocation of the process."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fxpar.checking import local_params
from fxpar.ir.pipeline_graph import PipelineGraph, position_of
from fxpar.runtime.binding import bind_here
from fxpar.runtime.channels import PendingMessage
from fxpar.runtime.micro import MicroRun, as_one_sequence
from fxpar.runtime.padding import pad
from fxpar.runtime.pipeline import BoundPipeline
from fxpar.transport.groups import ProcessGroups
from tests.captured import Captured
from tests.memory.measured import peak_bytes


class _Sent:
    """Work that is done when it is looked at for the second time: a message is on its way until the next one."""

    def __init__(self) -> None:
        self._looked = False

    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        before, self._looked = self._looked, True
        return before


class NoChannels:
    """Nobody at the other end: what is sent is forgotten, what is received are zeros."""

    def send(self, tensor: Tensor, to: int) -> PendingMessage:
        return _Sent()

    def receive(self, buffer: Tensor, source: int) -> PendingMessage:
        buffer.zero_()
        return _Sent()


def rank_bytes(captured: Captured, program: PipelineGraph, position: int, micro_batches: int) -> int:
    """Bytes at the peak of a group, above the level before it, on the first rank of a pipeline position. As the other
    ranks are not there, collectives leave their results as they are.
    """
    torch.set_num_threads(1)
    rank = next(rank for rank in program.mesh.ranks if position_of(program, rank) == position)
    dist.init_process_group("fake", rank=rank, world_size=program.strategy.world)
    try:
        bound = bind_here(program, ProcessGroups(), channels=NoChannels())
        assert isinstance(bound, BoundPipeline)
        params = local_params(program, captured.params, rank)
        _run(bound, captured, params, micro_batches)  # kernels allocate scratch that they keep, the first time
        return _run(bound, captured, params, micro_batches)
    finally:
        dist.destroy_process_group()


def _run(bound: BoundPipeline, captured: Captured, params: dict[str, Tensor], micro_batches: int) -> int:
    load = partial(_fresh, bound.program, captured)
    bound.prepare(params, captured.buffers)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        bound.run_all([MicroRun(load, 1.0) for _ in range(micro_batches)])
    bound.finish()
    return peak_bytes(profiler)


def _fresh(program: PipelineGraph, captured: Captured) -> dict[str, Tensor]:
    """A batch of its own for each micro-batch, as a loader makes it."""
    batch = as_one_sequence(program.inputs, captured.batches[0], 0)
    return {key: value.clone() for key, value in pad(program, batch).items()}
