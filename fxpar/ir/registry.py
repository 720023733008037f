"""Things with names: those that come with fxpar, and those that other packages install.

A name stands for a place, `module:attribute`, which is imported when the thing is asked for and not before. Nothing
registers itself on import, so what is known never depends on what was imported first, and a broken package harms only
those who ask for what is in it. A package declares what it brings in its own `pyproject.toml`:

    [project.entry-points."fxpar.passes"]
    my_pass = "my_package.my_module:MyPass"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fxpar.errors import DuplicateNameError, EntryLoadError, FxparError


@dataclass(frozen=True)
class Registry:
    """All things of one kind.

    `noun` is the kind in error messages, `group` the entry-point group of other packages, `builtin` are names and
    places of fxpar's own, `unknown(name, known names)` makes the error for a name that nobody has. With `modules` an
    entry names a module, which is imported for what it registers, and else an attribute of one.
    """

    noun: str
    group: str
    builtin: Mapping[str, str]
    unknown: Callable[[str, Iterable[str]], FxparError]
    modules: bool = False

    def available(self) -> tuple[str, ...]:
        """All names, sorted. Imports nothing. Raises DuplicateNameError when two packages use one name."""
        return tuple(sorted(self._table()))

    def installed(self) -> tuple[str, ...]:
        """The names that other packages bring, sorted. Raises as `available` does."""
        return tuple(name for name in self.available() if name not in self.builtin)

    def get(self, name: str) -> Any:
        """What the entry of this name stands for.

        Raises what `unknown` makes, DuplicateNameError, or EntryLoadError when the entry cannot be imported.
        """
        table = self._table()
        if name not in table:
            raise self.unknown(name, sorted(table))
        entry = table[name]
        try:
            if not entry.attr and not self.modules:
                raise ValueError("the entry names a module and no attribute in it")
            return entry.load()
        except (Exception, SystemExit) as cause:  # a module may end the process when it is imported
            raise EntryLoadError(self.noun, name, entry.value, _owner(entry), cause) from cause

    def _table(self) -> dict[str, EntryPoint]:
        """Name -> entry, built-in ones first; read anew each time, so that nothing goes stale."""
        table = {name: EntryPoint(name, value, self.group) for name, value in self.builtin.items()}
        for entry in entry_points(group=self.group):
            other = table.setdefault(entry.name, entry)
            if other.value != entry.value:
                raise DuplicateNameError(self.noun, entry.name, _describe(other), _describe(entry))
        return table


def _owner(entry: EntryPoint) -> str:
    """The distribution that declares `entry`; built-in entries have none."""
    return f"the package {entry.dist.name!r}" if entry.dist is not None else "fxpar"


def _describe(entry: EntryPoint) -> str:
    return f"{_owner(entry)} ({entry.value})"
