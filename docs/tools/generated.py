"""Reference pages that are made from the source: the passes in their order, the errors, settings of torchtitan.

The source is read, not repeated, so that the pages cannot say something else than `fxpar passes NAME` and the errors
themselves do.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import fxpar.errors
from fxpar.ir import pass_registry
from fxpar.lowering.ladder import default_passes
from fxpar.recipes import settings

_TIERS = {
    "exact": "results are bitwise equal",
    "numeric": "may round differently",
    "lossy": "computes something else, where the strategy says so",
}


# ------------------------------------------------------------------------------------------------------ passes
def pass_names() -> list[str]:
    """Names in the order of the lowering, then those that stand apart."""
    ladder = [step.name for step in default_passes(for_store=True, reduce=torch.bfloat16)]
    return [*ladder, *(name for name in pass_registry.BUILTIN if name not in ladder)]


def passes_reference() -> str:
    """One section per pass: what it is for, its options, tier and file."""
    return "\n\n".join(_pass_section(i, name) for i, name in enumerate(pass_names())) + "\n"


def _pass_section(number: int, name: str) -> str:
    pass_ = pass_registry.get(name)
    module = importlib.import_module(pass_.__module__)
    about = inspect.getdoc(module) or ""
    own = inspect.getdoc(pass_) or ""
    if own.startswith(f"{pass_.__name__}("):  # what dataclass writes where there is no docstring
        own = ""
    lines = [f"## {number}. `{name}`", "", about, ""]
    lines += [_options(pass_, own), ""]
    changes = _TIERS[pass_.tier]
    lines += [f"Tier `{pass_.tier}`: {changes}. `{pass_.__module__}.{pass_.__name__}`"]
    return "\n".join(lines)


def _options(pass_: Any, own: str) -> str:
    fields = [f"`{f.name}: {_type(f.type)} = {_default(f)}`" for f in dataclasses.fields(pass_)]
    if not fields:
        return "" if own == "No options." else own
    return f"Options: {', '.join(fields)}. {own}"


def _type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _default(field: dataclasses.Field[Any]) -> str:
    return "..." if field.default is dataclasses.MISSING else repr(field.default)


# ------------------------------------------------------------------------------------------------------ errors
def errors_reference() -> str:
    """One table per section of fxpar/errors: class, when it is raised, what it says."""
    folder = Path(inspect.getfile(fxpar.errors)).parent
    files = re.findall(r"from fxpar\.errors\.(\w+) import \*", (folder / "__init__.py").read_text(encoding="utf-8"))
    source = "\n".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in files)
    headings = {
        number: match[1]
        for number, line in enumerate(source.splitlines(), 1)
        if (match := re.match(r"# -{20,} (.+)", line))
    }
    text: list[str] = []
    waiting = dict(headings)
    for node in _error_classes(ast.parse(source)):
        for number in [n for n in waiting if n < node.lineno]:
            text += [
                "",
                f"## {waiting.pop(number).capitalize()}",
                "",
                "| error | when | message |",
                "|---|---|---|",
            ]
        if not text:
            text = ["## Base classes", "", "| error | when | message |", "|---|---|---|"]
        text.append(f"| `{node.name}` | {_cell(ast.get_docstring(node) or '')} | {_cell(_message(node))} |")
    return "\n".join(text) + "\n"


def _error_classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Error", "Warning")):
            yield node


def _message(node: ast.ClassDef) -> str:
    """The template of the message: what `__init__` hands to `super().__init__`."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__" and call.args:
            return _template(call.args[0])
    return ""


def _template(value: ast.expr) -> str:
    """Text as it stands, `<name>` for what is filled in."""
    if isinstance(value, ast.Constant):
        return str(value.value)
    if isinstance(value, ast.JoinedStr):
        return "".join(_template(part) for part in value.values)
    if isinstance(value, ast.FormattedValue):
        return "" if _only_a_hint(value.value) else f"<{_word(value.value)}>"
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return _template(value.left) + _template(value.right)
    return f"<{_word(value)}>"


def _only_a_hint(value: ast.expr) -> bool:
    """Calls such as `nearest(word, known)` and `_at(fqn, line)` add a clause where there is something to add."""
    return isinstance(value, ast.Call) and ast.unparse(value.func) in ("nearest", "_at")


def _word(value: ast.expr) -> str:
    names = [n.id for n in ast.walk(value) if isinstance(n, ast.Name) and n.id not in ("str", "len", "sorted", "self")]
    return (names or ["..."])[-1].strip("_").replace("_", " ")


def _cell(text: str) -> str:
    """One cell of a table: one line, nothing that Markdown or HTML would read."""
    text = " ".join(text.split()).replace("|", "\\|")
    return re.sub(r"([*_\[\]])", r"\\\1", text).replace("<", "&lt;").replace(">", "&gt;")


GENERATORS: dict[str, Callable[[], str]] = {
    "passes": passes_reference,
    "errors": errors_reference,
    "torchtitan_settings": settings.table,
}

if __name__ == "__main__":
    print(GENERATORS[sys.argv[1]](), end="")
