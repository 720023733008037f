"""Bytes per link of a list of transfers, and the time that a cluster needs for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxpar.cost.cluster import ClusterSpec
from fxpar.switch.problem import SwitchProblem


@dataclass(frozen=True, eq=False)
class LinkTraffic:
    """Bytes by rank, [ranks] each, and by pair of nodes ([from, to]; the diagonal stays inside)."""

    sent_inside: np.ndarray
    sent_between: np.ndarray
    received_inside: np.ndarray
    received_between: np.ndarray
    by_node: np.ndarray

    @property
    def inside(self) -> int:
        return int(self.sent_inside.sum())

    @property
    def between(self) -> int:
        return int(self.sent_between.sum())


def traffic(problem: SwitchProblem, transfers: np.ndarray) -> LinkTraffic:
    """Bytes per rank, direction and kind of link."""
    src, dst, nbytes = transfers["src"], transfers["dst"], transfers["nbytes"]
    pairs = np.bincount(problem.node_of[src] * problem.nodes + problem.node_of[dst], nbytes, problem.nodes**2)
    inside = problem.node_of[src] == problem.node_of[dst]

    def total(ranks: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        # float64 sums of whole numbers are exact up to 2**53 bytes
        return np.bincount(ranks[chosen], nbytes[chosen], problem.world).astype(np.int64)

    return LinkTraffic(
        total(src, inside),
        total(src, ~inside),
        total(dst, inside),
        total(dst, ~inside),
        pairs.astype(np.int64).reshape(problem.nodes, problem.nodes),
    )


def seconds(problem: SwitchProblem, transfers: np.ndarray) -> float:
    """Predicted time: step after step; in a step all links and directions work at once, the fullest counts."""
    total = 0.0
    for step in np.unique(transfers["step"]):
        total += _step_seconds(problem, traffic(problem, transfers[transfers["step"] == step]))
    return total


def _step_seconds(problem: SwitchProblem, load: LinkTraffic) -> float:
    cluster = problem.cluster
    inside = max(load.sent_inside.max(), load.received_inside.max()) / (cluster.intra_gb_per_s * 1e9)
    between = max(load.sent_between.max(), load.received_between.max()) / (cluster.inter_gb_per_s * 1e9)
    worst = max(inside, between)
    if cluster.node_gb_per_s is not None:  # the bytes of each node are known: no device needs an equal share of the cap
        crossing = load.by_node - np.diag(np.diag(load.by_node))
        worst = max(worst, max(crossing.sum(0).max(), crossing.sum(1).max()) / (cluster.node_gb_per_s * 1e9))
    return float(worst) + cluster.latency_us * 1e-6


def adding_seconds(cluster: ClusterSpec, links_s: float, nbytes: float) -> float:
    """Predicted time of a reduction whose links take `links_s`, and whose fullest rank reads and writes `nbytes` to add
    what arrives: at the rate of its memory, beside the links; but ranks that share cores do one after the other.
    """
    device = cluster.sustained
    adding_s = float(nbytes / device.bytes_per_s)
    return links_s + adding_s if device.shared_by > 1 else max(links_s, adding_s)


@dataclass(frozen=True, eq=False, kw_only=True)
class TransferPlan:
    """What is known of any list of transfers on a cluster; a plan has `problem` and `transfers`."""

    problem: SwitchProblem
    transfers: np.ndarray

    @cached_property
    def traffic(self) -> LinkTraffic:
        """Bytes per rank and link, all steps together."""
        return traffic(self.problem, self.transfers)

    @cached_property
    def links_s(self) -> float:
        """Seconds that the links of the problem's cluster need."""
        return seconds(self.problem, self.transfers)

    @property
    def predicted_s(self) -> float:
        """Seconds on the cluster of the problem."""
        return self.links_s

    @property
    def intra_node_bytes(self) -> int:
        return self.traffic.inside

    @property
    def inter_node_bytes(self) -> int:
        return self.traffic.between

    @property
    def max_send_bytes(self) -> int:
        """The fullest outgoing link of a device: the larger of its maxima inside nodes and between nodes."""
        load = self.traffic
        return int(max(load.sent_inside.max(), load.sent_between.max()))
