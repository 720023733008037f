"""Ways to call a forward whose loss is outside: structures, several calls, autograd's rules, buffers, errors."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.errors import SecondDerivativeError
from fxpar.lowering import lower_forward
from fxpar.runtime.plain import PlainRunner
from fxpar.tracer import capture_forward
from tests.captured import Counter, Norms
from tests.forwards import Outcome, Several, case, error, gathered, local_params, on_ranks, token_mean, truth


# ------------------------------------------------------------------------------------------------ ways to call it
def single(model: nn.Module, *args: Any, **options: Any) -> tuple[PlainRunner, dict[str, Tensor], dict[str, Tensor]]:
    """A runner for one rank, and the tensors to run it on."""
    program = lower_forward(capture_forward(model, args, **options), "dp1")
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    return PlainRunner(program, 0, {}), params, {name: b.clone() for name, b in model.named_buffers()}


def collect(into: dict[str, Tensor]) -> Any:
    """Adds gradients up, as `.grad` does."""

    def add(grads: dict[str, Tensor]) -> None:
        for fqn, grad in grads.items():
            into[fqn] = into[fqn] + grad if fqn in into else grad

    return add


def test_structure_of_the_result():
    model = Several().double()
    x = torch.randn(5, 6, dtype=torch.float64)
    runner, params, buffers = single(model, x)
    other = torch.randn(9, 6, dtype=torch.float64)
    found: dict[str, Tensor] = {}
    result = runner(params, buffers, (other,), seed=0, on_gradients=found.update)
    expected = model(other)
    assert result.keys() == expected.keys()
    assert (result["rows"], result["mode"], result["none"]) == (9, "all", None)
    assert result["pair"][1] is result["y"]
    assert torch.equal(result["best"], expected["best"])
    assert torch.equal(result["same"], other)
    assert not result["best"].requires_grad
    assert not result["same"].requires_grad
    loss = (result["y"] ** 2).sum() + result["pair"][0].sin().sum() + result["pair"][1].sum()
    loss.backward()
    ((expected["y"] ** 2).sum() + expected["pair"][0].sin().sum() + expected["y"].sum()).backward()
    assert found.keys() == {"into.weight", "into.bias", "out.weight", "out.bias"}  # nothing depends on the others
    assert error(found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}) <= 1e-12


def test_one_value_with_and_without_gradient():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.layer(x)
            return y, y.detach()

    model, x = Both(), torch.randn(5, 6)
    runner, params, buffers = single(model, x)
    found: dict[str, Tensor] = {}
    y, fixed = runner(params, buffers, (x,), seed=0, on_gradients=found.update)
    assert y.requires_grad
    assert not fixed.requires_grad
    y.sum().backward()
    assert found["layer.bias"].tolist() == [5.0] * 4


def test_a_value_without_a_gradient_of_the_loss():
    """Parameters behind values that the loss does not use have no gradient, as in autograd."""
    model = Several().double()
    x = torch.randn(5, 6, dtype=torch.float64)
    runner, params, buffers = single(model, x)
    found: dict[str, Tensor] = {}
    runner(params, buffers, (x,), seed=0, on_gradients=found.update)["pair"][0].sum().backward()
    model(x)["pair"][0].sum().backward()
    assert set(found) == {name for name, p in model.named_parameters() if p.grad is not None}
    assert "out.weight" not in found
    assert error(found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}) <= 1e-12


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "cp2"])
def test_gradients_of_arguments(strategy):
    """They are a replica's own, whole on each of its ranks."""
    model = Several().double()
    x, extra = (torch.randn(6, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    graph = capture_forward(model, (x,), {"extra": [extra]})
    assert [i.fqn for i in graph.inputs if i.kind == "batch"] == ["x", "extra.0"]
    model(x, extra=[extra])["y"].square().sum().backward()
    params = {name: p.detach() for name, p in model.named_parameters()}
    program = lower_forward(graph, strategy)

    def work(runner: PlainRunner, rank: int, replica: int) -> tuple[Tensor, ...]:
        mine = [t.detach().clone().requires_grad_() for t in (x, extra)]
        local = local_params(program, params, rank)
        result = runner(local, {}, (mine[0],), {"extra": [mine[1]]}, seed=0, on_gradients=lambda grads: None)
        result["y"].square().sum().backward()
        return mine[0].grad, mine[1].grad

    for found in on_ranks(program, work):
        assert error(dict(enumerate(found)), {0: x.grad, 1: extra.grad}) <= 1e-10


def test_forwards_before_backwards():
    """Two forwards, then one backward through both, then others in the other order."""
    one = case("llama")
    runner = PlainRunner(lower_forward(one.graph, "dp1"), 0, {})
    for order in ("together", "backwards"):
        found: dict[str, Tensor] = {}
        losses = [
            token_mean(
                runner(one.params, one.buffers, (), {k: b[k] for k in one.keys}, seed=0, on_gradients=collect(found)), b
            )
            for b in one.batches
        ]
        if order == "together":
            sum(losses).backward()
        else:
            losses[1].backward()
            losses[0].backward()
        assert error(found, truth("llama", 2)[1]) <= 1e-10


def test_backward_twice():
    model, x = Several(), torch.randn(5, 6)
    runner, params, buffers = single(model, x)
    found: dict[str, Tensor] = {}
    loss = runner(params, buffers, (x,), seed=0, on_gradients=collect(found))["y"].sum()
    loss.backward(retain_graph=True)
    once = {fqn: grad.clone() for fqn, grad in found.items()}
    loss.backward()
    assert all(torch.equal(found[fqn], 2 * once[fqn]) for fqn in once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_second_derivatives_are_refused():
    model, x = Several(), torch.randn(5, 6, requires_grad=True)
    runner, params, buffers = single(model, x)
    y = runner(params, buffers, (x,), seed=0, on_gradients=lambda grads: None)["y"]
    with pytest.raises(SecondDerivativeError):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_writing_into_a_value():
    """Like eager: fine where the backward does not need it, torch's error where it does."""
    model = Several().double()
    x = torch.randn(5, 6, dtype=torch.float64)
    runner, params, buffers = single(model, x)
    found: dict[str, Tensor] = {}
    y = runner(params, buffers, (x,), seed=0, on_gradients=found.update)["y"]
    y.mul_(3.0).sum().backward()
    (model(x)["y"] * 3.0).sum().backward()
    assert error({"": found["out.weight"]}, {"": model.out.weight.grad}) <= 1e-12
    h = runner(params, buffers, (x,), seed=0, on_gradients=found.update)["pair"][0]
    h.mul_(2.0)
    with pytest.raises(RuntimeError, match="inplace operation"):
        h.sum().backward()


class Box:
    """What autograd keeps of a saved tensor, to see when it lets go."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_saved_values_are_freed():
    one = case("llama")
    runner = PlainRunner(lower_forward(one.graph, "dp1"), 0, {})
    boxes: list[weakref.ref[Box]] = []

    def pack(tensor: Tensor) -> Box:
        box = Box(tensor)
        boxes.append(weakref.ref(box))
        return box

    batch = {k: one.batches[0][k] for k in one.keys}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        result = runner(one.params, one.buffers, (), batch, seed=0, on_gradients=lambda grads: None)
    kept = [box() for box in boxes]
    assert len(kept) > 20
    assert all(kept)
    del kept
    result.sum().backward()
    gc.collect()
    assert not any(box() for box in boxes)
    assert result.grad_fn is not None


def test_without_gradient():
    """`torch.no_grad()` with either graph, and a graph that was captured without gradients."""
    one = case("llama")
    batch = one.batches[0]
    arguments = {k: batch[k] for k in one.keys}
    plain = capture_forward(one.model, (), arguments, gradients=False)
    assert {o.kind for o in plain.outputs} == {"value"}
    program = lower_forward(plain, "tp2")
    assert program.backward.is_empty
    expected = one.model(**arguments).detach()

    def work(runner: PlainRunner, rank: int, replica: int) -> Tensor:
        local = local_params(runner.program, one.params, rank)
        return runner(local, one.buffers, (), arguments, seed=0, on_gradients=lambda grads: None)

    for value in on_ranks(program, work):
        assert not value.requires_grad
        assert error({"": value}, {"": expected}) <= 1e-10
    runner = PlainRunner(lower_forward(one.graph, "dp1"), 0, {})
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            value = runner(one.params, one.buffers, (), arguments, seed=0, on_gradients=lambda grads: None)
        assert not value.requires_grad
        assert error({"": value}, {"": expected}) <= 1e-10


@pytest.mark.parametrize("build", [Norms, Counter])
@pytest.mark.parametrize("strategy", ["dp1", "dp2", "tp2"])
def test_buffers(build, strategy):
    """New values are handed out, the mean over replicas; the backward reads the old ones even if these are written."""
    torch.manual_seed(0)
    model = build().double()
    batches = [{"x": torch.randn(8, 6, dtype=torch.float64)} for _ in range(2)]
    graph = capture_forward(model, (batches[0]["x"],))
    params = {name: p.detach() for name, p in model.named_parameters()}
    start = {name: b.clone() for name, b in model.named_buffers()}
    program = lower_forward(graph, strategy)
    replicas = program.strategy.degree("dp")

    def work(runner: PlainRunner, rank: int, replica: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        held = {name: b.clone() for name, b in start.items()}
        grads: dict[str, Tensor] = {}
        y = runner(
            local_params(program, params, rank),
            held,
            (batches[replica]["x"],),
            seed=0,
            on_gradients=grads.update,
            on_buffers=lambda new: [held[name].copy_(value) for name, value in new.items()],
        )
        y.square().sum().backward()
        return held, grads

    ends = []
    for batch in batches[:replicas]:
        for name, buffer in model.named_buffers():
            buffer.copy_(start[name])
        model(batch["x"]).square().sum().backward()
        ends.append({name: b.clone() for name, b in model.named_buffers()})
    done = on_ranks(program, work)
    for held, _ in done:
        for name, value in held.items():
            mean = torch.stack([end[name].double() for end in ends]).mean(0)
            torch.testing.assert_close(value.double(), mean, rtol=1e-10, atol=1e-12)
    outcomes = [Outcome(grads=grads) for _, grads in done]
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert error(gathered(program, outcomes), expected) <= 1e-10


class Gain(nn.Module):
    """The backward reads a buffer that the forward has set anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("gain", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * self.gain
        self.gain = self.gain * 3.0
        return y


def test_the_backward_reads_the_old_buffer():
    model, x = Gain(), torch.randn(5, 6)
    runner, params, buffers = single(model, x)
    found: dict[str, Tensor] = {}
    y = runner(
        params,
        buffers,
        (x,),
        seed=0,
        on_gradients=found.update,
        on_buffers=lambda new: buffers["gain"].copy_(new["gain"]),
    )
    assert buffers["gain"].tolist() == [6.0] * 4
    y.sum().backward()
    assert found["layer.bias"].tolist() == [10.0] * 4


class Fixed(Gain):
    """The buffer is only read."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gain


def test_a_buffer_that_somebody_writes_before_the_backward():
    model, x = Fixed(), torch.randn(5, 6)
    runner, params, buffers = single(model, x)
    y = runner(params, buffers, (x,), seed=0, on_gradients=lambda grads: None)
    buffers["gain"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_autocast_is_part_of_the_graph():
    """Run inside autocast, the graph does not cast again; captured inside, it casts as eager does."""
    model, x = Several(), torch.randn(5, 6)
    arguments = {"seed": 0, "on_gradients": lambda grads: None}
    with torch.autocast("cpu", torch.bfloat16):
        runner, params, buffers = single(model, x)
        torch.testing.assert_close(runner(params, buffers, (x,), **arguments)["y"], model(x)["y"])
    runner, params, buffers = single(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        found = runner(params, buffers, (x,), **arguments)["y"]
    torch.testing.assert_close(found, model(x)["y"])


@pytest.mark.slow
@pytest.mark.nightly
def test_inductor():
    model = Several().double()
    x = torch.randn(5, 6, dtype=torch.float64)
    program = lower_forward(capture_forward(model, (x,)), "dp1")
    params = {name: p.detach() for name, p in model.named_parameters()}
    runner = PlainRunner(program, 0, {}, compile="inductor")
    for rows in (5, 9):
        x = torch.randn(rows, 6, dtype=torch.float64)
        found: dict[str, Tensor] = {}
        result = runner(params, {}, (x,), seed=0, on_gradients=found.update)
        result["y"].square().sum().backward()
        model.zero_grad()
        model(x)["y"].square().sum().backward()
        assert result["rows"] == rows
        assert error({"": found["out.weight"]}, {"": model.out.weight.grad}) <= 1e-10
