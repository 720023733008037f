"""Which blocks of the library a test runs, and its CPU seconds: a plugin of pytest, for `python -m tests.choose`.

A block is what runs as one: the body of a function, of a branch, of a loop. As it begins, it sets a byte of a file
that is mapped into memory. So what forked ranks and processes of a test's own run counts too, and a test takes hardly
longer.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import json
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("fxpar", "passes", "recipes")
# Where `tests/choose.py` wants what was measured, and the file of the bytes: processes of a test inherit both.
RESULTS, BYTES = "FXPAR_TEST_BLOCKS", "FXPAR_TEST_BLOCKS_MAP"
_NAME = "__blocks__"


class _Marked(ast.NodeTransformer):
    """Puts a statement in front of each block."""

    def __init__(self, first: int) -> None:
        self.next, self._inside = first, 0

    def _mark(self, body: list[ast.stmt]) -> list[ast.stmt]:
        documented = self._docstring(body)
        (mark,) = ast.parse(f"{_NAME}[{self.next}] = 1").body
        self.next += 1
        for node in ast.walk(mark):
            ast.copy_location(node, body[min(documented, len(body) - 1)])
        return [*body[:documented], mark, *body[documented:]]

    @staticmethod
    def _docstring(body: list[ast.stmt]) -> int:
        first = body[0]
        return int(isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._inside += 1
        self.generic_visit(node)
        self._inside -= 1
        node.body = self._mark(node.body)
        return node

    def _visit_blocks(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        for name in ("body", "orelse", "finalbody") if self._inside else ():
            if getattr(node, name, None):
                setattr(node, name, self._mark(getattr(node, name)))
        return node

    visit_If = visit_For = visit_While = visit_Try = visit_ExceptHandler = visit_match_case = _visit_blocks


def marked(code: str | bytes, first: int) -> tuple[ast.Module, int]:
    """The tree of a file with its blocks counted from `first`, and the number after its last."""
    marker = _Marked(first)
    return marker.visit(ast.parse(code)), marker.next


def first_blocks() -> tuple[dict[str, int], int]:
    """The number of each file's first block, and how many there are."""
    found, count = {}, 0
    for path in sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py") if p.resolve() == p):
        found[str(path)] = count
        _, count = marked(path.read_bytes(), count)
    return found, count


def install() -> None:
    """Mark the library's files as they are imported. `sitecustomize` calls it, before anything else is."""
    firsts = json.loads(Path(os.environ[RESULTS], "first_blocks.json").read_text())
    plain = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, name: str) -> CodeType | None:
        path = Path(self.path).resolve()
        if str(path) not in firsts:
            return plain(self, name)
        tree, _ = marked(path.read_bytes(), firsts[str(path)])
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    mapped = os.environ.get(BYTES)
    setattr(builtins, _NAME, _map(Path(mapped)) if mapped else bytearray(1 << 20))


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--anew", action="store_true", help="run what tests/nightly.txt names too")


def pytest_configure() -> None:
    handle, path = tempfile.mkstemp(dir=os.environ[RESULTS], suffix=".bytes")
    with open(handle, "wb") as file:
        file.write(bytes(first_blocks()[1]))
    os.environ[BYTES] = path
    setattr(builtins, _NAME, _map(Path(path)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    blocks: mmap.mmap = getattr(builtins, _NAME)
    blocks[:] = bytes(len(blocks))
    before = _cpu_seconds()
    try:
        return (yield)
    finally:
        row = {"test": item.nodeid, "cpu_s": round(_cpu_seconds() - before, 3), "blocks": _places(blocks[:])}
        with Path(os.environ[RESULTS], f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def _places(data: bytes) -> list[int]:
    found, place = [], data.find(1)
    while place >= 0:
        found.append(place)
        place = data.find(1, place + 1)
    return found


def _cpu_seconds() -> float:
    """Of this process and all below it, those that ended too (Linux: /proc)."""
    parents, used = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        parents[int(folder.name)] = int(fields[1])
        used[int(folder.name)] = sum(map(int, fields[11:15]))
    total, mine = 0, {os.getpid()}
    while mine:
        total += sum(used.pop(pid, 0) for pid in mine)
        mine = {pid for pid, parent in parents.items() if parent in mine and pid in used}
    return total / os.sysconf("SC_CLK_TCK")
