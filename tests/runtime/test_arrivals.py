"""Weights that are waited for where they are used, while another thread brings them."""

from __future__ import annotations

import functools
import threading
import time

import pytest
import torch

from fxpar.ir.exec_graph import ExecGraph
from fxpar.lowering import lower
from fxpar.models import load
from fxpar.runtime.arrivals import Arrivals, Handed, order_of_gradients
from fxpar.runtime.bound import bind
from fxpar.runtime.micro import MicroRun
from fxpar.schedule.mini_batch import Pace
from fxpar.tracer import capture


@functools.cache
def lowered():
    model = load("llama", dtype=torch.float64, seed=1, options={"layers": "2", "dim": "16", "heads": "2", "ffn": "32"})
    program = lower(capture(model.model, model.loss_fn, model.example_batch), "dp1", for_store=True)
    assert isinstance(program, ExecGraph)
    return model, program


def bound_llama(backend="eager"):
    """On one device, with its parameters and a batch."""
    model, program = lowered()
    params = {fqn: p.detach() for fqn, p in model.model.named_parameters()}
    bound = bind(program, 0, {}, compile=backend)
    bound.prepare = functools.partial(bound.prepare, buffers=dict(model.model.named_buffers()))
    return bound, params, model.example_batch


def step(bound, params, batch, arrivals=None):
    bound.prepare(params, arrivals=arrivals)
    bound.run(batch, 1.0)
    bound.run(batch, 0.5)
    return bound.finish()


def test_each_weight_is_waited_for_where_it_is_first_used():
    """What has not come is zeros: every weight but the one that comes next. The result is that of weights which were
    all there, and the run was under way before the last one came.
    """
    bound, params, batch = bound_llama()
    want = step(bound, params, batch)
    empty, arrivals, order = {fqn: torch.zeros_like(p) for fqn, p in params.items()}, Arrivals(), []
    waiting, wait = threading.Semaphore(0), arrivals.wait

    def waited(fqn):
        if fqn not in order:
            order.append(fqn)
            waiting.release()
        wait(fqn)

    def bring():
        for number in range(len(params)):
            assert waiting.acquire(timeout=60)
            fqn = order[number]
            empty[fqn].copy_(params[fqn])
            arrivals.came([fqn])
        arrivals.ended()

    arrivals.wait = waited
    thread = threading.Thread(target=bring)
    thread.start()
    found = step(bound, empty, batch, arrivals)
    thread.join()
    assert sorted(order) == sorted(params)
    assert [order[0], order[-1]] == [next(iter(params)), list(params)[-1]]  # as they are used
    assert torch.equal(found["loss"], want["loss"])
    assert all(torch.equal(found["grads"][fqn], grad) for fqn, grad in want["grads"].items())
    assert arrivals.waited_s > 0


def test_a_later_group_waits_for_its_own_weights_only():
    bound, params, batch = bound_llama()
    late = Arrivals()
    late.ended()
    step(bound, params, batch, late)
    assert torch.equal(step(bound, params, batch)["loss"], step(bound, params, batch)["loss"])  # no arrivals at all


def test_a_switch_that_fails_ends_the_run_that_waits():
    bound, params, batch = bound_llama()
    arrivals = Arrivals()
    arrivals.came(list(params)[:3])
    threading.Timer(0.05, arrivals.ended, [OSError("no network")]).start()
    bound.prepare(params, arrivals=arrivals)
    with pytest.raises(OSError, match="no network"):
        bound.run(batch, 1.0)
    with pytest.raises(OSError, match="no network"):
        arrivals.wait_for_all()
    arrivals.wait(next(iter(params)))  # what had come is there


def test_a_compiled_graph_waits_for_everything(monkeypatch):
    """No call in the middle of what the compiler takes whole."""
    monkeypatch.setattr("fxpar.runtime.runner.compile_part", lambda graph, backend: lambda operands: ())
    bound, params, _ = bound_llama("inductor")
    arrivals = Arrivals()
    threading.Timer(0.05, arrivals.ended).start()
    begun = time.perf_counter()
    bound.prepare(params, arrivals=arrivals)
    assert time.perf_counter() - begun >= 0.04
    assert bound.pace is None


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_each_gradient_is_handed_over_when_it_is_final(micro_batches):
    """While the last micro-batch runs, in the order in which it makes them: the rest of it changes none of them."""
    bound, params, batch = bound_llama()
    made, running = [], threading.Event()
    run, finish = bound.run, bound.finish

    def last(*args, **kwargs):
        running.set()
        run(*args, **kwargs)
        running.clear()

    assert bound.pace == Pace()
    bound.run = last
    bound.prepare(params)
    bound.run_all(
        [MicroRun(lambda: batch, 1.0)] * micro_batches,
        made=lambda grads: made.append(({fqn: g.clone() for fqn, g in grads.items()}, running.is_set())),
    )
    found = finish()["grads"]
    *early, (all_, inside) = made
    assert not inside
    assert all(inside and len(grads) == 1 for grads, inside in early)
    order = [fqn for grads, _ in early for fqn in grads]
    assert order == order_of_gradients(bound.program)
    assert (order[0], order[-1]) == (list(params)[-1], next(iter(params)))  # backward
    assert all_.keys() == found.keys() == set(order)
    for grads, _ in made:
        assert all(torch.equal(found[fqn], grad) for fqn, grad in grads.items())


def test_a_replica_without_work_hands_over_zeros_at_once():
    bound, params, _ = bound_llama()
    made = []
    bound.prepare(params)
    bound.run_all([], made=made.append)
    assert [grads.keys() for grads in made] == [params.keys()]
    assert not any(grad.any() for grad in made[0].values())


def test_what_a_run_has_made_before_its_error_is_still_there():
    gradients, one = Handed(), torch.ones(2)

    def fails():
        with gradients.arrivals.coming():
            gradients.came({"a": one})
            time.sleep(0.02)
            raise OSError("no memory")

    with pytest.raises(OSError, match="no memory"):
        fails()
    assert gradients["a"] is one
    for ask in (lambda: gradients["b"], lambda: "b" in gradients, lambda: list(gradients)):
        with pytest.raises(OSError, match="no memory"):
            ask()
    whole = Handed()
    with whole.arrivals.coming():
        whole.came({"a": one})
        whole.came({"a": torch.zeros(2), "b": one})
    assert (whole["a"] is one, "c" in whole, dict(whole).keys()) == (True, False, {"a", "b"})


def test_each_of_several_that_wait_is_woken():
    arrivals = Arrivals()
    waiting = {fqn: threading.Thread(target=arrivals.wait, args=(fqn,), daemon=True) for fqn in ("first", "second")}
    for thread in waiting.values():
        thread.start()
        time.sleep(0.05)  # both wait before anything comes; were they late, they would not have to
    for fqn in ("second", "first"):
        arrivals.came([fqn])
        waiting[fqn].join(10)
        assert not waiting[fqn].is_alive(), fqn
