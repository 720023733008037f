"""What stands in [strategies] of a configuration: strategies by length, one for all lengths, or "auto"; and in [plan],
when a run takes others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxpar.batching import length_groups
from fxpar.errors import FxparError, nearest
from fxpar.errors.base import one_line
from fxpar.ir.teams import formations, is_compressed
from fxpar.ir.written import LONGEST
from fxpar.train.schema import shown

AUTO, STATIC = "auto", "static"
DRIFT = 0.25  # of a plan


@dataclass(frozen=True)
class PlanConfig:
    """When a run is planned anew: where steps take longer or shorter than predicted by more than the share `drift` (0:
    never; None: 0.25 for strategies of a plan or "auto"). And when experts under `lsh` see all rows:
    see `fxpar.ExactExperts`.
    """

    drift: float | None = field(default=None, metadata={"least": 0})
    residual: float | None = field(default=None, metadata={"above": 0})
    exact_steps: int = field(default=0, metadata={"least": 0})

    @property
    def of_experts(self) -> tuple[float | None, int]:
        """What `fxpar.ExactExperts` is told."""
        return self.residual, self.exact_steps


def plan_problems(plan: PlanConfig, strategies: Sequence[tuple[int, str]], compile: str) -> list[str]:
    """What of experts is said where there is nothing to say."""
    said = [name for name in ("residual", "exact_steps") if getattr(plan, name)]
    if not said:
        return []
    if not is_compressed(dict(strategies)):
        return [f"plan.{said[0]} is for experts that see means of rows: write +lsh(0.2) in a strategy, or leave it out"]
    if plan.residual and compile == "inductor":
        return ['plan.residual is measured in programs of engine.compile = "eager": change one of them']
    return []


def read_strategies(
    table: Any, data: Any, problems: list[str], where: str = "strategies"
) -> tuple[tuple[int, str], ...]:
    """Ascending (limit, strategy) of the section `where`; `static = "dp4"` takes sequences up to data.max_length, and
    so does "auto".
    """
    if table == AUTO:
        if not isinstance(data, dict) or not isinstance(data.get("max_length"), int):
            problems.append('strategies = "auto" needs data.max_length: the longest sequence in tokens, such as 4096')
        return ()
    if isinstance(table, str):
        problems.append(f'strategies = "{table}" must be "{AUTO}", or a section: [strategies]')
        return ()
    if not isinstance(table, dict) or not table:
        problems.append(
            'section [strategies] is missing: lengths and strategies such as 512 = "dp4", or static = "dp4"; or '
            'strategies = "auto" above the first section'
        )
        return ()
    if "static" in table:
        limit = data.get("max_length") if isinstance(data, dict) else None
        if len(table) > 1:
            problems.append("strategies.static stands alone; remove the other keys of [strategies]")
        if not isinstance(limit, int):
            problems.append("strategies.static needs data.max_length: the longest sequence in tokens, such as 4096")
            return ()
        table = {str(limit): table["static"]}
    found = []
    for key, text in table.items():
        if not re.fullmatch("[0-9]{1,10}", key) or not 1 <= int(key) <= LONGEST:
            shown_key, hint = one_line(key), nearest(key, [STATIC]) or f": those are from 1 to {LONGEST:,}"
            problems.append(f"{where}.{shown_key} is not a length in tokens{hint}")
        elif not isinstance(text, str):
            problems.append(f'{where}.{key} = {shown(text)} must be a strategy such as "dp2.tp2"')
        else:
            try:
                formations(text)
                found.append((int(key), text))
            except FxparError as error:
                problems.append(f"{where}.{key}: {error}")
    return tuple(sorted(found))


def group_problems(strategies: Sequence[tuple[int, str]], ranks: Any) -> list[str]:
    """What is wrong with the strategies together, to be told with other problems. `ranks` is run.ranks, None if it is
    not given: as many as the last strategy needs. Nothing is said where it is no number of ranks.
    """
    if not strategies or not (ranks is None or (type(ranks) is int and ranks > 0)):
        return []
    try:
        length_groups(dict(strategies), world=ranks or formations(strategies[-1][1])[0].world)
    except FxparError as error:
        return [str(error)]
    return []


def auto_problems(ranks: int | None, engine: Mapping[str, Any]) -> list[str]:
    """What strategies cannot be chosen for, or beside."""
    found = [
        f'engine.{name} needs strategies that are known, not strategies = "auto"'
        for name in ("token_budget", "token_budgets", "order")
        if engine[name]
    ]
    return found if ranks else ['strategies = "auto" needs run.ranks, or --ranks N: how many to choose for', *found]
