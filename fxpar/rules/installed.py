"""Ops of other packages by the namespace of their names: the module that defines them and registers their rules.

    [project.entry-points."fxpar.ops"]
    mine = "my_package.my_ops"

So a graph file that calls `mine.gate.default` can be read by a process that has not imported `my_package.my_ops`.
"""

from __future__ import annotations

from collections.abc import Iterable

from fxpar.errors import GraphFormatError
from fxpar.ir.registry import Registry


def _unknown(namespace: str, known: Iterable[str]) -> GraphFormatError:
    return GraphFormatError(f"no installed package has ops called {namespace}.*")


OPS = Registry("op namespace", "fxpar.ops", {}, _unknown, modules=True)


def import_ops(namespace: str) -> None:
    """Import the module that an installed package names for this namespace, if there is one.

    Raises DuplicateNameError, EntryLoadError.
    """
    if namespace in OPS.available():
        OPS.get(namespace)


__all__ = ["OPS", "import_ops"]
