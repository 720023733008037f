"""Numbers in the names of modules and parameters: repeated blocks, and what is said of all of them at once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_BLOCK = re.compile(r"(?:.*?\.)??\d+(?=\.|$)")


def starred(fqn: str) -> str:
    """`model.layers.7.mlp` -> `model.layers.*.mlp`."""
    return _NUMBER.sub("*", fqn)


def numbers_in(fqn: str) -> list[str]:
    """What `starred` takes out, in order."""
    return _NUMBER.findall(fqn)


def with_numbers(fqn: str, numbers: list[str]) -> str:
    """`fqn` with others in their place, in order."""
    given = iter(numbers)
    return _NUMBER.sub(lambda _: next(given), fqn)


def block_of(fqn: str) -> str:
    """`model.layers.3` for what is inside of layer 3 (the first number counts), "" outside of numbered modules."""
    match = _BLOCK.match(fqn)
    return match[0] if match else ""


def block_or_module_of(fqn: str) -> str:
    """The block of a parameter; outside of numbered modules the module that owns it."""
    return block_of(fqn) or fqn.rpartition(".")[0]


def common_module(fqns: Iterable[str]) -> str:
    """The innermost module that all are in: `layers.0` for `layers.0.norm` and `layers.0.mlp.up`; "" for none."""
    together = zip(*(fqn.split(".") for fqn in fqns), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, together))
