"""The loss in chunks, in the search: tried where logits are the peak, in as many chunks as help."""

from __future__ import annotations

import functools

import pytest

from fxpar.cli.options import GraphSource
from fxpar.cli.shallow import Shallow
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.device import CPU
from fxpar.errors import ChunkedLossError
from fxpar.ir.strategy import Strategy
from fxpar.memory import predict_memory, steady_micro_batches
from fxpar.search.chunked import GAIN, useful_chunks
from fxpar.search.driver import find_plan, find_plan_of
from fxpar.search.known import KnownModel
from fxpar.search.price import Candidate, Depth
from fxpar.search.problem import Problem
from fxpar.search.space import SAVINGS, with_savings

LONGEST, WIDE, NARROW = 512, 4096, 16
CLUSTER = ClusterSpec(1, 2, intra_gb_per_s=0.5, inter_gb_per_s=0.5, latency_us=100.0, device=CPU)
SHAPES = ("cp2", "tp2+sp")


@functools.cache
def model(vocab: int) -> Shallow:
    return Shallow(GraphSource("llama", world=2, options=("layers=1", f"vocab={vocab}")))


@functools.cache
def known(vocab: int = WIDE) -> KnownModel:
    """Lowered once for all tests."""
    return problem(None).known(model(vocab).lower, model(vocab).outlines)


def priced(text: str, vocab: int = WIDE) -> Candidate:
    found = known(vocab).candidate(Strategy.parse(text), lambda _: None)
    assert found is not None, known(vocab).refused
    return found


def problem(memory_bytes: int | None) -> Problem:
    return Problem(
        shapes=tuple(map(Strategy.parse, SHAPES)),
        cluster=CLUSTER,
        batches=((512, 300, 120, 64, 28), (500, 400, 100)),
        longest=LONGEST,
        memory_bytes=memory_bytes,
        max_strategies=1,
        depth=Depth(1, whole=True),
        keep=1,
    )


def least_bytes() -> int:
    """That the longest sequence takes with all other savings."""
    found = [with_savings(Strategy.parse(text), level) for text in SHAPES for level in range(len(SAVINGS))]
    return min(priced(str(one)).at(LONGEST).peak_bytes for one in found if one is not None)


def test_what_fits_only_in_chunks_is_found():
    """And takes no more than it says, lowered again."""
    plan = find_plan_of(problem(least_bytes() - 1), known()).plans[0]
    (name,) = plan.strategies
    assert "+chunks(" in name
    assert plan.memory_bytes[name] < least_bytes()
    strategy, sizes = Strategy.parse(name), {"T": plan.groups[-1].token_budget}
    count = steady_micro_batches(strategy)
    again = predict_memory(model(WIDE).lower(strategy, 1), sizes, micro_batches=count, cluster=CLUSTER)
    assert again.state_bytes + again.step_bytes + again.staging_bytes < least_bytes()


def test_where_all_fits_the_loss_is_whole():
    found = find_plan_of(problem(10**10), known())
    assert (found.evaluated, found.pruned) == (len(SHAPES), 0)
    assert "chunks" not in found.plans[0].strategies[0]


@pytest.mark.parametrize(("text", "vocab"), [("cp2", WIDE), ("tp2+sp+remat", WIDE), ("cp2", NARROW)])
def test_more_chunks_would_save_little(text, vocab):
    """And half of them would leave much, against programs with each number of chunks."""
    chunks = useful_chunks(priced(text, vocab), LONGEST)
    half, here, twice = (
        priced(f"{text}+chunks({n})" if n > 1 else text, vocab).at(LONGEST).step_bytes
        for n in (max(1, chunks // 2), chunks, 2 * chunks)
    )
    assert here - twice < 1.1 * GAIN * here
    assert (chunks > 1) == (vocab == WIDE)
    assert chunks == 1 or half - here > 0.9 * GAIN * half


def test_a_loss_that_mixes_tokens_is_searched_whole():
    """It is one of the refused, with the reason."""

    def lower(strategy: Strategy, layers: int):
        if strategy.chunks > 1:
            raise ChunkedLossError(str(strategy), "%mm", "mixes tokens")
        return model(WIDE).lower(strategy, layers)

    found = find_plan(problem(least_bytes() + 1), lower, model(WIDE).outlines)
    assert "chunks" not in found.plans[0].strategies[0]
    refused = {name: why for name, why in found.refused.items() if "chunks" in name}
    assert refused
    assert all("mixes tokens" in why for why in refused.values())


def test_parameters_lie_as_without_chunks():
    assert known().outlines(Strategy.parse("cp2+chunks(2)"), 1) is known().outlines(Strategy.parse("cp2"), 1)
