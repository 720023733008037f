"""What is there all the time, whatever runs: masters, the optimizer's moments, gradients at home."""

from __future__ import annotations

import functools
from collections.abc import Collection

from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.exec_graph import Program
from fxpar.store.home import ParamSpec, home_layout, param_specs
from fxpar.switch.layout import ParamLayout
from fxpar.switch.node_first import room_for_sums

OPTIMIZER_BYTES = 8
"""AdamW: two fp32 moments per element of the masters."""


def home_bytes(program: Program) -> tuple[int, int, int]:
    """Bytes of masters, of the optimizer's moments and of gradients at home, on the fullest rank."""
    trained = frozenset(out.fqn for out in program.outputs if out.kind == "grad")
    return _home_bytes(tuple(param_specs(program)), program.strategy.world, trained)


@functools.lru_cache(maxsize=64)  # strategies of a model have the same parameters
def _home_bytes(specs: tuple[ParamSpec, ...], world: int, trained: frozenset[str]) -> tuple[int, int, int]:
    return bytes_at_home(home_layout(specs, world), trained)


def sums_bytes(program: Program, cluster: ClusterSpec, staging_bytes: int) -> int:
    """Bytes that gradients on their way home need at most for sums inside a node."""
    return _sums_bytes(tuple(param_specs(program)), program.strategy.world, cluster, staging_bytes)


@functools.lru_cache(maxsize=64)
def _sums_bytes(specs: tuple[ParamSpec, ...], world: int, cluster: ClusterSpec, staging_bytes: int) -> int:
    return room_for_sums(home_layout(specs, world), cluster, staging_bytes)


def bytes_at_home(home: ParamLayout, trained: Collection[str]) -> tuple[int, int, int]:
    """The same of a home layout, in which `trained` parameters have gradients."""
    gradients = home.only(trained)
    elements = sum(-(-home.only({f}).max_bytes() // p.dtype.itemsize) for f, p in gradients.params.items())
    return home.max_bytes(), OPTIMIZER_BYTES * elements, gradients.max_bytes()
