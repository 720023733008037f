"""Models on the meta device: which values `parallelize` gives them, in any world."""

from __future__ import annotations

import warnings

import pytest
import torch
from scipy import stats
from torch import nn

import fxpar
from fxpar.errors import FxparWarning, ParallelizeError
from fxpar.runtime.forked import run_forked
from tests import warm  # noqa: F401


class Meta(nn.Module):
    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(131, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 131)
        if own:
            self.scale = nn.Parameter(torch.ones(16))

    def forward(self, input_ids):
        hidden = self.norm(self.embed(input_ids))
        return self.head(hidden * self.scale if hasattr(self, "scale") else hidden)


def opened_on_meta(world, strategies, seed=11, home=None, make=Meta, initializer=None):
    """Whole values of a model on the meta device after `parallelize`, from every rank of `world`."""

    def work(rank):
        with torch.device("meta"):
            model = make()
        torch.manual_seed(seed + 100 * rank)  # rank 0's counts
        fxpar.parallelize(model, strategies=strategies, monitor=False, home=home, initializer=initializer)
        model.train_step([torch.arange(30)])
        return {name: p.detach().full_tensor() for name, p in model.named_parameters()}

    return run_forked(world, work)


def test_a_model_on_the_meta_device_has_the_same_weights_in_every_world():
    """Whatever ranks, strategies and home layout; another seed gives others. Their distributions are torch's."""
    want, others = opened_on_meta(1, {64: "dp1"})[0], opened_on_meta(3, {16: "dp3", 64: "tp3"})
    others += opened_on_meta(2, {64: "tp2"}, home={"head.*": "R", "embed.weight": "S(1)"})
    for found in others:
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], value) for name, value in want.items())
    assert not torch.equal(opened_on_meta(1, {64: "dp1"}, seed=12)[0]["embed.weight"], want["embed.weight"])
    assert stats.kstest(want["embed.weight"].flatten().numpy(), "norm").pvalue > 1e-3
    assert stats.kstest(want["head.weight"].flatten().numpy(), stats.uniform(-0.25, 0.5).cdf).pvalue > 1e-3
    assert want["head.bias"].abs().max() <= 0.25
    assert (want["norm.weight"] == 1).all()
    assert (want["norm.bias"] == 0).all()


def test_whole_weights_on_the_meta_device_are_those_of_one_device():
    torch.manual_seed(11)
    want = Meta().state_dict()

    def work(rank):
        with torch.device("meta"):
            model = Meta()
        torch.manual_seed(11)
        fxpar.parallelize(model, strategies={64: "tp2"}, monitor=False, meta_init="whole")
        return {name: p.detach().full_tensor() for name, p in model.named_parameters()}

    for found in run_forked(2, work):
        assert all(torch.equal(found[name], value) for name, value in want.items())
    with pytest.raises(ParallelizeError, match="meta_init='hole' is none of slice, whole; did you mean 'whole'"):
        fxpar.parallelize(Meta(), strategies={64: "dp1"}, meta_init="hole")


def test_what_nothing_fills_on_the_meta_device_is_named():
    def work(rank):
        with torch.device("meta"):
            own = Meta(own=True)
        expected = pytest.warns(FxparWarning, match="no reset_parameters fills scale")
        with expected if rank == 0 else warnings.catch_warnings(action="error"):  # one rank says it
            fxpar.parallelize(own, strategies={64: "tp2"}, monitor=False)
        return own.scale.full_tensor().abs().max().item()

    assert run_forked(2, work) == [0, 0]


@pytest.mark.parametrize("meta_init", ["slice", "whole"])
def test_what_has_its_values_keeps_them(meta_init):
    """A trunk that was trained before, under a new head; a module of which one parameter is new."""

    def work(rank):
        torch.manual_seed(3)
        model = Meta(own=True)
        with torch.no_grad():
            for number, param in enumerate(model.parameters()):
                param.fill_(1.0 + number)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.head = nn.Linear(16, 131, device="meta")
        model.norm.bias = nn.Parameter(torch.empty(16, device="meta"))
        with warnings.catch_warnings(action="error"):  # all that is new is filled
            fxpar.parallelize(model, strategies={64: "tp2"}, monitor=False, meta_init=meta_init)
        after = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
        return {name: torch.equal(after[name], value) for name, value in before.items()}, after

    for same, after in run_forked(2, work):
        kept = {"embed.weight", "norm.weight", "scale"}
        assert {name for name, equal in same.items() if equal} == kept
        assert (after["norm.bias"] == 0).all()
        assert 0.1 < after["head.weight"].abs().max() <= 0.25


def test_an_initializer_fills_a_tied_model_on_the_meta_device():
    """A shared weight has the values of the last module that fills it; `to_empty` keeps them. What needs whole tensors,
    or puts others in their place, has the same values everywhere too.
    """

    def make():
        model = Meta()
        model.head.weight = model.embed.weight
        return model

    def fill(module):
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.Embedding):
                parameter.fill_(7.0)
            elif name == "bias" and isinstance(module, nn.Linear):
                module.bias = nn.Parameter(torch.randn(len(parameter)))
            elif parameter.dim() == 1:
                parameter[::2].normal_()
            else:
                nn.init.orthogonal_(parameter)

    def work(rank):
        with torch.device("meta"):
            model = make()
        torch.manual_seed(7)
        fxpar.parallelize(model, strategies={64: "tp2"}, monitor=False, initializer=fill)
        assert model.to_empty(device="cpu") is model
        assert model.head.weight is model.embed.weight
        return {name: p.detach().full_tensor() for name, p in model.named_parameters()}

    found = run_forked(2, work)
    assert len(found[0]) == 4
    alone = opened_on_meta(1, {64: "dp1"}, 7, make=make, initializer=fill)
    for other in (*found, *alone):
        assert all(torch.equal(other[name], value) for name, value in found[0].items())
    weight = found[0]["embed.weight"]
    assert torch.allclose(weight.T @ weight, torch.eye(16), atol=1e-5)
    assert (found[0]["norm.weight"] == 0).sum() == 8
    assert stats.kstest(found[0]["head.bias"].numpy(), "norm").pvalue > 1e-3
