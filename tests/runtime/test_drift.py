"""Steps that are not as predicted: the run is planned anew, on all ranks alike, and learns the same."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

import fxpar
from fxpar.errors import ParallelizeError, ReplanError
from fxpar.models.builtin import packed_lm_loss
from fxpar.runtime.drift import STEPS, Drift
from fxpar.runtime.engine import Replanned
from tests.runtime.hot import World, compiled, precompile, sequences, small

TWO = {64: "dp2", 512: "tp2+sp"}
PAIR = World(2, lambda: precompile(small, TWO))
BATCH = sequences(3, (5, 60, 33, 130, 8, 100, 90, 70))
SLOW = fxpar.Device(tflops=1e-6, memory_gb_per_s=1e-3, launch_us=0.0)
LINKS = fxpar.ClusterSpec(1, 2, 1e3, 1e3, 0.0, device=SLOW)  # costs far above what a step takes; switches for nothing


def parallel(**options):
    how = {"strategies": TWO, "loss": packed_lm_loss, "monitor": False, "cluster": LINKS, "token_budget": 600}
    return fxpar.parallelize(small(), **{**how, "compiled": compiled(small, TWO.values()), **options})


def as_if(report, factors, rank=0):
    """A report as if runs had taken so many times their predicted seconds, by strategy; rank 1 as predicted."""
    runs = {one.strategy: factors[one.strategy] if rank == 0 else 1.0 for one in report.groups}
    groups = tuple(
        replace(one, wall_s=runs[one.strategy] * one.predicted_s, switch_s=0.0, reduce_s=0.0) for one in report.groups
    )
    return replace(report, groups=groups, plan_s=0.0, wall_s=sum(one.wall_s for one in groups))


@PAIR.case
def decided_by_rank_0(rank):
    model = parallel()
    drift = model.fxpar_session.watch_drift(0.25)
    lines, losses = [], []
    for _ in range(STEPS + 2):
        report = model.train_step(BATCH)
        losses.append(report.loss)
        lines.append(drift.after(as_if(report, {"dp2": 3.0, "tp2+sp": 3.0}, rank)))
        model.zero_grad()
    return lines, losses, model.fxpar_session.engine.replanned


@PAIR.case
def other_limits(rank):
    """Limits fall if the strategy of short sequences is slow, and rise as far as there is room if that of long is."""
    found = []
    for factors in ({"dp2": 50.0, "tp2+sp": 1.0}, {"dp2": 1.0, "tp2+sp": 50.0}):
        for fits in (True, False):
            model = parallel(merge=False)
            engine = model.fxpar_session.engine
            drift = Drift(engine, 0.25, lambda groups: fits)  # noqa: B023 (runs at once)
            for _ in range(STEPS + 1):
                line = drift.after(as_if(model.train_step(BATCH), factors))
                model.zero_grad()
            report = model.train_step(BATCH)
            found.append(([group.limit for group in engine.groups], line, report.loss, engine.replanned.factors))
    return found


@PAIR.case
def kept_in_a_checkpoint(rank):
    model = parallel()
    engine = model.fxpar_session.engine
    assert "replanned" not in model.engine_state()
    before = model.plan(BATCH)
    engine.replan(Replanned((32, 512), (2.0, 3.0), 0.5))
    state = model.engine_state()
    again = parallel()
    again.load_engine_state(state)
    assert again.fxpar_session.engine.replanned == engine.replanned
    assert again.plan(BATCH) == model.plan(BATCH) != before
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again.load_engine_state({**state, "replanned": {**state["replanned"], "strategies": ["dp2", "cp2"]}})
    assert "not taken: it had other strategies" in str(caught[-1].message)
    kept = state["replanned"]
    wrong = [{"limits": 3}, *({**kept, "limits": limits} for limits in ((0, 512), (600, 512), (32, 64, 512)))]
    wrong += [{**kept, "factors": factors} for factors in ((1.0,), (1.0, 0.0), (1.0, float("nan")))]
    wrong += [{**kept, "borders": float("inf")}]
    for one in ({**state, "steps": "x"}, *({**state, "replanned": one} for one in wrong)):
        with pytest.raises(ParallelizeError, match="was not given what engine_state"):
            again.load_engine_state(one)
    tight = parallel(token_budget={64: 64, 512: 512})  # a sequence of 100 tokens is more than a micro-batch of 64
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tight.load_engine_state({**state, "replanned": {**kept, "limits": (100, 512)}})
    assert "limits 100, 512 and costs of the re-planned earlier run are not taken: micro" in str(caught[-1].message)
    assert [group.limit for group in tight.fxpar_session.engine.groups] == [64, 512]
    again.load_engine_state({**state, "replanned": {**kept, "limits": (100, 512)}})
    assert [group.limit for group in again.fxpar_session.engine.groups] == [100, 512]
    for limits in ((512,), (32, 64)):
        with pytest.raises(ReplanError, match="do not suit groups with limits 64, 512"):
            engine.replan(Replanned(limits, (1.0, 1.0)))
    return True


@PAIR.case
def measured(rank):
    """Predictions that are far off come near, and stay so: no second time."""
    model = parallel()
    drift, lines, ratios = model.fxpar_session.watch_drift(0.25), [], []
    for _ in range(STEPS + 2):
        report = model.train_step(BATCH)
        lines.append(bool(drift.after(report)))
        ratios.append((report.wall_s - report.plan_s) / report.predicted_s)
        model.zero_grad()
    return lines, ratios[0], ratios[-1]


def test_rank_0_decides_after_some_steps_in_a_row():
    (lines, losses, found), (others, same, there) = decided_by_rank_0()
    assert (lines, losses, found) == (others, same, there)
    assert [bool(line) for line in lines] == [False] * STEPS + [True, False]
    assert "5 steps, each more than 0.25 off, took 3 times the predicted time; costs are taken" in lines[STEPS]
    assert max(found.factors) == pytest.approx(3.0)
    assert found.limits[-1] == 512
    assert losses == pytest.approx(losses[:1] * len(losses), rel=1e-12)


def test_limits_are_searched_again():
    falls, falls_too, rises, stays = other_limits()[0]
    assert falls[0] == falls_too[0]
    assert falls[0][0] < 60  # its longest sequence runs elsewhere
    assert falls[3] == pytest.approx((50.0, 1.0))
    assert rises[0][0] >= 130
    assert f"new limits: <={rises[0][0]} dp2, <=512 tp2+sp" in rises[1]
    assert stays[0] == [64, 512]
    assert "limits stay: <=64 dp2" in stays[1]
    assert [one[2] for one in (falls, rises)] == pytest.approx([stays[2]] * 2, rel=1e-10)


def test_checkpoints_keep_what_was_planned_anew():
    assert kept_in_a_checkpoint() == [True, True]


def test_predictions_come_near_what_is_measured():
    (lines, before, after), (others, *_) = measured()
    assert lines == others
    assert lines == [False] * STEPS + [True, False]
    assert before < 0.1
    assert after > 3 * before
