"""A graph of Dynamo as a module with the module tree of the user's model, so that it can be captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from fxpar.dynamo.inputs import STEP, Slot


class _Scope(nn.Module):
    """Stands for a module of the user's model: holds its parameters, and runs the nodes that it made."""

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class _Nodes(fx.Interpreter):
    """Runs Dynamo's graph so that capture sees each node inside its module; wrapped numbers are plain ones."""

    def __init__(self, gm: fx.GraphModule, scopes: Mapping[str, nn.Module]) -> None:
        super().__init__(gm)
        self._scopes = scopes

    def run_node(self, n: fx.Node) -> Any:
        where = "" if n.op in ("placeholder", "output", "get_attr") else _scope_of(n)
        return self._scopes[where](super().run_node, n) if where else super().run_node(n)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target == "item" and not isinstance(args[0], Tensor):
            return args[0]
        return super().call_method(target, args, kwargs)


def _scope_of(node: fx.Node) -> str:
    """FQN of the module that a node was traced in."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    text = str(list(stack.values())[-1][0])
    steps = STEP.findall(text)
    return ".".join(steps) if steps else text.partition("]")[2].lstrip(".")


class GraphModel(nn.Module):
    """Dynamo's graph with the module tree of the user's model; called with the batch tensors."""

    def __init__(self, gm: fx.GraphModule, slots: Sequence[Slot], values: Sequence[Any]) -> None:
        super().__init__()
        self._slots, self._values = tuple(slots), tuple(values)
        scopes: dict[str, nn.Module] = {"": self}
        self._interpreter = _Nodes(gm, scopes)
        for node in gm.graph.nodes:
            _make(scopes, _scope_of(node))
        for slot, value in zip(slots, values, strict=True):
            owner, _, name = slot.name.rpartition(".")
            if slot.kind == "param":
                _make(scopes, owner).register_parameter(name, value)
            elif slot.kind == "buffer":
                _make(scopes, owner).register_buffer(name, value)

    def forward(self, **batch: Tensor) -> Any:
        tensors = dict(self.named_parameters(remove_duplicate=False))
        tensors |= dict(self.named_buffers(remove_duplicate=False)) | batch
        arguments = []
        for slot, value in zip(self._slots, self._values, strict=True):
            if slot.kind == "number":
                arguments.append(value.item() if isinstance(value, Tensor) else value)
            else:
                tensor = tensors[slot.name]
                arguments.append(tensor.shape[slot.dim] if slot.kind == "size" else tensor)
        return self._interpreter.run(*arguments)


def _make(scopes: dict[str, nn.Module], fqn: str) -> nn.Module:
    """The scope of this FQN, made if it is not there."""
    if fqn not in scopes:
        parent, _, name = fqn.rpartition(".")
        scopes[fqn] = _Scope()
        _make(scopes, parent).add_module(name, scopes[fqn])
    return scopes[fqn]
