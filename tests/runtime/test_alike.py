"""What every rank must be given alike, and what may come in another order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from fxpar.errors import BatchMismatchError, FxparError, LayOutError, OptionMismatchError, ReplicaBatchError
from fxpar.passes.share_weights import ShareWeights
from tests.runtime.hot import World, compiled, parallel, precompile, sequences, small

STRATEGIES = {16: "dp2", 64: "tp2", 512: "dp2+zero3"}
LENGTHS = (5, 9, 40, 100)


def prepare():
    precompile(small, STRATEGIES)


WORLD = World(2, prepare)


@WORLD.case
def programs_in_another_order(rank):
    given = compiled(small, STRATEGIES.values())
    programs = dict(reversed(given.programs.items())) if rank else given.programs
    model = parallel(small, strategies=STRATEGIES, compiled=replace(given, programs=programs))
    session = model._session()
    planned = [group.group for group in model.plan(sequences(1, LENGTHS)).groups]
    with pytest.raises(BatchMismatchError, match="the denominator on rank 1 differs"):
        model.train_step(sequences(1, LENGTHS), denominator=3.0 + rank)
    ran = [str(group.strategy) for group in model.train_step(sequences(1, LENGTHS)).groups]
    assert ran == [STRATEGIES[limit] for limit in (list(STRATEGIES)[g] for g in planned)]
    return list(session.programs), list(session.engine.bound), list(session.engine.switching.schedule.layouts), ran


def test_the_order_of_the_programs_is_that_of_the_groups():
    """Two orders of running that cost the same are told apart by it, and process groups are made in it."""
    first, second = programs_in_another_order()
    assert first == second
    assert first[0] == first[1] == first[2] == list(STRATEGIES.values())


@WORLD.case
def other_options(rank):
    fewer = {"token_budget": 600} if rank else {}
    swapped = {16: "tp2", 64: "dp2", 512: "dp2+zero3"} if rank else STRATEGIES
    cases = [
        ({"seed": rank}, "seed is 1 on rank 1, and 0 on rank 0. Every rank must"),
        ({"order": sorted(STRATEGIES.values(), reverse=bool(rank))}, r"order is \['tp2', .* on rank 1, and \['dp2', "),
        ({"strategies": swapped}, r"strategies .* is \['16: tp2 \(.* tokens\)', '64: .* and \['16: dp2 \("),
        (fewer, r"strategies \(and token budgets\) is \['16: dp2 \(600 tokens\)'"),
    ]
    if rank:
        cases += [({"cost": lambda *_: None}, "whether there is a cost model is True on rank 1, and False on rank 0")]
        cases += [({"initializer": lambda module: None}, "initializer is '.*lambda>' on rank 1, and 'NoneType' on")]
    else:
        cases += [({}, "whether there is a cost model is True"), ({}, "initializer is '.*lambda>' on rank 1, and")]
    lengths = {"lengths": [5, 60], "tokens_per_step": 900}
    auto = {"strategies": "auto", "compiled": None, **lengths} if rank else {}
    cases += [
        (auto, 'whether strategies="auto" is True on rank 1, and False on rank 0'),
        ({"monitor": bool(rank)}, "whether there is a monitor is True on rank 1, and False"),
    ]
    for options, message in cases:
        with pytest.raises(OptionMismatchError, match=message):
            parallel(small, **{"strategies": STRATEGIES, "compiled": compiled(small, STRATEGIES.values()), **options})
    return True


def test_ranks_with_other_options_are_told_so():
    assert all(other_options())


@WORLD.case
def written_otherwise(rank):
    rules = {"up_proj.*": "R", "*.weight": "S(0)"}
    turned = {"*.weight": "S(0)", "up_proj.*": "R"}  # of one weight another rule comes first
    every = {"strategies": STRATEGIES, "compiled": compiled(small, STRATEGIES.values())}
    with pytest.raises(OptionMismatchError, match=r"home is {'\*.weight.* on rank 1, and {'up_proj"):
        parallel(small, **every, home=turned if rank else rules)
    alike = {
        "resident": ("dp2",) if rank else ["dp2"],
        "memory_budget_bytes": 8e9 if rank else 8_000_000_000,
        "home": {"up_proj.*": "R", "head*": "R"} if rank else {"head*": "R", "up_proj.*": "R"},
    }
    return parallel(small, **every, **alike).train_step(sequences(1, LENGTHS)).loss


def test_the_same_written_otherwise_is_the_same():
    first, second = written_otherwise()
    assert first == second


@WORLD.case
def batches_of_plain_calls(rank):
    model = parallel(small, strategies=STRATEGIES, compiled=compiled(small, STRATEGIES.values()))
    ids, positions = torch.arange(12)[None], torch.arange(12)[None]
    message = "rank 1 calls the model with another batch than rank 0, though .* one replica under 'tp2'"
    with model.using("tp2"):
        with pytest.raises(ReplicaBatchError, match=message):
            model(ids + rank, positions)
        same = model(ids, position_ids=positions)  # a call that was refused is compared again
    with model.using("dp2"):
        own = model(ids + rank, positions)
    return torch.equal(own, same), float((own - same).abs().max())


@WORLD.case
def batches_of_replicas(rank):
    """Each number of rows is a capture of its own; gradients of equal rows, summed, are the mean over replicas."""
    model = parallel(small, strategies=STRATEGIES, compiled=compiled(small, STRATEGIES.values()))
    ids, positions = torch.arange(12)[None], torch.arange(12)[None]

    def gradient(*rows: int) -> torch.Tensor:
        with model.using("dp2"):
            model(ids.expand(rows[rank], -1), positions.expand(rows[rank], -1)).sum().backward()
        found = model.head.weight.grad.full_tensor()
        model.zero_grad()
        return found

    of_one = gradient(1, 1)
    return [float((gradient(*rows) / of_one).mean()) for rows in ((2, 2), (2, 3), (3, 1), (3, 2))]


def test_replicas_bring_other_numbers_of_rows():
    """What is new to one rank alone must not make it wait for the others."""
    for found in batches_of_replicas():
        assert found == pytest.approx([2.0, 2.5, 2.0, 2.5], rel=1e-10)


def test_ranks_of_one_replica_bring_the_same_batch():
    """Replicas bring their own: tp would mix the tokens of two batches without a word."""
    (_, near), (second, _) = batches_of_plain_calls()
    assert near < 1e-12
    assert not second


@dataclass(frozen=True)
class Broken(ShareWeights):
    error: type[Exception] = ValueError

    def lay_out(self, programs, rank, resident=None):
        if rank == 1:
            raise self.error("out of room")
        return super().lay_out(programs, rank, resident)


@WORLD.case
def a_layout_that_fails_on_one(rank):
    class Own(FxparError):
        """Cannot be sent: nobody else could find its class."""

    told = {}
    for error in (ValueError, Own):
        given = replace(compiled(small, STRATEGIES.values()), sharing=Broken(error))
        with pytest.raises(LayOutError) as found:
            parallel(small, strategies=STRATEGIES, compiled=given)
        told[error.__name__] = str(found.value), type(found.value.__cause__).__name__
    return told


@pytest.mark.parametrize("kind", ["ValueError", "Own"])
def test_nobody_waits_for_a_rank_whose_layout_fails(kind):
    (first, no_cause), (second, cause) = (told[kind] for told in a_layout_that_fails_on_one())
    assert first == second
    assert first.startswith(f"pass 'share_weights': lay_out raised {kind} on rank 1: out of room. Mend the pass")
    assert (no_cause, cause) == ("NoneType", kind)
