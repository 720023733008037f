"""The parameters of a parallel module are those of its store, or an error says which one is not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call

import fxpar
from fxpar.errors import (
    ChangedParameterError,
    FxparWarning,
    GradientHookError,
    ParallelizeError,
    StaleOptimizerError,
)
from tests.runtime.hot import World

IDS = torch.arange(6)


class Tied(nn.Module):
    """Two names of one weight, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gain, self.head = nn.Embedding(8, 4), nn.Parameter(torch.ones(4)), nn.Linear(4, 8)
        self.head.weight = self.embed.weight
        self.gain.requires_grad_(False)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids) * self.gain)


def halved(model: nn.Module) -> dict[str, torch.Tensor]:
    return {fqn: value.detach() / 2 for fqn, value in model.state_dict().items()}


def untie(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(torch.ones(8, 4))


CHANGES = {
    "gain": lambda model: model.load_state_dict(halved(model), assign=True),
    "head.weight": untie,
    "head.bias": lambda model: model.head.register_parameter("bias", None),
    "scale": lambda model: model.register_parameter("scale", nn.Parameter(torch.ones(4))),
}
WORLD = World(1, lambda: None)


def parallel() -> nn.Module:
    return fxpar.parallelize(Tied(), strategies={16: "dp1"}, monitor=False)


@WORLD.case
def replaced(rank: int) -> None:
    for fqn, change in CHANGES.items():
        model = parallel()
        change(model)
        for use in (model.train_step, model.evaluate):
            with pytest.raises(ChangedParameterError, match=f"parameter {fqn} is another one .*param.copy_"):
                use([IDS])
        with pytest.raises(ChangedParameterError, match=f"parameter {fqn} is another one"):
            model(IDS[None])
    model = parallel()
    model.head.bias.data = model.head.bias.data.double()
    with pytest.raises(ChangedParameterError, match=r"parameter head\.bias is torch\.float64, unlike"):
        model(IDS[None])
    model = parallel()
    with pytest.raises(ChangedParameterError, match="parameter gain"):
        functional_call(model, {"gain": torch.zeros(4)}, (IDS[None],))


def test_a_replaced_added_or_removed_parameter_is_named():
    replaced()


@WORLD.case
def frozen(rank: int) -> list[bool]:
    for fqn, trained in (("head.bias", False), ("gain", True)):
        model = parallel()
        model.get_parameter(fqn).requires_grad_(trained)
        with pytest.raises(ChangedParameterError, match=f"parameter {fqn} has requires_grad={trained}, unlike"):
            model.train_step([IDS])
        model.evaluate([IDS])
        model(IDS[None]).sum().backward()  # captured anew, with what has a gradient now
        assert (model.get_parameter(fqn).grad is not None) == trained
        model.zero_grad()
        model.get_parameter(fqn).requires_grad_(not trained)
        model.train_step([IDS])
    return [True]


def test_a_parameter_that_was_frozen_or_thawed_is_named():
    assert frozen() == [[True]]


@WORLD.case
def stale(rank: int) -> bool:
    plain = Tied()
    early = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = fxpar.parallelize(plain, strategies={16: "dp1"}, monitor=False)
    before = model.head.bias.full_tensor().clone()
    model.train_step([IDS])
    with pytest.raises(StaleOptimizerError, match=r"SGD was made before .* old gain.* SGD\(model\.parameters"):
        early.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return not torch.equal(model.head.bias.full_tensor(), before)


def test_an_optimizer_of_the_parameters_before_is_told():
    assert stale() == [True]


@WORLD.case
def hooked(rank: int) -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        plain = Tied()
        getattr(plain.head.bias, register)(print)
        with pytest.raises(GradientHookError, match=r"head\.bias has a hook"):
            fxpar.parallelize(plain, strategies={16: "dp1"}, monitor=False)
        model = parallel()
        handle = getattr(model.head.bias, register)(print)
        for use in (lambda m: m.train_step([IDS]), lambda m: m(IDS[None])):
            with pytest.raises(GradientHookError, match=r"head\.bias has a hook"):
                use(model)
        handle.remove()
        model.train_step([IDS])


def test_a_hook_that_would_not_run_is_an_error():
    hooked()


@WORLD.case
def hooked_late(rank: int) -> None:
    early = Tied()
    early.embed.register_forward_hook(lambda module, args, out: out * 2)
    early = fxpar.parallelize(early, strategies={16: "dp1"}, monitor=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxparWarning)
        early.train_step([IDS])  # it was captured with the model
    model = parallel()
    before = model.train_step([IDS]).loss
    model.embed.register_forward_hook(lambda module, args, out: out * 0)
    with pytest.warns(FxparWarning, match=r"module 'embed' has a hook .* train_step runs what was captured"):
        assert model.train_step([IDS]).loss == pytest.approx(before)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxparWarning)
        model.train_step([IDS])  # said once


def test_a_hook_on_a_module_that_comes_late_is_a_warning():
    hooked_late()


@WORLD.case
def not_a_cluster(rank: int) -> None:
    with pytest.raises(ParallelizeError, match=r"cluster='two.json' is not a ClusterSpec.*from_file"):
        fxpar.parallelize(Tied(), strategies={16: "dp1"}, monitor=False, cluster="two.json")


def test_a_cluster_is_no_path():
    not_a_cluster()
