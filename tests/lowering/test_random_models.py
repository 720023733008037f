"""Programs that nobody wrote: whatever the search decides for them, the gradients are those of one device.

More of them than a test run has time for:  python -m tests.lowering.test_random_models 1000
"""

from __future__ import annotations

import random
import sys
import warnings

import pytest
import torch

from fxpar import losses
from fxpar.checking import CheckResult
from tests.captured import take, tokens
from tests.random_model import VOCAB, RandomModel
from tests.repeat import thinned

STRATEGIES = (
    "tp2",
    "tp3",
    "tp4",
    "tp2+sp",
    "tp3+sp",
    "cp2",
    "cp3",
    "dp2.tp2",
    "cp2.tp2",
    "cp2.tp2+sp",
    "tp2.cp2+sp",
    "dp2.tp3+zero1",
    "dp2.tp3+sp+zero3",
    "dp2.cp2+zero3",
    "dp3.tp2+zero2",
)


def check_one(seed: int, count: int) -> tuple[RandomModel, list[CheckResult]]:
    """A random model under a few random strategies."""
    torch.manual_seed(seed)
    choice = random.Random(seed)
    model = RandomModel(seed, choice.randint(3, 9))
    captured = take(model, losses.causal_lm, tokens(VOCAB, 8, 5, 11, rows=choice.choice((1, 2))))
    return model, [captured.check(strategy) for strategy in choice.sample(STRATEGIES, count)]


@pytest.mark.parametrize("seed", thinned(range(40), range(3)))
def test_random_model(seed):
    model, results = check_one(seed, 2)
    assert all(result.ok for result in results), (model.kinds, [r for r in results if not r.ok])


def main(count: int, first: int = 100) -> None:
    """Print what fails among `count` models."""
    warnings.simplefilter("ignore")
    for seed in range(first, first + count):
        model, results = check_one(seed, 4)
        for result in results:
            if not result.ok:
                print(seed, model.kinds, result, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
