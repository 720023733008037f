"""Which option of a model is its number of layers, so that a search can look at a shallow one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fxpar.ir.fqn import block_of
from fxpar.models.builtin import EXAMPLES
from fxpar.models.hf_shrink import LAYER_NAMES
from fxpar.models.load import load
from fxpar.models.loaded import folder_of
from fxpar.models.resolved import resolved_options


@dataclass(frozen=True)
class LayerOption:
    """`--set name=layers` makes a model of `layers` layers, which repeat with `period`."""

    name: str
    layers: int
    period: int = 1


def layer_option(spec: str, given: Mapping[str, str]) -> LayerOption | None:
    """Of MODEL with the options `given`; None if it is not known how to make it shallower: a user's function, a model
    whose layers do not repeat, or one with several numbers of layers.

    Raises as `fxpar.models.load` does for options.
    """
    if spec in EXAMPLES:
        layers = resolved_options(spec, given).get("layers")
        return None if layers is None else LayerOption("layers", layers)
    if not spec.startswith("hf:") or folder_of(spec) is not None:
        return None
    config = resolved_options(spec, given)
    names = [name for name in LAYER_NAMES if isinstance(config.get(name), int)]
    if len(names) != 1:
        return None
    listed = {key for key, value in config.items() if isinstance(value, list) and len(value) == config[names[0]]}
    if listed - {"layer_types"}:
        return None
    layers = config[names[0]]
    kinds = config.get("layer_types") or ["layer"] * layers
    shapes = _shapes(spec, given, layers)
    if shapes is None:
        return None
    period = next(p for p in range(1, layers + 1) if _repeats(kinds, p, 0) and _repeats(shapes, p, 1))
    return LayerOption(names[0], layers, period)


def _repeats(kinds: Sequence[object], period: int, first: int) -> bool:
    """Whether they do from number `first` on."""
    return all(kind == kinds[i - period] for i, kind in enumerate(kinds) if i >= first + period)


def _shapes(spec: str, given: Mapping[str, str], layers: int) -> list[frozenset[tuple[str, torch.Size]]] | None:
    """The parameters of each layer, as experts may be in some layers only; None where no list has so many modules. A
    first layer of its own is what shallow models have, too.
    """
    found: dict[str, dict[int, set[tuple[str, torch.Size]]]] = {}
    for fqn, parameter in load(spec, options=given, device="meta").model.named_parameters():
        block = block_of(fqn)
        if block:
            name, _, number = block.rpartition(".")
            one = found.setdefault(name, {}).setdefault(int(number), set())
            one.add((name + fqn.removeprefix(block), parameter.shape))
    lists = [one for one in found.values() if one.keys() == {*range(layers)}]
    return [frozenset().union(*(one[i] for one in lists)) for i in range(layers)] if lists else None
