"""`fxpar passes`: what each pass does, from its docstring."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from fxpar import pass_registry
from fxpar.cli.console import plain_table, stdout_console
from fxpar.errors import FxparError
from fxpar.lowering import default_passes


def run_passes(name: str | None) -> None:
    """Print the list (the passes of `lower` in their order, then others), or the description of `name`.

    Raises the errors of the registry.
    """
    console = stdout_console()
    if name is not None:
        text = f"{name}\n\n{description(pass_registry.get(name))}"
    else:
        ladder = [step.name for step in default_passes()]
        others = [n for n in pass_registry.available() if n not in ladder]
        rows = [(str(i), n, first_line(n)) for i, n in enumerate(ladder, 1)]
        text = plain_table(("step", "pass", "what it does"), [*rows, *(("", n, first_line(n)) for n in others)], (0,))
    console.print(text, markup=False)


def first_line(name: str) -> str:
    """The first line of a pass' description; of a pass that cannot be loaded, why not."""
    try:
        return description(pass_registry.get(name)).splitlines()[0]
    except FxparError as error:
        return f"({error})"


def description(pass_: Any) -> str:
    """The docstring of the module if the pass is what the module is about, else its own."""
    module = sys.modules.get(getattr(pass_, "__module__", ""))
    own = inspect.getdoc(pass_) or ""
    whole = inspect.getdoc(module) or ""
    if module is None or not whole:
        return own or "(no description)"
    others = [
        v for v in vars(module).values() if hasattr(v, "tier") and getattr(v, "__module__", "") == module.__name__
    ]
    if [v for v in others if v is not pass_]:
        return own or whole
    return f"{whole}\n\n{own}" if own and own not in whole else whole
