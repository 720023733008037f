"""Which option of a model is its number of layers, so that a search can look at a shallow one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxpar.models.builtin import EXAMPLES
from fxpar.models.hf_shrink import LAYER_NAMES
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
    kinds = config.get("layer_types") or ["layer"] * config[names[0]]
    period = next(p for p in range(1, len(kinds) + 1) if all(kind == kinds[i % p] for i, kind in enumerate(kinds)))
    return LayerOption(names[0], config[names[0]], period)
