"""Adding results of later micro-batches to those of earlier ones, in place."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, fx

from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.strategy import Strategy
from fxpar.passes.accumulate_gradients import AccumulateGradients


def own_memory(values: list[Tensor], taken: Iterable[Tensor | None], keep: Collection[int] = ()) -> None:
    """Make `values` (but those at `keep`) buffers that can be added to: copy what shares memory with another or with
    `taken`, or is a view. A gradient may be a view (of another one, transposed, of a bucket that would stay) or an
    expanded scalar.
    """
    seen = {tensor.untyped_storage().data_ptr() for tensor in taken if tensor is not None}
    for i, value in enumerate(values):
        if i in keep:
            continue
        memory = value.untyped_storage()
        if memory.data_ptr() in seen or memory.nbytes() != value.numel() * value.element_size():
            values[i] = value.clone(memory_format=torch.contiguous_format)
        seen.add(values[i].untyped_storage().data_ptr())


def accumulating(graph: fx.Graph, keep: Collection[int]) -> fx.Graph:
    """A copy of a part that takes the results so far as further operands and adds to them; those at `keep` excepted."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    AccumulateGradients(keep=tuple(keep))(AnnotatedGraph(copy, (), (), (), Strategy((("dp", 1),))))
    return copy
