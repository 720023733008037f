from __future__ import annotations

import math

import pytest
import torch

from fxpar.errors import GradientNormError
from fxpar.runtime.report import Evaluated
from fxpar.train.config import OptimizerConfig, ScheduleConfig
from fxpar.train.loop import Hooks, Training, run_steps
from fxpar.train.optimize import changed_schedule, factor, make_optimizer, make_schedule
from fxpar.train.records import Totals
from tests.train.fakes import FakeModel, batches


def training(steps=6, clip=1.0, nan="error", **options):
    model = FakeModel(**options)
    optimizer = make_optimizer(model.parameters(), OptimizerConfig(lr=0.1))
    schedule = make_schedule(optimizer, ScheduleConfig(warmup=2), steps)
    return Training(model, batches(), optimizer, schedule, clip, nan)


def test_loss_falls_and_records_are_complete():
    records = []
    assert run_steps(training(30), 0, 30, 0, Hooks(done=records.append)) is False
    assert [r.step for r in records] == list(range(1, 31))
    assert records[-1].loss < 0.5 * records[0].loss
    assert all(r.sequences == 3 and r.tokens == r.valid_tokens + 3 and r.grad_norm > 0 for r in records)
    assert records[0].lr == pytest.approx(0.05)
    assert records[-1].lr == pytest.approx(0.01)
    assert records[3].wall_s >= records[3].engine_s > 0


def test_a_validation_has_its_metrics():
    records = []
    validate = {2: Evaluated(1.5, {"accuracy": 0.25})}.get
    run_steps(training(2), 0, 2, 0, Hooks(done=records.append, validate=validate))
    assert [(r.validation_loss, r.validation_metrics) for r in records] == [(None, {}), (1.5, {"accuracy": 0.25})]


def test_saves_every_few_steps_and_at_the_end():
    saved = []
    run_steps(training(7), 0, 7, 3, Hooks(done=lambda r: None, save=saved.append))
    assert saved == [3, 6, 7]
    saved.clear()
    run_steps(training(7), 4, 7, 0, Hooks(done=lambda r: None, save=saved.append))
    assert saved == [7]


def test_a_checkpoint_is_written_before_held_out_documents_are_read():
    saved: list[int] = []

    def validate(step: int) -> None:
        if step == 3:
            raise RuntimeError("no memory for it")

    with pytest.raises(RuntimeError, match="no memory"):
        run_steps(training(4), 0, 4, 3, Hooks(done=lambda r: None, save=saved.append, validate=validate))
    assert saved == [3]


@pytest.mark.parametrize(("ask_after", "done", "saves"), [(0, 0, []), (2, 2, [2]), (7, 7, [7])])
def test_stop(ask_after, done, saves):
    records, saved = [], []
    hooks = Hooks(
        done=records.append,
        sync=lambda cpu_s, wall_s: (len(records) + (cpu_s > 0) >= ask_after, 4 * cpu_s, wall_s),
        save=saved.append,
    )
    stopped = run_steps(training(7), 0, 7, 0, hooks)
    assert (len(records), saved) == (done, saves)
    assert stopped == (done < 7)


def test_a_skipped_step_changes_nothing_but_the_schedule():
    one = training(4, bad_steps=(1,))
    before = one.model.logits.weight.clone()
    records = []
    run_steps(one, 0, 1, 0, Hooks(done=records.append))
    assert records[0].skipped
    assert math.isnan(records[0].loss)
    assert torch.equal(before, one.model.logits.weight)
    assert one.scheduler.last_epoch == 1
    assert Totals.of(records).skipped == 1


@pytest.mark.parametrize("nan", ["error", "skip"])
def test_gradients_that_are_no_numbers(nan):
    one = training(2, nan=nan)
    one.model.logits.weight.register_hook(lambda grad: grad * math.inf)
    before, records = one.model.logits.weight.clone(), []
    if nan == "error":
        with pytest.raises(GradientNormError, match="step 1"):
            run_steps(one, 0, 1, 0, Hooks(done=records.append))
    else:
        run_steps(one, 0, 1, 0, Hooks(done=records.append))
        assert records[0].skipped
    assert torch.equal(before, one.model.logits.weight)


def test_without_clipping_no_norm_is_computed():
    records = []
    run_steps(training(1, clip=0.0), 0, 1, 0, Hooks(done=records.append))
    assert records[0].grad_norm is None


def test_totals():
    records = []
    run_steps(training(5), 0, 5, 0, Hooks(done=records.append, sync=lambda cpu_s, wall_s: (False, 2.0, wall_s)))
    totals = Totals.of(records)
    assert totals.cpu_s == 10.0
    assert totals.tokens == sum(r.tokens for r in records) == sum(g.tokens for g in totals.groups)
    (long,) = [g for g in totals.groups if g.strategy == "cp4"]
    assert long.switch_s == 0.125 * long.steps
    assert long.compute_s == (0.5 - 0.125 - 0.0625) * long.steps
    assert (totals.first_loss, totals.last_loss) == (records[0].loss, records[-1].loss)
    with pytest.raises(ValueError, match="no step"):
        Totals.of([])


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_schedule(kind):
    at = factor(ScheduleConfig(kind=kind, warmup=4, final=0.25), 24)
    values = [at(step) for step in range(24)]
    assert values[:4] == [0.25, 0.5, 0.75, 1.0]
    assert values[4] == 1.0
    assert values[-1] == pytest.approx(1.0 if kind == "constant" else 0.25)
    assert values[4:] == sorted(values[4:], reverse=True)
    if kind != "constant":
        assert values[13] > values[14]


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("implementation", ["auto", "fused", "foreach", "loop"])
def test_optimizers(name, implementation):
    model = torch.nn.Linear(3, 2)
    optimizer = make_optimizer(model.parameters(), OptimizerConfig(name=name, implementation=implementation))
    assert [len(g["params"]) for g in optimizer.param_groups] == [1, 1]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    model(torch.ones(3)).sum().backward()
    before = model.weight.clone()
    optimizer.step()
    assert not torch.equal(before, model.weight)
    fused = implementation == "fused" or (implementation == "auto" and name != "sgd")  # which takes no DTensors
    assert bool(optimizer.defaults["fused"]) == fused


def test_another_number_of_steps_changes_the_schedule():
    linear = ScheduleConfig(kind="linear", warmup=0, final=0.0)
    said = changed_schedule(linear, 11, 21, 5, 0.1)
    assert said == (
        "the linear schedule now ends at step 21, not 11: step 6 runs with learning rate 7.50e-02 instead of 5.00e-02"
    )
    assert changed_schedule(linear, 11, 11, 5, 0.1) == ""
    assert changed_schedule(ScheduleConfig(kind="constant"), 11, 21, 5, 0.1) == ""
