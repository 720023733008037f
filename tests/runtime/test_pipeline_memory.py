"""What a pipeline keeps of a micro-batch, and until when."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxpar.checking import local_params
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.lowering import lower
from fxpar.runtime.binding import bind_here
from fxpar.runtime.channels import ThreadChannels, ThreadWorld
from fxpar.runtime.micro import MicroRun, local_batch
from fxpar.runtime.stage import BoundStage
from fxpar.torch_api.threaded import run_threads
from fxpar.transport.groups import ProcessGroups
from tests.captured import llama


@pytest.fixture(autouse=True)
def young_objects():
    """Collections look at what a test makes, and not at all that was there before, which takes a second each time."""
    llama(layers=4)
    gc.freeze()
    yield
    gc.unfreeze()


class Tracked(TorchDispatchMode):
    """Bytes of the tensors that were made under it and are alive, by storage, and the most there have been."""

    def __init__(self) -> None:
        super().__init__()
        model = llama(layers=4)
        held = (*model.params.values(), *model.buffers.values(), *(t for b in model.batches for t in b.values()))
        self.held = {tensor.untyped_storage().data_ptr() for tensor in held}
        self.alive: dict[int, weakref.ref] = {}
        self.history: list[int] = []

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage.data_ptr() not in self.held:
                    self.alive[storage.data_ptr()] = weakref.ref(storage)
        self.history.append(self.nbytes)
        return out

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes() for ref in list(self.alive.values()) if (s := ref()) is not None)


def bound_stages(strategy: str) -> list[BoundStage]:
    """Stages of a rank each, that need no process group."""
    model = llama(layers=4)
    program = lower(model.graph, strategy)
    assert isinstance(program, PipelineGraph)
    stages = [BoundStage(stage, 0, {}) for stage in program.stages]
    for rank, stage in enumerate(stages):
        stage.prepare(local_params(program, model.params, rank), model.buffers)
    return stages


def forward(stages: list[BoundStage], micro_batch: int) -> list[dict[str, Tensor]]:
    sent: dict[str, Tensor] = {}
    found = []
    for stage in stages:
        batch = local_batch(stage.program, llama(layers=4).batches[micro_batch], 0)
        sent = stage.forward(micro_batch, batch, sent, MicroRun(dict, 1.0))
        found.append(sent)
    return found


@pytest.mark.parametrize("halves", [False, True])
def test_saved_values_are_freed_as_the_backward_runs(halves):
    """What is alive never grows by all gradients on top of all that was saved, and at the end only gradients are."""
    stages = bound_stages("pp2")
    parts = ["input_part", "weight_part"] if halves else ["backward"]
    gradients = [sum(s.local.numel({}) * 8 for s in stage.program.given("grad").values()) for stage in stages]
    with Tracked() as mode:
        forward(stages, 0)
        gc.collect()
        saved, mode.history = mode.nbytes, []
        sent = {}
        for part in parts:
            sent |= stages[1].backward(0, {}, part)
        assert max(mode.history) < saved + gradients[1]
        for part in parts:
            stages[0].backward(0, sent, part)
        sent.clear()
        gc.collect()
        assert sum(gradients) <= mode.nbytes <= sum(gradients) + 64  # and the loss
        for stage in stages:
            stage.reduce()
    gc.collect()
    assert mode.nbytes == 0


def test_only_what_the_backward_reads_is_kept():
    """What the first stage sends is of no use for its own backward: it goes as soon as it is sent."""
    stages = bound_stages("pp2")
    batch = llama(layers=4).batches[0]
    sent = stages[0].forward(0, local_batch(stages[0].program, batch, 0), {}, MicroRun(dict, 1.0))
    (value,) = map(weakref.ref, sent.values())
    sent.clear()
    gc.collect()
    assert value() is None


def peak(strategy: str, micro_batches: int) -> list[int]:
    """The most bytes alive on each rank."""
    model = llama(layers=4)
    program = lower(model.graph, strategy)
    world = ThreadWorld()

    def work(rank: int) -> int:
        bound = bind_here(program, ProcessGroups(), channels=ThreadChannels(world, rank))
        bound.prepare(local_params(program, model.params, rank), model.buffers)
        with Tracked() as mode:
            bound.run_all([MicroRun(lambda: model.batches[2], 1.0) for _ in range(micro_batches)])
            most = max(mode.history)
            bound.finish()
            mode.history.clear()
        # Threads emulate the broadcast of the loss: it holds every rank's tensor until the last rank has left it.
        dist.barrier()
        gc.collect()
        assert mode.nbytes == 0, "something of the group is still there"
        return most

    return run_threads(program.strategy.world, work)


def test_schedules_bound_what_is_kept():
    """1F1B keeps as many micro-batches as there are stages behind, GPipe all of them; nothing is left behind."""
    few, many = peak("pp2", 4), peak("pp2", 12)
    for a, b in zip(few, many, strict=True):
        assert b <= 1.02 * a
    everything = peak("pp2+gpipe", 12)
    assert everything[1] > 3 * many[1]
    assert max(peak("pp2+zb_h1", 12)) < 1.3 * max(many)
