"""HotSPa's Figure 8: the switches among its five layouts of a 32B model on 4 x 8 devices, per planner."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from fxpar.ir.strategy import Strategy
from fxpar.search.published import A800, FIGURE_8_GB, LAYERS_32B, LAYOUTS
from fxpar.search.switching import Outlines
from fxpar.switch import ParamLayout, SwitchPlan, layout_of, plan_switch
from fxpar.switch.planners import PLANNERS

CAPTURED = 4  # layers, which divide evenly over the stages; each stands for as many of the model
WHAT = ("weights", "gradients")


@dataclass(frozen=True)
class Switched:
    """A switch by one planner: bytes over all devices, the fullest sender's, and seconds. Fused: a device sends one
    message to another one in a step; else one for each slice, and each costs the latency.
    """

    what: str
    source: str
    target: str
    planner: str
    local_bytes: int
    intra_node_bytes: int
    inter_node_bytes: int
    max_send_bytes: int
    fused_s: float
    unfused_s: float
    messages: int
    slices: int

    def to_json(self) -> dict[str, Any]:
        """With the published bytes of weights, in GB, where there are any."""
        found = asdict(self)
        if self.what == "weights" and self.planner in ("hotspa", "relay"):
            local, inside, between, relayed = FIGURE_8_GB[self.source, self.target]
            if self.planner == "relay":
                found["published_gb"] = {"inter_node": relayed}
            else:
                found["published_gb"] = {"local": local, "intra_node": inside, "inter_node": between}
        return found


def layouts_32b(outlines: Outlines) -> dict[str, ParamLayout]:
    """By name, of all layers. `outlines` is of the model with MODEL_32B's sizes, weights in the dtype on the wire."""
    return {
        name: _deepened(layout_of(outlines(Strategy.parse(text), CAPTURED), name)) for name, text in LAYOUTS.items()
    }


def _deepened(layout: ParamLayout) -> ParamLayout:
    params, each = {}, LAYERS_32B // CAPTURED
    for fqn, param in layout.params.items():
        first, _, rest = fqn.partition(".")
        number, _, name = rest.partition(".")
        if first != "layers":
            params[fqn] = param
            continue
        for i in range(each):
            params[f"layers.{int(number) * each + i}.{name}"] = param
    return replace(layout, params=params)


def figure_8(
    layouts: Mapping[str, ParamLayout],
    planners: Sequence[str] = tuple(PLANNERS),
    what: Sequence[str] = WHAT,
) -> list[Switched]:
    """Every switch, each plan verified."""
    found = []
    for kind in what:
        placed = {name: one if kind == "weights" else one.scattered() for name, one in layouts.items()}
        for source, target in itertools.permutations(placed, 2):
            for planner in planners:
                plan = plan_switch(placed[source], placed[target], A800, planner)
                plan.verify()
                found.append(_switched(kind, source, target, plan))
    return found


def _switched(what: str, source: str, target: str, plan: SwitchPlan) -> Switched:
    cluster, steps = plan.problem.cluster, max(plan.steps, 1)
    wire_s = plan.predicted_s - float(cluster.latency_s) * plan.steps
    pairs = np.unique(plan.transfers[["src", "dst", "step"]])
    fused, unfused = (_most_of_a_rank(each, steps) for each in (pairs, plan.transfers))
    return Switched(
        what=what,
        source=source,
        target=target,
        planner=plan.planner,
        local_bytes=plan.problem.local_bytes,
        intra_node_bytes=plan.intra_node_bytes,
        inter_node_bytes=plan.inter_node_bytes,
        max_send_bytes=plan.max_send_bytes,
        fused_s=wire_s + fused * float(cluster.latency_s),
        unfused_s=wire_s + unfused * float(cluster.latency_s),
        messages=len(pairs),
        slices=len(plan.transfers),
    )


def _most_of_a_rank(messages: np.ndarray, steps: int) -> int:
    """Messages that the busiest rank sends or receives, step after step."""
    total = 0
    for step in range(steps):
        here = messages[messages["step"] == step]
        total += max((int(np.bincount(here[end]).max()) for end in ("src", "dst") if len(here)), default=0)
    return total
