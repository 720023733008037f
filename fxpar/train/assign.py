"""`--set section.key=value` of a configuration."""

from __future__ import annotations

import re
from typing import Any

from fxpar.ir.written import OutOfBoundsError, read
from fxpar.train.strategies import AUTO, STATIC


def assign(tables: dict[str, Any], assignment: str, problems: list[str]) -> None:
    """Put `section.key=value` into the tables; the value is TOML, or a text where that does not parse."""
    path, equals, text = assignment.partition("=")
    keys = path.strip().split(".")
    whole = keys == ["strategies"]
    if not equals or (len(keys) < 2 and not whole) or not all(keys):
        problems.append(f"--set {assignment}: write section.key=value, such as run.steps=10")
        return
    name = keys[-1] if re.fullmatch(r"[A-Za-z0-9_-]+", keys[-1]) else "value"
    try:
        value = read(f"{name} = {text}", "TOML")[name]
    except OutOfBoundsError as error:
        problems.append(f"--set {path.strip()}: {error}")
        return
    except ValueError:
        value = text.strip()
    if whole:  # all of them, as a file would say it
        tables["strategies"] = value if isinstance(value, dict) or value == AUTO else {STATIC: value}
        return
    table = tables
    for key in keys[:-1]:
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            problems.append(f"--set {assignment}: {key} is not a section")
            return
        table = inner
    if keys[0] == "strategies" and (keys[-1] == STATIC or STATIC in table):
        table.clear()  # one way of naming strategies replaces the other
    table[keys[-1]] = value
