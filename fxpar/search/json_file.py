"""A JSON file of somebody else's: read strictly, and every complaint names file, key and value."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from fxpar.errors import GalvatronFileError, GalvatronKeyError

_MOST = 1e18  # of any unit: sums and products of such numbers are still finite


class JsonFile:
    """One object of keys and values. Raises GalvatronFileError; its methods raise GalvatronKeyError."""

    def __init__(self, path: Path) -> None:
        self.file = str(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or (
                "it is no UTF-8 text" if isinstance(error, UnicodeError) else error
            )
            raise GalvatronFileError(self.file, f"it cannot be read: {why}") from error
        try:
            data = json.loads(text, object_pairs_hook=self._unique, parse_constant=self._constant)
        except (ValueError, RecursionError) as error:
            raise GalvatronFileError(self.file, f"it is not JSON ({error}). Copy the file again") from error
        if not isinstance(data, dict):
            raise GalvatronFileError(self.file, "it is JSON, but not an object with keys")
        self.data: dict[str, Any] = data

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise GalvatronKeyError(self.file, key, value, "it stands there twice; delete one of them")
            found[key] = value
        return found

    def _constant(self, name: str) -> NoReturn:
        raise GalvatronFileError(self.file, f"it holds {name}. Measure again, or write a number")

    def refuse(self, key: str, value: object, why: str, known: Iterable[str] = ()) -> NoReturn:
        """Raise GalvatronKeyError; of the `known` keys the nearest is named."""
        raise GalvatronKeyError(self.file, key, value, why, known)

    def exactly(self, where: str, table: dict[str, Any], known: tuple[str, ...]) -> None:
        """`table`, which stands at the key `where`, has these keys and no others."""
        for key, value in table.items():
            if key not in known:
                self.refuse(f"{where}.{key}", value, "not known here", (f"{where}.{name}" for name in known))
        for key in known:
            if key not in table:
                self.refuse(f"{where}.{key}", None, "it is missing", (f"{where}.{name}" for name in table))

    def number(self, key: str, value: object, least: float = 0.0, above: bool = False) -> float:
        """`value` as a number of at least (or `above`) `least`, and a finite one."""
        good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST
        if not isinstance(value, int | float) or not good or value < least or (above and value == least):
            self.refuse(key, value, f"write a number {'above' if above else 'of at least'} {least:g}")
        return float(value)

    def table(self, key: str, value: object) -> dict[str, Any]:
        """`value` as an object that is not empty."""
        if not isinstance(value, dict) or not value:
            self.refuse(key, value, "write an object with keys of its own")
        return value

    def by_number(self, key: str, value: object, what: str) -> dict[int, Any]:
        """{1: 514.6, 2: 273.3} for {"1": 514.6, "2": 273.3}; `what` its keys are."""
        found = {}
        for name, inside in self.table(key, value).items():
            if not re.fullmatch(r"[1-9]\d{0,8}", name):
                self.refuse(f"{key}.{name}", inside, f"keys here are {what}")
            found[int(name)] = inside
        return found
