"""A Hugging Face dataset that `save_to_disk` wrote: one column of which is the text. Needs datasets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fxpar.data.corpus import Document, Place, Skip
from fxpar.data.parquet import column_texts
from fxpar.errors import CorpusFormatError, MissingDataPackageError

MARKERS = ("dataset_info.json", "dataset_dict.json")
_BATCH_ROWS = 1000


class DatasetSource:
    """Rows as documents, named `row`; rows count from 0. A place is (0, row, 0)."""

    kind = "dataset"

    def __init__(self, dataset: Any, column: str, label: str) -> None:
        self.label = label
        self.files_read = len(dataset.cache_files)
        self._table = dataset.select_columns([column]).with_format("arrow")
        self._column = column

    def scan(self) -> Iterator[Document | Skip]:
        """All rows with a text in the column."""
        for first in range(0, len(self._table), _BATCH_ROWS):
            rows = column_texts(self._table[first : first + _BATCH_ROWS].column(self._column))
            for row, value in enumerate(rows, start=first):
                yield Skip(value.reason, str(row)) if isinstance(value, Skip) else Document((0, row, 0), value)

    def read(self, place: Place) -> str:
        """The text of a row."""
        value = column_texts(self._table[place[1] : place[1] + 1].column(self._column))[0]
        if isinstance(value, Skip):
            raise ValueError("the row has no text any more")
        return value

    def name(self, place: Place) -> str:
        """The number of the row."""
        return str(place[1])

    def hint(self) -> str:
        """Why there may be no document."""
        return "" if len(self._table) else "it has no row"


def dataset_source(path: Path, *, column: str = "text", split: str | None = None) -> DatasetSource:
    """The rows of a dataset on disk; one with several splits needs the name of one.

    Raises MissingDataPackageError, CorpusFormatError.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingDataPackageError("datasets on disk", "datasets", 'pip install "fxpar[data]"') from error
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # the package raises many classes for a folder that is none of its own
        raise CorpusFormatError(str(path), "dataset", f"`datasets.load_from_disk` says: {error}") from error
    if isinstance(found, datasets.DatasetDict):
        names = ", ".join(sorted(str(name) for name in found))
        if split is None and len(found) > 1:
            raise CorpusFormatError(str(path), "dataset", f"it has the splits {names}: name one as `split`")
        if split is not None and split not in found:
            raise CorpusFormatError(str(path), "dataset", f"it has no split {split!r}; it has {names}")
        found = found[split if split is not None else next(iter(found))]
    elif split is not None:
        raise CorpusFormatError(str(path), "dataset", f"it has no splits; leave out `split` ({split!r})")
    if column not in found.column_names:
        columns = ", ".join(found.column_names)
        raise CorpusFormatError(
            str(path), "dataset", f"no column {column!r}; it has {columns}: name one as `column` (`data.text` of a run)"
        )
    return DatasetSource(found, column, str(path))
