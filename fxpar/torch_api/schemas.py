"""What torch says about an op: its arguments, its results, what it writes, and its tags.

What this wraps (torch 2.13): `OpOverload._schema`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxpar.ir.serialize import OpOverload


@dataclass(frozen=True)
class Argument:
    """One argument; `kind` as in the schema: Tensor, List[int], Optional[ScalarType], ...

    `shared`: a result may be, or may be a view of, this argument's memory.
    """

    name: str
    kind: str
    required: bool
    keyword_only: bool
    shared: bool


@dataclass(frozen=True)
class Schema:
    """`results` are kinds; `writes` names the arguments that the op writes to."""

    arguments: tuple[Argument, ...]
    results: tuple[str, ...]
    writes: tuple[str, ...]
    tags: frozenset[Any]


@functools.lru_cache(maxsize=4096)
def schema_of(op: Any) -> Schema:
    """The schema of an OpOverload."""
    found = op._schema
    return Schema(
        tuple(
            Argument(a.name, str(a.real_type), not a.has_default_value(), bool(a.kwarg_only), a.alias_info is not None)
            for a in found.arguments
        ),
        tuple(str(r.type) for r in found.returns),
        tuple(a.name for a in found.arguments if a.alias_info is not None and a.alias_info.is_write),
        frozenset(op.tags),
    )


def writes(node: fx.Node) -> bool:
    """Whether a call writes over an operand."""
    return isinstance(node.target, OpOverload) and bool(schema_of(node.target).writes)
