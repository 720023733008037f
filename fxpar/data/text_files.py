"""A folder of text or code files: one document per file. `python-stdlib` is such a folder that everybody has."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

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


def text_source(path: Path, *, glob: Sequence[str] = ()) -> TextSource:
    """The files at or below `path`."""
    return TextSource(list_files(path, glob), label=str(path))


def stdlib_source(*, glob: Sequence[str] = ("*.py",), tests: bool = False) -> TextSource:
    """The source files of the running Python's standard library: real text, with a long tail of lengths.

    `tests` adds the library's own tests, about as much again.
    """
    without = (*_OTHER_PEOPLES_CODE, *(() if tests else _TEST_FOLDERS))
    return TextSource(list_files(Path(sysconfig.get_path("stdlib")), glob, without=without), STDLIB, STDLIB)
