"""What Python does on the way, by its audit events: files opened to write, processes, imports, code from text."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_HARMFUL = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "urllib.", "ftplib.", "http.", "webbrowser.", "pty.")
_HARMLESS = {"os.listdir", "os.scandir", "os.utime", "ctypes.dlsym", "ctypes.dlsym/handle"}
_KNOWN = {*sys.stdlib_module_names, "torch", "sympy", "mpmath", "numpy", "fxpar", "rich", "opt_einsum", "triton"}
_CALLED = re.compile(
    r"torch\.ops\.(aten|fxpar|_c10d_functional)\.\w+\.\w+|"
    r"(fxpar_(ops_layout|markers|collectives|runtime_runner|runtime_bound)|torch|math)_\w+|device"
)

_BOXED = {"iter(args_list)", "next(args_iter)", "args_list.clear()"}  # how a function empties the list of its operands


class _Watch:
    """One hook for the whole process, as hooks cannot be taken away; it listens while `seen` is a list."""

    seen: list[str] | None = None
    added = False


def _hear(event: str, args: tuple[Any, ...]) -> None:
    seen, _Watch.seen = _Watch.seen, None  # what is done here is no news
    if seen is None:
        return
    try:
        _note(seen, event, args)
    finally:
        _Watch.seen = seen


def _note(seen: list[str], event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        path, _, flags = args
        if isinstance(flags, int) and flags & _WRITES and path != os.devnull:
            seen.append(f"opened {path!r} to write")
    elif event == "import":
        if str(args[0]).partition(".")[0] not in _KNOWN:
            seen.append(f"imported {args[0]}")
    elif event == "compile":
        source, name = args
        if source is not None and name != "<unknown>" and not _is_file(name) and not is_generated(source):
            seen.append(f"compiled {source!r} of {name!r}")  # <unknown> is only parsed, by tracebacks
    elif event == "exec":
        name = getattr(args[0], "co_filename", "")
        if not _is_file(name) and not name.startswith(("<eval_with_key>", "<frozen ")):
            seen.append(f"ran {args[0]!r}")
    elif event.startswith(_HARMFUL) and event not in _HARMLESS:
        seen.append(f"{event} {args!r}")


def _is_file(name: Any) -> bool:
    return isinstance(name, str | bytes) and os.path.isabs(name) and os.path.isfile(name)


def is_generated(source: str | bytes) -> bool:
    """Whether a text is one function such as torch.fx generates: it calls ops, and those functions of torch and fxpar
    that fx has put under names of their own.
    """
    try:
        (function, *more) = (n for n in ast.parse(source).body if not isinstance(n, ast.Import | ast.ImportFrom))
    except (SyntaxError, ValueError, TypeError):
        return False
    inside = [node for statement in getattr(function, "body", ()) for node in ast.walk(statement)]
    calls = [node for node in inside if isinstance(node, ast.Call) and ast.unparse(node) not in _BOXED]
    called = [ast.unparse(node.func) for node in calls]
    odd = (
        ast.Import,
        ast.ImportFrom,
        ast.Lambda,
        ast.FunctionDef,
        ast.ClassDef,
        ast.Await,
        ast.Yield,
        ast.comprehension,
    )
    return (
        isinstance(function, ast.FunctionDef)
        and not (more or function.decorator_list or function.args.defaults)
        and all(argument.annotation is None for argument in function.args.args)
        and all(_CALLED.fullmatch(name) for name in called)
        and not any(isinstance(node, odd) for node in inside)
    )


@contextmanager
def watched() -> Iterator[list[str]]:
    """What happens inside of the block that no graph and no checkpoint may make happen."""
    if not _Watch.added:
        sys.addaudithook(_hear)
        _Watch.added = True
    seen: list[str] = []
    _Watch.seen = seen
    try:
        yield seen
    finally:
        _Watch.seen = None
