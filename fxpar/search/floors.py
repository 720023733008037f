"""What a strategy that saves memory takes at least, from the same one that saves none: nothing is lowered for it.

kernels    as many as without, and the products that a recomputation of whole blocks runs again
transfers  those of ZeRO-3 as far as nothing there is could hide them; else what the forward waits for
memory     weights and accumulated gradients, which stay whole without ZeRO, whatever is recomputed; with ZeRO, but
           without recomputation, what the backward needs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import fx

from fxpar.cost.calls import COMPUTE, NOMINAL_TOKENS, NodeCost, collective_s, node_costs
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.polynomial import Polynomial
from fxpar.ir.exec_graph import ExecGraph
from fxpar.ir.fqn import block_of
from fxpar.ir.graph import TensorMeta
from fxpar.ir.node_meta import fqn_of, is_backward, reader_of
from fxpar.ir.strategy import Strategy
from fxpar.search.price import Candidate, Memory

PRODUCTS = ("product", "attention")  # kinds of calls
_BYTES = torch.uint8


@dataclass(frozen=True)
class Parts:
    """Seconds of a micro-batch that no memory is saved in: kernels; of them, what "full" runs again; what the forward
    waits for of transfers; transfers alone. And what ZeRO-3 would take to gather all parameters once, and to scatter
    their gradients.
    """

    kernels: Polynomial
    again: Polynomial
    waited: Polynomial
    transfers: Polynomial
    gathered_s: Fraction
    scattered_s: Fraction

    @classmethod
    def of(cls, program: ExecGraph, cluster: ClusterSpec) -> Parts:
        costs = node_costs(program, cluster)
        kernels = [one for one in costs if one.kind in COMPUTE]
        others = [one for one in costs if one.kind not in COMPUTE]
        named = {one.name: one for one in kernels if one.part == "body" and one.kind in PRODUCTS}
        return cls(
            _summed(kernels),
            _summed([named[node.name] for node in run_again(program.body.graph) if node.name in named]),
            sum((one.exposed for one in others if not one.backward), Polynomial()),
            _summed(others),
            *_of_weights(program, cluster),
        )

    def minus(self, other: Parts) -> Parts:
        """What this one has more."""
        return Parts(
            self.kernels + other.kernels * -1,
            self.again + other.again * -1,
            self.waited + other.waited * -1,
            self.transfers + other.transfers * -1,
            self.gathered_s - other.gathered_s,
            self.scattered_s - other.scattered_s,
        )

    def least(self, strategy: Strategy, gathers: int) -> Polynomial:
        """Under a strategy that saves memory, and gathers parameters so often if that is by ZeRO-3."""
        full = strategy.remat is not None and strategy.remat.mode == "full"
        kernels = self.kernels + self.again if full else self.kernels
        if strategy.zero < 3:
            return kernels + self.waited
        beside_s = (kernels + self.transfers).at(NOMINAL_TOKENS)
        return kernels + Polynomial(max(Fraction(0), gathers * self.gathered_s + self.scattered_s - beside_s))


def _summed(costs: Sequence[NodeCost]) -> Polynomial:
    return sum((one.seconds for one in costs), Polynomial())


def _of_weights(program: ExecGraph, cluster: ClusterSpec) -> tuple[Fraction, Fraction]:
    """Seconds to gather all parameters of a program once, each cut over the axes where it is whole, and to scatter as
    many gradients.
    """
    nbytes: dict[str, int] = {}
    for info, stored in program.params():
        axes = program.strategy.data_axes_of(info.fqn)
        if axes and info.meta.shape:
            nbytes[axes] = nbytes.get(axes, 0) + stored.local.numel({}) * stored.local.dtype.itemsize
    gathered, scattered = Fraction(0), Fraction(0)
    for axes, held in nbytes.items():
        piece = held // program.strategy.mesh.degree(axes)
        gathered += _alone_s(program, cluster, "all_gather", axes, piece)
        scattered += _alone_s(program, cluster, "reduce_scatter", axes, held)
    return gathered, scattered


def _alone_s(program: ExecGraph, cluster: ClusterSpec, kind: str, axes: str, nbytes: int) -> Fraction:
    return collective_s(program, cluster, kind, axes, TensorMeta((nbytes,), _BYTES)).c0


def run_again(graph: fx.Graph) -> set[fx.Node]:
    """Nodes of the forward that `remat(full)` runs again at least: within a block, what the backward needs, and what
    that is made of up to what the forward reads elsewhere (as `fxpar.remat` chooses them).
    """
    blocks = {node: _block(node) for node in graph.nodes if node.op == "call_function" and not is_backward(node)}

    def stays(node: fx.Node) -> bool:
        mine = blocks.get(node)
        return bool(mine) and all(is_backward(user) or blocks.get(user) == mine for user in node.users)

    todo = [node for node in blocks if stays(node) and any(map(is_backward, node.users))]
    found: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [one for one in node.all_input_nodes if blocks.get(one) == blocks[node] and stays(one)]
    return found


def _block(node: fx.Node) -> str:
    """That of a node, if what reads it is in the same one."""
    block = block_of(fqn_of(node))
    return block if block == block_of(reader_of(node)) else ""


@dataclass
class LeastFlat(Candidate):
    """`plain`, a strategy without stages that saves no memory, as if it saved some: `strategy` takes no less."""

    plain: Candidate = field(kw_only=True)
    parts: tuple[Parts, Parts] = field(kw_only=True)  # of the first sample, and what the second has more
    whole_loss: bool = field(kw_only=True)  # the loss in chunks would save nothing

    @property
    def _positions(self) -> list[tuple[Polynomial, Polynomial]]:  # type: ignore[override]
        few, step = self.parts
        return [(few.least(self.strategy, 1), step.least(self.strategy, 2))]

    @property
    def keeps(self) -> bool:
        """Whether the backward finds what it needs as it does under `plain`."""
        return self.strategy.remat is None and self.whole_loss

    def predicted(self, tokens: int) -> Memory:
        return self._held(self.plain.at(tokens))

    def of_first(self, tokens: int) -> Memory:
        return self._held(self.plain.of_first(tokens))

    def _held(self, one: Memory) -> Memory:
        if self.strategy.zero:
            held = max(0, one.step_bytes - one.gradient_bytes) if self.keeps else 0
            return Memory(one.home_bytes, one.optimizer_bytes, 0, held, 0, 0)
        kept = one.home_bytes, one.optimizer_bytes, one.weight_bytes
        return Memory(*kept, one.gradient_bytes, one.gradient_bytes, one.staging_bytes)


@dataclass
class Floors:
    """Floors of a model, for all of its strategies."""

    cluster: ClusterSpec
    _parts: dict[Strategy, tuple[Parts, Parts]] = field(default_factory=dict, init=False)

    def least(self, plain: Candidate, strategy: Strategy, whole_loss: bool) -> LeastFlat | None:
        """What `strategy` takes at least, with its loss in chunks too, unless these would save nothing (`whole_loss`);
        None where that cannot be said, as the model is lowered whole.
        """
        if len(plain.programs) != 2:
            return None
        if plain.strategy not in self._parts:
            few, more = (
                Parts.of(program, self.cluster) for program in plain.programs if isinstance(program, ExecGraph)
            )
            self._parts[plain.strategy] = few, more.minus(few)
        return LeastFlat(
            strategy,
            self.cluster,
            plain.anchors,
            plain.samples,
            plain.steps,
            plain.programs,
            plain=plain,
            parts=self._parts[plain.strategy],
            whole_loss=whole_loss,
        )


__all__ = ["Floors", "LeastFlat", "Parts", "run_again"]
