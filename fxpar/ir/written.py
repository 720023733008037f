"""TOML and JSON that somebody wrote, read with bounds: nothing that is computed with it overflows. Needs no torch."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

MOST = 2**63 - 1  # of any number: what an integer of TOML, and of torch, may be
LONGEST = 2**30  # tokens of a sequence: no size of a graph overflows
_DEEPEST = 50
_LONG = re.compile(r"([\w.-]+)\"?\s*[=:][\s\[]*[-+]?(\d[\d_]{999,})")  # Python reads numbers of up to 4,300 digits


class OutOfBoundsError(ValueError):
    """Well-formed, but of no use: a number that is not finite or has more than 64 bits, brackets without end, or a key
    that stands twice.
    """


def read(text: str, kind: Literal["TOML", "JSON"]) -> Any:
    """What the text says. Raises ValueError, a whole sentence about `it`; OutOfBoundsError names key and value."""
    try:
        found = tomllib.loads(text) if kind == "TOML" else json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise OutOfBoundsError(_TOO_DEEP) from None
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"it is not {kind}: {error}") from error
    except OutOfBoundsError:
        raise
    except ValueError:  # of the conversion to a number
        key, digits = next(iter(_LONG.findall(text)), ("it", ""))
        raise OutOfBoundsError(_unusable(key, f"a number of {len(digits):,} digits")) from None
    for key, value in _leaves(found):
        if not in_bounds(value):
            raise OutOfBoundsError(_unusable(key, brief(value)))
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table of JSON. TOML has no key twice anyway."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise OutOfBoundsError(f"its key {twice!r} stands twice in one table; keep one")
    return found


def in_bounds(value: object) -> bool:
    """Whether it is no number, or one that is finite and has at most 64 bits."""
    return not isinstance(value, int | float) or -MOST <= value <= MOST  # no NaN either


def brief(value: object) -> str:
    """A value for a message: `a number of 400 digits` for one that would fill the screen."""
    if isinstance(value, int) and value.bit_length() > 100:
        digits = int(math.log10(abs(value)))  # of a size that Python may not print; rounded
        return f"a number of {digits + (abs(value) >= 10**digits):,} digits"
    return repr(value)


_TOO_DEEP = f"its brackets are nested more than {_DEEPEST} deep, which nothing here is"


def is_task_name(name: object) -> bool:
    """Whether a task may be called so: FQNs of several tasks in one file are told apart by it."""
    return isinstance(name, str) and bool(name) and name.isprintable() and not set(name) & set(":/")


def _unusable(key: str, shown: str) -> str:
    return f"{key} = {shown} cannot be used: a number is finite and below 2**63"


def _leaves(found: Any) -> Iterator[tuple[str, object]]:
    """(keys joined by '.', value) of all that is no table and no list. Raises OutOfBoundsError for too many levels."""
    waiting: list[tuple[str, Any, int]] = [("", found, 0)]
    while waiting:
        key, value, depth = waiting.pop()
        if depth > _DEEPEST:
            raise OutOfBoundsError(_TOO_DEEP)
        if isinstance(value, Mapping):
            waiting += [(f"{key}.{name}" if key else name, inner, depth + 1) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(key, inner, depth + 1) for inner in value]
        else:
            yield key or "it", value
