"""Constants of a captured graph become inputs: tensors held as plain attributes, or made from Python numbers."""

from __future__ import annotations

from torch import Tensor, fx

from fxpar.ir.graph import Input
from fxpar.ir.node_meta import tensor_of


def lift_constants(gm: fx.GraphModule, inputs: tuple[Input, ...]) -> tuple[tuple[Input, ...], dict[str, Tensor]]:
    """Replace every `get_attr` by a placeholder behind the others; returns all inputs and the constants' values."""
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
