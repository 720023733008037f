"""A sequence drops the same elements under every strategy, in any packing, and those that it drops alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpar
from fxpar.ir.exec_graph import compile_graph
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.pass_base import ancestors
from fxpar.losses import cross_entropy_sum, next_token_labels
from fxpar.lowering import lower
from fxpar.models.builtin import packed_lm_loss
from fxpar.models.gpt import Gpt, GptOptions
from fxpar.ops.dropout import token_numbers
from fxpar.passes.pack_documents import packed_if_proved
from fxpar.runtime.compiling import capture_step
from fxpar.runtime.engine import Engine, EngineOptions
from fxpar.runtime.forked import run_forked
from fxpar.runtime.task import CompiledModel
from fxpar.tracer import capture
from tests.runtime.hot import largest_error, sequences

VOCAB, LENGTHS = 31, (6, 20, 4, 8, 12)


class Mixed(nn.Module):
    """Dropout of attention probabilities [1, H, T, T], of tokens as [1, T, D] and [T, D], of the row's mean [1, D]."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.pooled = pooled
        self.embedding, self.qkv, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, 24), nn.Linear(8, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = F.dropout(self.embedding(input_ids), 0.3)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.4).transpose(1, 2).flatten(2)
        row = F.dropout(x.mean(1), 0.5)[:, None] if self.pooled else 0.0
        return self.head(F.dropout(x.flatten(0, 1), 0.2).view_as(x) + row)


def make_gpt() -> nn.Module:
    torch.manual_seed(2)
    return Gpt(GptOptions(2, 16, 2, 64, VOCAB, 32, 0.4)).double()


def make_mixed(pooled: bool = False) -> nn.Module:
    torch.manual_seed(2)
    return Mixed(pooled).double()


make_pooled = functools.partial(make_mixed, True)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy_sum(model(batch["input_ids"]), batch["labels"])


# Strategies, and how the mini-batch is packed: one sequence a row, two or three, all in one.
GPT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dp2", {"packed": False}),
    ("dp2+zero3", {"token_budget": 26}),
    ("tp2+sp", {"token_budget": 50}),
    ("cp2", {"token_budget": 26}),
    ("pp2", {"token_budget": 26}),
)
POOLED: tuple[tuple[str, dict[str, Any]], ...] = tuple(
    (s, {"packed": False, "length_multiple": 2}) for s in ("dp2", "tp2", "cp2")
)
MIXED: tuple[tuple[str, dict[str, Any]], ...] = tuple(
    (s, {"packed": True, "token_budget": 26}) for s in ("dp2", "tp2+sp", "cp2")
)
CASES = [
    *((make_gpt, packed_lm_loss, *case) for case in GPT),
    *((make_mixed, packed_lm_loss, *case) for case in MIXED),
    *((make_pooled, loss, *case) for case in POOLED),
]
# The others are nightly: what they drop is dropped under the same strategy, packed alike, in one of these.
EVERY_RUN = [
    i
    for i, (make, _, strategy, _) in enumerate(CASES)
    if (make, strategy) not in ((make_gpt, "cp2"), (make_mixed, "dp2"), (make_pooled, "dp2"))
]


@functools.cache
def captured(make: Callable[[], nn.Module]) -> tuple[LogicalGraph, LogicalGraph, str]:
    """The graph of one sequence, that of its rows, and why these are one sequence each."""
    row = torch.zeros(1, 13, dtype=torch.int64)
    batch = {"input_ids": row, "labels": row}
    logical = capture_step(make(), *((loss, batch) if make is make_pooled else (packed_lm_loss, None)))
    return logical, *packed_if_proved(logical)


@functools.cache
def compiled(case: int) -> CompiledModel:
    make, _, strategy, _ = CASES[case]
    logical, rows, unpacked = captured(make)
    program = lower(rows, strategy, for_store=True)
    return CompiledModel(logical, {str(program.strategy): program}, packing=rows.packing, unpacked=unpacked)


def run(case: int, steps: int) -> dict[str, Tensor]:
    make, loss_fn, strategy, options = CASES[case]
    given = {"loss": loss_fn, "compiled": compiled(case), "monitor": False, "seed": 5, **options}
    model: Any = fxpar.parallelize(make(), strategies={20: strategy}, **given)
    for _ in range(steps):
        model.zero_grad()
        model.train_step(sequences(1, LENGTHS, VOCAB))
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def one(case: int, step: int, index: int, ids: Tensor, count: int) -> dict[str, Tensor]:
    """Gradients of the captured graph, on one device, on a sequence by itself; `count` labels in the mini-batch."""
    logical = compiled(case).logical
    row = {"input_ids": ids[None], "labels": next_token_labels(ids[None])}
    row |= {"position_ids": torch.arange(len(ids))[None], "token_numbers": token_numbers([(index, len(ids))])}
    known = {
        "param": dict(CASES[case][0]().named_parameters()),
        "batch": row,
        "scale": {"scale": torch.tensor(1.0 / count, dtype=torch.float64)},
        "seed": {"seed": torch.tensor(seed_of_step(step))},
    }
    with torch.no_grad():
        results = compile_graph(logical.gm.graph)(*(known[i.kind][i.fqn] for i in logical.inputs))
    return {out.fqn: v for out, v in zip(logical.outputs, results, strict=True) if out.kind == "grad"}


def alone(case: int, step: int) -> dict[str, Tensor]:
    """The sum over the mini-batch's sequences."""
    batch, total = sequences(1, LENGTHS, VOCAB), {}
    for index, ids in enumerate(batch):
        for name, grad in one(case, step, index, ids, sum(LENGTHS) - len(LENGTHS)).items():
            total[name] = total.get(name, 0) + grad
    return total


def first(make: Any) -> int:
    return next(i for i, case in enumerate(CASES) if case[0] is make)


def seed_of_step(step: int) -> int:
    engine: Any = object.__new__(Engine)
    engine.options, engine.steps = EngineOptions(seed=5), step
    return engine._seed()


@pytest.mark.parametrize("cases", [EVERY_RUN, pytest.param(range(len(CASES)), marks=pytest.mark.nightly)], ids=len)
def test_like_each_sequence_alone(cases):
    truth = {make: alone(first(make), 0) for make in (make_gpt, make_mixed, make_pooled)}
    later = alone(0, 1)
    for case in cases:
        assert any(i.fqn == "token_numbers" for i in compiled(case).logical.inputs)
    (found, second), _ = run_forked(2, lambda rank: ({i: run(i, 1) for i in cases}, run(0, 2)), 240.0)
    errors = {f"{i} {CASES[i][2]}": largest_error(found[i], truth[CASES[i][0]]) for i in cases}
    assert max(errors.values()) <= 1e-10, errors
    assert largest_error(second, later) <= 1e-10
    assert largest_error(later, truth[make_gpt]) > 1e-2  # another step, other masks


class Row(nn.Module):
    """Drops of the row's mean only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.head(x + F.dropout(x.mean(1), 0.5)[:, None])


def test_a_value_of_the_row_is_dropped_by_its_sequence():
    row = torch.arange(9)[None]
    graph = capture(Row(), loss, {"input_ids": row, "labels": row})
    (drop, _) = graph.gm.graph.find_nodes(op="call_function", target=torch.ops.fxpar.dropout.default)
    numbers = next(n for n, i in zip(graph.placeholders, graph.inputs, strict=True) if i.fqn == "token_numbers")
    assert numbers in ancestors([drop.args[1]])  # the seed; there is no dim to count tokens along
    assert numbers not in ancestors(list(drop.args[2]))


def test_sequences_drop_other_elements():
    numbers = token_numbers([(0, 5), (1, 5), (7, 3)])
    assert numbers.unique().numel() == 13
    assert torch.equal(numbers[:, 5:10], token_numbers([(1, 5)]))
