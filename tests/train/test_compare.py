from __future__ import annotations

from dataclasses import replace

import pytest

from fxpar.errors import CompareError
from fxpar.train.compare import Comparison, check_agreement, comparison_lines
from tests.train.test_metrics import steps


def runs():
    hot = [replace(r, wall_s=1.0, cpu_s=3.0) for r in steps(4)]
    return hot, [replace(r, wall_s=2.0, cpu_s=4.5, loss=r.loss * (1 + 1e-7)) for r in hot]


def test_figures_leave_the_first_step_out():
    hot, static = runs()
    static[0] = replace(static[0], wall_s=100.0)
    found = Comparison.of(hot, static, "cp4", "float32")
    assert (found.steps, found.hot_s, found.static_s, found.speedup) == (3, 3.0, 6.0, 2.0)
    assert (found.hot_cpu_ms, found.static_cpu_ms) == (9000.0, 13500.0)
    assert found.loss_diff == pytest.approx(1e-7, rel=1e-3)
    check_agreement(found)
    lines = list(comparison_lines(found))
    assert [line.split()[-1] for line in lines[1:4]] == ["2.00x", "2.00x", "1.50x"]
    assert lines[4].startswith("losses   agree")


def test_losses_that_differ():
    hot, static = runs()
    static[2] = replace(static[2], loss=static[2].loss * 1.01)
    found = Comparison.of(hot, static, "cp4", "float32")
    with pytest.raises(CompareError, match=r"step 3 differ by 9\.9e-03"):
        check_agreement(found)
    static[2] = replace(static[2], loss=float("nan"))
    assert not Comparison.of(hot, static, "cp4", "float32").agrees


def test_other_batches_are_no_comparison():
    hot, static = runs()
    with pytest.raises(CompareError, match="same mini-batches"):
        Comparison.of(hot, static[:-1], "cp4", "float32")
    with pytest.raises(CompareError, match="two steps"):
        Comparison.of(hot[:1], static[:1], "cp4", "float32")
