"""`--set key=value`: texts become values of the type that the option has by default."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

from fxpar.errors import ModelOptionError
from fxpar.errors.base import one_line
from fxpar.ir.written import OutOfBoundsError, in_bounds, read

_WORDS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
_MOST = 2**24  # of a size of a built-in model: two of them make a weight that can be counted
_JSON_WORDS = {"True": "true", "False": "false", "None": "null"}
Options = TypeVar("Options")


def parse_assignments(items: Iterable[str]) -> dict[str, str]:
    """{"a": "1"} for ["a=1"]. Raises ModelOptionError for an item without '='."""
    found = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise ModelOptionError(item, "is not an assignment; write key=value, such as num_hidden_layers=4")
        found[key.strip()] = value.strip()
    return found


def typed(key: str, text: str, current: Any) -> Any:
    """`text` as a value of the type of `current`; as JSON, else as it stands, where that is None or a container.

    Raises ModelOptionError.
    """
    try:
        if isinstance(current, bool):
            return _WORDS[text.lower()]
        if isinstance(current, int | float):
            value = type(current)(text)
            if not in_bounds(value):
                raise ModelOptionError(_shown(key, text), "must be finite and below 2**63")
            return value
    except (KeyError, ValueError):
        kind = {bool: "true or false", int: "an integer", float: "a number"}[type(current)]
        raise ModelOptionError(_shown(key, text), f"must be {kind}") from None
    if isinstance(current, str):
        return text
    try:
        return read(_JSON_WORDS.get(text, text), "JSON")
    except OutOfBoundsError as error:
        raise ModelOptionError(_shown(key, text), f"cannot be read: {error}") from None
    except ValueError:
        return text


def _shown(key: str, text: str) -> str:
    return f"{key}={text}" if len(text) <= 60 else f"{key}={one_line(text)}..."


def with_options(defaults: Options, given: Mapping[str, str], owner: str) -> Options:
    """The options dataclass with the given texts filled in. Raises ModelOptionError for an unknown key."""
    known = asdict(defaults)  # type: ignore[call-overload]
    for key in given:
        if key not in known:
            raise ModelOptionError.unknown(key, owner, known)
    values = {key: typed(key, text, known[key]) for key, text in given.items()}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if isinstance(value, int) and not 1 <= value <= _MOST:
            raise ModelOptionError(_shown(key, given[key]), f"must be a number from 1 to {_MOST:,}")
        if value < 0:
            raise ModelOptionError(_shown(key, given[key]), "must be a number from 0 on")
    made = replace(defaults, **values)  # type: ignore[type-var]
    _check_multiples(made)
    return made


def _check_multiples(options: Any) -> None:
    """Of a field with `parts_of` that other one is a multiple, times `times`. Raises ModelOptionError."""
    for one in fields(options):
        if "parts_of" in one.metadata:
            whole, parts, times = one.metadata["parts_of"], getattr(options, one.name), one.metadata.get("times", 1)
            size = getattr(options, whole)
            if size % (parts * times):
                why = f"does not fit {whole}={size}, which must be a multiple of {parts * times}"
                raise ModelOptionError(f"{one.name}={parts}", why)


def with_arguments(given: Mapping[str, str], signature: inspect.Signature, owner: str) -> dict[str, Any]:
    """Keyword arguments of a user's function from texts, typed by its defaults. Raises ModelOptionError."""
    known = {name: p.default for name, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD}
    takes_any = len(known) < len(signature.parameters)
    arguments = {}
    for key, text in given.items():
        if key not in known and not takes_any:
            raise ModelOptionError.unknown(key, owner, known)
        default = known.get(key)
        arguments[key] = typed(key, text, None if default is inspect.Parameter.empty else default)
    missing = [k for k, default in known.items() if default is inspect.Parameter.empty and k not in arguments]
    if missing:
        raise ModelOptionError(missing[0], f"is an argument of {owner} without a default; give it with --set")
    return arguments
