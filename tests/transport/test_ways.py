"""What a switch does in special ways: all-gathers, merged copies, shared memory, bounded staging, relays, sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import ExecutionError
from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.mesh import Mesh
from fxpar.runtime.forked import run_forked
from fxpar.switch import ParamLayout, PlacedParam, plan_switch
from fxpar.switch.reduction import plan_reduction
from fxpar.switch.terms import GradientPlacement
from fxpar.torch_api.threaded import run_threads
from fxpar.transport import Holding, Reduction, Staging, Switch
from fxpar.transport.executions import choose, resolve
from fxpar.transport.holding import Located
from fxpar.transport.phases import cut_phases
from fxpar.transport.views import paired_views, slice_views
from tests.repeat import examples
from tests.transport.cases import Case, cases, drawn, in_one_buffer, local_tensors, whole_tensors

WORLD = 4
FLAT = ClusterSpec(1, 4, 10, 10, 10)
PAIRS = ClusterSpec(2, 2, 200, 25, 10)


def layout(
    text: str, shape: tuple[int, ...] = (16, 8), tensors: int = 8, first: int = 0, dtype: torch.dtype = torch.float32
) -> ParamLayout:
    """`tensors` equal tensors by a text such as "dp2.tp2@0" (dim 0 cut by tp) or "dp4"."""
    axes, _, dim = text.partition("@")
    mesh = Mesh(tuple((part[:2], int(part[2:])) for part in axes.split(".")), first)
    dims = tuple((AxisShard("tp"),) if dim and int(dim) == d else () for d in range(len(shape)))
    param = PlacedParam(shape, dtype, (DistConfig(mesh, dims),))
    return ParamLayout(text, WORLD, {f"w{i}": param for i in range(tensors)})


def numbers(like: ParamLayout, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Different numbers in every tensor."""
    found, start = {}, 1
    for fqn, param in like.params.items():
        size = int(torch.tensor(param.shape).prod())
        found[fqn] = torch.arange(start, start + size).to(dtype).reshape(param.shape)
        start += size
    return found


def held(of: ParamLayout, rank: int, whole: dict[str, Tensor] | None = None, flat: bool = True) -> Holding:
    return Holding(of, local_tensors(of, whole, rank, None, flat, padded=True))


def assert_right(target: Holding, rank: int, whole: dict[str, Tensor]) -> None:
    for fqn, tensor in held(target.layout, rank, whole).tensors.items():
        assert torch.equal(target.tensors[fqn], tensor), fqn


def test_all_gathers():
    whole = numbers(layout("dp4"))
    three = layout("tp3@0", (12, 8), first=1), layout("dp3", (12, 8), first=1)
    trios = plan_switch(*three, FLAT)
    four = plan_switch(layout("tp4@0"), layout("dp4"), FLAT)
    cut = plan_switch(layout("tp4@0"), layout("tp4@1"), FLAT)

    def work(rank: int) -> list[str]:
        seen = []
        for checked in (False, True):
            target = held(layout("dp4"), rank)
            source = held(layout("tp4@0"), rank, whole)
            switch = Switch(four, rank, [source], target, execution="all_gather", checked=checked, staging_bytes=4000)
            assert switch.run().received_bytes == 8 * 12 * 8 * 4
            assert_right(target, rank, whole)
            seen += switch.counts.executions
            # A process group of its own: ranks 1, 2, 3.
            small = numbers(three[0])
            target = held(three[1], rank)
            switch = Switch(trios, rank, [held(three[0], rank, small)], target, execution="all_gather", checked=checked)
            switch.run()
            assert_right(target, rank, small)
            seen += switch.counts.executions
        with pytest.raises(ExecutionError, match="is not a set of equal all-gathers"):
            Switch(cut, rank, [], held(layout("tp4@1"), rank), execution="all_gather")
        return seen

    results = run_forked(WORLD, work)
    assert all(set(seen) == {"all_gather"} for seen in results)
    assert len(results[0]) < len(results[1]) == len(results[2]) == len(results[3])


def test_what_auto_does():
    """All-gathers on GPUs where a phase is nothing else; messages on CPUs; collectives where there is nothing else."""
    gathering = plan_switch(layout("tp4@0"), layout("dp4"), FLAT)
    cutting = plan_switch(layout("tp4@0"), layout("tp4@1"), FLAT)

    def work(rank: int) -> None:
        assert resolve("auto", torch.device("cuda"), None) == "gather"
        assert resolve("auto", torch.device("cpu"), None) == "a2a"
        assert resolve("p2p", torch.device("cuda"), None) == "p2p"

    run_threads(WORLD, work)
    for plan, execution in ((gathering, "all_gather"), (cutting, "p2p")):
        (phase,) = cut_phases(plan.problem, plan.transfers, 1 << 20)
        assert choose(plan.problem, plan.transfers, phase, "gather")[0] == execution
        assert choose(plan.problem, plan.transfers, phase, "p2p")[0] == "p2p"


def test_grouped_messages():
    """One grouped call per phase, as NCCL needs it; gloo takes it too. Two hops, several phases."""
    plan = plan_switch(layout("tp4@1"), layout("dp4"), PAIRS, "relay")
    whole = numbers(layout("dp4"))

    def work(rank: int) -> int:
        target = held(layout("dp4"), rank)
        switch = Switch(plan, rank, [held(layout("tp4@1"), rank, whole)], target, execution="p2p", staging_bytes=2000)
        for _, phase in switch.compiled.phases:
            phase.wire.grouped = True
        for _ in range(2):
            for tensor in target.tensors.values():
                tensor.zero_()
            switch.run()
            assert_right(target, rank, whole)
        return len(switch.compiled.phases)

    assert min(run_forked(WORLD, work)) > 4


def test_collective_executions_need_no_messages_between_pairs():
    """On ranks that are threads there are collectives only."""
    whole = numbers(layout("dp4"))
    plans = [
        (plan_switch(layout(a), layout(b), FLAT), a, b, way)
        for a, b, way in (("tp4@0", "tp4@1", "a2a"), ("tp4@0", "dp4", "all_gather"), ("dp2.tp2@1", "tp4@0", "auto"))
    ]

    def work(rank: int) -> None:
        for plan, a, b, way in plans:
            target = held(layout(b), rank)
            Switch(plan, rank, [held(layout(a), rank, whole)], target, execution=way).run()
            assert_right(target, rank, whole)

    run_threads(WORLD, work)


@pytest.mark.parametrize(("merge", "flat", "views"), [(True, True, 1), (False, True, 64), (True, False, 64)])
def test_equal_tensors_at_equal_distances_are_one_view(merge, flat, views):
    """Rank 2 has rows 8 to 11 of them, or columns 4 and 5."""
    cuts = layout("tp4@0", tensors=64), layout("tp4@1", tensors=64)
    rows, columns = (Located(held(cut, 2, numbers(cut), flat), 2) for cut in cuts)
    fqns = list(cuts[0].params)
    assert len([*slice_views(rows, fqns, (0, 4), (4, 2), merge)]) == views
    pairs = [*paired_views(rows, columns, fqns, ((0, 4), (8, 0)), (4, 2), merge)]
    assert len(pairs) == views
    assert all(torch.equal(one, other) for one, other in pairs)


def test_whole_messages_are_sent_from_the_tensors():
    """Tensors without gaps: what a peer gets is one run of memory on both sides."""
    cut, whole_layout = layout("tp4@0", tensors=1), layout("dp4", tensors=1)
    plan = plan_switch(cut, whole_layout, FLAT)
    whole = numbers(cut)

    def work(rank: int) -> int:
        target = held(whole_layout, rank)
        switch = Switch(plan, rank, [held(cut, rank, whole)], target, execution="p2p")
        switch.run()
        assert_right(target, rank, whole)
        return switch.counts.staging_bytes

    assert run_forked(WORLD, work) == [0] * WORLD


def test_large_slices_are_messages_of_their_own():
    """Two tensors of 4 MB and three small ones: the large ones need no staging; also as terms of a sum."""
    shapes = {"w0": (2048, 512), "w1": (16, 8), "w2": (2048, 512), "w3": (16, 8), "w4": (16, 8)}
    cut, full = (
        ParamLayout(name, WORLD, {fqn: layout(name, shape).params["w0"] for fqn, shape in shapes.items()})
        for name in ("tp4@0", "dp4")
    )
    plan = plan_switch(cut, full, FLAT)
    whole = numbers(full)
    terms = DistConfig(Mesh((("dp", 4),)), ((), ()), (("dp", "sum"),))
    placed = {fqn: GradientPlacement(shape, terms, torch.float32) for fqn, shape in shapes.items()}
    sums = plan_reduction(placed, cut, FLAT)

    def work(rank: int) -> int:
        target = held(full, rank)
        switch = Switch(plan, rank, [held(cut, rank, whole)], target)
        switch.run()
        assert_right(target, rank, whole)
        target = held(cut, rank)
        reduction = Reduction(sums, rank, target)
        reduction.run(whole)
        assert_right(target, rank, {fqn: 4 * value for fqn, value in whole.items()})
        return switch.counts.staging_bytes

    assert all(0 < staged < 1 << 16 for staged in run_forked(WORLD, work))


def test_staging_stays_under_its_bound():
    """Many tensors, and one that alone is larger than the bound: 64 KB, where 16 KB are allowed."""
    large = {"large": (128, 128), "odd": (3, 1000)}
    sources, targets = layout("tp4@1", (32, 32), 40), layout("tp4@0", (32, 32), 40)
    for of, cut in ((sources, 1), (targets, 0)):
        for fqn, shape in large.items():
            dims = tuple((AxisShard("tp"),) if d == cut else () for d in range(2))
            of.params[fqn] = PlacedParam(shape, torch.float32, (DistConfig(Mesh((("tp", 4),)), dims),))  # type: ignore[index]
    plans = {planner: plan_switch(sources, targets, PAIRS, planner) for planner in ("hotspa", "relay")}
    spread = plan_switch(layout("tp4@1", (64, 64)), layout("dp4", (64, 64)), PAIRS, "relay")
    whole, more = numbers(sources), numbers(layout("dp4", (64, 64)))
    bound = 16 << 10

    def work(rank: int) -> list[int]:
        used = []
        for plan in plans.values():
            for execution in ("p2p", "a2a"):
                target = held(targets, rank)
                source = held(sources, rank, whole)
                switch = Switch(plan, rank, [source], target, execution=execution, staging_bytes=bound)
                for _ in range(2):
                    switch.run()
                    assert_right(target, rank, whole)
                assert len(switch.counts.executions) > 10
                used.append(switch.counts.staging_bytes)
        target = held(layout("dp4", (64, 64)), rank)
        shared = Staging()
        source = held(layout("tp4@1", (64, 64)), rank, more)
        for _ in range(2):
            switch = Switch(spread, rank, [source], target, execution="p2p", staging_bytes=bound, staging=shared)
            switch.run()
            assert_right(target, rank, more)
        assert shared.nbytes == switch.counts.staging_bytes
        return [*used, shared.nbytes]

    for used in run_forked(WORLD, work):
        assert all(0 < size <= bound + 1024 for size in used), used  # rounding of each message to 64 bytes


def in_same_memory(case: Case, rank: int, offset: int) -> tuple[list[Holding], Holding]:
    """The first source and the target start in the same buffer, `offset` elements apart."""
    whole = whole_tensors(case.target)
    pieces = [
        in_one_buffer(local_tensors(case.sources[0], whole, rank, torch.float32, False, case.padded[1])),
        in_one_buffer(local_tensors(case.target, None, rank, None, False, case.padded[0])),
    ]
    buffer = torch.full((2000,), -1.0)
    moved = []
    for tensors, start in zip(pieces, (0, offset), strict=True):
        found = {}
        for fqn, tensor in tensors.items():
            at = start + tensor.storage_offset()
            found[fqn] = buffer.as_strided(tensor.shape, tensor.stride(), at)
        moved.append(found)
    for fqn, tensor in pieces[0].items():
        moved[0][fqn].copy_(tensor)
    return [Holding(case.sources[0], moved[0])], Holding(case.target, moved[1])


def test_target_written_over_the_source():
    chosen = drawn(cases(holders=False, dtypes=(torch.float32,)), examples(15))
    planned = [(case, plan_switch(case.sources[0], case.target, case.cluster)) for case in chosen]

    def work(rank: int) -> tuple[int, int]:
        snapshots = skipped = 0
        for number, (case, plan) in enumerate(planned):
            whole = whole_tensors(case.target)
            sources, target = in_same_memory(case, rank, number % 4)
            execution = ("p2p", "a2a")[number % 2]
            switch = Switch(
                plan, rank, sources, target, execution=execution, staging_bytes=(1 << 20, 300)[number % 3 // 2]
            )
            switch.run()
            for fqn, tensor in local_tensors(case.target, whole, rank, None, False, case.padded[0]).items():
                real = local_tensors(case.target, whole, rank, None, False, False)[fqn]
                index = tuple(slice(0, size) for size in real.shape)
                assert torch.equal(target.tensors[fqn][index], tensor[index]), (fqn, case)
            snapshots += len(switch.compiled.snapshots)
            skipped += switch.counts.skipped_bytes
        return snapshots, skipped

    results = run_forked(WORLD, work)
    assert all(sum(part) > 0 for part in zip(*results, strict=True))


def test_a_shard_inside_the_fuller_tensor_is_left_where_it_is():
    """As the weight store shares memory: nothing is copied at home, no snapshot is taken, in both directions."""
    cut, full = layout("tp4@1"), layout("dp4")
    whole = numbers(full)
    there, back = plan_switch(cut, full, FLAT), plan_switch(full, cut, FLAT)

    def work(rank: int) -> None:
        target = held(full, rank)
        shards = {fqn: tensor[:, 2 * rank : 2 * rank + 2] for fqn, tensor in target.tensors.items()}
        for fqn, shard in shards.items():
            shard.copy_(whole[fqn][:, 2 * rank : 2 * rank + 2])
        switch = Switch(there, rank, [Holding(cut, shards)], target, execution="p2p")
        report = switch.run()
        assert_right(target, rank, whole)
        assert (report.copied_bytes, report.skipped_bytes) == (0, 8 * 16 * 2 * 4)
        assert not switch.compiled.snapshots
        report = Switch(back, rank, [target], Holding(cut, shards)).run()
        assert (report.sent_bytes, report.copied_bytes, report.skipped_bytes) == (0, 0, 8 * 16 * 2 * 4)

    run_forked(WORLD, work)


def test_a_source_in_the_dtype_of_the_wire_is_preferred():
    """Home in fp32 and a copy in bf16 that somebody changed: the copy is what is read."""
    home, copy = layout("tp4@0", dtype=torch.bfloat16), layout("tp4@0", dtype=torch.bfloat16)
    full = layout("dp4", dtype=torch.bfloat16)
    plan = plan_switch(home, full, FLAT, extra_holders=[copy])
    whole = {fqn: torch.full((16, 8), 1.001) for fqn in full.params}

    def work(rank: int) -> None:
        exact = Holding(home, local_tensors(home, whole, rank, torch.float32, True, True))
        target = held(full, rank)
        Switch(plan, rank, [exact], target).run()
        assert (target.tensors["w3"] == torch.tensor(1.001).bfloat16()).all()
        marked = Holding(copy, {fqn: torch.full((4, 8), 2.0).bfloat16() for fqn in full.params})
        Switch(plan, rank, [exact, marked], target).run()
        assert (target.tensors["w3"] == 2).all()

    run_forked(WORLD, work)


def test_adding():
    """The chain of gradients: what arrives and what is copied at home is added; relayed plans cannot add."""
    before, after = layout("tp4@0"), layout("dp2.tp2@1")
    scattered = after.scattered()
    plan = plan_switch(before, scattered, FLAT, "hotspa")
    whole = numbers(before)
    relayed = plan_switch(before, layout("dp4"), PAIRS, "relay")

    def work(rank: int) -> None:
        for checked in (False, True):
            target = held(scattered, rank)
            for tensor in target.tensors.values():
                tensor.fill_(0.5)
            switch = Switch(plan, rank, [held(before, rank, whole)], target, add=True, checked=checked)
            switch.run()
            switch.run()
            expected = held(scattered, rank, {fqn: 2 * value + 0.5 for fqn, value in whole.items()})
            for fqn, tensor in expected.tensors.items():
                assert torch.equal(target.tensors[fqn], tensor)
        with pytest.raises(ExecutionError, match="a relayed plan cannot add"):
            Switch(relayed, rank, [held(before, rank, whole)], held(layout("dp4"), rank), add=True)

    run_forked(WORLD, work)


def test_padding_is_never_written():
    """7 rows on 4 ranks: the last rank holds one row and one of padding."""
    cut = layout("tp4@0", (7, 3))
    plan = plan_switch(layout("dp4", (7, 3)), cut, FLAT)
    other = plan_switch(layout("tp4@1", (7, 4)), layout("tp4@0", (7, 4)), FLAT)

    def work(rank: int) -> None:
        for made, source in ((plan, layout("dp4", (7, 3))), (other, layout("tp4@1", (7, 4)))):
            to = layout("tp4@0", next(iter(source.params.values())).shape)
            target = held(to, rank)
            for tensor in target.tensors.values():
                tensor.fill_(9)
            Switch(made, rank, [held(source, rank, numbers(source))], target).run()
            for fqn, tensor in held(to, rank, numbers(source)).tensors.items():
                rows = 1 if rank == 3 else 2
                assert torch.equal(target.tensors[fqn][:rows], tensor[:rows])
                assert (target.tensors[fqn][rows:] == 9).all()

    run_forked(WORLD, work)


def test_tensors_given_only_where_something_is_held():
    """Two stages: each rank is given the parameters of its stage only."""
    halves = [DistConfig(Mesh((("tp", 2),), first), ((AxisShard("tp"),), ())) for first in (0, 2)]
    stages = {f"w{i}": PlacedParam((8, 4), torch.float32, (half,)) for i, half in enumerate(halves)}
    source = ParamLayout("pp2", WORLD, stages)
    target_layout = replace(layout("tp4@1", (8, 4), 2), name="tp4")
    plan = plan_switch(source, target_layout, FLAT)
    whole = numbers(target_layout)

    def work(rank: int) -> None:
        given = held(source, rank, whole)
        assert len(given.tensors) == 1
        target = held(target_layout, rank)
        Switch(plan, rank, [given], target).run()
        assert_right(target, rank, whole)

    run_forked(WORLD, work)
