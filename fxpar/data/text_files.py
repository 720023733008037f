"""A folder of text or code files: one document per file. `python-stdlib` is such a folder that everybody has."""

from __future__ import annotations

import itertools
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from fxpar.data.corpus import Document, Place, Skip
from fxpar.data.files import FileList, decode, list_files, read_regular
from fxpar.data.report import UNDECODABLE, UNREADABLE

STDLIB = "python-stdlib"
_OTHER_PEOPLES_CODE = ("site-packages", "dist-packages")
_TEST_FOLDERS = ("test", "tests", "idle_test")


class TextSource:
    """Whole files as documents, named by their path in the folder."""

    def __init__(self, files: FileList, kind: str = "text", label: str = "") -> None:
        self.kind = kind
        self.label = label or str(files.root if len(files.names) != 1 else files.path(0))
        self.files_read = 0
        self._files = files

    def scan(self) -> Iterator[Document | Skip]:
        """All files that are text."""
        for index, name in enumerate(self._files.names):
            try:
                data = read_regular(self._files.path(index))
            except OSError:
                yield Skip(UNREADABLE, name)
                continue
            self.files_read += 1
            try:
                yield Document((index, 0, 0), decode(data))
            except UnicodeDecodeError as error:
                yield Skip(UNDECODABLE, f"{name} at byte {error.start}")

    def read(self, place: Place) -> str:
        """The text of a file."""
        return decode(read_regular(self._files.path(place[0])))

    def name(self, place: Place) -> str:
        """The path of a file inside the folder."""
        return self._files.names[place[0]]

    def hint(self) -> str:
        """Why there may be no document."""
        return self._files.hint()


class DefinitionSource(TextSource):
    """Python files cut before each function and class at the left margin: lengths with a tail as long as the web's."""

    def scan(self) -> Iterator[Document | Skip]:
        """All definitions, and what stands between them."""
        for found in super().scan():
            if isinstance(found, Skip):
                yield found
                continue
            file = found.place[0]
            whole = True
            for start, stop in definitions(found.text):
                if found.text[start:stop].strip():
                    whole = False
                    yield Document((file, start, stop), found.text[start:stop])
            if whole:
                yield found  # an empty file is counted as one

    def read(self, place: Place) -> str:
        """The text between two positions of a file."""
        text, (_, start, stop) = super().read(place), place
        return text[start:stop] if stop else text

    def name(self, place: Place) -> str:
        """The path of the file and the position in it."""
        return f"{super().name(place)}:{place[1]}" if place[2] else super().name(place)


# A line that begins a definition, with the decorators in front of it.
_DEFINITION = re.compile(r"^(?:@.*\n(?:[ \t)].*\n)*)*(?:async def|def|class)\b", re.MULTILINE)


def definitions(text: str) -> list[tuple[int, int]]:
    """Where the parts of a Python file begin and end, in characters; together they are the file."""
    cuts = sorted({0, len(text), *(match.start() for match in _DEFINITION.finditer(text))})
    return list(itertools.pairwise(cuts))


def text_source(path: Path, *, glob: Sequence[str] = ()) -> TextSource:
    """The files at or below `path`."""
    return TextSource(list_files(path, glob), label=str(path))


def stdlib_source(
    *, glob: Sequence[str] = ("*.py",), tests: bool = False, unit: Literal["file", "definition"] = "file"
) -> TextSource:
    """The source files of the running Python's standard library: real text, with a long tail of lengths.

    `tests` adds the library's own tests, about as much again. A document is a file, or one function or class of it.
    """
    without = (*_OTHER_PEOPLES_CODE, *(() if tests else _TEST_FOLDERS))
    files = list_files(Path(sysconfig.get_path("stdlib")), glob, without=without)
    return {"file": TextSource, "definition": DefinitionSource}[unit](files, STDLIB, STDLIB)
