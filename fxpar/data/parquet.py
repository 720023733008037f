"""Parquet files: one column of which is the text. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpar.data.corpus import Document, Place, Skip
from fxpar.data.files import FileList, list_files, require_regular
from fxpar.data.report import EMPTY, NO_FIELD, NOT_TEXT, UNDECODABLE, UNREADABLE
from fxpar.errors import MissingDataPackageError

if TYPE_CHECKING:
    import pyarrow.parquet

SUFFIXES = (".parquet",)


class ParquetSource:
    """Rows as documents, named `file:row`; rows count from 0. A place is (file, row group, row of the group)."""

    kind = "parquet"

    def __init__(self, files: FileList, column: str, label: str) -> None:
        self.label = label
        self.files_read = 0
        self._files = files
        self._column = column
        self._columns: set[str] = set()
        self._first_rows: dict[tuple[int, int], int] = {}
        self._group: tuple[int, int] = (-1, -1)
        self._values: list[str | Skip] = []

    def scan(self) -> Iterator[Document | Skip]:
        """All rows with a text in the column."""
        import pyarrow

        for index, name in enumerate(self._files.names):
            try:
                with self._open(index) as file:
                    yield from self._scan_file(index, file)
            except (OSError, pyarrow.ArrowException):
                yield Skip(UNREADABLE, name)

    def read(self, place: Place) -> str:
        """The text of a row; the row group it lies in stays in memory for the next ones."""
        if place[:2] != self._group:
            with self._open(place[0]) as file:
                self._load(place[0], place[1], file)
        value = self._values[place[2]]
        if isinstance(value, Skip):
            raise ValueError("the row has no text any more")
        return value

    def name(self, place: Place) -> str:
        """The path of the file inside the folder, and the row."""
        return f"{self._files.names[place[0]]}:{self._first_rows[place[:2]] + place[2]}"

    def hint(self) -> str:
        """Why there may be no document: the columns that the files do have."""
        if self._columns:
            columns = ", ".join(sorted(self._columns))
            return f"no column {self._column!r}; its files have {columns}: name one as `column` (`data.text` of a run)"
        return self._files.hint()

    def _open(self, index: int) -> pyarrow.parquet.ParquetFile:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(require_regular(self._files.path(index)))

    def _scan_file(self, index: int, file: pyarrow.parquet.ParquetFile) -> Iterator[Document | Skip]:
        name, columns = self._files.names[index], file.schema_arrow.names
        if self._column not in columns:
            self._columns.update(columns[:20])
            yield Skip(f"{NO_FIELD} {self._column!r}", name)
            return
        self.files_read += 1
        first = 0
        for group in range(file.num_row_groups):
            self._first_rows[index, group] = first
            self._load(index, group, file)
            for row, value in enumerate(self._values):
                if isinstance(value, Skip):
                    yield Skip(value.reason, f"{name}:{first + row}")
                else:
                    yield Document((index, group, row), value)
            first += len(self._values)
        if first == 0:
            yield Skip(EMPTY, name)

    def _load(self, index: int, group: int, file: pyarrow.parquet.ParquetFile) -> None:
        table = file.read_row_group(group, columns=[self._column])
        self._values = column_texts(table.column(self._column))
        self._group = (index, group)


def column_texts(column: Any) -> list[str | Skip]:
    """The texts of an Arrow column (chunked array); a Skip without a name where a row has none."""
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:  # one bad row fails the whole column: take them one at a time
        values = [_decoded(value) for value in column]
    return [
        value if isinstance(value, (str, Skip)) else Skip(EMPTY if value is None else NOT_TEXT, "") for value in values
    ]


def _decoded(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return Skip(UNDECODABLE, "")


def parquet_source(path: Path, *, column: str = "text", glob: Sequence[str] = ("*.parquet",)) -> ParquetSource:
    """The rows of one file, or of all files that fit below a folder. Raises MissingDataPackageError."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise MissingDataPackageError("parquet files", "pyarrow", 'pip install "fxpar[data]"') from error
    return ParquetSource(list_files(path, glob), column, str(path))
