"""JSON lines: one object per line, one field of which is the text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from fxpar.data.corpus import Document, Place, Skip
from fxpar.data.files import FileList, list_files, require_regular
from fxpar.data.report import BAD_JSON, EMPTY, NO_FIELD, NOT_TEXT, UNDECODABLE, UNREADABLE

SUFFIXES = (".jsonl", ".ndjson")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonlSource:
    """Lines as documents, named `file:line`; lines count from 1. A place is (file, byte offset, line)."""

    kind = "jsonl"

    def __init__(self, files: FileList, field: str, label: str) -> None:
        self.label = label
        self.files_read = 0
        self._files = files
        self._field = field
        self._seen: set[str] = set()

    def scan(self) -> Iterator[Document | Skip]:
        """All lines that are objects with a text in the field."""
        for index, name in enumerate(self._files.names):
            try:
                yield from self._scan_file(index)
            except OSError:
                yield Skip(UNREADABLE, name)

    def read(self, place: Place) -> str:
        """The text of a line."""
        with open(self._files.path(place[0]), "rb") as file:
            file.seek(place[1])
            text, _ = self._text(file.readline())
        if text is None:
            raise ValueError("the line has no text any more")
        return text

    def name(self, place: Place) -> str:
        """The path of the file inside the folder, and the line."""
        return f"{self._files.names[place[0]]}:{place[2]}"

    def hint(self) -> str:
        """Why there may be no document: the fields that lines do have."""
        if self._seen:
            known = ", ".join(sorted(self._seen))
            return f"no field {self._field!r}; its lines have {known}: name one as `field` (`data.text` of a run)"
        return self._files.hint()

    def _scan_file(self, index: int) -> Iterator[Document | Skip]:
        with open(require_regular(self._files.path(index)), "rb") as file:
            self.files_read += 1
            offset = 0
            for line, raw in enumerate(file, start=1):
                place = (index, offset, line)
                offset += len(raw)
                text, problem = self._text(raw)
                yield Skip(problem, self.name(place)) if text is None else Document(place, text)
            if offset == 0:
                yield Skip(EMPTY, self._files.names[index])

    def _text(self, raw: bytes) -> tuple[str | None, str]:
        """The text of a line, or why it has none."""
        try:
            line = raw.removeprefix(_BYTE_ORDER_MARK).decode()
        except UnicodeDecodeError:
            return None, UNDECODABLE
        if not line.strip():
            return None, EMPTY
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return None, BAD_JSON
        if not isinstance(value, dict):
            return None, BAD_JSON
        if self._field not in value:
            if len(self._seen) < 20:
                self._seen.update(value)
            return None, f"{NO_FIELD} {self._field!r}"
        text = value[self._field]
        return (text, "") if isinstance(text, str) else (None, NOT_TEXT)


def jsonl_source(path: Path, *, field: str = "text", glob: Sequence[str] = ("*.jsonl", "*.ndjson")) -> JsonlSource:
    """The lines of one file, or of all files that fit below a folder."""
    return JsonlSource(list_files(path, glob), field, str(path))
