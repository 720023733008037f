"""`fxpar passes`: what each pass does, from its docstring. Running one is in `fxpar.cli.run_pass`."""

from __future__ import annotations

import inspect
import sys
import textwrap
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from fxpar.cli.commands import PassesRequest
from fxpar.cli.console import plain_table, stdout_console
from fxpar.cli.request import check_output, to_json, write_output
from fxpar.errors import FxparError
from fxpar.ir import pass_registry
from fxpar.lowering import default_passes

_WIDE = 110  # columns that the list needs to be a table


def run_passes(request: PassesRequest) -> None:
    """Run a pass on a graph file, or print the list (the passes of `lower` in their order, then others), or the
    description of one; with `json` write what there is to know of them to this file.

    Raises what `run_pass` raises, the errors of the registry, OutputError.
    """
    name, json = request.name, request.json
    if name is not None and request.on is not None:
        from fxpar.cli.run_pass import run_pass

        run_pass(request, name, request.on)
        return
    ladder = [step.name for step in default_passes()]
    others = [n for n in pass_registry.available() if n not in ladder]
    if json is not None:
        check_output(json)
        found = [name] if name is not None else [*ladder, *others]
        entries = [_entry(n, ladder, loaded=name is not None) for n in found]
        write_output(json, to_json({"passes": entries}))
    if json == "-":
        return
    console = stdout_console()
    if name is not None:
        console.print(f"{name}\n\n{description(pass_registry.get(name))}", markup=False)
        return
    rows = [(str(i), n, first_line(n)) for i, n in enumerate(ladder)]
    rows += [("", n, first_line(n)) for n in others]
    if console.is_terminal and console.width < _WIDE:
        for step, title, line in rows:
            console.print(f"{step:>2}  {title}", markup=False, style="bold")
            console.print(textwrap.indent(textwrap.fill(line, console.width - 4), "    "), markup=False)
        return
    console.print(plain_table(("step", "pass", "what it does"), rows, (0,)), markup=False, soft_wrap=True)


def _entry(name: str, ladder: list[str], *, loaded: bool) -> dict[str, Any]:
    """One pass as JSON; of a pass that cannot be loaded why not, unless it must be (`loaded`)."""
    step = ladder.index(name) if name in ladder else None
    try:
        cls = pass_registry.get(name)
    except FxparError as error:
        if loaded:
            raise
        return {"name": name, "step": step, "error": str(error)}
    options = [
        {
            "name": f.name,
            "type": str(f.type),
            "default": None if f.default is MISSING else _plain(f.default),
            "required": f.default is MISSING and f.default_factory is MISSING,
        }
        for f in (fields(cls) if is_dataclass(cls) else ())
    ]
    tier = getattr(cls, "tier", None)
    return {"name": name, "step": step, "tier": tier, "options": options, "description": description(cls)}


def _plain(value: Any) -> Any:
    """A default as a JSON value."""
    return value if isinstance(value, bool | int | float | str | None) else str(value)


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
