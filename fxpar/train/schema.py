"""From tables of plain values to frozen dataclasses: unknown keys, wrong types and bad values, all reported at once.

A field's annotation is its type: `int`, `float` (takes integers), `bool`, `str`, a `Literal` of words, `tuple[float,
float]`, `list[str]`, `list[int]`, `dict[str, Any]`, or several of them and None joined by `|`. Field metadata may hold
`least`, `above` and `most` (bounds).
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fxpar.errors import nearest

T = TypeVar("T")

# What other programs call a key.
_ALIASES = {"learning_rate": "lr", "batch_size": "batch_sequences", "max_steps": "steps"}
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text", dict: "a table"}


def from_table(cls: type[T], table: Mapping[str, Any], section: str, problems: list[str]) -> T | None:
    """An instance of the dataclass `cls`; None, and what is wrong appended to `problems`, if the table does not fit."""
    hints = get_type_hints(cls)
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    before = len(problems)
    values = {}
    for key, value in table.items():
        if key not in known:
            alias = _ALIASES.get(key, "")
            hint = nearest(alias if alias in known else key, known) or f"; [{section}] has {', '.join(known)}"
            problems.append(f"{section}.{key} is not a known key{hint}")
            continue
        problem = fits(value, hints[key], known[key].metadata)
        if problem:
            problems.append(f"{section}.{key} = {shown(value)} {problem}")
        else:
            values[key] = _converted(value, hints[key])
    for name, field in known.items():
        if field.default is MISSING and field.default_factory is MISSING and name not in table:
            problems.append(f"{section}.{name} is missing ({expected(hints[name])})")
    return cls(**values) if len(problems) == before else None


def fits(value: Any, hint: Any, bounds: Mapping[str, Any]) -> str:
    """What is wrong with `value` (`must be an integer, 1 or more`), or an empty string."""
    if not _is_a(value, hint):
        return f"must be {expected(hint)}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            return "must be finite"
        if "least" in bounds and value < bounds["least"]:
            return f"must be {bounds['least']} or more"
        if "above" in bounds and value <= bounds["above"]:
            return f"must be more than {bounds['above']}"
        if "most" in bounds and value > bounds["most"]:
            return f"must be {bounds['most']:,} or less"
    return ""


def expected(hint: Any) -> str:
    """A type annotation in the words of the user."""
    if _alternatives(hint):
        return " or ".join(map(expected, _alternatives(hint)))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(word) for word in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list of {len(get_args(hint))} numbers"
    if get_origin(hint) is list:
        return "a list of integers" if get_args(hint) == (int,) else "a list of texts"
    return _WORDS[get_origin(hint) or hint]


def shown(value: Any) -> str:
    """A value as TOML writes it, or nearly so."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _alternatives(hint: Any) -> list[Any]:
    """Of a union its members other than None; none of any other type."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()
    return [member for member in members if member is not type(None)]


def _is_a(value: Any, hint: Any) -> bool:
    if _alternatives(hint):
        return any(_is_a(value, member) for member in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint) and isinstance(value, str)
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        return isinstance(value, list | tuple) and len(value) == len(parts) and all(map(_is_a, value, parts))
    if get_origin(hint) is list:
        (kind,) = get_args(hint)
        return isinstance(value, list) and all(_is_a(item, kind) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, get_origin(hint) or hint)


def _converted(value: Any, hint: Any) -> Any:
    if _alternatives(hint):
        return _converted(value, next((one for one in _alternatives(hint) if _is_a(value, one)), None))
    if get_origin(hint) is tuple:
        return tuple(_converted(v, h) for v, h in zip(value, get_args(hint), strict=True))
    return float(value) if hint is float else value
