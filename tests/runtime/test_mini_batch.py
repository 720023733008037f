"""What a mini-batch does on this rank, without a graph."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from fxpar.batching import GroupPlan, LengthGroup
from fxpar.ir.strategy import Strategy
from fxpar.runtime.mini_batch import GroupWork, MiniBatch


def test_a_reduction_ends_after_its_run():
    """Also where this rank needs none of its gradients: the next switch may write where the run has its weights."""
    ended = []

    class Stub(SimpleNamespace):
        """Of a bound graph, a switching and gradients."""

        def run_all(self, micro_batches: Any, spans: Any, made: Any) -> None:
            time.sleep(0.05)
            ended.append("run")

        def to(self, *args: Any) -> int:
            ended.append("switch")
            return 0

    stub: Any = Stub(
        prepare=lambda *args: None,
        finish=lambda: {"loss": 0.0, "metrics": {}, "grads": {}, "buffers": {}, "experts": {}},
        store=SimpleNamespace(compute=lambda name: {}),
        resident=(),
        predicted_s=lambda *args: 0.0,
        pass_on=lambda *names: False,
        add=lambda name, gradients: 0,
    )
    spec, plan = LengthGroup(8, Strategy.parse("dp1"), 8), GroupPlan(0, ((),), 0.0)
    groups = [GroupWork(spec, name, plan, (8,), list) for name in "ab"]
    MiniBatch(groups, {"a": stub, "b": stub}, stub, stub, {}, lambda text: nullcontext()).run(overlap=True)
    assert ended == ["switch", "run", "switch", "run"]
