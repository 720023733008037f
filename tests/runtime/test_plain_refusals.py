"""Plain calls that are refused: other arguments, changed weights, padding that would be seen."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.errors import CallMismatchError, PadError, PositionsError, StaleWeightsError
from fxpar.lowering import lower_forward
from fxpar.runtime.plain import PlainRunner
from fxpar.tracer import capture_forward
from tests.forwards import Several, error, local_params, on_ranks
from tests.runtime.test_plain_calls import single


def test_arguments_that_were_not_captured():
    model, x = Several(), torch.randn(5, 6)
    runner, params, buffers = single(model, x)
    call = functools.partial(runner, params, buffers, seed=0, on_gradients=lambda grads: None)
    for args, kwargs, words in [
        ((x.double(),), {}, "x is torch.float64"),
        ((torch.randn(5, 7),), {}, r"x is torch.float32 \[5, 7\]"),
        ((x, "other"), {}, "nested"),
        ((), {"x": x}, "nested"),
        (("text",), {}, "x is a str"),
        ((x.clone().requires_grad_(),), {}, "without a gradient"),
    ]:
        with pytest.raises(CallMismatchError, match=words):
            call(args, kwargs)
    runner, params, buffers = single(model, x, "fast")
    with pytest.raises(CallMismatchError, match="'slow' instead of 'fast'"):
        runner(params, buffers, (x, "slow"), seed=0, on_gradients=lambda grads: None)


def test_a_size_that_the_capture_does_not_hold_for():
    class Numbered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Embedding(8, 4)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.positions(torch.arange(input_ids.shape[1]))

    runner, params, buffers = single(Numbered(), torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(
        CallMismatchError, match=r"the sequence length, is 9, .* holds for 1 to 8, because .* at T=5: a"
    ):
        runner(params, buffers, (torch.zeros(1, 9, dtype=torch.long),), seed=0, on_gradients=lambda grads: None)
    with pytest.raises(
        CallMismatchError, match=r"the sequence length, is 0, .* holds for 1 to 8: leave such calls out"
    ):
        runner(params, buffers, (torch.zeros(1, 0, dtype=torch.long),), seed=0, on_gradients=lambda grads: None)


@pytest.mark.parametrize(("captured", "called"), [(6, 20), (20, 6)])
def test_images_in_any_number_whatever_kernel_torch_takes_for_them(captured, called):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)).double()
    runner, params, buffers = single(model, torch.randn(captured, 3, 8, 8, dtype=torch.float64))
    assert [(dim.minimum, dim.maximum) for dim in runner.program.dims] == [(1, None)]
    images, found = torch.randn(called, 3, 8, 8, dtype=torch.float64), {}
    runner(params, buffers, (images,), seed=0, on_gradients=found.update).square().sum().backward()
    model(images).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[name], parameter.grad, rtol=1e-12)


def test_weights_that_changed():
    model, x = Several(), torch.randn(5, 6)
    runner, params, buffers = single(model, x)
    version = [0]
    result = runner(params, buffers, (x,), seed=0, on_gradients=lambda grads: None, weights=lambda: version[0])
    version[0] += 1
    with pytest.raises(StaleWeightsError):
        result["y"].sum().backward()


def test_positions_at_which_transformers_would_begin_a_document():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=31, **sizes)).double()
    ids, documents = torch.randint(31, (1, 7)), torch.tensor([[0, 1, 2, 0, 1, 2, 3]])

    def logits(positions, **more):
        kwargs = {"input_ids": ids, "position_ids": positions, "use_cache": False, **more}
        runner = PlainRunner(lower_forward(capture_forward(model, (), kwargs), "dp1"), 0, {})
        tensors = dict(model.named_parameters()), dict(model.named_buffers())
        found = runner(*tensors, (), kwargs, seed=0, on_gradients=lambda grads: None).logits
        assert torch.allclose(found, model(**kwargs).logits, rtol=1e-12)

    logits(documents)
    logits(torch.arange(5, 12)[None])
    logits(documents + 3, attention_mask=torch.ones_like(ids))
    with pytest.raises(PositionsError, match="position_ids of row 0 go from 5 to 3 at token 3"):
        logits(documents + 3)


class Pooled(nn.Module):
    """What it returns of the tokens would change with padding."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.embedding, self.head = how, nn.Embedding(31, 16), nn.Linear(16, 31)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.head(self.embedding(input_ids))
        if self.how == "twice":
            return torch.cat([x, x], 1)
        if self.how == "flat":
            return x.flatten(0, 1)
        return {"mean": x.mean(), "last": x[:, -1], "tail": x[:, -2:], "scalar": x.sum()}[self.how]


@pytest.mark.parametrize("how", ["mean", "last", "tail", "scalar", "twice", "flat"])
def test_padding_that_would_be_seen(how):
    model = Pooled(how).double()
    ids = torch.randint(31, (2, 8))
    graph = capture_forward(model, (ids,))
    program = lower_forward(graph, "cp2")
    params = {name: p.detach() for name, p in model.named_parameters()}

    def work(runner: PlainRunner, rank: int, replica: int) -> Any:
        local = local_params(program, params, rank)
        value = runner(local, {}, (ids,), seed=0, on_gradients=lambda grads: None)
        with pytest.raises(PadError):
            runner(local, {}, (ids[:, :7],), seed=0, on_gradients=lambda grads: None)
        return value

    for value in on_ranks(program, work):
        assert error({"": value}, {"": model(ids)}) <= 1e-10
