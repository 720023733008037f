"""Programs that nobody wrote, fp32 inside of fp64: whatever is an island and what not, the function is the same."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxpar import losses
from fxpar.precision import Precision, with_precision
from fxpar.torch_api import kernels
from tests.captured import Captured, take, tokens
from tests.precision.runs import arguments, casts, gradients, l2_error, run, together
from tests.random_model import VOCAB, RandomModel
from tests.repeat import examples


@functools.cache
def captured(seed: int) -> Captured:
    torch.manual_seed(seed)
    return take(RandomModel(seed, 3 + seed % 7), losses.causal_lm, tokens(VOCAB, 8, rows=2))


def check_one(seed: int, precision: Precision) -> None:
    """fp32 rounds by 6e-8; ten layers and their gradients stay far below 1e-4 of the truth, which no mistake does."""
    found = captured(seed)
    graph = with_precision(found.graph, precision)
    results = run(graph, found.params, found.buffers, found.batches[0])
    with torch.no_grad():
        truth = list(found.graph.gm(*arguments(found.graph, found.params, found.buffers, found.batches[0])))
    assert l2_error(results[0], truth[0]) < 1e-5
    assert l2_error(together(gradients(graph, results)), together(gradients(found.graph, truth))) < 1e-4
    assert all(cast.users and cast.args[0].target is not kernels.to_copy for cast in casts(graph))


@settings(max_examples=examples(6), suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 5), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([(), ("embedding",), ("*",)]))
def test_random_model(seed, norms, softmax, loss, globs):
    check_one(seed, Precision(torch.float32, fp32=globs, norms=norms, softmax=softmax, loss=loss))


@pytest.mark.parametrize("seed", [6, 7])
def test_random_model_in_bf16_has_the_dtypes_that_it_says(seed):
    found = captured(seed)
    run(with_precision(found.graph, Precision(torch.bfloat16)), found.params, found.buffers, found.batches[0])
