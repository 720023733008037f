"""Loss and gradients in bf16 with islands: near the truth, nearer than all in bf16, equal to eager code with casts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar.precision import Precision, with_precision
from fxpar.tracer import capture
from tests import captured
from tests.precision.runs import BF16, EVERY_RUN, EVERYTHING_LOW, MODELS, arguments, case, gradients, l2_error, together
from tests.repeat import thinned

# bf16 rounds by up to 2^-9 (0.2 %). A gradient goes through some tens of roundings, most of which average out over the
# tokens: 1 % on these models, 2 % for the worst parameter. 5 % leaves room for other kernels, and is far below what a
# missing or doubled term makes.
GRADIENT = 0.05
LOSS = 2e-3
# Gradients that are zero but for rounding (a key bias without rotary positions) have no relative error.
NOISE = 1e-3


@pytest.mark.parametrize("spec", thinned(MODELS, EVERY_RUN))
def test_near_the_truth(spec):
    loss, grads = case(spec).run(case(spec).bf16)
    true_loss, truth = case(spec).truth
    assert l2_error(loss, true_loss) < LOSS
    largest = max(float(g.norm()) for g in truth.values())
    counted = [fqn for fqn, g in truth.items() if float(g.norm()) > NOISE * largest]
    assert len(counted) > 0.8 * len(truth)
    errors = {fqn: l2_error(grads[fqn], truth[fqn]) for fqn in counted}
    assert max(errors.values()) < GRADIENT, max(errors.items(), key=lambda item: item[1])
    assert 1e-4 < l2_error(together(grads), together(truth)) < 0.6 * GRADIENT


@pytest.mark.parametrize(
    "spec", thinned(["llama", "gpt", "hf:llama", "hf:gpt2", "hf:gemma2", "hf:qwen2"], ["llama", "gpt", "hf:gemma2"])
)
def test_islands_bring_it_nearer(spec):
    """The loss by a factor (its sum over tokens is not rounded), gradients by what the norms' share of rounding is."""
    found = case(spec)
    true_loss, truth = found.truth
    loss, grads = found.run(found.bf16)
    low_loss, low_grads = found.run(with_precision(found.graph, EVERYTHING_LOW))
    assert 4 * l2_error(loss, true_loss) < l2_error(low_loss, true_loss)
    assert l2_error(together(grads), together(truth)) < 0.95 * l2_error(together(low_grads), together(truth))


def test_a_wide_island_is_exact_where_all_is_an_island():
    """fp32 inside of a model captured in fp64: errors are those of fp32."""
    found = captured.llama()
    graph = with_precision(found.graph, Precision(torch.float32))
    with torch.no_grad():
        results = graph.gm(*arguments(graph, found.params, found.buffers, found.batches[0]))
        truth = found.graph.gm(*arguments(found.graph, found.params, found.buffers, found.batches[0]))
    errors = [l2_error(a, b) for a, b in zip(results, truth, strict=True)]
    assert 1e-9 < max(errors) < 1e-5


def test_the_gradient_of_an_embedding_does_not_stall():
    """2,000 equal tokens: added up in bf16, the gradient would be off by 30 %."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 16), nn.Linear(16, 3))
    T = 2000
    batch = {"x": torch.zeros(T, dtype=torch.int64), "y": torch.randn(T, 3) + 1.0}
    graph = capture(model, captured.squared, batch)
    low = with_precision(graph, BF16)
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    with torch.no_grad():
        value = gradients(low, list(low.gm(*arguments(low, params, buffers, batch))))["0.weight"]
        truth = gradients(graph, list(graph.gm(*arguments(graph, params, buffers, batch))))["0.weight"]
    assert value.dtype == torch.bfloat16
    assert l2_error(value, truth) < 0.01


# ------------------------------------------------------------------------------------------------------------ eager
class Small(nn.Module):
    """Without biases: eager code adds them inside of the product, without the rounding in between."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(6, 16, bias=False), nn.LayerNorm(16), nn.Linear(16, 4, bias=False)
        self.scores = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.into(x))
        return self.out(h * self.scores(h).softmax(-1))


class SmallWithCasts(Small):
    """What one would write by hand: bf16 weights, norm and softmax in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        low = torch.bfloat16
        h = self.norm(F.linear(x.to(low), self.into.weight).float()).to(low)
        weights = F.linear(h, self.scores.weight).float().softmax(-1).to(low)
        return F.linear(h * weights, self.out.weight)


def test_equals_eager_code_with_the_same_casts_bit_by_bit():
    torch.manual_seed(0)
    model, eager = Small(), SmallWithCasts()
    eager.load_state_dict(model.state_dict())
    for name in ("into", "scores", "out"):
        getattr(eager, name).to(torch.bfloat16)
    (batch,) = captured.vectors(6, 4, 9)
    graph = with_precision(capture(model, captured.squared, batch), BF16)
    with torch.no_grad():
        results = list(graph.gm(*arguments(graph, dict(model.named_parameters()), {}, batch)))
    loss = captured.squared(eager, batch)
    loss.backward()
    assert torch.equal(results[0], loss.detach())
    for fqn, grad in gradients(graph, results).items():
        assert torch.equal(grad, eager.get_parameter(fqn).grad), fqn


def test_agrees_with_a_host_model_in_bf16():
    """Transformers' own Llama in bf16 has fp32 norms and softmax inside; it rounds its norm weights, too."""
    found = case("hf:llama")
    batch, model = found.loaded.example_batch, found.loaded.model
    rounded = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    low = with_precision(found.graph, BF16)
    with torch.no_grad():
        results = list(low.gm(*arguments(low, rounded, found.loaded.buffers(), batch)))
        truth = list(found.graph.gm(*arguments(found.graph, rounded, found.loaded.buffers(), batch)))
    host = {name: p.clone().requires_grad_() for name, p in rounded.items()}

    class Called(nn.Module):
        """The model with the rounded parameters, under the same loss function."""

        def forward(self, input_ids: Tensor) -> Tensor:
            arguments = {"input_ids": input_ids, "use_cache": False}
            return torch.func.functional_call(model, host, (), arguments).logits

    loss = found.loaded.loss_fn(Called(), batch)
    grads = dict(zip(host, torch.autograd.grad(loss, list(host.values())), strict=True))
    exact = gradients(found.graph, truth)
    graph_error = l2_error(together(gradients(low, results)), together(exact))
    host_error = l2_error(together({fqn: grads[fqn] for fqn in exact}), together(exact))
    between = l2_error(together(gradients(low, results)), together({fqn: grads[fqn] for fqn in exact}))
    assert l2_error(results[0], loss.detach()) < 1e-3
    assert between < 0.02
    assert graph_error < 1.1 * host_error
