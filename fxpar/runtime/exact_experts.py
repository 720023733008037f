"""Experts that see all rows again: for the first steps of a run, and where means are too far from the rows.

A layer of experts under `lsh` computes with means of rows (`fxpar.passes.compress_dispatch`). How far rows are from
these is measured in every step (`ExpertLoad.residual`), the same on all ranks. Strategies of which a layer has left are
lowered anew; weights lie as before, so nothing moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

from fxpar.errors import ExactExpertsError, nearest
from fxpar.ir.module_rules import ModuleRule
from fxpar.ir.strategy import Strategy
from fxpar.ir.teams import each_rewritten, formations, is_compressed
from fxpar.runtime.report import StepReport

STEPS = 5  # in a row beyond the limit: one odd mini-batch is none

Choices = Mapping[int, Strategy | str]


class Changeable(Protocol):
    """What of a parallel module is asked."""

    @property
    def fxpar_session(self) -> Any: ...

    @property
    def step_count(self) -> int: ...

    def change_strategies(self, strategies: Choices, *, order: Any, resident: Any, plain: Any) -> object: ...


class ExactExperts:
    """Watches a model of `fxpar.parallelize` with strategies that have `lsh`; all ranks make it, and call it, alike.

    Experts of all layers see all rows until `first_steps` steps are done. Those of a layer whose rows were further than
    `residual` from their means, as a share of how long rows are, in 5 steps in a row see all rows from the next step
    on, for good.

    Raises ExactExpertsError for strategies without `lsh`, for tasks, and for programs in which nothing is measured.
    """

    def __init__(self, model: Changeable, residual: float | None = None, first_steps: int = 0) -> None:
        session = model.fxpar_session
        options = session.options
        self.model, self.residual, self.first_steps = model, residual, first_steps
        self._known = tuple(session.engine.expert_layers)
        self._given: Choices = dict(session.first.task.strategies or {})
        self._named = {name: getattr(options, name) for name in ("order", "resident", "plain")}
        self._layers: set[str] = set()
        self._beyond: Counter[str] = Counter()  # steps in a row
        if options.tasks is not None:
            raise ExactExpertsError("this model was parallelized with tasks=, and it is for one loss")
        if not is_compressed(self._given):
            raise ExactExpertsError(f"none of {', '.join(map(str, self._given.values()))} has +lsh")
        if residual is not None and options.compile == "inductor":
            raise ExactExpertsError('nothing looks into programs of compile="inductor", so no residual is known')
        self._now: Choices = self._given
        self._take()

    def after(self, report: StepReport) -> str:
        """To be called after each step; in one line what changed, or nothing. The same on all ranks."""
        lines = []
        for load in report.experts:
            beyond = self.residual is not None and load.residual is not None and load.residual > self.residual
            self._beyond[load.module] = self._beyond[load.module] + 1 if beyond else 0
            if self._beyond[load.module] == STEPS:
                self._layers.add(load.module)
                lines.append(
                    f"experts of {load.module or 'the model'} see all rows from now on: for {STEPS} steps their rows "
                    f"were more than {self.residual:g} from their means, {load.residual:.3g} now"
                )
        began = self._is_compressed()
        self._take()
        if self._is_compressed() and not began:
            lines.append(f"experts see means of rows from now on: {self.first_steps} steps were exact")
        return "; ".join(lines)

    def state(self) -> list[str]:
        """The layers, by module, whose experts see all rows for good."""
        return sorted(self._layers)

    def load_state(self, layers: Collection[str]) -> None:
        """Go on from the `state` of an earlier run, after the model has the count of its steps. Raises
        ExactExpertsError for a layer that there is not.
        """
        for name in {*layers} - {*self._known}:
            raise ExactExpertsError(f"there is no layer of experts {name!r}{nearest(name, self._known)}")
        self._layers = {*layers}
        self._take()

    def _is_compressed(self) -> bool:
        return is_compressed(self._now)

    def _take(self) -> None:
        """Change to the strategies of the next step, if they are others."""
        layers = {*self._known} if self.model.step_count < self.first_steps else self._layers
        due = {limit: self._rewritten(one, layers) for limit, one in self._given.items()} if layers else self._given
        if due == self._now:
            return
        names = {str(old): str(new) for old, new in zip(self._all(self._given), self._all(due), strict=True)}
        order, resident, plain = (self._named[name] for name in ("order", "resident", "plain"))
        self.model.change_strategies(
            due,
            order=order and list(dict.fromkeys(names[_printed(one)] for one in order)),
            resident=resident and list(dict.fromkeys(names[_printed(one)] for one in resident)),
            plain=plain and names[_printed(plain)],
        )
        self._now = due
        self._beyond.clear()

    def _rewritten(self, choice: Strategy | str, layers: Collection[str]) -> Strategy | str:
        return each_rewritten(choice, lambda strategy: seeing_all_rows(strategy, layers, self._known))

    @staticmethod
    def _all(choices: Choices) -> list[Strategy]:
        return [strategy for _, choice in sorted(choices.items()) for strategy in formations(choice)]


def seeing_all_rows(strategy: Strategy, layers: Collection[str], known: Collection[str]) -> Strategy:
    """The strategy without `lsh` in these of the `known` layers of experts (by module); with strategies by stage, whose
    layers are not known before the model is cut, without any.
    """
    if strategy.by_stage:
        return replace(strategy, by_stage=tuple(seeing_all_rows(block, known, known) for block in strategy.by_stage))
    if strategy.teams:
        return replace(strategy, teams=tuple(seeing_all_rows(team, layers, known) for team in strategy.teams))
    if not strategy.most("lsh"):
        return strategy
    shares = {name: strategy.share_of("lsh", strategy.rule_of(name, "lsh")) for name in known if name not in layers}
    shares |= dict.fromkeys(layers, 0.0)
    # What no layer has is nobody's: a share of the strategy itself that all rules deny would compress nothing.
    most = shares.get("", strategy.lsh if strategy.lsh in shares.values() else max(shares.values()))
    rules = [replace(rule, lsh=None) for rule in strategy.rules]
    rules = [rule for rule in rules if rule.says]
    rules += [ModuleRule(name, lsh=share) for name, share in sorted(shares.items()) if share != most]
    return replace(strategy, lsh=most, rules=tuple(rules))


def _printed(name: str) -> str:
    return str(Strategy.parse(name))
