"""Hot switching inside a mini-batch: loss, gradients and trained weights are those of one device."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import fxpar
from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import (
    BatchMismatchError,
    MemoryBudgetError,
    MiniBatchError,
    NanLossError,
    OrderError,
    ParallelizeError,
    SequenceError,
    SequenceTooLongError,
    StrategyWorldsError,
    TokenBudgetError,
    TokenIdError,
)
from fxpar.switch.node_first import NodeFirstPlan
from tests.runtime.hot import (
    STRATEGIES,
    Case,
    Small,
    World,
    adamw,
    agreed,
    compiled,
    hot,
    largest_error,
    loss_error,
    make_llama,
    named,
    one_device,
    parallel,
    precompile,
    sequences,
    shallow,
    small,
)


def make_float():
    return make_llama(torch.float32)


def make_narrow():
    return Small().bfloat16()


@pytest.mark.nightly  # a few steps are among the cases below
@pytest.mark.parametrize(("make", "steps", "limit"), [(make_llama, 20, 1e-9), (make_float, 20, 1e-5)])
def test_many_steps_of_three_strategies_equal_one_device(make, steps, limit):
    # With fp32 Adam turns the rounding of a gradient near zero into a step of the learning rate's size.
    optimizer = {"fused": True, "lr": 3e-5 if make is make_float else 3e-4}
    case = Case([sequences(seed, (5, 60, 33, 17, 130, 8)) for seed in range(steps)], make=make, optimizer=optimizer)
    have, want = hot({"": case})[""], case.one_device()
    assert {group.strategy for group in have["reports"][0].groups} == {"dp4", "dp2.tp2+sp", "cp2.tp2"}
    assert loss_error(have["losses"], want["losses"]) <= limit
    assert largest_error(have["params"], want["params"]) <= limit


# On two of four ranks a quarter lies outside of the half that the rank holds, so the two take more than one.
TAKING_TURNS = {16: "dp2.tp2", 512: "tp4"}


def prepare():
    for case in CASES.values():
        precompile(case.make, case.options.get("strategies"))
    precompile(make_narrow)
    precompile(shallow, TAKING_TURNS)
    precompile(small)
    precompile(small, {64: "dp2"})


WORLD = World(4, prepare)


ORDER = ("dp2.tp2+sp", "cp2.tp2", "dp4")  # none at its place of those that are not told


@WORLD.case
def in_order(rank):
    batch, model = sequences(7), parallel(small, order=ORDER)
    planned = [list(STRATEGIES.values())[group.group] for group in model.plan(batch).groups]
    report = model.train_step(batch)
    assert tuple(planned) == tuple(group.strategy for group in report.groups) == ORDER
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def test_another_order_gives_the_same_gradients():
    want = one_device(small(), [sequences(7)], clip=None)
    assert largest_error(in_order()[0], want["grads"]) <= 1e-12


SLOW_NETWORK = ClusterSpec(2, 2, intra_gb_per_s=200, inter_gb_per_s=0.01, latency_us=0)
BATCHES = [sequences(seed) for seed in (3, 4)]
HOME = {"turns": "R", "up_proj.weight": "S(1)"}
HOME_OF_LLAMA = {"*norm*": "R", "*.q_proj.weight": "S(1)"}
OPTIONS = {
    "chain, home rules": {"gradients": "chain", "home": HOME},
    "zero3 and zero2, checked, a2a, tiny staging": {
        "strategies": {16: "dp4+zero3", 64: "dp2.tp2+zero2", 512: "cp4"},
        **{"checked": True, "execution": "a2a", "staging_bytes": 1 << 16, "resident": []},
    },
    "sums of nodes first": {
        "cluster": SLOW_NETWORK,
        "home": HOME,
        "staging_bytes": 1 << 14,  # one tensor at a time, or slices of it
    },
}
MORE_OPTIONS = {
    # Each of these is part of one above.
    "one resident": {"resident": ["dp2.tp2+sp"], "order": ["cp2.tp2", "dp2.tp2+sp", "dp4"]},
    "checked, a2a, tiny staging": {"checked": True, "execution": "a2a", "staging_bytes": 1 << 16, "resident": []},
    "zero3 and zero2": {"strategies": {16: "dp4+zero3", 64: "dp2.tp2+zero2", 512: "cp4"}},
    "static": {"strategies": {512: "dp2.cp2"}},
    "arena only, hotspa planner": {"resident": [], "planner": "hotspa"},
    "by turns through doors, checked, tiny staging": {
        "strategies": {16: "dp4+zero3", 64: "dp2.tp2+sp", 512: "cp4"},
        **{"planner": "turns", "cluster": SLOW_NETWORK, "checked": True, "staging_bytes": 1 << 14, "resident": []},
    },
    "chain with zero": {"strategies": {16: "dp4+zero3", 64: "dp2.tp2+sp", 512: "cp4"}, "gradients": "chain"},
    "one strategy twice": {"strategies": {16: "dp4", 64: "dp4", 512: "tp4"}, "gradients": "chain"},
    "by turns, chain, home rules": {"planner": "turns", "gradients": "chain", "home": HOME_OF_LLAMA},
}
FEW = [(2,), (9, 300), (16, 17, 64, 65, 512)]
CASES = {
    **{name: Case(BATCHES, options, small) for name, options in OPTIONS.items()},
    "documents in bins, one resident": Case(
        BATCHES,
        {
            "strategies": {16: "rows4+zero1", 64: "dp2.rows2+zero2", 512: "tp4+sp[*.attention: rows2.tp2]"},
            "resident": ["dp2.rows2+zero2"],
            "order": ["tp4+sp[*.attention: rows2.tp2]", "dp2.rows2+zero2", "rows4+zero1"],
        },
        shallow,
    ),
    "rings": Case(BATCHES, {"strategies": {16: "dp4", 64: "tp2.ring2+sp", 512: "cp2.ring2+zero3"}}, shallow),
    "few sequences, fused optimizer": Case(
        [sequences(0, (5, 60, 33, 17, 130, 8)), *(sequences(11, lengths) for lengths in FEW)],
        make=shallow,
        optimizer={"fused": True},
    ),
}
MORE = {
    name: Case(BATCHES, {**options, "home": HOME_OF_LLAMA} if "home" in options else options, shallow)
    for name, options in {**OPTIONS, **MORE_OPTIONS}.items()
}


@WORLD.case
def every_case(rank):
    return {name: named(name, case.run) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def trained():
    return agreed(every_case())


@pytest.fixture(scope="module")
def trained_more():
    return hot(MORE)


@pytest.mark.parametrize("name", CASES)
def test_neither_options_nor_few_sequences_change_a_result(trained, name):
    equal_to_one_device(trained[name], CASES[name])


def test_the_cases_run_under_three_strategies(trained):
    groups = trained["few sequences, fused optimizer"]["reports"][0].groups
    assert {group.strategy for group in groups} == {"dp4", "dp2.tp2+sp", "cp2.tp2"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", MORE)
def test_nor_do_these(trained_more, name):
    equal_to_one_device(trained_more[name], MORE[name])


def equal_to_one_device(have: dict, case: Case) -> None:
    want = case.one_device()
    assert sum(group.sequences for group in have["reports"][0].groups) == len(case.batches[0])
    assert loss_error(have["losses"], want["losses"]) <= 1e-12
    assert largest_error(have["params"], want["params"]) <= 1e-9


STAGED = 1 << 13  # bytes of messages: not all fit in at a time


@WORLD.case
def through_nodes(rank):
    model = parallel(small, cluster=SLOW_NETWORK, staging_bytes=STAGED)
    engine = model._session().engine
    report = model.train_step(sequences(5))
    plans = [engine.gradients.plan(name) for name in STRATEGIES.values()]
    slots = [slot.numel() for slot in engine.switching.options.staging.slots]
    return plans, report, [group.reduce_bytes for group in report.groups], model.memory, slots


def test_gradients_go_through_the_nodes_where_the_network_is_slow():
    for plans, report, sent, memory, slots in through_nodes():
        assert all(isinstance(plan, NodeFirstPlan) for plan in plans)
        by_name = dict(zip(STRATEGIES.values(), plans, strict=True))
        assert sent == [
            by_name[group.strategy].intra_node_bytes + by_name[group.strategy].inter_node_bytes
            for group in report.groups
        ]
        reserved_for_sums = memory.staging_bytes - STAGED
        assert reserved_for_sums >= max(max(plan.sums_bytes for plan in plans), *slots[2:])
        assert STAGED / 2 < sum(slots[:2]) <= STAGED


@WORLD.case
def budgets(rank):
    free = parallel(shallow, strategies=TAKING_TURNS, overlap=False).memory
    model = parallel(shallow, strategies=TAKING_TURNS, memory_budget_bytes=free.total_bytes - 1)
    report = model.train_step(sequences(5))
    both = parallel(shallow, strategies=TAKING_TURNS)
    enough = parallel(shallow, strategies=TAKING_TURNS, memory_budget_bytes=both.memory.total_bytes)
    less = parallel(shallow, strategies=TAKING_TURNS, memory_budget_bytes=both.memory.total_bytes - 1)
    apart = parallel(shallow, strategies=TAKING_TURNS, memory_budget_bytes=free.total_bytes)
    sessions = [m._session() for m in (both, enough, less, apart, model)]
    assert [session.engine.options.overlap for session in sessions] == [True, True, True, False, False]
    assert both.memory.arena_bytes == 0 < less.memory.arena_bytes  # rather turns than groups that do not overlap
    assert less.memory.total_bytes < both.memory.total_bytes
    assert apart.memory == free
    with pytest.raises(MemoryBudgetError, match="home weights") as caught:
        parallel(shallow, strategies=TAKING_TURNS, memory_budget_bytes=1000)
    return free, model.memory, report.loss, str(caught.value)


def test_a_budget_makes_layouts_take_turns_and_too_small_a_one_is_an_error():
    want = one_device(shallow(), [sequences(5)])["losses"]
    for free, tight, loss, message in budgets():
        assert tight.total_bytes < free.total_bytes
        assert tight.arena_bytes > 0 == free.arena_bytes
        assert loss_error([loss], want) <= 1e-12
        assert "tp4 alone" in message
        assert ", but the budget is 1.0 kB. " in message


@WORLD.case
def added_up(rank):
    one, two = sequences(1), sequences(2)
    model = parallel(small)
    model.train_step(one)
    model.train_step(two)
    both = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=False)
    model.train_step(one)
    again = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
    dropped, placed, *_ = model.parameters()
    dropped.grad, placed.grad = None, placed.grad.redistribute(placements=[torch.distributed.tensor.Replicate()])
    model.train_step(two)
    mixed = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return both, again, mixed


def test_gradients_add_up_until_they_are_dropped():
    first, second = (one_device(small(), [sequences(seed)], clip=None)["grads"] for seed in (1, 2))
    both, again, mixed = added_up()[0]
    total = {name: first[name] + second[name] for name in first}
    assert largest_error(both, total) <= 1e-12
    assert largest_error(again, first) <= 1e-12
    dropped = next(iter(first))
    assert largest_error(mixed, {**total, dropped: second[dropped]}) <= 1e-12


@WORLD.case
def switched(rank):
    model = parallel(make_narrow, resident=["dp2.tp2+sp"])
    session = model._session()
    store, switching = session.store, session.engine.switching
    before = store.gather()
    for visits in (["cp2.tp2"], ["dp2.tp2+sp", "dp4", "cp2.tp2"], ["dp4", "cp2.tp2", "dp2.tp2+sp", "dp4"]):
        visited = []
        for name in visits:
            switching.to(name, visited)
            visited.append(name)
            for info, stored in zip(session.programs[name].inputs, session.programs[name].stored_inputs, strict=True):
                if info.kind == "param":
                    want = stored.dist.take(before[info.fqn].to(stored.meta.dtype), rank)
                    assert torch.equal(store.compute(name)[info.fqn], want), (name, info.fqn)
    after = store.gather()
    assert all(torch.equal(after[fqn], value) for fqn, value in before.items())
    return {fqn: (value.dtype, store.compute("dp4")[fqn].dtype) for fqn, value in after.items()}


def test_weights_are_the_same_before_and_after_any_switches():
    dtypes = switched()[0]
    assert set(dtypes.values()) == {(torch.float32, torch.bfloat16)}


def broken():
    model = small()
    with torch.no_grad():
        model.embedding.weight[7] = float("nan")
    return model


@WORLD.case
def not_a_number(rank):
    good, bad = [torch.arange(20, 40)], [torch.arange(3, 60), torch.arange(5)]
    programs = compiled(small)
    model = parallel(broken, compiled=programs)
    model.train_step(good)
    with pytest.raises(NanLossError, match="step 2"):
        model.train_step(bad)
    skipping = parallel(broken, nan="skip", compiled=programs)
    optimizer = adamw(skipping)
    before = skipping._session().store.gather()
    report = skipping.train_step(bad)
    nn.utils.clip_grad_norm_(skipping.parameters(), 1.0)
    optimizer.step()
    after = skipping._session().store.gather()
    same = all(
        torch.equal(
            after[n],
            v,
        )
        or n == "embedding.weight"
        for n, v in before.items()
    )
    return report.skipped, same, skipping.train_step(good).skipped


def test_loss_that_is_no_number():
    assert not_a_number() == [(True, True, False)] * 4


@functools.cache
def refusing():
    """A session of this rank for tests whose steps are all refused."""
    return parallel(small)


@WORLD.case
def different_batches(rank):
    model = refusing()
    batch = sequences(1)
    if rank == 2:
        batch[3] = batch[3] + 1
    with pytest.raises(BatchMismatchError, match="rank 2 differs"):
        model.train_step(batch)
    return True


def test_ranks_with_different_batches_are_named():
    assert all(different_batches())


@WORLD.case
def bad_options(rank):
    cases = [
        ({"order": ["dp4", "tp4"]}, OrderError, "'tp4' is none"),
        ({"order": ["dp4"]}, OrderError, "each strategy must appear once: dp4, .*; there is dp4$"),
        ({"resident": ["dp3"]}, OrderError, "dp3"),
        ({"strategies": {16: "dp4", 64: "dp2"}}, StrategyWorldsError, "dp2"),
        ({"token_budget": 100}, TokenBudgetError, "512"),
    ]
    for options, error, text in cases:
        with pytest.raises(error, match=text):
            parallel(small, **options)
    model = refusing()
    with pytest.raises(SequenceTooLongError, match="600"):
        model.train_step([torch.arange(10), torch.arange(600) % 131])
    unknown = [torch.arange(10), {"input_ids": torch.arange(10), "labels": torch.arange(122, 132)}]
    for run in (model.train_step, model.evaluate):
        with pytest.raises(TokenIdError, match=r"sequence 1 .*position 9: 'labels' is 131, but the table"):
            run(unknown)
    for odd, error in (([[1, 2, 3]], SequenceError), ({"input_ids": torch.arange(3)}, MiniBatchError)):
        with pytest.raises(error):
            model.train_step(odd)
    assert model.step_count == 0
    return True


def test_bad_options():
    assert all(bad_options())


def test_without_a_process_group_the_error_says_how_to_start():
    with pytest.raises(ParallelizeError, match="torchrun"):
        fxpar.parallelize(small(), strategies={16: "dp4"})
