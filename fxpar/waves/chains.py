"""A plan of waves for a model: where each MetaOp is in the graph of its task, and what each rank runs when."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fxpar.waves.plan import WavePlan
from fxpar.waves.runs import RunPlan


@dataclass(frozen=True)
class Chain:
    """What a MetaOp is in the captured graph of `task`: for each of its equal layers the modules of it (FQNs; what is
    inside of them belongs to it too). `before` and `behind` are modules that run with its first and its last layer,
    such as an embedding, a norm or the loss; "" is code that is in no module. `strategies`: by number of devices, what
    the times of the MetaOp are those of.
    """

    metaop: str
    task: str
    layers: tuple[tuple[str, ...], ...]
    before: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    strategies: Mapping[int, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Assignment:
    """A piece of a plan: layers `first` to `last` (not included) of a MetaOp, which are these `modules` of a task's
    graph, run in wave `wave` on `ranks`, in the order of their rows, under `strategy`.
    """

    wave: int
    task: str
    metaop: str
    first: int
    last: int
    modules: tuple[str, ...]
    ranks: tuple[int, ...]
    strategy: str


@dataclass(frozen=True)
class TasksPlan:
    """A plan, the chain of each MetaOp of its graph, and the plan that a run can follow; the latter two not where the
    plan is of costs without a model. A device holds `memory_bytes`: more than that only if no plan of pieces fits.
    """

    plan: WavePlan
    chains: tuple[Chain, ...] = ()
    runs: RunPlan | None = None
    memory_bytes: float = math.inf

    @property
    def strategies(self) -> dict[tuple[int, int], str]:
        """By MetaOp (its place) and number of devices."""
        return {(m, width): one for m, chain in enumerate(self.chains) for width, one in chain.strategies.items()}

    @cached_property
    def assignments(self) -> tuple[Assignment, ...]:
        """By piece of the plan. `plan.step.runs` has their forwards and backwards in the order in which they start."""
        waves = {piece: number for number, members in enumerate(self.plan.waves) for piece in members}
        return tuple(self._assignment(at, waves[at]) for at in range(len(self.plan.pieces)))

    def _assignment(self, at: int, wave: int) -> Assignment:
        piece = self.plan.pieces[at]
        chain = self.chains[piece.metaop]
        modules = [one for layer in chain.layers[piece.first : piece.last] for one in layer]
        if piece.first == 0:
            modules = [*chain.before, *modules]
        if piece.last == len(chain.layers):
            modules = [*modules, *chain.behind]
        strategy = chain.strategies[len(piece.devices)]
        return Assignment(
            wave, chain.task, chain.metaop, piece.first, piece.last, tuple(modules), piece.devices, strategy
        )
