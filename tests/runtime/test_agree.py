"""What tells mini-batches apart: every value, dtype and shape, whatever the memory looks like."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from fxpar.cost.cluster import usual_cluster
from fxpar.errors import DeviceMismatchError, ProgramMismatchError, ValueMismatchError
from fxpar.ir.content import content
from fxpar.runtime.agree import agreed_cluster, check_same_programs, check_same_values, digest
from fxpar.torch_api.threaded import run_threads
from tests.captured import lowered, mlp

IDS = torch.arange(6)


def test_equal_values_have_equal_digests_in_any_memory():
    columns = torch.stack([IDS, IDS + 50], 1)
    assert digest([columns[:, 0]]) == digest([IDS]) == digest([{"input_ids": IDS}])
    # One element is contiguous with any stride.
    assert digest([columns[:1, 0], IDS]) == digest([IDS[:1], IDS])
    assert digest([{"w": torch.randn(4, 1, 3).expand(4, 2, 3)[:1, 0, :1] * 0}]) == digest([{"w": torch.zeros(1, 1)}])


def test_whatever_differs_is_told_apart():
    given = [
        [IDS],
        [IDS, IDS],
        [IDS.flip(0)],
        [IDS.int()],
        [IDS.view(2, 3)],
        [{"tokens": IDS}],
        [IDS.to("meta")],
        [IDS.float().to_sparse()],
        [IDS.tolist()],
        [None],
        [],
        None,
        IDS,
        iter([IDS]),
    ]
    found = [digest(one) for one in given]
    for (i, a), (j, b) in itertools.combinations(enumerate(found), 2):
        assert a != b, (given[i], given[j])


# ---------------------------------------------------------------------------------------------- what ranks start with
def test_the_content_of_a_tensor_is_every_bit_in_its_place():
    x = torch.randn(40, 6, dtype=torch.float64)
    assert content(x) == content(x.t().contiguous().t()) == content(torch.stack([x, x])[1])
    other = x.clone()
    other[39, 5] = torch.nextafter(other[39, 5], torch.tensor(9.0, dtype=torch.float64))
    assert len({int(content(one)) for one in (x, other, x.flip(0), x + 1, x[1:], x.bfloat16(), x > 0)}) == 7
    long = torch.zeros((1 << 20) + 3)
    last = long.clone()
    last[-1] = 1e-30
    assert len({int(content(one)) for one in (long, last, last.roll(1), last.roll(3))}) == 4
    assert [int(content(torch.tensor(one))) for one in (True, 7, 1.0)] == [1, 7, 0x3F800000]
    assert int(content(torch.empty(0))) == 0


class Weighted(nn.Module):
    def __init__(self, weight: float, count: float, device: str = "cpu") -> None:
        super().__init__()
        self.empty = nn.Linear(3, 2, device="meta")
        self.weight = nn.Parameter(torch.full((4,), weight, device=device))
        self.register_buffer("count", torch.tensor(count))


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([(1.0, 0.0), (1.0, 0.0)], ""),
        ([(1.0, 0.0, "meta"), (2.0, 0.0, "meta")], ""),
        ([(1.0, 0.0), (1.0, 0.0), (2.0, 0.0)], "the parameter 'weight' on rank 2 differs"),
        ([(1.0, 0.0), (1.0, 0.0, "meta"), (2.0, 0.0)], "the parameter 'weight' on rank 1, 2 differs"),
        ([(1.0, 0.0), (1.0, 3.0)], "the buffer 'count' on rank 1 differs .*the same seed, or load the same checkpoint"),
    ],
)
def test_ranks_that_start_with_other_values(models, message):
    def start(rank: int) -> str:
        try:
            check_same_values(Weighted(*models[rank]))
        except ValueMismatchError as error:
            return str(error)
        return ""

    for said in run_threads(len(models), start):
        assert re.search(message, said) if message else said == ""


def test_programs_that_differ_in_their_numbers():
    """The loss or the model holds a tensor as a plain attribute: it is part of the program."""
    program = lowered(mlp(), "dp2")

    def check(rank: int) -> str:
        try:
            check_same_programs({"dp2": replace(program, constants={"c": torch.full((2,), rank // 2)})})
        except ProgramMismatchError as error:
            return str(error)
        return ""

    assert all("rank 2 compiled another program for 'dp2'" in said for said in run_threads(3, check))


@pytest.mark.parametrize(
    "change",
    [
        lambda program: {"constants": {"c": torch.ones(1)}},
        lambda program: {"divisors": {"T": 7}},
        lambda program: {"padding_hazard": "positions"},
        lambda program: {"stored_inputs": program.stored_inputs[::-1]},
        lambda program: {"stored_outputs": program.stored_outputs[::-1]},
        lambda program: {"outputs": program.outputs[::-1]},
    ],
)
def test_the_fingerprint_of_a_program_has_all_that_ranks_must_share(change):
    program = lowered(mlp(), "dp2")
    assert replace(program, **change(program)).fingerprint() != program.fingerprint()
    assert replace(program, timings={}).fingerprint() == program.fingerprint()


def test_the_cluster_is_that_of_rank_0():
    found = run_threads(3, lambda rank: agreed_cluster(usual_cluster(4, 1 + rank, "cpu"), "cpu"))
    assert found == [usual_cluster(4, 1, "cpu")] * 3


def test_different_kinds_of_devices_are_refused_on_all_ranks():
    def agree(rank: int) -> str:
        try:
            agreed_cluster(usual_cluster(3), "cpu" if rank == 1 else "cuda")
        except DeviceMismatchError as error:
            return str(error)
        return ""

    for said in run_threads(3, agree):
        assert re.search(r"'cuda' on rank 0, 2; 'cpu' on rank 1\. Every rank must pass it on the same", said)
