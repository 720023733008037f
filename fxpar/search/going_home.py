"""Gradients of a program on their way to the optimizer's layout: what that takes, and what it sends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.link_bytes import LinkBytes
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.exec_graph import Program
from fxpar.ir.mesh import Mesh
from fxpar.memory.state import sums_bytes
from fxpar.schedule.mini_batch import STAGING_BYTES, staged_bytes
from fxpar.store.home import ParamSpec, home_layout, param_specs
from fxpar.switch.node_first import ReductionCost, cheapest_cost
from fxpar.switch.terms import GradientPlacement, gradient_placements

Moved = Callable[[DistConfig], DistConfig]


def going_home(program: Program, cluster: ClusterSpec, moved: Moved | None = None) -> ReductionCost:
    """What the gradients of a program take and send to go home; `moved` says where else they lie."""
    world = program.strategy.world
    if world == 1:
        return ReductionCost(0.0, 0, 0)
    terms = tuple(terms_of(program, moved).items())
    return _cost(terms, tuple(param_specs(program)), world, cluster)


def staging_of(weights: int, samples: Sequence[Program], steps: float, cluster: ClusterSpec) -> int:
    """Bytes of messages, and of sums inside nodes, of a model with `weights` bytes on a rank. Neither grows beyond its
    cap as layers do, of which the model has so many `steps` from the first sample to the last more than the first.
    """
    if samples[0].strategy.world == 1:
        return 0
    few, more = (sums_bytes(one, cluster, STAGING_BYTES) for one in (samples[0], samples[-1]))
    sums = min(few + (more - few) * steps, max(few, more, STAGING_BYTES))
    return staged_bytes(weights, STAGING_BYTES) + round(sums)


def terms_of(program: Program, moved: Moved | None = None) -> dict[str, tuple[GradientPlacement, ...]]:
    """Where the terms of each gradient lie."""
    found = gradient_placements(program)
    if moved is None:
        return found
    return {fqn: tuple(replace(one, dist=moved(one.dist)) for one in terms) for fqn, terms in found.items()}


def sent_home(program: Program, cluster: ClusterSpec, moved: Moved | None = None) -> LinkBytes:
    """The bytes of it."""
    return _bytes(going_home(program, cluster, moved))


def sent_home_by_position(program: Program, cluster: ClusterSpec) -> list[LinkBytes]:
    """The same for the parameters of each mesh of `program`, in the order of `fxpar.cost.group.rank_costs`; what
    several have counts for the first.
    """
    if program.strategy.world == 1:
        return [LinkBytes()]
    terms, mine = gradient_placements(program), dict[Mesh, dict[str, tuple[GradientPlacement, ...]]]()
    for placed in program.placed:
        here = mine.setdefault(placed.mesh, {})
        here |= {info.fqn: terms.pop(info.fqn) for info, _ in placed.params() if info.fqn in terms}
    specs, world = tuple(param_specs(program)), program.strategy.world
    return [_bytes(_cost(tuple(one.items()), specs, world, cluster)) if one else LinkBytes() for one in mine.values()]


def _bytes(found: ReductionCost) -> LinkBytes:
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
