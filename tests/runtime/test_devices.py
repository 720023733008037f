"""Whatever a program makes is made where its parameters are. The meta device stands for a GPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: TID251 - registers the backend "fake"
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxpar.batching.documents import cut_in_documents, mark_documents
from fxpar.errors import ParallelizeError
from fxpar.ir.graph import TOKEN_NUMBERS, LogicalGraph
from fxpar.lowering import lower
from fxpar.models import load
from fxpar.passes.pack_documents import packed_if_proved
from fxpar.runtime.bound import bind
from fxpar.runtime.micro import as_one_sequence, local_batch
from fxpar.runtime.opening import require_backend
from fxpar.runtime.padding import pad
from fxpar.tracer import capture
from fxpar.transport.groups import ProcessGroups
from tests.repeat import thinned

ELSEWHERE = torch.device("meta")


class Devices(TorchDispatchMode):
    """Where the results of all ops lie."""

    def __init__(self) -> None:
        super().__init__()
        self.strays: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(x, Tensor) and x.device != ELSEWHERE for x in tree_leaves(result)):
            self.strays.add(str(func))
        return result


@functools.cache
def captured(model: str) -> tuple[LogicalGraph, Any]:
    options = {"llama": {"layers": "1"}, "gpt": {"layers": "1", "dropout": "0.1"}, "vit": {"layers": "1"}}
    loaded = load(model, options=options.get(model, {}))
    return packed_if_proved(capture(loaded.model, loaded.loss_fn, loaded.example_batch))[0], loaded


def _moved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(ELSEWHERE) for name, value in tensors.items()}


@pytest.mark.parametrize(
    ("backends", "ranks", "is_refused"),
    [
        ("cpu:gloo,cuda:gloo", 2, True),
        ("cpu:gloo,cuda:nccl", 2, False),
        ("cpu:gloo,cuda:gloo", 1, False),
    ],
)
def test_gloo_sends_no_gpu_tensors(backends, ranks, is_refused, monkeypatch):
    """Told before anything is sent: gloo ends the process there."""
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    require_backend(torch.device("cpu"))
    if not is_refused:
        require_backend(torch.device("cuda"))
        return
    with pytest.raises(ParallelizeError, match="sends GPU tensors with gloo"):
        require_backend(torch.device("cuda"))


def test_what_a_check_adds_to_a_row_lies_where_the_row_does():
    logical, loaded = captured("gpt")
    row = {key: value.to(ELSEWHERE) for key, value in loaded.batches[0].items() if key in ("input_ids", "labels")}
    made = cut_in_documents(logical.inputs, as_one_sequence(logical.inputs, row, 3))
    assert {"document_ids", TOKEN_NUMBERS} <= made.keys()
    assert {value.device for value in made.values()} == {ELSEWHERE}


STRATEGIES, MODELS = ["dp1+remat", "dp2+zero3", "tp2+sp", "cp2"], ["llama", "gpt", "mlp", "vit"]
# Llama under each strategy, each other model under one that has more to it there: dropout, rows, images.
EVERY_RUN = [*itertools.product(["llama"], STRATEGIES), ("gpt", "dp1+remat"), ("mlp", "dp2+zero3"), ("vit", "cp2")]


@pytest.mark.parametrize(("model", "strategy"), thinned(itertools.product(MODELS, STRATEGIES), EVERY_RUN))
def test_nothing_is_made_elsewhere(model, strategy):
    logical, loaded = captured(model)
    program = lower(logical, strategy)
    row = mark_documents(logical.inputs, as_one_sequence(logical.inputs, loaded.batches[0], 0))
    batch = local_batch(program, pad(program, row), 0)
    params = loaded.params()
    mine = {
        info.fqn: stored.dist.take(params[info.fqn], 0)
        for info, stored in zip(program.inputs, program.stored_inputs, strict=True)
        if info.kind == "param"
    }
    params, buffers, batch = (_moved(tensors) for tensors in (mine, loaded.buffers(), batch))
    dist.init_process_group("fake", rank=0, world_size=program.strategy.world)
    try:
        runner = bind(program, 0, ProcessGroups().names(program.strategy.mesh, program.axes()))
        with Devices() as devices:
            runner.prepare(params, buffers)
            table = dict(enumerate(runner.fill({"batch": batch, "scale": 1.0, "seed": 1})))
            sums = runner.call("body", runner.gather("body", {"input": table}))
            runner.call("epilogue", runner.gather("epilogue", {"body": sums}))
    finally:
        dist.destroy_process_group()
    assert devices.strays == set()
