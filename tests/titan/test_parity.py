"""The same losses and gradient norms as stock torchtitan on one rank, whatever the strategy."""

from __future__ import annotations

import pytest

from tests.repeat import thinned

from .runs import SWITCHING, Run, recipe, train

pytestmark = pytest.mark.titan

FAMILIES = ["llama3", "qwen3"]
STEPS = 5


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def seed_checkpoint(family, tmp_path_factory):
    """The initial weights, as torchtitan makes a checkpoint of them on one rank."""
    folder = tmp_path_factory.mktemp(f"seed-{family}")

    def make():
        config = recipe(family, None)
        config.checkpoint.enable = config.checkpoint.create_seed_checkpoint = True
        return config

    train(1, make, folder)
    return folder / "outputs" / "checkpoint" / "step-0"


def from_seed(family, strategies, path, **training):
    def make():
        config = recipe(family, strategies, **({} if strategies is None else {"merge": False}))
        config.checkpoint.enable = config.checkpoint.load_only = True
        config.checkpoint.initial_load_path = str(path)
        config.debug.seed = 5  # the weights come from the checkpoint
        config.training.steps = STEPS
        for key, value in training.items():
            setattr(config.training, key, value)
        return config

    return make


@pytest.fixture(scope="module")
def stock(family, seed_checkpoint, tmp_path_factory):
    return train(1, from_seed(family, None, seed_checkpoint), tmp_path_factory.mktemp("stock"))


def largest_difference(a: dict[int, float], b: dict[int, float]) -> float:
    assert a.keys() == b.keys()
    return max(abs(a[step] - b[step]) for step in a)


def assert_like_stock(found: Run, stock: Run) -> None:
    assert len(found.losses) == STEPS
    assert largest_difference(found.losses, stock.losses) < 2e-6  # two units in the last place of fp32
    assert max(abs(found.norms[step] / norm - 1) for step, norm in stock.norms.items()) < 1e-5


# The switching run has all axes but pipeline stages.
def test_steps_of_three_strategies_from_one_seed_checkpoint(family, seed_checkpoint, stock: Run, tmp_path):
    assert_like_stock(train(2, from_seed(family, SWITCHING, seed_checkpoint), tmp_path), stock)


# Rules, chunks of the loss, stages that differ.
RULED = [
    "tp2+sp+chunks(2)[*.attention: rows2; layers.1: +remat]",
    "dp1+cut(layers.1) > dp1+chunks(2)[layers.1: +remat]",
]
ONE_FAMILY = pytest.mark.parametrize("family", thinned(FAMILIES, ["llama3"]), indirect=True, scope="module")


@ONE_FAMILY
@pytest.mark.parametrize("strategy", thinned(["dp2", "tp2+sp", "pp2", "cp2", *RULED], ["pp2"]))
def test_steps_of_one_strategy_from_one_seed_checkpoint(family, strategy, seed_checkpoint, stock: Run, tmp_path):
    assert_like_stock(train(2, from_seed(family, {512: strategy}, seed_checkpoint), tmp_path), stock)


@pytest.mark.nightly  # by day: tests/precision/test_sharded.py, and test_the_command_of_the_docs, which is in bf16
@ONE_FAMILY
def test_bf16(family, seed_checkpoint, tmp_path):
    made = {
        name: from_seed(family, strategies, seed_checkpoint, mixed_precision_param="bfloat16")
        for name, strategies in (("stock", None), ("three", SWITCHING))
    }
    stock = train(1, made["stock"], tmp_path / "stock")
    found = train(2, made["three"], tmp_path / "three")
    assert 0 < largest_difference(found.losses, stock.losses) < 2e-3


@ONE_FAMILY
def test_the_initial_weights_are_those_of_one_rank(family, tmp_path):
    """From one seed of the random generator, without a checkpoint."""

    def make(strategies):
        def made():
            config = recipe(family, strategies)
            config.training.steps = 1
            config.optimizer.param_groups[0].optimizer_kwargs["lr"] = 0.0
            return config

        return made

    one = train(1, make(None), tmp_path / "one", weights=True)
    two = train(2, make(SWITCHING), tmp_path / "two", weights=True)
    assert one.weights.keys() == two.weights.keys()
    assert all((one.weights[name] == two.weights[name]).all() for name in one.weights)
