"""Where a graph may be cut: its repeated layers, what each costs, and the cuts that balance stages."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction

from fxpar.cost.calls import busy_s
from fxpar.cost.cluster import USUAL
from fxpar.errors import StageCountError
from fxpar.ir.fqn import block_of
from fxpar.ir.node_meta import fqn_of, is_backward
from fxpar.stages.nodes import Nodes

# A list of modules counts as layers if it takes at least this share of the forward's time.
_SHARE = 0.1
_CLUSTER = USUAL["cuda"]  # where a model is cut must not depend on where it is lowered


@dataclass(frozen=True)
class Layer:
    """A repeated module. It is cut off from what runs before its first op, number `start` of the forward; `seconds`
    are those of its forward up to the next layer (the first layer's with what comes before it).
    """

    fqn: str
    start: int
    seconds: Fraction


def find_layers(nodes: Nodes) -> list[Layer]:
    """The repeated modules (`layers.0`, `layers.1`, ...; of nested ones the outermost) in the order in which they run.

    A module that runs again after a later one, or whose parameters do, cannot begin a stage: it counts to the layer
    before.
    """
    bound = nodes.bound
    starts: dict[str, int] = {}
    work: dict[str, Fraction] = defaultdict(Fraction)
    costs = [busy_s(node, nodes.shape, _CLUSTER) for node in bound]
    for i, node in enumerate(bound):
        fqn = block_of(fqn_of(node))
        if fqn and not is_backward(node):
            starts.setdefault(fqn, i)
            work[_parent(fqn)] += costs[i]
    enough = _SHARE * sum(work.values())
    counted = [(i, fqn) for fqn, i in starts.items() if work[_parent(fqn)] >= enough]
    usable = [(i, fqn) for i, fqn in sorted(counted) if not rerun(nodes, [(i, fqn)])]
    begins = [0, *(i for i, _ in usable[1:])][: len(usable)]
    ends = [*begins[1:], len(bound)]
    return [
        Layer(fqn, i, sum(costs[begin:end], Fraction(0)))
        for (i, fqn), begin, end in zip(usable, begins, ends[: len(usable)], strict=True)
    ]


def _parent(fqn: str) -> str:
    return fqn.rpartition(".")[0]


def rerun(nodes: Nodes, cuts: list[tuple[int, str]]) -> dict[str, list[int]]:
    """Modules with parameters that run on values of a later stage than their first one, with their stages; `cuts` are
    (first op, FQN).

    Modules around a cut are in several stages by nature, a parameter that two modules share is none of theirs, and a
    second look-up of tokens in a table needs no values: the table is then on several stages, like one that is tied.
    """
    around = {fqn[:end] for _, fqn in cuts for end in _dots(fqn)}
    stages: dict[str, set[int]] = defaultdict(set)
    on_values: dict[str, int] = defaultdict(int)
    for i, fqn, reads_values in nodes.reads_params:
        if fqn not in around:
            stage = sum(start <= i for start, _ in cuts)
            stages[fqn].add(stage)
            on_values[fqn] = max(on_values[fqn], stage if reads_values else 0)
    return {fqn: sorted(found) for fqn, found in stages.items() if on_values[fqn] > min(found)}


def _dots(fqn: str) -> list[int]:
    return [0, *(i for i, c in enumerate(fqn) if c == ".")]


def layer_cuts(nodes: Nodes, stages: int) -> list[str]:
    """`balanced_cuts` of the layers of a model. Raises StageCountError, which says what counts as a layer."""
    layers = find_layers(nodes)
    if stages <= len(layers):
        return balanced_cuts(layers, stages)
    names = ", ".join(repr(layer.fqn) for layer in layers[:4]) + ", ..." * (len(layers) > 4)
    counted = f" ({names})" if layers else ""
    why = f"{stages} stages need {stages} layers, there are {len(layers)}{counted}"
    what = "Numbered modules count (layers.0, layers.1) that run once and take a tenth of the forward. "
    others = module_cuts(nodes, stages)
    say = f", or say where they begin, for example +cut({'|'.join(others)})" if others else ""
    raise StageCountError(nodes.logical.name, why, f"{what}Use fewer stages (a smaller pp){say}")


def module_cuts(nodes: Nodes, stages: int) -> list[str]:
    """As `layer_cuts`, at modules of any name, the outermost that are enough; none if there are not enough."""
    costs = [busy_s(node, nodes.shape, _CLUSTER) for node in nodes.bound]
    names = [fqn_of(node) if not is_backward(node) else "" for node in nodes.bound]
    starts: dict[str, int] = {}
    for i, name in enumerate(names):
        for end in (*_dots(name)[1:], len(name)):
            starts.setdefault(name[:end], i)
    first_param = min((i for i, *_ in nodes.reads_params), default=len(names))
    for depth in range(1, 2 + max((name.count(".") for name in names), default=0)):
        outer = {starts[fqn]: fqn for fqn in starts if fqn and fqn.count(".") < depth}  # of two that begin here, inner
        usable = [(i, fqn) for i, fqn in sorted(outer.items()) if i > first_param and not rerun(nodes, [(i, fqn)])]
        begins = [(0, ""), *usable]
        ends = [*(i for i, _ in usable), len(names)]
        layers = [Layer(fqn, a, sum(costs[a:b], Fraction(0))) for (a, fqn), b in zip(begins, ends, strict=True)]
        if stages <= len(layers):
            found = balanced_cuts(layers, stages)
            if not rerun(nodes, [(starts[fqn], fqn) for fqn in found]):
                return found
    return []


def balanced_cuts(layers: list[Layer], stages: int) -> list[str]:
    """The layers with which stages 1, 2, ... begin, such that the dearest stage is as cheap as can be; of several such
    cuts the one of least spread, and then the one whose first stages are larger. There are as many layers or more.
    """
    total = [Fraction(0)]
    for layer in layers:
        total.append(total[-1] + layer.seconds)

    @functools.cache
    def best(begin: int, left: int) -> tuple[Fraction, Fraction, tuple[int, ...]]:
        """(dearest stage, sum of squares, negated ends) of layers[begin:] in `left` stages."""
        if left == 1:
            cost = total[-1] - total[begin]
            return cost, cost * cost, ()
        found = []
        for end in range(begin + 1, len(layers) - left + 2):
            cost = total[end] - total[begin]
            dearest, spread, ends = best(end, left - 1)
            found.append((max(cost, dearest), spread + cost * cost, (-end, *ends)))
        return min(found)

    return [layers[-end].fqn for end in best(0, stages)[2]]
