"""Strategies with different pipeline stages in one mini-batch, on forked ranks: trained weights are one device's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxpar.models import load
from tests.runtime.hot import (
    Case,
    World,
    hot,
    largest_error,
    loss_error,
    make_llama,
    parallel,
    precompile,
    sequences,
    stacked,
)

PIPELINES = {16: "dp2.pp2", 64: "pp4", 512: "tp2.cp2"}
LENGTHS = (5, 16, 12, 9, 14, 3) * 6 + (60, 33, 45, 64) * 3 + (130, 90, 1)  # several micro-batches in each group
LIMITED = {16: "dp2.pp2", 64: "pp4", 130: "tp2.cp2"}
OWN = {16: "dp2.tp1 > dp2+zero3", 64: "tp3 > dp1", 512: "tp2+sp+zb_h1 > rows2"}  # stages under strategies of their own
EIGHT = {
    "pipelines": {16: "dp4.pp2", 64: "dp2.pp2.tp2+sp", 512: "pp4.cp2+zb_h1"},
    "orders of ranks": {16: "tp2.dp4+sp+zero1", 64: "dp2.pp2.tp2+sp", 512: "dp2.cp2.dp2+zero3"},
    "other orders": {16: "dp2.tp2.dp2+sp+zero2", 64: "pp2.tp2.dp2", 512: "cp2.tp2.cp2+sp"},
}


DEEP = {"layers": "4", "dim": "32", "heads": "4", "kv_heads": "2", "ffn": "48"}


def deep() -> nn.Module:
    return make_llama(**DEEP)


def deep_tied() -> nn.Module:
    return make_llama(**DEEP, tied="true")


def tied() -> nn.Module:
    return load(
        "gpt", dtype=torch.float64, seed=1, options={"layers": "4", "dim": "32", "positions": "256", "dropout": "0"}
    ).model


def equal(have: dict, want: dict) -> None:
    assert loss_error(have["losses"], want["losses"]) <= 1e-12
    assert largest_error(have["grads"], want["grads"]) <= 1e-9
    assert largest_error(have["params"], want["params"]) <= 1e-9


BATCHES = [sequences(seed) for seed in (3, 4)]
TIED = [sequences(seed, (5, 60, 33, 130, 8, 12)) for seed in (3, 4)]
OPTIONS = {
    "chain, zero": {"strategies": {16: "dp2.pp2+zero3", 64: "pp2.tp2+sp+zb_h1", 512: "cp4"}, "gradients": "chain"},
}
# The head's term of the gradient is made on the last stage, under every strategy on other ranks.
CASES = {
    "several micro-batches": Case([sequences(0, LENGTHS)], {"strategies": LIMITED, "token_budget": 130}, stacked),
    # At last few sequences and empty groups.
    "chain, arena only": Case(
        [*BATCHES, sequences(11, (2,)), sequences(12, (9, 300))],
        {"strategies": PIPELINES, "resident": [], "checked": True, "gradients": "chain"},
        stacked,
    ),
    "stages that differ": Case(BATCHES[:1], {"strategies": OWN}, stacked),
}
NIGHTLY = {
    **{f"{name}, llama": replace(case, make=deep_tied) for name, case in CASES.items()},
    "untied": Case([sequences(0, LENGTHS)], {"strategies": LIMITED, "token_budget": 130}, deep),
    "tied, chain": Case(TIED, {"strategies": PIPELINES, "gradients": "chain"}, tied),
    **{name: Case(BATCHES[:1], options, deep) for name, options in OPTIONS.items()},
    "interleaved": Case(
        BATCHES[:1], {"strategies": {64: "dp2.pp2+interleaved_1f1b+zero2", 512: "pp2.cp2+remat+offload"}}, deep
    ),
    "other cuts": Case(
        BATCHES,
        {"strategies": {64: "pp2.dp2+cut(layers.1)", 512: "pp2.dp2+gpipe+cut(layers.3)"}},
        deep,
    ),
    "tied": Case(TIED[:1], {"strategies": PIPELINES}, tied),
    "stages that differ": Case(TIED, {"strategies": OWN, "gradients": "chain", "checked": True}, tied),
}


@pytest.fixture(scope="module")
def trained() -> dict[str, dict]:
    return hot(CASES)


@pytest.mark.nightly
def test_more_of_them():
    for name, have in hot(NIGHTLY).items():
        equal(have, NIGHTLY[name].one_device())


@pytest.mark.parametrize("name", CASES)
def test_trained_weights_are_those_of_one_device(trained, name):
    case = CASES[name]
    assert sum(group.sequences for group in trained[name]["reports"][0].groups) == len(case.batches[0])
    equal(trained[name], case.one_device())


def test_steps_of_three_strategies_equal_one_device(trained):
    have = trained["several micro-batches"]
    micro_batches = {group.strategy: group.micro_batches for group in have["reports"][0].groups}
    assert micro_batches == {"dp2.pp2": 2, "pp4": 5, "tp2.cp2": 2}


@pytest.mark.nightly
def test_eight_ranks():
    cases = {text: Case([sequences(6, LENGTHS)], {"strategies": each}, deep) for text, each in EIGHT.items()}
    for text, have in hot(cases, world=8).items():
        assert {group.strategy for group in have["reports"][0].groups} == set(EIGHT[text].values())
        equal(have, cases[text].one_device())


class Normed(nn.Module):
    """A token model whose layers end in batch norms over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(131, 16), nn.Linear(16, 131)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x.flatten(0, 1)).view_as(x)
        return self.head(x)


def normed() -> nn.Module:
    torch.manual_seed(1)
    return Normed().to(torch.float64)


TWO_STAGES, HELD_OUT = {512: "dp2.pp2"}, sequences(2, (20, 30, 2, 9))
WORLD = World(4, lambda: precompile(normed, TWO_STAGES))


@WORLD.case
def stepped(rank):
    """The buffers before a step and after it, and what is evaluated before."""
    model = parallel(normed, strategies=TWO_STAGES, packed=False)
    evaluated = model.evaluate(HELD_OUT)
    before = {name: value.clone() for name, value in model.named_buffers()}
    model.train_step(sequences(1, (20, 30)))
    return (before, dict(model.named_buffers())), evaluated


def test_written_buffers_are_the_same_on_all_ranks():
    """A new value of either stage, in the module of every rank."""
    results = [buffers for buffers, _ in stepped()]
    before, after = results[0]
    assert {name for name in after if not torch.equal(before[name], after[name])} == set(after)
    assert all(torch.equal(value, after[name]) for _, other in results for name, value in other.items())


def test_evaluates_through_stages():
    """In evaluation mode: with the running statistics as they are."""
    found = [evaluated for _, evaluated in stepped()]
    model, total = normed().eval(), 0.0
    for ids in HELD_OUT:
        total += F.cross_entropy(model(ids[None])[0, :-1], ids[1:], reduction="sum").item()
    assert found == pytest.approx([total / sum(len(ids) - 1 for ids in HELD_OUT)] * 4, rel=1e-12)
