"""Why a row must not be padded, if it must not."""

from __future__ import annotations

import sympy

from fxpar.flow.analysis import in_words, token_flow
from fxpar.ir.graph import AnnotatedGraph, LogicalGraph


def token_symbol(graph: LogicalGraph | AnnotatedGraph) -> sympy.Symbol | None:
    """The dim that context and sequence parallelism cut: T where there is one, else the first dynamic dim."""
    if not graph.dims:
        return None
    return next((d.symbol for d in graph.dims if d.name == "T"), graph.dims[0].symbol)


def padding_hazard(logical: LogicalGraph) -> str | None:
    """What of the model would see tokens behind the last one, in words; None if nothing does.

    A stage of a pipeline has none of its own: the whole graph is asked.
    """
    token = token_symbol(logical)
    if token is None or any(info.kind in ("received", "received_grad") for info in logical.inputs):
        return None
    if any(out.kind == "sent" for out in logical.outputs):
        return None
    if logical.packing is not None:
        return logical.packing.padding_hazard
    flow = token_flow(logical, token, "padding")
    return None if flow.hazard is None else in_words(flow.hazard)


def with_packing(hazard: str, unpacked: str) -> str:
    """Why rows must not be padded, and why they are not packed either, unless by the same op: attention over packed
    rows knows what is padding, so what stops packing may be all that stops padding.
    """
    same_op = unpacked.split(" ")[0] == hazard.split(" ")[0]
    return hazard if same_op or not unpacked else f"{hazard} (and rows are not packed, since {unpacked})"
