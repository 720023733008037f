"""fxpar: capture a model once, lower it to a verified program per rank and parallel strategy.

The names below are imported when first used, so that `import fxpar` (and `fxpar --help`) do not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fxpar.version import __version__

if TYPE_CHECKING:
    from fxpar import losses
    from fxpar.annotate.tp_plan import overrides_from_tp_plan
    from fxpar.api import ParallelModule, parallelize
    from fxpar.checking import CheckResult, check
    from fxpar.cost.cluster import ClusterSpec
    from fxpar.cost.device import Device
    from fxpar.errors import FxparError, FxparWarning
    from fxpar.ir.dist_config import DistConfig, Partial, Replicate, Shard
    from fxpar.ir.exec_graph import ExecGraph
    from fxpar.ir.graph import AnnotatedGraph, LogicalGraph
    from fxpar.ir.mesh import Mesh
    from fxpar.ir.strategy import Strategy
    from fxpar.lowering import lower
    from fxpar.runtime.compiling import compile_strategies, compile_task
    from fxpar.runtime.exact_experts import ExactExperts
    from fxpar.runtime.task import Task
    from fxpar.store.folder import Weights
    from fxpar.tracer import capture
    from fxpar.tracer.experts import expert_mm, weighted_sum
    from fxpar.transport.redistribute import redistribute

_WHERE = {
    "AnnotatedGraph": "fxpar.ir.graph",
    "CheckResult": "fxpar.checking",
    "ClusterSpec": "fxpar.cost.cluster",
    "Device": "fxpar.cost.device",
    "DistConfig": "fxpar.ir.dist_config",
    "ExactExperts": "fxpar.runtime.exact_experts",
    "ExecGraph": "fxpar.ir.exec_graph",
    "FxparError": "fxpar.errors",
    "FxparWarning": "fxpar.errors",
    "LogicalGraph": "fxpar.ir.graph",
    "Mesh": "fxpar.ir.mesh",
    "ParallelModule": "fxpar.api",
    "Partial": "fxpar.ir.dist_config",
    "Replicate": "fxpar.ir.dist_config",
    "Shard": "fxpar.ir.dist_config",
    "Strategy": "fxpar.ir.strategy",
    "Task": "fxpar.runtime.task",
    "Weights": "fxpar.store.folder",
    "capture": "fxpar.tracer",
    "check": "fxpar.checking",
    "compile_strategies": "fxpar.runtime.compiling",
    "compile_task": "fxpar.runtime.compiling",
    "expert_mm": "fxpar.tracer.experts",
    "losses": "fxpar.losses:",
    "lower": "fxpar.lowering",
    "overrides_from_tp_plan": "fxpar.annotate.tp_plan",
    "parallelize": "fxpar.api",
    "redistribute": "fxpar.transport.redistribute",
    "weighted_sum": "fxpar.tracer.experts",
}

__all__ = [
    "AnnotatedGraph",
    "CheckResult",
    "ClusterSpec",
    "Device",
    "DistConfig",
    "ExactExperts",
    "ExecGraph",
    "FxparError",
    "FxparWarning",
    "LogicalGraph",
    "Mesh",
    "ParallelModule",
    "Partial",
    "Replicate",
    "Shard",
    "Strategy",
    "Task",
    "Weights",
    "__version__",
    "capture",
    "check",
    "compile_strategies",
    "compile_task",
    "expert_mm",
    "losses",
    "lower",
    "overrides_from_tp_plan",
    "parallelize",
    "redistribute",
    "weighted_sum",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'fxpar' has no attribute {name!r}")
    place, colon, _ = _WHERE[name].partition(":")
    module = importlib.import_module(place)
    value = module if colon else getattr(module, name)  # with a colon the module itself is meant
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
