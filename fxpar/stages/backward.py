"""Which stage each backward node belongs to: at every boundary the fewest bytes of gradients cross.

A node that reads parameters or forward values of later stages must be late, one that reads parameters of earlier stages
must be early, and whatever a late node needs is late. What is left open (sums of gradients, views, casts around the
boundary) goes where a minimum cut over the bytes of values puts it. Module names only break ties: a sum of gradients is
traced with whichever of its terms came last, so its name means little.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from fxpar.errors import NotAChainError
from fxpar.ir.graph import TensorMeta
from fxpar.ir.node_meta import fqn_of, tensor_of, whole_meta
from fxpar.stages.mincut import EARLY, LATE, CutNetwork
from fxpar.stages.nodes import Nodes, nbytes, producer


@dataclass
class Backward:
    """The backward ops (those of several results with all of these), and what pins them to stages.

    `stage_of`: of forward nodes. `holders`: FQN of a parameter -> the stages whose forward reads it. `pinned`: results
    that belong on one of these stages. `dropped` ops run on no stage.
    """

    nodes: Nodes
    stage_of: Mapping[fx.Node, int]
    holders: Mapping[str, tuple[int, ...]]
    pinned: Mapping[fx.Node, tuple[int, ...]]
    dropped: frozenset[fx.Node] = frozenset()
    values: list[fx.Node] = field(init=False)
    ops: list[fx.Node] = field(init=False)  # those of the values that are no part of another one
    operands: dict[fx.Node, list[fx.Node]] = field(init=False)  # values, forward and backward, that are not free
    users: dict[fx.Node, list[fx.Node]] = field(init=False)  # value -> ops
    home: dict[str, int] = field(init=False)  # module -> the stage of all its forward nodes, where there is one

    def __post_init__(self) -> None:
        nodes = self.nodes
        left_out = nodes.forward | nodes.free | self.dropped
        self.values = [n for n in nodes.position if n not in left_out]
        self.ops = [n for n in self.values if producer(n) is n]
        self.operands = {
            op: [o for o in op.all_input_nodes if o in nodes.position and o not in nodes.free] for op in self.ops
        }
        self.users = defaultdict(list)
        for op, operands in self.operands.items():
            for value in operands:
                self.users[value].append(op)
        found: dict[str, set[int]] = defaultdict(set)
        for node, stage in self.stage_of.items():
            found[fqn_of(node)].add(stage)
        self.home = {fqn: next(iter(stages)) for fqn, stages in found.items() if len(stages) == 1}

    def assign(self, stages: int) -> dict[fx.Node, int]:
        """Stage of every backward node that is not free. Raises NotAChainError."""
        stage = dict.fromkeys(self.ops, 0)
        late: set[fx.Node] = set()
        for boundary in range(stages - 1, 0, -1):
            late = self._late(boundary, late)
            for op in late:
                stage[op] = max(stage[op], boundary)
        return {node: stage[producer(node)] for node in self.values}

    def _late(self, boundary: int, later: set[fx.Node]) -> set[fx.Node]:
        """Ops of stages `boundary` and up; `later` are those of stages further up."""
        pins = {op: True if op in later else self._pin(op, boundary) for op in self.ops}
        late = self._closure((op for op, pin in pins.items() if pin is True), down=False)
        early = self._closure((op for op, pin in pins.items() if pin is False), down=True)
        both = late & early
        if both:
            self._raise(boundary, sorted(both, key=self.nodes.position.__getitem__))
        free = [op for op in self.ops if op not in late and op not in early]
        if not free:
            return late
        return late | self._cheapest(boundary, free, late, early)

    def _pin(self, op: fx.Node, boundary: int) -> bool | None:
        """Whether an op must be late (True) or early (False); None if either will do."""
        if any(self.stage_of.get(o, 0) >= boundary for o in self.operands[op]):
            return True  # it reads a forward value of a later stage
        allowed = [self.pinned[op]] if op in self.pinned else []
        home = self.home.get(fqn_of(op))
        for fqn in self.nodes.params_of(op):
            held = self.holders.get(fqn, ())
            # The use of a tied weight belongs to the module that it is the backward of.
            allowed.append((home,) if home is not None and home in held else held)
        if any(stages and min(stages) >= boundary for stages in allowed):
            return True
        # Late and no later than this boundary is on stage `boundary`.
        return None if all(boundary in stages for stages in allowed) else False

    def _closure(self, ops: Iterable[fx.Node], *, down: bool) -> set[fx.Node]:
        """These ops and all backward ops that need them (down), or that they need."""
        todo = list(ops)
        found = set(todo)
        while todo:
            op = todo.pop()
            if down:
                results = [op, *(n for n in op.users if producer(n) is op)]
                near = [user for value in results for user in self.users.get(value, ())]
            else:
                near = [producer(o) for o in self.operands[op] if o not in self.stage_of]
            for other in near:
                if other not in found:
                    found.add(other)
                    todo.append(other)
        return found

    def _cheapest(self, boundary: int, free: list[fx.Node], late: set[fx.Node], early: set[fx.Node]) -> set[fx.Node]:
        network, inside = CutNetwork(), set(free)

        def end(op: fx.Node) -> object:
            return LATE if op in late else EARLY if op in early else op

        for op in free:
            home = self.home.get(fqn_of(op))
            if home is not None:
                network.hint(op, home >= boundary)
            for value in self.operands[op]:
                if value in self.stage_of:
                    continue
                if producer(value) in inside:
                    network.forbid(op, producer(value))
        values = {
            v: users for v, users in self.users.items() if any(u in inside for u in users) or producer(v) in inside
        }
        for value, users in values.items():
            price = float(nbytes(tensor_of(value), self.nodes.dims))
            if value in self.stage_of:  # a value of the forward, sent along only if somebody late reads it
                if self.stage_of[value] < boundary and not self._crosses(value, boundary, late):
                    for user in users:
                        if user in inside:
                            network.forbid(user, ("forward", value))
                    network.pay(("forward", value), EARLY, price)
                continue
            if producer(value) in early or (any(user in early for user in users) and producer(value) in late):
                continue  # does not cross, or does in any case
            network.pay(end(producer(value)), ("gradient", value), price)
            for user in users:
                network.forbid(("gradient", value), end(user))
        return {op for op in network.late() if op in inside}  # type: ignore[misc]

    def _crosses(self, value: fx.Node, boundary: int, late: set[fx.Node]) -> bool:
        """Whether a forward value goes over a boundary already."""
        forward = (self.stage_of.get(user, 0) >= boundary for user in value.users)
        return any(forward) or any(user in late for user in self.users.get(value, ()))

    def _raise(self, boundary: int, both: list[fx.Node]) -> None:
        op = both[0]
        values = [f"%{o.name} {whole_meta(o)}" for o in self.operands[op] if isinstance(whole_meta(o), TensorMeta)]
        raise NotAChainError(
            self.nodes.logical.name,
            f"%{op.name} of the backward (in {op.meta.get('fqn') or 'the root'}) is needed on both sides of the "
            f"boundary between stages {boundary - 1} and {boundary}; it reads {', '.join(values[:4])}",
            "Cut elsewhere, or use dp, cp or tp instead of pp",
        )
