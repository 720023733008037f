"""Every code block of README and docs/ runs, or what it names exists; no block is left out in silence.

`python` blocks run in order in one namespace per page, in a folder of the page; those with `title="train.py"` are
written there too, and run when a `torchrun` line of the page says so. `fxpar` lines run in this process, other commands
are checked for what they name. `toml` blocks are configurations of `fxpar train` (or parts of a pyproject.toml). An
`output` block is what the block before it printed, `...` standing for anything. `text` blocks are no code.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fxpar.cost.cluster import ClusterSpec
from fxpar.search.plan_file import parse_plan
from fxpar.train.config import parse_config
from tests.cli.helpers import fxpar
from tests.docs.blocks import Block, find_blocks
from tests.docs.pages import RANKS, prepare, way_of
from tests.docs.ranks import run_ranks
from tests.docs.shell import check_command, commands, torchrun

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", *sorted(path.name for path in (ROOT / "docs").glob("*.md"))]
_MOST_RANKS = 4
SWAPPED: set[str] = set()  # commands that ran with a small model in place of a published one
RAN: dict[tuple[str, ...], tuple[int, str, str]] = {}


@dataclass
class Page:
    """One page while its blocks run: their names, its folder, and what the last block printed."""

    folder: Path
    names: dict[str, Any]
    blocks: list[Block]
    printed: str = ""

    def run(self) -> None:
        waiting: list[Block] = []  # blocks for ranks, until one comes that is not
        for block in self.blocks:
            if waiting and (block.language != "python" or block.ranks != waiting[0].ranks):
                self.on_ranks(waiting)
                waiting = []
            if block.ranks and block.language == "python" and not block.title:
                waiting.append(block)
            elif not block.skipped:
                self.one(block)
        if waiting:
            self.on_ranks(waiting)

    def one(self, block: Block) -> None:
        handler = HANDLERS.get(block.language)
        assert handler, f"{block.where}: a block of the language {block.language!r}; use one of {', '.join(HANDLERS)}"
        if block.title:
            (self.folder / block.title).write_text(block.text + "\n")
        try:
            handler(self, block)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"docs {block.where}: {type(error).__name__}: {error}") from error

    def python(self, block: Block) -> None:
        if block.title and self.is_used(block.title.removesuffix(".py")):
            compile(block.text, block.where, "exec")
            return
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            run_text(block, self.names)
        self.printed = said.getvalue()

    def is_used(self, module: str) -> bool:
        """Whether a command starts or reads this file, or another block imports it: then it runs there."""
        word = re.compile(rf"(?:^\s*(?:from|import) |[ /]){module}(?:\.py\b| import\b|$)", re.MULTILINE)
        return any(word.search(b.text) for b in self.blocks if b.language in ("sh", "console", "python"))

    def on_ranks(self, blocks: list[Block]) -> None:
        def body(rank: int) -> None:
            for block in blocks:
                run_text(block, self.names)

        try:
            self.printed = run_ranks(blocks[0].ranks, body)[0]
        except Exception as error:
            raise AssertionError(f"docs {blocks[0].where}: {error}") from error

    def shell(self, block: Block) -> None:
        for words in commands(block.text):
            self.command(words, block.status)

    def console(self, block: Block) -> None:
        """`$ command` and what it prints."""
        for part in ("\n" + block.text).split("\n$ ")[1:]:
            command, _, wanted = part.partition("\n")
            for words in commands(command):
                self.command(words, block.status)
            if wanted.strip():
                compare(wanted, self.printed, block.where)

    def command(self, words: list[str], status: int) -> None:
        check_command(words, self.folder)
        if words[0] == "torchrun":
            self.start(words[1:])
        elif words[0] == "fxpar":
            self.fxpar(words[1:], status)

    def start(self, words: list[str]) -> None:
        """Run a script of this page on as many ranks as the line says, if these are few and on one machine."""
        ranks, script, is_module, _ = torchrun(words)
        if is_module or not 0 < ranks <= _MOST_RANKS or not any(b.title == script for b in self.blocks):
            return

        def body(_rank: int) -> None:
            runpy.run_path(str(self.folder / script), run_name="__main__")

        self.printed = run_ranks(ranks, body)[0]

    def fxpar(self, words: list[str], expected: int) -> None:
        way = way_of(" ".join(words))
        if way is not None and way.how == "parsed":
            return
        if way is not None and way.how == "once":
            if words[0] in SWAPPED:
                return
            SWAPPED.add(words[0])
        if way is not None:
            at = next(i for i, word in enumerate(words) if word.startswith("hf:"))
            words = [*words[:at], *way.model.split(), *words[at + 1 :]]
        status, self.printed, said = once(*words)
        assert status == expected, f"fxpar {' '.join(words)} ended with {status}: {said or self.printed}"

    def toml(self, block: Block) -> None:
        tables = tomllib.loads(block.text)
        if set(tables) <= {"project", "build-system", "tool"}:
            return
        if "nodes" in tables:
            ClusterSpec.from_dict(tables)
        elif "fxpar_plan" in tables:
            assert parse_plan(block.text, block.where).groups
        else:
            parse_config(block.text, block.where, "docs")

    def output(self, block: Block) -> None:
        compare(block.text, self.printed, block.where)


def once(*words: str) -> tuple[int, str, str]:
    """`fxpar WORDS`; what names no file of the page does the same on every page, and runs once. A plan that goes to a
    file is printed as one that does not.
    """
    if words[0] == "plan" and words[-2:-1] == ("-o",):
        RAN[words[:-2]] = fxpar(*words)
        return RAN[words[:-2]]
    if any(re.search(r"\.(?:py|toml|json|fxpar|html)\b|/", word) for word in words):
        return fxpar(*words)
    if words not in RAN:
        RAN[words] = fxpar(*words)
    return RAN[words]


def run_text(block: Block, names: dict[str, Any]) -> None:
    """Execute a block; tracebacks show the lines of the page."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        exec(compile("\n" * (block.line - 1) + block.text, f"docs/{block.page}", "exec"), names)


def compare(wanted: str, got: str, where: str) -> None:
    assert shows(wanted, got), f"{where} shows\n{wanted}\nbut this was printed\n{got}"


def shows(wanted: str, got: str) -> bool:
    """Whether a page shows what was printed: a line `...` stands for any lines, `...` in a line for any characters;
    blank lines and the width of gaps do not count.
    """
    parts = [""]  # between the lines `...`
    for line in filter(None, (" ".join(line.split()) for line in wanted.splitlines())):
        if line == "...":
            parts.append("")
        else:
            parts[-1] += _with_gaps([re.escape(part) for part in line.split("...")], ".*?") + r"\n"
    lines = filter(None, (" ".join(line.split()) for line in got.splitlines()))
    return re.fullmatch(_with_gaps(parts, r"(?:.*\n)*?"), "".join(f"{line}\n" for line in lines)) is not None


def _with_gaps(parts: list[str], gap: str) -> str:
    """The first place where a part fits is as good as any: none is tried twice, so a mismatch is found as fast."""
    first, *middle, last = parts if len(parts) > 1 else (*parts, "")
    return first + "".join(f"(?>{gap}{part})" for part in middle) + (gap + last if len(parts) > 1 else "")


@contextlib.contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """Modules in the folder are found, and forgotten afterwards: another page has others of these names."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


HANDLERS = {
    "python": Page.python,
    "sh": Page.shell,
    "bash": Page.shell,
    "console": Page.console,
    "toml": Page.toml,
    "output": Page.output,
    "json": lambda page, block: json.loads(block.text),
    "text": lambda page, block: None,
}


@pytest.mark.parametrize("page", PAGES)
def test_blocks(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / page if page == "README.md" else ROOT / "docs" / page
    blocks = find_blocks(path, page)
    if page in RANKS:
        blocks = [replace(b, ranks=RANKS[page]) if b.language == "python" else b for b in blocks]
    if not blocks:
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    with on_path(tmp_path):
        Page(tmp_path, prepare(page, tmp_path), blocks).run()
