"""Strategies side by side in one mini-batch with others, on forked ranks: trained weights are one device's."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxpar.runtime.forked import run_forked
from tests.runtime.hot import (
    Case,
    hot,
    largest_error,
    loss_error,
    one_device,
    parallel,
    precompile,
    sequences,
    shallow,
    small,
    stacked,
)

IN_STEP = "dp2+zero3 | dp1+zero3"
LENGTHS = (5, 60, 33, 17, 130, 8, 90, 12, 45, 2)
OF_BOTH = sequences(3, (60, 30, 100, 90, 8, 80))  # groups of `APART`
CASES = {
    "with others": Case(
        [sequences(seed, LENGTHS) for seed in (3, 4)], {"strategies": {16: "dp4", 64: "cp2 | dp2", 512: "cp4"}}, small
    ),
    "stages, zero": Case(
        [sequences(seed, LENGTHS) for seed in (3, 4)],
        {"strategies": {64: "tp2 > dp1 | dp1", 512: "pp2+zb_h1 | dp2+zero3"}, "gradients": "chain"},
        stacked,
    ),
    "in step": Case(  # of unequal numbers of micro-batches; in the second mini-batch dp2 has none
        [sequences(5, (130, 60, 130, 33)), sequences(6, (130,))],
        {"strategies": {130: "cp2+zero3 | dp2+zero3"}, "token_budget": 130, "record": True},
        shallow,
    ),
    "several micro-batches": Case(
        [sequences(5, LENGTHS * 2)],
        {"strategies": {130: "tp2+sp | dp1 | dp1"}, "token_budget": 130, "memory_budget_bytes": 10**9},
        small,
    ),
}


@pytest.fixture(scope="module")
def trained():
    return hot(CASES)


@pytest.mark.parametrize("name", CASES)
def test_trained_weights_are_those_of_one_device(trained, name):
    want = CASES[name].one_device()
    assert loss_error(trained[name]["losses"], want["losses"]) <= 1e-12
    assert largest_error(trained[name]["grads"], want["grads"]) <= 1e-9
    assert largest_error(trained[name]["params"], want["params"]) <= 1e-9


def test_all_groups_have_run(trained):
    strategies = [group.strategy for group in trained["with others"]["reports"][0].groups]
    assert sorted(strategies) == ["cp2 | dp2", "cp4", "dp4"]
    (group,) = trained["several micro-batches"]["reports"][0].groups
    assert group.micro_batches > 1


def test_teams_in_step_have_what_the_lengths_ask_for(trained):
    """Or the case would not show what idle ranks do."""
    first, second = (report.trace.groups[0].micro_batches for report in trained["in step"]["reports"])
    assert [len(one) for one in second] == [1, 0, 0]
    assert len({len(one) for one in first}) > 1
    assert largest_error(trained["in step"]["grads"], CASES["in step"].one_device()["grads"]) <= 1e-10


APART = {64: "cp2 | dp1", 512: "cp2 | dp1+remat"}


def goes_on(rank: int, begun: Any) -> tuple[float, bool]:
    """The team of two ends its first round only when the other team has begun its second one."""
    model = parallel(small, strategies=APART, overlap=True, order=list(APART.values()))
    first, second = (model.fxpar_session.engine.bound[name] for name in APART.values())
    waited, (run_first, run_second) = [True], (first.run_all, second.run_all)
    if rank < 2:
        first.run_all = lambda *given: (run_first(*given), waited.append(begun.wait(20)))
    else:
        second.run_all = lambda *given: (begun.set(), run_second(*given))
    loss = model.train_step(OF_BOTH).loss
    return loss, all(waited)


def test_evaluates_and_calls():
    """The mean over all teams of held-out sequences, with and without stages, in step, and plain calls: `model(x)`.
    Before that, teams go on to the next round without the others.
    """
    strategies = {16: IN_STEP, 64: "cp2 | dp1", 512: "pp2 | dp1"}
    precompile(stacked, strategies)
    precompile(small, APART)
    held_out, begun = sequences(2, (20, 100, 2, 9)), multiprocessing.get_context("fork").Event()

    def work(rank: int) -> tuple[float, torch.Tensor]:
        loss, went_on = goes_on(rank, begun)
        assert went_on
        assert loss == pytest.approx(
            one_device(small(), [sequences(3, (60, 30, 100, 90, 8, 80))])["losses"][0], rel=1e-12
        )
        model = parallel(stacked, strategies=strategies, plain="cp2 | dp1")
        found = model.evaluate(held_out)
        loss = model(input_ids=held_out[0][None], position_ids=torch.arange(20)[None]).square().sum()
        loss.backward()
        with model.using(IN_STEP):
            model(input_ids=held_out[0][None], position_ids=torch.arange(20)[None]).square().sum().backward()
        return found, model.get_parameter("embedding.weight").grad.full_tensor()

    results = run_forked(3, work)
    model, total = stacked().eval(), 0.0
    for ids in held_out:
        logits = model(ids[None], torch.arange(len(ids))[None])
        total += F.cross_entropy(logits[0, :-1], ids[1:], reduction="sum").item()
    assert [found for found, _ in results] == pytest.approx([total / sum(len(i) - 1 for i in held_out)] * 3, rel=1e-12)
    plain: nn.Module = stacked()
    plain(held_out[0][None], torch.arange(20)[None]).square().sum().backward()
    want = 2 * plain.get_parameter("embedding.weight").grad
    assert all((grad - want).abs().max() <= 1e-10 * want.abs().max() for _, grad in results)
