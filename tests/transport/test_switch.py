"""Switches on real ranks: every planner and execution, there and back, bit by bit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

import torch
import torch.distributed as dist

from fxpar.runtime.forked import run_forked
from fxpar.switch import plan_large_switch, plan_switch
from fxpar.switch.planners import PLANNERS
from fxpar.transport import Holding, ProcessGroups, Switch
from fxpar.transport.holding import local_runs
from tests.repeat import examples
from tests.transport.cases import WORLD, Case, cases, drawn, local_tensors, whole_tensors

EXECUTIONS = ("auto", "p2p", "a2a")
BEFORE = -7.0


def holdings(case: Case, rank: int) -> tuple[list[Holding], Holding, dict]:
    whole = whole_tensors(case.target)
    sources = [
        Holding(layout, local_tensors(layout, whole, rank, dtype, flat, padded))
        for layout, dtype, flat, padded in zip(
            case.sources, case.source_dtypes, case.flat[1:], case.padded[1:], strict=True
        )
    ]
    target = Holding(case.target, local_tensors(case.target, None, rank, None, case.flat[0], case.padded[0]))
    expected = local_tensors(case.target, whole, rank, None, False, case.padded[0])
    for fqn, tensor in expected.items():  # what nothing may write keeps what it had
        runs = local_runs(case.target, fqn, rank) or []
        real = tensor[tuple(slice(0, sum(run[2] for run in of_dim)) for of_dim in runs)].clone()
        tensor.fill_(BEFORE)
        tensor[tuple(slice(0, size) for size in real.shape)] = real
    return sources, target, expected


def assert_equal(found: dict, expected: dict, note: object = "") -> None:
    assert found.keys() == expected.keys()
    for fqn, tensor in expected.items():
        assert torch.equal(found[fqn], tensor), (note, fqn, found[fqn], tensor)


def arrived(tensors: Mapping, expected: Mapping, complete: list[str], fqns: Collection[str]) -> None:
    """What is called complete has its values."""
    mine = [fqn for fqn in fqns if fqn in expected]
    assert_equal({fqn: tensors[fqn] for fqn in mine}, {fqn: expected[fqn] for fqn in mine})
    complete.extend(fqns)


def test_random_switches_move_bit_exactly():
    chosen = drawn(cases(), examples(60))
    planned = []
    for number, case in enumerate(chosen):
        planner = ("auto", *PLANNERS, "turns")[number % 6]
        plan = plan_large_switch(case.sources[0], case.target, case.cluster, planner, case.sources[1:])
        plan.verify()
        planned.append((case, plan))

    def work(rank: int) -> int:
        process_groups = ProcessGroups()
        sent_bytes = 0
        for number, (case, plan) in enumerate(planned):
            sources, target, expected = holdings(case, rank)
            switch = Switch(
                plan,
                rank,
                sources,
                target,
                execution=EXECUTIONS[number // 2 % 3],
                staging_bytes=(64 << 20, 256, 2000)[number // 6 % 3],
                checked=number % 4 == 0,
                merge=number % 5 != 0,
                bucketed=number % 7 == 0,
                process_groups=process_groups,
            )
            for _ in range(2):
                for tensor in target.tensors.values():
                    tensor.fill_(BEFORE)
                complete: list[str] = []
                report = switch.run(partial(arrived, target.tensors, expected, complete))
                assert sorted(complete) == sorted(plan.problem.tensors)
                assert_equal(dict(target.tensors), expected, (number, switch.options))
            sent_bytes += report.sent_bytes
        return sent_bytes

    sent = sum(plan.intra_node_bytes + plan.inter_node_bytes for _, plan in planned)
    assert sum(run_forked(WORLD, work)) == sent > 0


def test_there_and_back():
    chosen = drawn(cases(holders=False, dtypes=(torch.float32,)), examples(12))

    def work(rank: int) -> None:
        dist.barrier()
        for case in chosen:
            there = plan_switch(case.sources[0], case.target, case.cluster)
            back = plan_switch(case.target, case.sources[0], case.cluster)
            source, target, _ = holdings(case, rank)
            before = local_tensors(case.sources[0], whole_tensors(case.target), rank, None, False, True)
            again = Holding(case.sources[0], local_tensors(case.sources[0], None, rank, None, False, True))
            Switch(there, rank, source, target).run()
            Switch(back, rank, [target], again).run()
            assert_equal(dict(again.tensors), before)

    run_forked(WORLD, work)
