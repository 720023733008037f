"""From a raw trace to the fields of a graph: no writes, canonical form, constants as inputs."""

from __future__ import annotations

import time
from typing import Any

from torch import fx

from fxpar.ir.graph import TOKEN_NUMBERS, Input, Output
from fxpar.torch_api.symbolic import FakeWorld
from fxpar.tracer.canonical import Canonical
from fxpar.tracer.constants import lift_constants
from fxpar.tracer.dynamic import DynamicDims
from fxpar.tracer.functional import make_functional
from fxpar.tracer.guards import check_guards
from fxpar.tracer.simplify import simplify
from fxpar.tracer.step import RawTrace


def _without_numbers(gm: fx.GraphModule, inputs: tuple[Input, ...]) -> tuple[Input, ...]:
    """The inputs without token numbers that no dropout reads; so the graph."""
    kept = []
    for node, info in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if info.fqn == TOKEN_NUMBERS and info.kind == "batch" and not node.users:
            gm.graph.erase_node(node)
        else:
            kept.append(info)
    gm.recompile()
    return tuple(kept)


def canonical_graph(raw: RawTrace, world: FakeWorld, dims: DynamicDims, started: float) -> dict[str, Any]:
    """Arguments of LogicalGraph; new values of buffers come last among the outputs. `started` is a process time.

    Raises SpecializedShapeError, MutationError, UnsupportedOpError.
    """
    traced = time.process_time()
    signature = raw.signature
    functional = make_functional(raw.gm, signature, world)
    checked = check_guards(world, dims.dims)
    outputs = [out for out in raw.outputs if out.kind != "buffer"]
    reassigned = [out.fqn for out in raw.outputs if out.kind == "buffer"]
    count = len(outputs)
    buffers = dict(zip(reassigned, functional.results[count:], strict=True)) | functional.buffers
    written = [fqn for fqn in signature.of_kind("buffer") if fqn in buffers]
    results = functional.results[:count] + [buffers[fqn] for fqn in written]
    gm = Canonical(functional.gm, signature.inputs, dims, world).run(results)
    simplify(gm)
    inputs, constants = lift_constants(gm, _without_numbers(gm, signature.inputs))
    done = time.process_time()
    return {
        "gm": gm,
        "inputs": inputs,
        "outputs": (*outputs, *(Output("buffer", fqn) for fqn in written)),
        "dims": checked,
        "constants": constants,
        "timings": {"capture_cpu_s": done - started, "trace_cpu_s": traced - started, "canonical_cpu_s": done - traced},
    }
