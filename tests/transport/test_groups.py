"""Process groups are made by their members; nobody else is asked."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: TID251 - registers the backend "fake"

import fxpar.transport.groups as groups
from fxpar.ir.mesh import Mesh
from fxpar.runtime.forked import run_forked
from fxpar.torch_api.threaded import run_threads
from fxpar.transport.groups import ProcessGroups

MESH = Mesh((("dp", 2), ("tp", 2)))


def total(group: dist.ProcessGroup | None) -> float:
    """The sum of the ranks of a group."""
    rank = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(rank, group=group)
    return float(rank)


def sums(made: ProcessGroups, mesh: Mesh, axes: tuple[str, ...]) -> dict[str, float]:
    by_name = {each.group_name: each for each in made._groups.values() if each is not None}
    return {axis: total(by_name[name]) for axis, name in made.names(mesh, axes).items()}


def check_of_four(rank: int) -> int:
    """Number of groups that this rank has."""
    made = ProcessGroups()
    made.names(MESH, ("dp", "tp", "dp.tp"))
    dp, tp = rank % 2 * 2 + 2, (1, 5)[rank // 2]
    assert sums(made, MESH, ("dp", "tp", "dp.tp")) == {"dp": dp, "tp": tp, "dp.tp": 6}
    again = ProcessGroups()  # groups of its own, of the same ranks
    assert again.names(MESH, ("tp",)).items().isdisjoint(made.names(MESH, ("tp",)).items())
    assert sums(again, MESH, ("tp",)) == {"tp": tp}
    return made.count


def lonely_pairs(rank: int) -> float:
    """Members that have made different numbers of groups meet; rank 3 makes none."""
    made, found = ProcessGroups(timeout_s=30), 0.0
    for ranks in ((0, 1), (0, 2), (1, 2)):
        if rank in ranks and rank != 3:
            found += total(made.of(ranks[::-1] if rank == 2 else ranks))
    assert made.of((0, 1), "another") is None or rank < 2
    return found


def within_a_part(rank: int) -> tuple[float, float]:
    """Groups within a part of the ranks, which the others do not count; then one of all."""
    part, found = dist.new_group([1, 3]), 0.0
    if rank in (1, 3):
        found = total(ProcessGroups(within=part).of_places((0, 1)))
    return found, total(ProcessGroups(timeout_s=10).world())


def test_each_rank_makes_its_own():
    def all_three(rank: int) -> tuple[int, float, tuple[float, float]]:
        return check_of_four(rank), lonely_pairs(rank), within_a_part(rank)

    found = run_forked(4, all_three, timeout_s=60)
    assert found == [(3, 3.0, (0.0, 6.0)), (3, 4.0, (4.0, 6.0)), (3, 5.0, (0.0, 6.0)), (3, 0.0, (4.0, 6.0))]


def test_ranks_that_are_threads():
    run_threads(4, check_of_four, timeout_s=60)


def beside_another_backend(rank: int, file: str) -> tuple[str, float]:
    """A group for messages of the CPU where the default one has a backend that moves nothing here."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=2, store=dist.FileStore(file, 2))
    group = ProcessGroups(backend="gloo").of((0, 1))
    found = dist.get_backend(group), total(group)
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(f"{file}-end", 2))
    return found


def test_a_backend_of_its_own(tmp_path):
    file = str(tmp_path / "store")
    assert run_forked(2, lambda rank: beside_another_backend(rank, file), timeout_s=60) == [("gloo", 1.0)] * 2


@pytest.fixture
def one_of_thousands():
    dist.init_process_group("fake", rank=70, world_size=4096, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_few_groups_of_thousands_of_ranks(one_of_thousands):
    made = ProcessGroups()
    for axes in ((("dp", 64), ("pp", 4), ("tp", 16)), (("dp", 128), ("cp", 4), ("tp", 8)), (("dp", 2), ("tp", 2048))):
        mesh = Mesh(axes)
        assert len(made.names(mesh, (*mesh.names, ".".join(mesh.names)))) == len(axes) + 1
    assert len(made._groups) == 9  # three, three and two, and one of all ranks
    assert made.names(Mesh((("tp", 64),)), ("tp",)) == {}


def test_where_groups_are_split_off_the_default_one_all_ranks_make_all(monkeypatch, one_of_thousands):
    """As NCCL wants it."""
    monkeypatch.setattr(groups, "members_suffice", lambda: False)
    made, new_group = [], dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda ranks, **given: (made.append(ranks), new_group(ranks, **given))[1])
    names = ProcessGroups(timeout_s=5).names(Mesh((("dp", 64), ("tp", 2))), ("tp",))
    assert made == [[first, first + 1] for first in range(0, 128, 2)]
    assert list(names) == ["tp"]
