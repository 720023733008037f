"""Inside of a micro-batch: predicted time and bytes of each module block and collective, in program order.

Everything is a polynomial in the lengths of the micro-batch's sequences, so one table serves micro-batches of any size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fxpar.cost.calls import COMPUTE, NodeCost, handed_on_s, node_costs
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.polynomial import Polynomial
from fxpar.ir.exec_graph import Part, Program
from fxpar.ir.pipeline_graph import PipelineGraph, StageProgram, TeamsGraph
from fxpar.runtime.pipeline import plan_pipeline
from fxpar.schedule import Action, Costs, Schedule, Timeline, Transfer, simulate

MOST_ROWS = 3000  # of a strategy; beyond that whole layers are one row
ACTION_PARTS = {"F": "forward", "B": "backward", "I": "input_part", "W": "weight_part"}
"""Which graph of a stage an action of the schedule runs."""


@dataclass(frozen=True)
class Term:
    """c0 + c1 * T + c2 * sum(len**2), over the lengths of a micro-batch's sequences; T is their sum."""

    c0: float
    c1: float
    c2: float

    @classmethod
    def of(cls, polynomials: Iterable[Polynomial], factor: float = 1.0) -> Term:
        """The sum of polynomials, times `factor`."""
        total = sum(polynomials, Polynomial())
        return cls(*(float(c) * factor for c in (total.c0, total.c1, total.c2)))

    def at(self, lengths: Sequence[int]) -> float:
        """The value for sequences of these lengths in tokens."""
        return self.c0 + self.c1 * sum(lengths) + self.c2 * sum(length * length for length in lengths)

    def to_json(self) -> list[float]:
        return [float(f"{c:.7g}") for c in (self.c0, self.c1, self.c2)]


@dataclass(frozen=True)
class Row:
    """Neighbouring calls of one module: kernels together ("compute"), or collectives of one kind over one axis."""

    module: str
    kind: str
    axis: str
    backward: bool
    calls: int
    ms: Term
    nbytes: Term

    def to_json(self) -> list[Any]:
        return [
            self.module,
            self.kind,
            self.axis,
            int(self.backward),
            self.calls,
            self.ms.to_json(),
            self.nbytes.to_json(),
        ]


@dataclass(frozen=True)
class PartCost:
    """One graph: `body`, or of a stage `forward`, `backward` (or its halves); or what runs once around them."""

    rows: tuple[Row, ...]
    ms: Term
    kernels: tuple[tuple[str, int, Term], ...]  # kind of kernel, calls, ms

    @classmethod
    def of(cls, nodes: Sequence[NodeCost], depth: int) -> PartCost:
        """The sums of calls in program order."""
        by_kind = {kind: [node.exposed for node in nodes if node.kind == kind] for kind in COMPUTE}
        kernels = tuple((kind, len(found), Term.of(found, 1e3)) for kind, found in by_kind.items() if found)
        return cls(_rows(nodes, depth), Term.of((node.exposed for node in nodes), 1e3), kernels)

    def to_json(self) -> dict[str, Any]:
        """Rows as lists, in the order of their fields."""
        return {
            "rows": [row.to_json() for row in self.rows],
            "kernels": [[kind, calls, ms.to_json()] for kind, calls, ms in self.kernels],
        }


@dataclass(frozen=True)
class Inside:
    """Costs of a program's parts, by stage (0 without pp) and name; of teams by their places among `placed`."""

    program: Program
    cluster: ClusterSpec
    sends: dict[tuple[int, str], Term] = field(default_factory=dict)
    _early: dict[int, Term] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> dict[tuple[int, str], list[NodeCost]]:
        """The calls of each part of all stages, in program order: what all else here is made of."""
        found: dict[tuple[int, str], list[NodeCost]] = {}
        if isinstance(self.program, TeamsGraph):
            for number, team in enumerate(self.teams):
                first = self.program.places_of(number).start
                found |= {(first + stage, name): nodes for (stage, name), nodes in team.nodes.items()}
            return found
        for index, program in enumerate(self.program.placed):
            parts = self._parts(program)
            found |= {(index, name): [] for name in parts}
            for cost in node_costs(program, self.cluster, parts=parts):
                found[index, cost.part].append(cost)
        return found

    @cached_property
    def teams(self) -> tuple[Inside, ...]:
        """Of each of several teams side by side; else this one."""
        if not isinstance(self.program, TeamsGraph):
            return (self,)
        return tuple(Inside(team, self.cluster) for team in self.program.teams)

    @cached_property
    def parts(self) -> dict[tuple[int, str], PartCost]:
        """Of all stages; prologue and epilogue too, which run once per group."""
        parts = {key: PartCost.of(found, 2) for key, found in self.nodes.items()}
        if sum(len(part.rows) for part in parts.values()) > MOST_ROWS:
            parts = {key: PartCost.of(found, 1) for key, found in self.nodes.items()}
        return parts

    def ms(self, stage: int, part: str, lengths: Sequence[int]) -> float:
        """Predicted ms of a part for a micro-batch of sequences of these lengths."""
        return self.parts[stage, part].ms.at(lengths)

    def node_ms(self, stage: int, part: str, lengths: Sequence[int]) -> dict[str, float]:
        """Predicted ms of each call of a part, by its name."""
        return {cost.name: Term.of([cost.exposed], 1e3).at(lengths) for cost in self.nodes[stage, part]}

    def once_ms(self, part: str) -> float:
        """ms of the prologue or the epilogue of a group, on the slowest stage."""
        return max(cost.ms.c0 for (_, name), cost in self.parts.items() if name == part)

    def send_ms(self, stage: int, what: str, lengths: Sequence[int]) -> float:
        """ms of the messages with which a stage hands a micro-batch on ("activation" or "gradient")."""
        if (stage, what) not in self.sends:
            assert isinstance(self.program, PipelineGraph)
            kind = "sent" if what == "activation" else "sent_grad"
            self.sends[stage, what] = Term.of([handed_on_s(self.program, stage, kind, self.cluster)], 1e3)
        return self.sends[stage, what].at(lengths)

    def early_ms(self, stage: int, lengths: Sequence[int]) -> float:
        """ms of the forward of a stage that run while what it receives is on its way: a tower of its own."""
        if stage not in self._early:
            placed = self.program.placed[stage]
            early = placed.early if isinstance(placed, StageProgram) else None
            names = set() if early is None else {node.name for node in early.graph.nodes}
            found = [cost.exposed for cost in self.nodes[stage, "forward"] if cost.name in names] if names else []
            self._early[stage] = Term.of(found, 1e3)
        return self._early[stage].at(lengths)

    def timeline(self, plan: Schedule, lengths: Sequence[int]) -> Timeline:
        """A schedule of the program's stages on paper, all micro-batches with sequences of these lengths."""

        def ms(action: Action) -> float:
            return self.ms(action.stage, ACTION_PARTS[action.part], lengths)

        def transfer_ms(transfer: Transfer) -> float:
            return self.send_ms(transfer.stage, transfer.what, lengths)

        def early_ms(action: Action) -> float:
            return self.early_ms(action.stage, lengths)

        return simulate(plan, Costs(ms, ms, ms, ms, transfer_ms, early_ms))

    def _parts(self, program: Program) -> Mapping[str, Part]:
        """The graphs that run: the backward of a stage whole, or in halves where the schedule has it so."""
        if not (isinstance(self.program, PipelineGraph) and isinstance(program, StageProgram)):
            return program.parts
        actions = plan_pipeline(self.program, self.program.strategy.pipeline_size).actions
        names = {ACTION_PARTS[action.part] for done in actions for action in done}
        return {name: getattr(program, name) for name in ("prologue", *sorted(names), "epilogue")}

    def to_json(self) -> dict[str, Any]:
        """{"stages": [{part: {"rows", "kernels"}}, ...]} of the parts that run per micro-batch."""
        stages: dict[int, dict[str, Any]] = {}
        for (stage, name), cost in self.parts.items():
            if name not in ("prologue", "epilogue"):
                stages.setdefault(stage, {})[name] = cost.to_json()
        return {"stages": [stages[index] for index in sorted(stages)]}


def block_of(fqn: str, depth: int) -> str:
    """The module of a row: `layers.3.attention` for `layers.3.attention.q_proj` and depth 2, `layers.3` for depth 1.

    Outside of numbered layers the first `depth` names.
    """
    names = fqn.split(".")
    numbered = next((i for i, name in enumerate(names) if name.isdecimal()), None)
    return ".".join(names[: depth if numbered is None else numbered + depth])


def _rows(nodes: Sequence[NodeCost], depth: int) -> tuple[Row, ...]:
    rows = []
    for (module, kind, axis, backward), group in itertools.groupby(nodes, key=lambda node: _key(node, depth)):
        found = list(group)
        ms, nbytes = Term.of((n.exposed for n in found), 1e3), Term.of(n.nbytes for n in found)
        rows.append(Row(module, kind, axis, backward, len(found), ms, nbytes))
    return tuple(rows)


def _key(node: NodeCost, depth: int) -> tuple[str, str, str, bool]:
    kind = "compute" if node.kind in COMPUTE else node.kind
    return block_of(node.fqn, depth), kind, node.axis, node.backward
