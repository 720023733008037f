"""Chains of equal layers in the graph of a step: modules side by side that do the same, one on the result of the other.

Numbers in names play no part, and no list of modules is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from torch import fx

from fxpar.cost.calls import busy_s
from fxpar.cost.cluster import USUAL
from fxpar.cost.ops import SizesAt, is_kernel, touched
from fxpar.ir.graph import LogicalGraph, run_dims
from fxpar.ir.node_meta import fqn_of, is_backward, tensor_metas
from fxpar.ops.traits import aten, is_view
from fxpar.stages.nodes import Nodes

SHARE = Fraction(1, 10)  # of a task's work: a module that takes as much is a MetaOp of its own
_LONGEST_PERIOD = 4  # modules of a layer side by side: kinds of attention that take turns
Layers = tuple[tuple[str, ...], ...]  # by layer, the FQNs of its modules


@dataclass(frozen=True)
class Forward:
    """The forward of a step: its calls in order, what each reads of them, and how long it keeps a device busy (of usual
    figures, at the sizes of the example: what is a layer must not depend on where it runs). Left out is what costs
    nothing and is computed wherever it is read: sizes, positions, masks, views of parameters.
    """

    nodes: Nodes
    calls: tuple[fx.Node, ...] = field(init=False)
    reads: dict[fx.Node, list[fx.Node]] = field(init=False)
    seconds: dict[fx.Node, Fraction] = field(init=False)

    def __post_init__(self) -> None:
        calls: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes.bound:
            reads = [one for one in node.all_input_nodes if one in calls]
            if not is_backward(node) and any(tensor_metas(node)) and (reads or not is_view(node.target)):
                calls[node] = reads
        shape = SizesAt(run_dims(self.nodes.logical))
        object.__setattr__(self, "calls", tuple(calls))
        object.__setattr__(self, "reads", calls)
        object.__setattr__(self, "seconds", {n: busy_s(n, shape, USUAL["cuda"]) for n in calls})

    @classmethod
    def of(cls, logical: LogicalGraph) -> Forward:
        return cls(Nodes(logical))

    @cached_property
    def by_module(self) -> dict[str, list[fx.Node]]:
        """Calls of each module and of what is inside of it, "" among them."""
        found: dict[str, list[fx.Node]] = {}
        for node in self.calls:
            for module in around(fqn_of(node)):
                found.setdefault(module, []).append(node)
        return found

    @cached_property
    def children(self) -> dict[str, list[str]]:
        """The modules directly in each module, in the order in which they begin."""
        found: dict[str, list[str]] = {}
        for module in self.by_module:
            if module:
                found.setdefault(_outer(module, self.by_module), []).append(module)
        return found

    def work(self, module: str) -> Fraction:
        return sum((self.seconds[n] for n in self.by_module[module]), Fraction(0))

    def looks(self, module: str) -> tuple[object, ...]:
        """What two modules have in common that do the same: kernels in order with the tensors that they touch, and the
        numbers that they are given. Copies are left out: the first layer may read another memory format.
        """
        return tuple(
            (node.target, *touched(node), *(a for a in node.args if isinstance(a, bool | int | float | str)))
            for node in self.by_module[module]
            if is_kernel(node) and node.target is not aten.clone.default
        )

    def params(self, modules: Sequence[str]) -> tuple[str, ...]:
        """FQNs of the parameters that modules, and what is inside of them, read."""
        return self.read_by(node for module in modules for node in self.by_module[module])

    def read_by(self, calls: Iterable[fx.Node]) -> tuple[str, ...]:
        """FQNs of the parameters that calls read, as they are or as views."""
        found: dict[str, None] = {}
        left = list(calls)
        while left:
            node = left.pop()
            found |= dict.fromkeys(self.nodes.params_of(node))
            left += [one for one in node.all_input_nodes if one.op == "call_function" and one not in self.reads]
        return tuple(found)


def around(fqn: str) -> list[str]:
    """A module and those that it is in, from the root ("") on."""
    parts = fqn.split(".") if fqn else []
    return [".".join(parts[:end]) for end in range(len(parts) + 1)]


def chains(forward: Forward) -> list[Layers]:
    """All chains of two layers or more, and modules without any that read parameters and take `SHARE` of the work, as
    one layer. The outermost of each.
    """
    enough = SHARE * forward.work("")
    found: list[Layers] = []

    def visit(module: str) -> bool:
        """Whether there are chains in it."""
        before = len(found)
        inside = forward.children.get(module, [])
        runs = list(_runs(forward, inside))
        in_runs = {one for run in runs for layer in run for one in layer}
        found.extend(runs)
        whole = [one for one in inside if one not in in_runs and not visit(one)]
        if len(found) > before or not module:
            found.extend(((one,),) for one in whole if forward.work(one) >= enough and forward.params([one]))
        return len(found) > before

    visit("")
    return found


def _runs(forward: Forward, modules: Sequence[str]) -> Iterator[Layers]:
    """Equal layers in a row among these siblings, each on the result of the one before; the longest first."""
    looks = [forward.looks(one) if forward.params([one]) else () for one in modules]
    at = 0
    while at < len(modules):
        period, count = max(
            ((p, _repeats(looks, at, p)) for p in range(1, _LONGEST_PERIOD + 1)),
            key=lambda one: (one[1] * one[0], -one[0]),
        )
        layers = [tuple(modules[at + i * period : at + (i + 1) * period]) for i in range(count)]
        linked = next((i for i in range(1, count) if not _follows(forward, layers[i - 1], layers[i])), count)
        if linked > 1:
            yield tuple(layers[:linked])
            at += linked * period
        else:
            at += 1


def _repeats(looks: Sequence[tuple[object, ...]], at: int, period: int) -> int:
    """How often the `period` modules from `at` on come again in a row, themselves counted; 0 if they do nothing."""
    first, count = looks[at : at + period], 0
    if len(first) < period or not all(first):
        return 0
    while looks[at + count * period : at + (count + 1) * period] == first:
        count += 1
    return count if count > 1 else 0


def _follows(forward: Forward, layer: Sequence[str], following: Sequence[str]) -> bool:
    """Whether all that reads from a layer is in the following one, and something does."""
    mine = {n for one in layer for n in forward.by_module[one]}
    theirs = {n for one in following for n in forward.by_module[one]}
    readers = {user for n in mine for user in n.users if user in forward.reads} - mine
    return bool(readers) and readers <= theirs


def _outer(module: str, known: dict[str, list[fx.Node]]) -> str:
    return next(one for one in reversed(around(module)[:-1]) if one in known)
