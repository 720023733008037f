"""When experts under `lsh` see all rows: which strategies follow, and when they are taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fxpar.errors import ExactExpertsError
from fxpar.ir.strategy import Strategy
from fxpar.runtime.exact_experts import STEPS, ExactExperts, seeing_all_rows
from fxpar.runtime.report import ExpertLoad

KNOWN = ("layers.0.moe", "layers.1.moe", "layers.2.moe")


@pytest.mark.parametrize(
    ("text", "layers", "want"),
    [
        ("ep2+lsh(0.2)", ("layers.1.moe",), "ep2+lsh(0.2)[layers.1.moe: +lsh(none)]"),
        ("ep2+lsh(0.2)", KNOWN, "ep2"),
        ("ep2[layers.1: +lsh(0.3)+remat]", ("layers.1.moe",), "ep2[layers.1: +remat]"),
        ("ep2+lsh(0.2)[*.moe: +lsh(0.3); layers.0: +remat]", ("layers.2.moe",),
         "ep2+lsh(0.3)[layers.0: +remat; layers.2.moe: +lsh(none)]"),
        ("ep2+lsh(0.2)[layers.1: +lsh(0.5)]", KNOWN[:1],
         "ep2+lsh(0.2)[layers.0.moe: +lsh(none); layers.1.moe: +lsh(0.5)]"),
        ("ep2+lsh(0.2) | dp2+lsh(0.4)", KNOWN[2:],
         "ep2+lsh(0.2)[layers.2.moe: +lsh(none)] | dp2+lsh(0.4)[layers.2.moe: +lsh(none)]"),
        ("ep2+lsh(0.2) > tp2", KNOWN[2:], "ep2 > tp2"),
        ("tp2", KNOWN, "tp2"),
    ],
)  # fmt: skip
def test_layers_that_see_all_rows(text, layers, want):
    found = seeing_all_rows(Strategy.parse(text), layers, KNOWN)
    assert found == Strategy.parse(want)
    assert Strategy.parse(str(found)) == found


class Model:
    """Counts steps, and keeps what it was changed to."""

    def __init__(self, strategies: dict[int, str], **options: Any) -> None:
        given = {"tasks": None, "compile": "eager", "order": None, "resident": None, "plain": None, **options}
        engine = SimpleNamespace(expert_layers=dict.fromkeys(KNOWN, 4))
        task = SimpleNamespace(task=SimpleNamespace(strategies=strategies))
        self.fxpar_session = SimpleNamespace(options=SimpleNamespace(**given), engine=engine, first=task)
        self.step_count, self.changes = 0, list[tuple[dict[int, str], dict[str, Any]]]()

    def change_strategies(self, strategies, **named):
        self.changes.append(({limit: str(one) for limit, one in strategies.items()}, named))

    def step(self, *residuals: float | None) -> Any:
        self.step_count += 1
        loads = [ExpertLoad(name, (1.0,), (1.0,), (), one) for name, one in zip(KNOWN, residuals, strict=False)]
        return SimpleNamespace(experts=tuple(loads))


def test_a_layer_beyond_the_limit_for_some_steps_is_taken_back():
    model = Model({64: "dp2", 512: "rounds(ep2+lsh(0.2), dp1)"}, order=["ep2+lsh(0.2)", "dp2"])
    exact = ExactExperts(model, residual=0.5)
    for residual in [0.6] * (STEPS - 1) + [0.4] + [0.6] * (STEPS - 1):
        assert exact.after(model.step(residual, 0.1, None)) == ""
    assert model.changes == []
    assert exact.after(model.step(0.7, 0.1, None)) == (
        "experts of layers.0.moe see all rows from now on: for 5 steps their rows were more than 0.5 from their means, "
        "0.7 now"
    )
    changed = "ep2+lsh(0.2)[layers.0.moe: +lsh(none)]"
    named = {"order": [changed, "dp2"], "resident": None, "plain": None}
    assert model.changes == [({64: "dp2", 512: f"rounds({changed}, dp1)"}, named)]
    assert exact.state() == ["layers.0.moe"]


def test_the_first_steps_are_exact():
    model = Model({64: "dp2", 512: "dp2+lsh(0.2)"}, plain="dp2+lsh(0.2)", resident=["dp2", "dp2+lsh(0.2)"])
    exact = ExactExperts(model, first_steps=2)
    assert model.changes == [({64: "dp2", 512: "dp2"}, {"order": None, "resident": ["dp2"], "plain": "dp2"})]
    assert exact.after(model.step(None)) == ""
    assert exact.after(model.step(None)) == "experts see means of rows from now on: 2 steps were exact"
    assert model.changes[1][0] == {64: "dp2", 512: "dp2+lsh(0.2)"}
    assert len(model.changes) == 2


def test_a_run_goes_on_as_it_was():
    model = Model({512: "dp2+lsh(0.2)"})
    exact = ExactExperts(model, 0.5, first_steps=2)
    model.step_count = 7
    exact.load_state(["layers.1.moe"])
    assert model.changes[-1][0] == {512: "dp2+lsh(0.2)[layers.1.moe: +lsh(none)]"}
    with pytest.raises(ExactExpertsError, match=r"no layer of experts 'layers.1.moee'; did you mean 'layers.1.moe'"):
        exact.load_state(["layers.1.moee"])


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Model({64: "dp2", 512: "tp2"}), r"none of dp2, tp2 has \+lsh"),
        (Model({64: "dp2+lsh(0.2)"}, compile="inductor"), "no residual is known"),
        (Model({64: "dp2+lsh(0.2)"}, tasks={}), "it is for one loss"),
    ],
)
def test_what_cannot_be_watched_is_refused(model, says):
    with pytest.raises(ExactExpertsError, match=says):
        ExactExperts(model, residual=0.5)
