"""Phases and messages of random plans: complete, bounded, and the same at both ends."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.mesh import Mesh
from fxpar.switch import ParamLayout, PlacedParam, plan_switch
from fxpar.transport.messages import messages
from fxpar.transport.phases import cut_phases, part_of
from tests.repeat import examples
from tests.switch.moving import switches


def load(problem, table, phase) -> np.ndarray:
    """[ranks]: bytes that each rank sends and receives."""
    total = np.zeros(problem.world, np.int64)
    for row in table[phase.rows]:
        cls = problem.classes[problem.class_of[row["tensor"]]]
        box = part_of(tuple(map(tuple, cls.boxes[row["slice"]].tolist())), phase.part, phase.parts)
        nbytes = math.prod(stop - start for start, stop in box) * cls.itemsize
        total[row["src"]] += nbytes
        total[row["dst"]] += nbytes
    return total


@settings(max_examples=examples(20))
@given(switches(), st.sampled_from((1, 64, 300, 1000, 1 << 20)), st.sampled_from(("hotspa", "relay")))
def test_phases_are_complete_and_bounded(case, staging_bytes, planner):
    sources, target, cluster = case
    plan = plan_switch(sources[0], target, cluster, planner)
    problem, table = plan.problem, plan.transfers
    phases = cut_phases(problem, table, staging_bytes)
    seen = np.concatenate([np.empty((0, 3), np.int64), *(rows_of(phase) for phase in phases)])
    assert len(np.unique(seen, axis=0)) == len(seen)
    share = np.zeros(len(table))
    np.add.at(share, seen[:, 0], 1 / seen[:, 2])
    assert np.allclose(share, 1)
    for phase in phases:
        assert set(table["step"][phase.rows].tolist()) == {phase.step}
        limit = staging_bytes // 2  # as two are under way, of this plan or of another one in the same memory
        alone = len(np.unique(table["tensor"][phase.rows])) == 1
        smallest = alone and phase.parts >= longest_side(problem, table[phase.rows])
        assert smallest or load(problem, table, phase).max() <= limit


def longest_side(problem, rows) -> int:
    ends = problem.classes[problem.class_of[rows["tensor"][0]]].boxes[rows["slice"]]
    return int((ends[:, :, 1] - ends[:, :, 0]).max(initial=1))


def rows_of(phase) -> np.ndarray:
    """[rows, 3]: row, part, parts."""
    count = len(phase.rows)
    return np.stack([phase.rows, np.full(count, phase.part), np.full(count, phase.parts)], 1)


@settings(max_examples=examples(20))
@given(switches(), st.sampled_from((64, 1000, 1 << 20)))
def test_what_is_sent_on_has_arrived(case, staging_bytes):
    """Each hop comes after the one before, and not right behind it if there are other buckets."""
    sources, target, cluster = case
    plan = plan_switch(sources[0], target, cluster, "relay")
    phases = cut_phases(plan.problem, plan.transfers, staging_bytes)
    place = {(phase.bucket, phase.step): number for number, phase in enumerate(phases)}
    buckets = {bucket for bucket, _ in place}
    for bucket in buckets:
        if (bucket, 1) in place and (bucket, 0) in place:
            assert place[bucket, 0] < place[bucket, 1]
            if (bucket + 1, 0) in place:
                assert place[bucket + 1, 0] < place[bucket, 1]


@settings(max_examples=examples(20))
@given(switches(), st.sampled_from((200, 1 << 20)), st.sampled_from((None, 1, 32)), st.data())
def test_both_ends_agree_on_every_message(case, staging_bytes, alone_bytes, data):
    sources, target, cluster = case
    plan = plan_switch(sources[0], target, cluster)
    # Tensors of all sizes of items in one message, as the ranks of a mixed model have them.
    of_size = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    sizes = [data.draw(st.sampled_from((1, 2, 4, 8))) for _ in plan.problem.classes]
    dtypes = [of_size[sizes[number]] for number in plan.problem.class_of.tolist()]
    world, moved = plan.problem.world, 0
    for phase in cut_phases(plan.problem, plan.transfers, staging_bytes):
        ends = [messages(plan.problem, plan.transfers, phase, rank, dtypes, alone_bytes) for rank in range(world)]
        sent, received = by_pair(out for out, _ in ends), by_pair(into for _, into in ends)
        assert sent == received
        assert alone_bytes is not None or all(len(between) == 1 for between in sent.values())
        every = list(itertools.chain(*sent.values()))
        for message in every:
            assert message.nbytes > 0
            assert all(piece.offset % piece.dtype.itemsize == 0 for piece in message.pieces)
            for one, two in itertools.pairwise(message.pieces):
                assert one.offset + one.nbytes == two.offset
            moved += sum(piece.numel for piece in message.pieces)
            sizes = {piece.nbytes // len(piece.fqns) for piece in message.pieces}
            if alone_bytes is not None and max(sizes) >= alone_bytes:
                assert [len(piece.fqns) for piece in message.pieces] == [1]
        for one, two in itertools.combinations(every, 2):
            assert one.key != two.key or one.pieces == two.pieces
    numel = {n: cls.nbytes // cls.itemsize for n, cls in enumerate(plan.problem.classes)}
    table = plan.transfers
    numbers = zip(plan.problem.class_of[table["tensor"]].tolist(), table["slice"].tolist(), strict=True)
    assert moved == sum(int(numel[number][piece]) for number, piece in numbers)


def by_pair(lists) -> dict:
    """Messages by (source, destination), in order."""
    found: dict = {}
    for message in itertools.chain(*lists):
        found.setdefault((message.src, message.dst), []).append(message)
    return found


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 12))
def test_parts_of_a_box_cover_it(sizes, parts):
    box = tuple((start, start + size) for start, size in enumerate(sizes))
    found = [part_of(box, part, parts) for part in range(parts)]
    cells = [cell for part in found for cell in itertools.product(*(range(*ends) for ends in part))]
    assert sorted(cells) == sorted(itertools.product(*(range(*ends) for ends in box)))


def test_a_bucketed_switch_comes_in_eighths(monkeypatch):
    monkeypatch.setattr("fxpar.schedule.mini_batch.BUCKET_BYTES", 1)
    mesh = Mesh((("tp", 2),))
    placed = [PlacedParam((8, 4), torch.float32, (DistConfig(mesh, (of, ())),)) for of in ((AxisShard("tp"),), ())]
    cut, whole = (ParamLayout("", 2, {f"w{n}": param for n in range(32)}) for param in placed)
    plan = plan_switch(cut, whole, ClusterSpec(1, 2, 1.0, 1.0, 0))
    problem, table = plan.problem, plan.transfers
    assert len(cut_phases(problem, table, 1 << 20)) == 1
    sent_and_received = int(load(problem, table, cut_phases(problem, table, 1 << 20)[0]).max())
    assert len(cut_phases(problem, table, sent_and_received)) == 2  # of which each has half of the memory
    phases = cut_phases(problem, table, 1 << 20, bucketed=True)
    assert [sorted(set(table["tensor"][phase.rows].tolist())) for phase in phases] == [
        list(range(first, first + 4)) for first in range(0, 32, 4)
    ]
