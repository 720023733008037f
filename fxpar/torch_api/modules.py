"""Graph modules of other kinds (torch 2.13: `torch.fx._lazy_graph_module`, `torch.fx.graph._BoxedCodeGen`)."""

from __future__ import annotations

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _BoxedCodeGen


def lazy_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph module whose code is written when somebody reads or calls it: most graphs are only walked."""
    return _LazyGraphModule(root, graph)


def compile_boxed(graph: fx.Graph) -> fx.GraphModule:
    """A module that takes one list of all operands and clears it, so that each is freed after its last use; `graph`
    belongs to it.
    """
    graph.set_codegen(_BoxedCodeGen())
    return fx.GraphModule(nn.Module(), graph)
