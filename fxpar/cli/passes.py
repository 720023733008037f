"""`fxpar passes`: what each pass does, from its docstring. Running one is in `fxpar.cli.run_pass`.

Docstrings of fxpar's own passes are read from their files: importing them waits seconds for torch.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import fxpar
from fxpar.cli.console import plain_table, stdout_console
from fxpar.cli.request import check_output, to_json, write_output
from fxpar.cli.run_commands import PassesRequest
from fxpar.errors import FxparError
from fxpar.ir.columns import folded
from fxpar.ir.pass_names import BUILTIN, LADDER, PASSES

_CLASS = re.compile(r"^class (\w+).*?(?=^\S|\Z)", re.MULTILINE | re.DOTALL)  # with its body
_TIER = re.compile(r"^    tier\b.*=", re.MULTILINE)  # a protocol only says that there is one
_DOC = re.compile(r"\s*(?:class [^\n]*:\s+)?\"\"\"(.*?)(?:\"\"\"|\n)")  # its first line


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
    ladder = list(LADDER)
    others = [n for n in PASSES.available() if n not in ladder]
    if json is not None:
        check_output(json)
        found = [name] if name is not None else [*ladder, *others]
        entries = [_entry(n, ladder, loaded=name is not None) for n in found]
        write_output(json, to_json({"passes": entries}))
    if json == "-":
        return
    console = stdout_console()
    if name is not None:
        console.print(f"{name}\n\n{description_of(name)}", markup=False)
        return
    rows = [(str(i), n, first_line(n)) for i, n in enumerate(ladder)]
    rows += [("", n, first_line(n)) for n in others]
    table = plain_table(("step", "pass", "what it does"), rows, (0,))
    if console.is_terminal and max(map(len, table.splitlines())) > console.width:
        for step, title, line in rows:
            console.print(f"{step:>2}  {title}", markup=False, style="bold")
            console.print("\n".join(folded(line, console.width, "    ", "    ")), markup=False, soft_wrap=True)
        return
    console.print(table, markup=False, soft_wrap=True)


def _entry(name: str, ladder: list[str], *, loaded: bool) -> dict[str, Any]:
    """One pass as JSON; of a pass that cannot be loaded why not, unless it must be (`loaded`)."""
    step = ladder.index(name) if name in ladder else None
    try:
        cls = PASSES.get(name)
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
    """The first line of a pass' description; of a pass that cannot be loaded, why not.

    Of fxpar's own without parsing their files, which takes as long as all else of a list.
    """
    try:
        file, attribute = _place_of(name)
        text = "" if file is None else file.read_text(encoding="utf-8")
        classes = {found[1]: found[0] for found in _CLASS.finditer(text)}
        steps = [each for each, body in classes.items() if _TIER.search(body)]
        whole, own = _DOC.match(text), _DOC.search(classes.get(attribute, ""))
        found = whole if whole and steps in ([], [attribute]) else own or whole
        return found[1] if found else description_of(name).splitlines()[0]
    except FxparError as error:
        return f"({error})"


def description_of(name: str) -> str:
    """What `description` says of the pass called `name`; of fxpar's own from its file. Raises as `PASSES.get` does."""
    file, attribute = _place_of(name)
    if file is None:
        return description(PASSES.get(name))
    module = ast.parse(file.read_text(encoding="utf-8"))
    classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    steps = [each for each in classes if any(_sets(line, "tier") for line in classes[each].body)]
    own = ast.get_docstring(classes[attribute]) or "" if attribute in classes else ""
    return _joined(ast.get_docstring(module) or "", own, alone=steps in ([], [attribute]))


def _place_of(name: str) -> tuple[Path | None, str]:
    """The file of one of fxpar's own passes, None for others, and the name of its class."""
    place, _, attribute = BUILTIN.get(name, "").partition(":")
    file = Path(fxpar.__file__).parents[1].joinpath(*place.split(".")).with_suffix(".py")
    return (file if place.startswith("fxpar.") and file.is_file() else None), attribute


def _sets(line: ast.stmt, name: str) -> bool:
    """Whether the line of a class body gives the attribute."""
    targets: list[ast.expr] = []
    if isinstance(line, ast.Assign):
        targets = line.targets
    elif isinstance(line, ast.AnnAssign) and line.value is not None:  # a protocol only says that there is one
        targets = [line.target]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def _joined(whole: str, own: str, *, alone: bool) -> str:
    """The docstrings of a module and of a pass in it, as one text."""
    if not whole or not alone:
        return own or whole or "(no description)"
    return f"{whole}\n\n{own}" if own and own not in whole else whole


def description(pass_: Any) -> str:
    """The docstring of the module if the pass is what the module is about, else its own."""
    module = sys.modules.get(getattr(pass_, "__module__", ""))
    own = inspect.getdoc(pass_) or ""
    whole = inspect.getdoc(module) or ""
    there = vars(module).values() if module is not None else ()
    steps = [v for v in there if hasattr(v, "tier") and getattr(v, "__module__", "") == getattr(module, "__name__", "")]
    return _joined(whole, own, alone=all(v is pass_ for v in steps))
