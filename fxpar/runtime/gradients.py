"""Gradients of a group, from the placements of its graph into the home layout.

home    every term goes to its home shard and is added there, in the order of ranks: straight, or as the sum of its
        node, whichever is predicted to be faster on the cluster
chain   (the paper's way) terms are reduced within the replicas of their graph; the sum so far travels from graph to
        graph, is added to, and goes home after the last one
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.exec_graph import Program
from fxpar.runtime.arrivals import order_of_gradients
from fxpar.runtime.loss_scaler import overflows_anywhere
from fxpar.runtime.switching import TransportOptions
from fxpar.store.weights import WeightStore
from fxpar.switch import ParamLayout, SwitchPlan, plan_switch
from fxpar.switch.node_first import NodeFirstPlan, cheapest_reduction
from fxpar.switch.reduction import AnyReductionPlan, plan_reduction
from fxpar.switch.terms import accumulators_of, gradient_placements
from fxpar.transport import Holding, NodeFirstReduction, Reduction, Switch, reduction_on

Mode = Literal["home", "chain"]


@dataclass
class Gradients:
    """The gradients of a mini-batch on this rank: `begin`, `add` per group, `end`."""

    store: WeightStore
    programs: Mapping[str, Program]
    cluster: ClusterSpec
    mode: Mode = "home"
    options: TransportOptions = field(default_factory=TransportOptions)
    planner: str = "auto"
    _plans: dict[str, AnyReductionPlan | NodeFirstPlan] = field(default_factory=dict)
    _reductions: dict[str, Reduction | NodeFirstReduction] = field(default_factory=dict)
    _chain: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    _hops: dict[tuple[str, str], tuple[SwitchPlan, Switch]] = field(default_factory=dict)
    _known: dict[str, Hashable | None] = field(default_factory=dict)
    _last: str | None = None

    def begin(self, scale: float = 1.0, names: Collection[str] | None = None) -> None:
        """Start a mini-batch whose loss is multiplied by `scale`: `.grad` of these parameters (by default of all that
        are trained) is where gradients go.
        """
        self.store.attach_gradients(self.store.trained if names is None else names)
        if scale != 1.0:  # what earlier mini-batches have left is divided with the rest at the end
            self.store.scale_gradients(scale)
        self._last = None

    def add(self, name: str, grads: Mapping[str, Tensor]) -> int:
        """Reduce the gradients of a group and add them to what is there; returns the bytes that all ranks sent. With
        mode "home" a gradient is looked up when it is its turn to leave, in the order in which the graph makes them.
        """
        plan = self.plan(name)
        sent = plan.intra_node_bytes + plan.inter_node_bytes
        if self.mode == "home":
            self._reduction(name, self.store.home_grads).run(grads, accumulate=True)
            return sent
        here = self._chain_tensors(name)
        again = self._last == name  # two groups under one strategy
        self._reduction(name, here).run(grads, accumulate=again)
        if self._last is not None and not again:
            sent += self._hop(self._last, name)
        self._last = name
        return sent

    def end(self) -> None:
        """After the last group."""
        if self.mode == "chain" and self._last is not None:
            self._hop(self._last, "home")

    def unscale(self, scale: float) -> bool:
        """Divide by the factor on the loss; False if a gradient of any rank overflowed."""
        store = self.store
        if overflows_anywhere(store.flat_gradients, self.options.group, store.device):
            return False
        store.scale_gradients(1.0 / scale)
        return True

    def drop(self) -> None:
        """Forget the gradients of this mini-batch, and those before it that `.grad` still held."""
        self.store.drop_gradients()

    def predicted_s(self, name: str) -> float:
        """Predicted seconds of the reduction after a group."""
        return self.plan(name).predicted_s

    def pass_on(self, name: str, following: str) -> bool:
        """Whether a run under `following` adds to the gradients of one under `name` before it, in place of those being
        reduced: they lie alike. A chain hands its sums from graph to graph anyway.
        """
        mine = self._accumulators(name)
        return self.mode == "home" and mine is not None and mine == self._accumulators(following)

    def _accumulators(self, name: str) -> Hashable | None:
        if name not in self._known:
            self._known[name] = accumulators_of(self.programs[name])
        return self._known[name]

    def plan(self, name: str) -> AnyReductionPlan | NodeFirstPlan:
        """The verified plan of a group's reduction."""
        if name not in self._plans:
            terms = gradient_placements(self.programs[name])
            plan = (
                cheapest_reduction(
                    terms,
                    self._target(order_of_gradients(self.programs[name])),
                    self.cluster,
                    name,
                    self.options.staging_bytes,
                    self.planner,
                )
                if self.mode == "home"
                else plan_reduction(terms, self._scattered(name), self.cluster, name, self.planner)
            )
            plan.verify()
            self._plans[name] = plan
        return self._plans[name]

    def _target(self, order: Sequence[str] = ()) -> ParamLayout:
        """Home, as far as it is trained."""
        home = self.store.home
        return ParamLayout(
            "home", home.world, {f: home.params[f] for f in order or home.params if f in self.store.trained}
        )

    def _scattered(self, name: str) -> ParamLayout:
        """Where the sum of a graph's replicas lies in chain mode, in the dtype of the home layout."""
        if name == "home":
            return self._target()
        layout = self.store.layouts[name].scattered()
        params = {f: p for f, p in layout.params.items() if f in self.store.trained}
        return _with_dtypes(ParamLayout(layout.name, layout.world, params), self.store.home)

    def _reduction(self, name: str, target: Mapping[str, Tensor]) -> Reduction | NodeFirstReduction:
        if name not in self._reductions:
            layout = self._target() if self.mode == "home" else self._scattered(name)
            self._reductions[name] = reduction_on(
                self.plan(name),
                self.store.rank,
                Holding(layout, target),
                bucketed=self.options.bucketed,
                **self.options.shared(),
            )
        return self._reductions[name]

    def _chain_tensors(self, name: str) -> dict[str, Tensor]:
        if name == "home":
            return self.store.home_grads
        if name not in self._chain:
            rank, device = self.store.rank, self.store.device
            self._chain[name] = {
                fqn: torch.zeros(dist.local_shape(param.shape), dtype=param.dtype, device=device)
                for fqn, param in self._scattered(name).params.items()
                for dist in param.copies
                if rank in dist.mesh
            }
        return self._chain[name]

    def _hop(self, source: str, target: str) -> int:
        """Add the sum so far to what the target holds."""
        key = (source, target)
        if key not in self._hops:
            before, after = self._scattered(source), self._scattered(target)
            plan = plan_switch(before, after, self.cluster, "hotspa")  # a sum cannot be relayed
            plan.verify()
            switch = Switch(
                plan,
                self.store.rank,
                [Holding(before, self._chain_tensors(source))],
                Holding(after, self._chain_tensors(target)),
                **self.options.of_switch(),
                add=True,
            )
            self._hops[key] = (plan, switch)
        plan, switch = self._hops[key]
        switch.run()
        return plan.intra_node_bytes + plan.inter_node_bytes


def _with_dtypes(layout: ParamLayout, like: ParamLayout) -> ParamLayout:
    params = {fqn: replace(param, dtype=like.params[fqn].dtype) for fqn, param in layout.params.items()}
    return replace(layout, params=params)
