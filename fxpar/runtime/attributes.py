"""Plain attributes of modules, such as a dropout rate: a captured graph has the values that they had."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from fxpar.tracer.state import class_attributes

_PLAIN = (bool, int, float, complex, str)
_OF_TORCH = frozenset(vars(nn.Module()))  # `training` among them, which a capture takes care of


@dataclass(frozen=True)
class PlainAttribute:
    """`name` of the module `fqn`, with the value that it had; `now` is the module's own dict, `of_class` what its class
    says where that says nothing.
    """

    fqn: str
    name: str
    value: Any
    now: dict[str, Any]
    of_class: Any = None

    def changed(self) -> bool:
        value = self.now.get(self.name, self.of_class)
        return value is not self.value and value != self.value


def plain_attributes(module: nn.Module) -> list[PlainAttribute]:
    """Of all its modules: numbers and texts, which a forward may compute with or branch on."""
    return list(_found(module))


def _found(module: nn.Module) -> Iterator[PlainAttribute]:
    for fqn, one in module.named_modules():
        of_class = class_attributes(type(one))
        for name, value in {**of_class, **vars(one)}.items():
            if isinstance(value, _PLAIN) and name not in _OF_TORCH:
                yield PlainAttribute(fqn, name, value, vars(one), of_class.get(name))
