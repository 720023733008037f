"""From a raw trace to the fields of a graph: no writes, canonical form, constants as inputs."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from fxpar.ir.graph import TOKEN_NUMBERS, Input, LogicalGraph, Output
from fxpar.ir.node_meta import tensor_of
from fxpar.torch_api.symbolic import FakeWorld
from fxpar.tracer.canonical import Canonical
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


def without_unread(logical: LogicalGraph) -> LogicalGraph:
    """A graph without the parameters that nothing in it reads: where several graphs of one model each have their own
    part of it. The given graph is left as it is.
    """
    graph, copied = fx.Graph(), {}
    graph.output(graph.graph_copy(logical.gm.graph, copied))
    kept = []
    for node, info in zip(logical.placeholders, logical.inputs, strict=True):
        if info.kind == "param" and not node.users:
            graph.erase_node(copied[node])
        else:
            kept.append(info)
    return replace(logical, gm=fx.GraphModule(logical.gm, graph), inputs=tuple(kept))


def _lift_constants(gm: fx.GraphModule, inputs: tuple[Input, ...]) -> tuple[tuple[Input, ...], dict[str, Tensor]]:
    """Replace every `get_attr`, a tensor held as a plain attribute or made from Python numbers, by a placeholder behind
    the others; returns all inputs and the constants' values.
    """
    constants: dict[str, Tensor] = {}
    lifted: dict[str, fx.Node] = {}
    found = list(inputs)
    last = next(reversed(gm.graph.find_nodes(op="placeholder")), None)
    for node in gm.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name not in lifted:
            value = getattr(gm, name)
            with gm.graph.inserting_after(last) if last is not None else gm.graph.inserting_before():
                last = lifted[name] = gm.graph.placeholder(name)
            last.meta.update(node.meta)
            constants[name] = value
            found.append(Input("constant", name, tensor_of(node)))
        node.replace_all_uses_with(lifted[name])
        gm.graph.erase_node(node)
    if constants:
        gm.recompile()
    return tuple(found), constants


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
    inputs, constants = _lift_constants(gm, _without_numbers(gm, signature.inputs))
    done = time.process_time()
    return {
        "gm": gm,
        "inputs": inputs,
        "outputs": (*outputs, *(Output("buffer", fqn) for fqn in written)),
        "dims": checked,
        "constants": constants,
        "timings": {"capture_cpu_s": done - started, "trace_cpu_s": traced - started, "canonical_cpu_s": done - traced},
    }
