"""Carry out the switches of a schedule on this rank's storage; each is compiled when it is first needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxpar.schedule.mini_batch import STAGING_BYTES
from fxpar.store.weights import WeightStore
from fxpar.switch.order import SwitchSchedule
from fxpar.transport import Holding, ProcessGroups, Staging, Switch


@dataclass(frozen=True)
class TransportOptions:
    """How bytes travel; see `fxpar.transport`. Staging memory and process groups are shared by all switches."""

    execution: str = "auto"
    staging_bytes: int = STAGING_BYTES
    checked: bool = False
    group: Any = None
    timeout_s: float | None = None
    bucketed: bool = False
    staging: Staging | None = None
    process_groups: ProcessGroups | None = None

    def shared(self) -> dict[str, Any]:
        """Keyword arguments that a Switch and a Reduction have in common."""
        names = ("staging_bytes", "checked", "group", "timeout_s", "staging")
        return {name: getattr(self, name) for name in names}

    def of_switch(self) -> dict[str, Any]:
        """Keyword arguments of a Switch."""
        return {**self.shared(), "execution": self.execution, "process_groups": self.process_groups}


@dataclass
class Switching:
    """Weights to the layouts of the strategies, from home and from what earlier groups have left resident. `fills`
    grows whenever somebody, this or another, writes over layouts that take turns in the arena.
    """

    store: WeightStore
    schedule: SwitchSchedule
    options: TransportOptions = field(default_factory=TransportOptions)
    fills: int = 0
    _compiled: dict[tuple[str, frozenset[str]], Switch] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.store.home.world

    @property
    def resident(self) -> Collection[str]:
        """Strategies whose layouts stay in memory."""
        return self.schedule.resident

    def to(
        self, name: str, visited: Sequence[str], arrived: Callable[[Collection[str]], object] = lambda _: None
    ) -> int:
        """Fill the layout of `name`; `visited` have run before in this mini-batch. Returns bytes moved by all ranks.
        `arrived` is called with weights that are complete.
        """
        if self.is_filled(name, visited):
            return 0
        self.overwrites(name)
        plan = self.schedule.plan(name, visited)
        self.compiled(name, visited).run(arrived)
        return plan.intra_node_bytes + plan.inter_node_bytes

    def overwrites(self, name: str) -> None:
        """To be called before somebody writes weights into the layout of `name`."""
        self.fills += 1
        self.store.clear_padding(name)

    def compiled(self, name: str, visited: Sequence[str]) -> Switch:
        """The switch to `name`, with this rank's messages prepared; all ranks ask for the same ones in one order."""
        key = (name, self.schedule.sources(visited))
        if key not in self._compiled:
            layouts, plan = self.schedule.layouts, self.schedule.plan(name, visited)
            plan.verify()
            sources = [Holding(layouts[other], self.store.compute(other)) for other in layouts if other in key[1]]
            self._compiled[key] = Switch(
                plan,
                self.store.rank,
                # A layout that has been filled comes first: its pieces need no cast, and may be the target's memory.
                [*sources, Holding(self.store.wire, self.store.home_tensors)],
                Holding(layouts[name], self.store.compute(name)),
                bucketed=self.options.bucketed,
                **self.options.of_switch(),
            )
        return self._compiled[key]

    def is_filled(self, name: str, visited: Sequence[str]) -> bool:
        """Whether the layout of `name` has its weights already: it is resident, or the arena still holds it."""
        return (name in visited and name in self.schedule.resident) or (bool(visited) and visited[-1] == name)

    def predicted_s(self, name: str, visited: Sequence[str]) -> float:
        """Predicted seconds of `to`."""
        return 0.0 if self.is_filled(name, visited) else self.schedule.plan(name, visited).predicted_s
