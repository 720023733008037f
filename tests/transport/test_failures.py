"""What goes wrong: bad tensors, ranks with different plans, damaged slices, peers that are not there."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fxpar.errors import (
    ChecksumError,
    ExecutionError,
    FingerprintError,
    HoldingError,
    RankError,
    ReductionError,
    TransferError,
)
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.mesh import Mesh
from fxpar.runtime.forked import run_forked
from fxpar.switch import plan_switch
from fxpar.switch.node_first import plan_node_first
from fxpar.switch.reduction import plan_reduction
from fxpar.switch.terms import GradientPlacement
from fxpar.torch_api.threaded import run_threads
from fxpar.transport import Holding, Reduction, Switch, reduction_on
from fxpar.transport.checksum import checksums
from tests.transport.test_ways import FLAT, PAIRS, WORLD, held, layout, numbers


def test_tensors_that_are_not_what_the_layout_says():
    rows, columns = layout("tp4@0"), layout("tp4@1")
    plan = plan_switch(rows, columns, FLAT)

    def work(rank: int) -> None:
        good, target = held(rows, rank, numbers(rows)), held(columns, rank)
        wrong = Holding(rows, {**good.tensors, "w3": torch.zeros(4, 9)})
        with pytest.raises(
            HoldingError, match=rf"'tp4@0': w3 is \[4, 9\] on rank {rank}, but .* holds \[4, 8\] of \[16"
        ):
            Switch(plan, rank, [wrong], target)
        lost = Holding(rows, {fqn: t for fqn, t in good.tensors.items() if fqn != "w3"})
        with pytest.raises(HoldingError, match=rf"w3 \[.* must be sent by rank {rank}, which does not have it"):
            Switch(plan, rank, [lost], target)
        short = Holding(columns, {fqn: t for fqn, t in target.tensors.items() if fqn != "w3"})
        with pytest.raises(HoldingError, match=rf"'tp4@1': w3 is needed on rank {rank}, but was not given"):
            Switch(plan, rank, [good], short)
        with pytest.raises(ExecutionError, match="did you mean 'p2p'"):
            Switch(plan, rank, [good], target, execution="p2")

    run_threads(WORLD, work)


def test_ranks_with_different_plans_are_named():
    rows, columns = layout("tp4@0"), layout("tp4@1")
    usual = plan_switch(rows, columns, FLAT)
    full = layout("dp4")
    spread = plan_switch(full, columns, FLAT), plan_switch(rows, full, FLAT)

    def work(rank: int) -> list[str]:
        messages = []
        for mine in (spread[1] if rank == 2 else usual, spread[1] if rank in (1, 2) else usual):
            target = held(columns if mine is usual else full, rank)
            switch = Switch(mine, rank, [held(rows, rank, numbers(rows))], target, execution="p2p")
            with pytest.raises(FingerprintError) as error:
                switch.run()
            messages.append(str(error.value))
            assert not any(tensor.any() for tensor in target.tensors.values())
        switch = Switch(usual, rank, [held(rows, rank)], held(columns, rank), staging_bytes=1 << (20 + (rank == 3)))
        with pytest.raises(FingerprintError, match=r"rank\(s\) 3 differs"):
            switch.run()
        return messages

    for one, two in run_threads(WORLD, work):
        assert "the plan of rank(s) 2 differs from that of all others; nothing was sent" in one
        assert "0, 3; 1, 2" in two


def test_a_damaged_slice_is_found_in_checked_mode():
    rows, columns, full = layout("tp4@0"), layout("tp4@1"), layout("dp4")
    plan, gather = plan_switch(rows, columns, FLAT), plan_switch(rows, full, FLAT)
    mesh = Mesh((("dp", 4),))
    partial = GradientPlacement((16, 8), DistConfig(mesh, ((), ()), (("dp", "sum"),)), torch.float32)
    reduction_plan = plan_reduction(dict.fromkeys(rows.params, partial), rows, FLAT)

    def damage(buffer: torch.Tensor) -> None:
        buffer[5] ^= 16

    def work(rank: int) -> list[str]:
        found = []
        for checked in (False, True):
            for execution, add in (("p2p", False), ("p2p", True), ("a2a", False)):
                switch = Switch(
                    plan,
                    rank,
                    [held(rows, rank, numbers(rows))],
                    held(columns, rank),
                    execution=execution,
                    checked=checked,
                    add=add,
                )
                ((_, phase),) = switch.compiled.phases
                if rank == 1 and execution == "p2p":
                    letter = next(parcel for parcel in phase.receives if parcel.peer == 3)
                    letter.tasks.insert(0, lambda buffer=letter.buffer: damage(buffer))
                elif rank == 1:
                    phase.unpack.insert(0, lambda phase=phase: damage(phase.received[sum(phase.receive_splits[:3]) :]))
                found.append(outcome(switch.run))
            source = held(rows, rank, numbers(rows))
            switch = Switch(gather, rank, [source], held(full, rank), execution="all_gather", checked=checked)
            ((_, phase),) = switch.compiled.phases
            if rank == 1:
                part = phase.parts[0]
                part.unpack.insert(0, lambda part=part: damage(part.received[3 * len(part.received) // 4 :]))
            found.append(outcome(switch.run))
            reduction = Reduction(reduction_plan, rank, held(rows, rank), checked=checked)
            if rank == 1:
                letter = next(p for p in reduction.phases[0][1].receives if p.peer == 3)
                letter.tasks.insert(0, lambda buffer=letter.buffer: damage(buffer))
            gradients = {fqn: torch.ones(16, 8) for fqn in rows.params}
            found.append(outcome(lambda reduction=reduction, gradients=gradients: reduction.run(gradients)))
        return found

    results = run_forked(WORLD, work)
    assert results[0] == results[2] == results[3] == [""] * 10
    found = results[1]
    assert found[:5] == [""] * 5  # unnoticed without checks
    switched = r"switch tp4@0 -> tp4@1: w0[12:16, 2:4] from rank 3 differs on rank 1 from what was sent"
    assert found[5:8] == [switched] * 3
    assert found[8] == "switch tp4@0 -> dp4: w0[12:16, 0:8] from rank 3 differs on rank 1 from what was sent"
    assert "gradients -> tp4@0: w0[4:8, 0:8] from rank 3 differs on rank 1" in found[9]


def outcome(run) -> str:
    try:
        run()
    except ChecksumError as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


def test_checksums_see_bits_and_places():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        view = torch.randn(3, 5, 7, generator=generator).to(dtype)
        sums = checksums(view, dtype)
        assert sums.shape == (3,)
        assert sums.unique().numel() == 3
        assert torch.equal(sums, checksums(view.mT.contiguous().mT, dtype))  # strides do not matter
        for i, j in ((0, 1), (3, 30), (33, 34)):
            swapped = view.clone().view(3, 35)
            swapped[1, i], swapped[1, j] = view.view(3, 35)[1, j], view.view(3, 35)[1, i]
            assert (checksums(swapped, dtype) == sums).tolist() == [True, False, True]
        flipped = view.clone()
        flipped[2, 4, 6] = -flipped[2, 4, 6]
        assert (checksums(flipped, dtype) == sums).tolist() == [True, True, False]
        zeros = torch.zeros(1, 4, dtype=dtype)
        assert not torch.equal(checksums(zeros, dtype), checksums(-zeros, dtype))
    pair = torch.tensor([[1.0, 5.0, -1.0, 5.0]], dtype=torch.float32)
    assert not torch.equal(checksums(pair, torch.float32), checksums(pair[:, [2, 1, 0, 3]], torch.float32))


@pytest.mark.parametrize("way", ["hang", "die"])
def test_a_missing_peer_is_named(tmp_path: Path, way: str):
    rows, columns = layout("tp4@0"), layout("tp4@1")
    plan = plan_switch(rows, columns, FLAT)

    def work(rank: int) -> None:
        switch = Switch(plan, rank, [held(rows, rank)], held(columns, rank), execution="p2p", timeout_s=1)
        switch.run()
        dist.barrier()
        if rank == 2:
            if way == "die":
                os._exit(1)
            time.sleep(2.5)
            return
        begun = time.monotonic()
        try:
            switch.run()
        except TransferError as error:
            (tmp_path / f"{rank}").write_text(f"{time.monotonic() - begun:.1f} {error}")
        os._exit(0)

    with pytest.raises(RankError):
        run_forked(WORLD, work, timeout_s=4)
    named = [path.read_text() for path in sorted(tmp_path.iterdir())]
    assert len(named) == 3
    assert all("switch tp4@0 -> tp4@1: transfer with rank(s) " in text for text in named)
    assert any("rank(s) 2 failed" in text for text in named), named
    assert all(float(text.split()[0]) < 3 for text in named)


def test_gradients_that_do_not_fit():
    mesh = Mesh((("dp", 4),))
    home = layout("tp4@0", tensors=2)
    partial = GradientPlacement((16, 8), DistConfig(mesh, ((), ()), (("dp", "sum"),)), torch.float32)
    plan = plan_reduction(dict.fromkeys(home.params, partial), home, FLAT)

    def work(rank: int) -> None:
        reduction = Reduction(plan, rank, held(home, rank))
        good = {fqn: torch.ones(16, 8) for fqn in home.params}
        for bad, why in (
            ({"w0": good["w0"]}, rf"w1: no gradient was given on rank {rank}"),
            (
                {**good, "w1": good["w1"].double()},
                r"w1: the gradient is torch.float64, but was planned as torch.float32",
            ),
        ):
            with pytest.raises(ReductionError, match=why):
                reduction.run(bad)
        with pytest.raises(HoldingError, match=r"'gradients': w1 is \[4, 8\] on rank"):
            reduction.run({**good, "w1": torch.ones(4, 8)})

    run_threads(WORLD, work)


class Making(dict[str, torch.Tensor]):
    """Gradients of a run that fails: those that it has not made raise its error."""

    def __contains__(self, fqn: object) -> bool:
        if not super().__contains__(fqn):
            raise ValueError("the run has failed")
        return True


@pytest.mark.parametrize("through_nodes", [False, True])
def test_a_reduction_ends_alike_where_the_run_fails_on_all_ranks(through_nodes):
    """As far as there are gradients it is carried out, and the next one finds nothing under way."""
    home = layout("tp4@0")
    partial = GradientPlacement((16, 8), DistConfig(Mesh((("dp", 4),)), ((), ()), (("dp", "sum"),)), torch.float32)
    sources = dict.fromkeys(home.params, partial)
    through = plan_node_first(sources, home, PAIRS, sums_bytes=1) if through_nodes else None
    plan = through or plan_reduction(sources, home, PAIRS)

    def work(rank: int) -> None:
        target = held(home, rank)
        reduction = reduction_on(plan, rank, target, staging_bytes=2048)
        grads = {fqn: torch.full((16, 8), float(rank)) for fqn in home.params}
        for made in (0, 3, 2):
            with pytest.raises(ValueError, match="the run has failed"):
                reduction.run(Making(list(grads.items())[:made]), accumulate=False)
            for number, tensor in enumerate(target.tensors.values()):
                assert torch.equal(tensor, torch.full((4, 8), 6.0 if number < made else 0.0))
            for tensor in target.tensors.values():
                tensor.zero_()
        reduction.run(grads, accumulate=False)
        assert all(torch.equal(tensor, torch.full((4, 8), 6.0)) for tensor in target.tensors.values())

    run_forked(WORLD, work)
