"""Graph modules that compile late (torch 2.13: `torch.fx._lazy_graph_module`)."""

from __future__ import annotations

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule


def lazy_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph module whose code is written when somebody reads or calls it: most graphs are only walked."""
    return _LazyGraphModule(root, graph)
