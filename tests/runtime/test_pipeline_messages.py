"""What stages send each other: nothing writes into a tensor that is on its way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxpar.checking.driver as checking
from fxpar.ir.strategy_text import SCHEDULES
from fxpar.lowering import lower
from fxpar.runtime.channels import PendingMessage, ThreadChannels, ThreadWorld
from fxpar.runtime.micro import MicroRun
from fxpar.runtime.stage import BoundStage
from tests.captured import llama, squared, take, vectors
from tests.repeat import crossed
from tests.runtime.test_pipeline import compare
from tests.stages.models import odd, random_model


class Handed(nn.Module):
    """The gradient of `shift` is also what goes back to the first stage for `gain`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.gain, self.shift = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        gain = torch.tanh(self.gain)
        x = torch.tanh(self.layers[0](x))
        x = torch.tanh(self.layers[1](x)) * (gain + self.shift)
        return self.layers[2](x)


class LateChannels:
    """Like a slow network: what is sent is read when the receiver waits for it, and not before."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.world, self.rank = world, rank

    def send(self, tensor: Tensor, to: int) -> PendingMessage:
        self.world.of(self.rank, to).put(tensor)
        return _Sent()

    def receive(self, buffer: Tensor, source: int) -> PendingMessage:
        return ThreadChannels(self.world, self.rank).receive(buffer, source)


class _Sent:
    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        return False  # so that the sender keeps the tensor


@pytest.mark.filterwarnings("ignore::fxpar.errors.FxparWarning")  # some weights of random models do nothing
@pytest.mark.parametrize("strategy", ["pp2", "pp2+zb_h1", "dp2.pp2+zero3+gpipe"])
def test_a_gradient_that_comes_ready_made(strategy):
    """The first stage does nothing for it, but must add it up over micro-batches."""
    model, flags = random_model(4), "+cut(steps.5)"
    first, _ = lower(model.graph, f"pp2{flags}").stages
    assert first.taken("received_grad").keys() & {node.name for node in first.weight_part.results}
    compare(model, f"{strategy}{flags}")


@pytest.mark.parametrize(("schedule", "name"), crossed(SCHEDULES[:2] + SCHEDULES[3:], ["llama", "skips"]))
def test_what_is_on_its_way_is_left_alone(name, schedule, monkeypatch):
    """Nothing writes into a sent tensor before it is read."""
    monkeypatch.setattr(checking, "ThreadChannels", LateChannels)
    compare(llama(layers=4) if name == "llama" else odd(name), f"pp2+{schedule}")


@pytest.mark.parametrize("halves", [False, True])
def test_gradients_are_not_added_into_what_is_sent(halves):
    """The gradient of `shift` and what goes back to the first stage are one tensor."""
    torch.manual_seed(0)
    model = take(Handed(), squared, vectors(6, 6, 4, 8))
    compare(model, "pp2+zb_h1+cut(layers.1)" if halves else "pp2+cut(layers.1)")
    program = lower(model.graph, "pp2+cut(layers.1)")
    first, second = (BoundStage(stage, stage.mesh.offset, {}) for stage in program.stages)
    for stage in (first, second):
        stage.prepare(model.params, model.buffers)
    sent, run = {}, MicroRun(dict, 1.0)
    for i, batch in enumerate(model.batches):
        second.forward(i, batch, first.forward(i, batch, {}, run), run)
        for part in ("input_part", "weight_part") if halves else ("backward",):
            for fqn, value in second.backward(i, {}, part).items():
                sent[i, fqn] = value, value.clone()
    assert len(sent) == 4
    assert all(torch.equal(value, before) for value, before in sent.values())
