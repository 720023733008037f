"""Layers and stages that differ: what is proposed, what it is said to take, and that it runs."""

from __future__ import annotations

import functools

import pytest

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.device import CPU
from fxpar.ir.strategy import Strategy
from fxpar.models.builtin import packed_lm_loss
from fxpar.search.bounds import Intervals
from fxpar.search.chosen import lowering
from fxpar.search.kinds import MixedCandidate
from fxpar.search.known import KnownModel
from fxpar.search.price import Candidate, Depth
from fxpar.search.pricing import SetPricer
from fxpar.search.proposals import Group
from fxpar.search.space import without_stages
from fxpar.search.staged import StagedGuess
from fxpar.search.stages import StageSearch
from tests.captured import Captured, take, tokens
from tests.search.shallow import Stack, stack_rows

LAYERS, LONGEST, VOCAB = 7, 512, 131
CLUSTER = ClusterSpec(1, 4, intra_gb_per_s=5.0, inter_gb_per_s=5.0, latency_us=20.0, device=CPU)
BATCHES = ((512, 400, 300, 200, 512, 128) * 4,)


@functools.cache
def known(vocab: int) -> KnownModel:
    lower, outlines = lowering(functools.partial(stack_rows, vocab=vocab))
    return KnownModel(lower, outlines, CLUSTER, Depth(LAYERS), (256, 4096))


DEEP = KnownModel(*lowering(functools.partial(stack_rows, vocab=VOCAB)), CLUSTER, Depth(16), (256, 4096))


def guess(vocab: int, text: str) -> StagedGuess:
    strategy = Strategy.parse(text)
    flat = known(vocab).candidate(without_stages(strategy), lambda _: None)
    assert flat is not None
    return StagedGuess(strategy, CLUSTER, known(vocab).anchors, flat)


@functools.cache
def found(vocab: int, share: float, *names: str) -> tuple[float, list[Candidate]]:
    """Seconds of the best of these as they are, and what is proposed instead, with memory for such a share of what the
    first, which needs most, needs beyond the last.
    """
    model, members = known(vocab), [guess(vocab, name) for name in names]
    most, least = (members[at].at(LONGEST).peak_bytes for at in (0, -1))
    memory = round(least + share * (most - least))
    pricer = SetPricer(CLUSTER, model.depth, model.outlines, BATCHES, memory)
    groups = [Group([(LONGEST, one)], one.name, Intervals((LONGEST,), BATCHES), pricer) for one in members]
    seconds = [group.seconds(one) for group, one in zip(groups, members, strict=True)]
    now_s, candidates = min(seconds), []
    group = groups[seconds.index(now_s)]
    for proposal in StageSearch(model, members, lambda _: None).proposals(group, now_s):
        probe = model.candidate(proposal.strategies[0], lambda _: None)
        assert probe is not None, model.refused
        assert proposal.closer is not None
        candidates += [one for one in proposal.closer(probe) if group.seconds(one) < now_s]
    return now_s, sorted(candidates, key=group.seconds)


SAVING = (VOCAB, 0.2, "dp2.pp2", "dp2.pp2+remat")
HEAD = (1 << 16, 10.0, "pp2.cp2", "pp2.cp2+remat")  # the head takes longer than all layers


def test_the_first_stage_recomputes_more():
    """It holds two micro-batches, the last one."""
    best = found(*SAVING)[1][0]
    strategy = best.strategy
    cut = int(strategy.pipeline.cuts[0].removeprefix("layers."))
    again = [strategy.remat_of(f"layers.{i}") is not None for i in range(LAYERS)]
    assert 0 < sum(again) < LAYERS
    assert sum(again[:cut]) > sum(again[cut:])
    assert again[:cut] == sorted(again[:cut], reverse=True)  # those in front


def test_a_proposal_takes_what_it_takes_when_it_is_lowered():
    best = found(*SAVING)[1][0]
    anew = known(VOCAB).candidate(best.strategy, lambda _: None)
    assert anew is not None
    assert best.cost.seconds([LONGEST]) == pytest.approx(anew.cost.seconds([LONGEST]), rel=1e-3)
    assert best.at(LONGEST).peak_bytes == pytest.approx(anew.at(LONGEST).peak_bytes, rel=0.02)
    assert best.reduce_s == pytest.approx(anew.reduce_s, rel=0.05)


def test_nothing_is_proposed_where_all_fits():
    assert found(VOCAB, 10.0, *SAVING[2:])[1] == []


def test_a_stage_with_a_large_head_gets_more_ranks():
    proposed = found(*HEAD)[1]
    best = proposed[0].strategy
    assert [stage.world for stage in best.by_stage] == [1, 3]
    assert best.pipeline.cuts
    assert proposed[0].cost.seconds([LONGEST]) < 0.9 * guess(HEAD[0], HEAD[2]).cost.seconds([LONGEST])


def test_equal_stages_with_other_numbers_of_layers():
    """Of equal stages not all are looked at; of those that get other numbers of layers each is."""
    equal = DEEP.candidate(Strategy.parse("pp4[layers.{0,4,8,12}: +remat]"), lambda _: None)
    other = Strategy.parse("pp4+cut(layers.4|layers.8|layers.13)[layers.{0,4,8,13}: +remat]")
    anew = DEEP.candidate(other, lambda _: None)
    assert isinstance(equal, MixedCandidate)
    assert isinstance(anew, MixedCandidate)
    counted = equal.with_counts(other, [(1, 3), (1, 3), (1, 4), (1, 2)])
    assert counted.more == anew.more
    assert counted.predicted(LONGEST) == anew.predicted(LONGEST)
    held = [anew.memory_at(place, (0, 0), LONGEST).step_bytes for place in range(3)]
    assert held == sorted(held, reverse=True)  # the third stage has fewer micro-batches under way than the second
    assert [counted.memory_at(place, (0, 0), LONGEST).step_bytes for place in range(3)] == held


@pytest.mark.parametrize("case", [SAVING, HEAD], ids=["one strategy", "stages that differ"])
def test_what_is_proposed_runs(case):
    """In float64, against a single device; of the model a smaller vocabulary."""
    text = str(found(*case)[1][0].strategy)
    result = captured().check(text)
    assert result.ok, result


@functools.cache
def captured() -> Captured:
    return take(Stack(LAYERS, VOCAB), packed_lm_loss, tokens(VOCAB, 13, 24, 7, 18))
