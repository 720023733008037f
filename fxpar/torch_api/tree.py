"""Nested containers of tensors, taken apart and put together again.

What this wraps (torch 2.13): `torch.utils._pytree`, which knows tuples, lists, dicts, named tuples, dataclasses and
classes that are registered with it (the outputs of Hugging Face models are).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Structure:
    """The containers of a value without its leaves. Equal for values that are nested alike; pickles."""

    spec: Any

    @property
    def is_leaf(self) -> bool:
        return self.spec.is_leaf()

    def __reduce__(self) -> tuple[Any, ...]:
        # The spec itself warns when it is unpickled, so a value of this structure is pickled instead.
        return _structure_of, (unflatten([0] * self.spec.num_leaves, self),)

    def __str__(self) -> str:
        return str(self.spec)


def _structure_of(value: Any) -> Structure:
    return flatten(value)[1]


def flatten_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Structure]:
    """The leaves of a call's arguments and their structure; keyword arguments count in the order of their names."""
    return flatten((tuple(args), dict(sorted(kwargs.items()))))


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """The leaves of a value and its structure; a value that is no known container is a leaf itself."""
    leaves, spec = pytree.tree_flatten(value)
    return leaves, Structure(spec)


def mapped(function: Callable[[Any], Any], kind: type, value: Any) -> Any:
    """The value with `function(leaf)` in place of each leaf of this kind."""
    return pytree.tree_map_only(kind, function, value)


def unflatten(leaves: Sequence[Any], structure: Structure) -> Any:
    """Inverse of `flatten` and `flatten_call`."""
    return pytree.tree_unflatten(list(leaves), structure.spec)
