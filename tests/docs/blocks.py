"""The code blocks of a page, in order.

A block is fenced (one without a language that begins with a program's name is a command), or it is an indented line
that begins with a program's name. What stands behind the language in the fence (`title="train.py"`) names a file; a
comment right above the fence, `<!-- test: ranks=4 -->`, says how to run it. Nothing else on a page is code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("fxpar", "make", "torchrun", "python", "python3", "pip", "sbatch", "srun", "git", "pytest", "mkdocs")
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,})(?P<info>[^`]*)$")
_TITLE = re.compile(r'title="([^"]+)"')
_DIRECTIVE = re.compile(r"^ *<!-- test: (.*?) -->$")
PLAIN_COMMAND = re.compile(rf"(?:\$ )?(?:{'|'.join(PROGRAMS)}) \S")
_COMMAND = re.compile(rf"^    (?:[A-Z_]+=\S+ )*(?:{'|'.join(PROGRAMS)}) \S")


@dataclass(frozen=True)
class Block:
    """One block. `line` is that of its first line; `title` the file it is written to; `ranks` 0: this process."""

    page: str
    line: int
    language: str
    text: str
    title: str = ""
    ranks: int = 0
    status: int = 0  # exit status of its commands
    skipped: str = ""  # why it is not run

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def find_blocks(path: Path, page: str) -> list[Block]:
    """All blocks of a page. Raises ValueError for a fence that does not end and a directive that is not known."""
    lines = path.read_text(encoding="utf-8").splitlines()
    blocks: list[Block] = []
    number = 0
    while number < len(lines):
        opened = _FENCE.match(lines[number])
        if opened is None:
            if _COMMAND.match(lines[number]) and (
                number == 0 or not lines[number - 1].strip() or blocks_end(blocks, number)
            ):
                blocks.append(Block(page, number + 1, "sh", lines[number].strip()))
            number += 1
            continue
        start, indent = number + 1, len(opened["indent"])
        end = start
        while end < len(lines) and lines[end].strip() != opened["fence"]:
            end += 1
        if end == len(lines):
            raise ValueError(f"{page}:{start}: this fence does not end")
        language, _, rest = opened["info"].strip().partition(" ")
        title = _TITLE.search(rest)
        text = "\n".join(line[indent:] for line in lines[start:end])
        options = directive(lines[number - 1], f"{page}:{number}") if number else {}
        if not language and PLAIN_COMMAND.match(text):
            language = "console" if text.startswith("$ ") else "sh"
        blocks.append(Block(page, start + 1, language, text, title[1] if title else "", **options))
        number = end + 1
    return blocks


def blocks_end(blocks: list[Block], number: int) -> bool:
    """Whether line `number` (from 0) goes on with an indented block of one-line commands."""
    return bool(blocks) and blocks[-1].language == "sh" and blocks[-1].line == number


def directive(line: str, where: str) -> dict:
    """Options of `<!-- test: ranks=4 -->`, `status=1` or `skip=why`; {} for any other line."""
    match = _DIRECTIVE.match(line)
    if match is None:
        return {}
    key, _, value = match[1].partition("=")
    if key in ("ranks", "status") and value.isdecimal():
        return {key: int(value)}
    if key == "skip" and len(value.split()) >= 4:
        return {"skipped": value}
    raise ValueError(f"{where}: {match[1]!r} is none of ranks=N, status=N, skip=REASON (a sentence)")
