"""What the inputs of a graph of Dynamo are in the user's program."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from fxpar.ir.graph import TOKENS
from fxpar.tracer.dynamic import BATCH

STEP = re.compile(r"_(?:modules|parameters|buffers)\['([^']+)'\]")
_WORD = re.compile(r"\['(\w+)'\]")


@dataclass(frozen=True)
class Slot:
    """One input of Dynamo's graph.

    A "size" is dim `dim` of the batch tensor `name`; a "number" is fixed in what is captured. `dims` names the dynamic
    dims of a batch tensor.
    """

    kind: Literal["param", "buffer", "batch", "size", "number"]
    name: str
    dim: int = 0
    dims: tuple[tuple[int, str], ...] = ()


def slots_of(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Slot]:
    """What each input of the graph is, by its source in the user's program."""
    nodes = gm.graph.find_nodes(op="placeholder")
    symbols = _dim_names(nodes)
    used: set[str] = set()
    slots: list[Slot] = []
    sizes: dict[str, tuple[str, int]] = {}
    for node, example in zip(nodes, example_inputs, strict=True):
        path, word = _source(node)
        if isinstance(example, nn.Parameter):
            slots.append(Slot("param", _unique(path or node.name, used)))
        elif not isinstance(example, Tensor) or _is_number(node):
            slots.append(Slot("number", node.name))
        elif path:
            slots.append(Slot("buffer", _unique(path, used)))
        else:
            name = _unique(word or node.name, used)
            shape = [str(size) for size in _example(node).shape]
            for d, size in enumerate(shape):
                sizes.setdefault(size, (name, d))
            slots.append(Slot("batch", name, dims=tuple((d, symbols[s]) for d, s in enumerate(shape) if s in symbols)))
    return [_as_size(slot, node, sizes, symbols) for slot, node in zip(slots, nodes, strict=True)]


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _as_size(slot: Slot, node: fx.Node, sizes: Mapping[str, tuple[str, int]], symbols: Mapping[str, str]) -> Slot:
    """A number that is the size of a dynamic dim, as that."""
    text = str(_example(node))
    if slot.kind != "number" or text not in symbols:
        return slot
    name, dim = sizes[text]
    return Slot("size", name, dim)


def _is_number(node: fx.Node) -> bool:
    """Whether a tensor is a Python number that Dynamo has wrapped."""
    return (
        bool(node.users)
        and not _example(node).shape
        and all(user.op == "call_method" and user.target == "item" for user in node.users)
    )


def _dim_names(nodes: Sequence[fx.Node]) -> dict[str, str]:
    """Symbols of the graph's dynamic sizes -> names of dims: T is the tokens' dim, which cp and sp cut."""
    shapes = [(_example(n), [str(s) for s in _example(n).shape]) for n in nodes if isinstance(_example(n), Tensor)]
    symbols = dict.fromkeys(text for _, shape in shapes for text in shape if not text.isdigit())
    names = {symbol: f"D{i}" for i, symbol in enumerate(symbols)}
    tokens = next((shape[1] for value, shape in shapes if has_tokens(value) and shape[1] in symbols), None)
    rows = next((shape[0] for _, shape in shapes if shape and shape[0] in symbols and shape[0] != tokens), None)
    if rows is not None:
        names[rows] = BATCH
    if tokens is not None:
        names[tokens] = TOKENS
    return names


def has_tokens(value: Tensor) -> bool:
    """Ids [B, T] or activations [B, T, D]."""
    is_integer = not value.dtype.is_floating_point and value.dtype != torch.bool
    return (value.dim() == 2 and is_integer) or value.dim() == 3


def _source(node: fx.Node) -> tuple[str, str]:
    """(FQN inside the model, else "", last name) of what an input was in the user's program."""
    argument = node.meta.get("grapharg")
    name = str(argument.source.name) if argument is not None and argument.source is not None else ""
    words = _WORD.findall(name)
    return ".".join(STEP.findall(name)), words[-1] if words else ""


def _unique(name: str, used: set[str]) -> str:
    found, count = name, 1
    while found in used:
        count += 1
        found = f"{name}_{count}"
    used.add(found)
    return found
