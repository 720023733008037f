"""Gradients of a program on their way to the optimizer's layout: what that takes, and what it sends."""

from __future__ import annotations

import functools

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.link_bytes import LinkBytes
from fxpar.ir.exec_graph import Program
from fxpar.store.home import ParamSpec, home_layout, param_specs
from fxpar.switch.node_first import ReductionCost, cheapest_cost
from fxpar.switch.terms import GradientPlacement, gradient_placements

STAGING_BYTES = 64 << 20


def going_home(program: Program, cluster: ClusterSpec) -> ReductionCost:
    """What the gradients of a program take and send to go home."""
    world = program.strategy.world
    if world == 1:
        return ReductionCost(0.0, 0, 0)
    terms = tuple(gradient_placements(program).items())
    return _cost(terms, tuple(param_specs(program)), world, cluster)


def sent_home(program: Program, cluster: ClusterSpec) -> LinkBytes:
    """The bytes of it."""
    found = going_home(program, cluster)
    return LinkBytes(found.intra_node_bytes, found.inter_node_bytes)


@functools.lru_cache(maxsize=1024)
def _cost(
    terms: tuple[tuple[str, tuple[GradientPlacement, ...]], ...],
    specs: tuple[ParamSpec, ...],
    world: int,
    cluster: ClusterSpec,
) -> ReductionCost:
    """Once for all strategies under which gradients lie alike."""
    home, sources = home_layout(specs, world), dict(terms)
    return cheapest_cost(sources, home.only(sources), cluster, sums_bytes=STAGING_BYTES)
