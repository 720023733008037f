"""`open_corpus`: from a path or a name to documents."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxpar.data import dataset, jsonl, parquet
from fxpar.data.corpus import Corpus, DocumentSource
from fxpar.data.files import list_files
from fxpar.data.text_files import STDLIB, stdlib_source, text_source
from fxpar.errors import CorpusKindError, CorpusOptionError, CorpusPathError


@dataclass(frozen=True)
class CorpusKind:
    """One kind of corpus: how it is opened, and whether it lies at a path."""

    open: Callable[..., DocumentSource]
    at_path: bool = True

    def options(self) -> list[str]:
        """The names of its options."""
        return [p.name for p in inspect.signature(self.open).parameters.values() if p.kind is p.KEYWORD_ONLY]


KINDS: dict[str, CorpusKind] = {
    "text": CorpusKind(text_source),
    "jsonl": CorpusKind(jsonl.jsonl_source),
    "parquet": CorpusKind(parquet.parquet_source),
    "dataset": CorpusKind(dataset.dataset_source),
    STDLIB: CorpusKind(stdlib_source, at_path=False),
}
_SUFFIX_KINDS = {suffix: kind for kind, of in (("jsonl", jsonl), ("parquet", parquet)) for suffix in of.SUFFIXES}
_OPTION_TYPES: dict[str, type] = {"field": str, "column": str, "split": str, "tests": bool, "unit": str}
_UNITS = ("file", "definition")


def check_source(source: str | Path) -> Path:
    """Where the documents are. Raises CorpusPathError if there is nothing."""
    path = Path(source).expanduser()
    if not os.path.exists(path):  # False, too, where a name is too long for a file
        raise CorpusPathError(str(source), [STDLIB])
    return path


def open_corpus(source: str | Path, *, kind: str | None = None, **options: Any) -> Corpus:
    """The documents of a path, or of the built-in corpus `python-stdlib`. Reads everything once.

    Kinds and their options:

    - text: files at or below the path, one document each. `glob`: one or several patterns.
    - jsonl: a file or a folder of them. `field` ("text"), `glob`.
    - parquet: a file or a folder of them. `column` ("text"), `glob`.
    - dataset: a folder that `datasets` saved. `column` ("text"), `split`.
    - python-stdlib: the source files of the running Python. `glob`, `tests` (False), `unit` ("file", or "definition":
      each function and class is a document).

    Without `kind` it is told from the path: by suffix, by the files that mark a dataset, and a folder whose files
    (those that `glob` leaves) are all JSONL or all parquet is of that kind; anything else is text.

    Raises CorpusPathError, CorpusKindError, CorpusOptionError, CorpusFormatError, MissingDataPackageError,
    EmptyCorpusError.
    """
    name = kind or (STDLIB if str(source) == STDLIB else kind_of(Path(source).expanduser(), options.get("glob")))
    if name not in KINDS:
        raise CorpusKindError(name, KINDS)
    found = KINDS[name]
    checked = {option: _checked(name, option, value) for option, value in options.items() if value is not None}
    if not found.at_path:
        return Corpus(found.open(**checked))
    return Corpus(found.open(check_source(source), **checked))


def kind_of(path: Path, glob: Any = None) -> str:
    """The kind of corpus at a path, of the files that `glob` (one or several patterns) leaves of a folder.

    Raises CorpusPathError if there is nothing, CorpusOptionError for what is no pattern.
    """
    if not os.path.exists(path):  # False, too, where a name is too long for a file
        raise CorpusPathError(str(path), [STDLIB])
    if path.is_dir() and any((path / marker).is_file() for marker in dataset.MARKERS):
        return "dataset"
    globs = () if glob is None else _checked("text", "glob", glob)
    kinds = {_SUFFIX_KINDS.get(Path(name).suffix.lower(), "text") for name in list_files(path, globs).names}
    return kinds.pop() if len(kinds) == 1 else "text"


def _checked(kind: str, option: str, value: Any) -> Any:
    """An option's value in the form that the source takes. Raises CorpusOptionError."""
    known = KINDS[kind].options()
    if option not in known:
        raise CorpusOptionError(kind, option, known)
    if option == "glob":
        globs = [value] if isinstance(value, str) else value
        if not isinstance(globs, (list, tuple)) or not globs or not all(isinstance(g, str) and g for g in globs):
            raise CorpusOptionError(kind, option, known, f"{value!r} is neither a pattern nor a list of patterns")
        return tuple(globs)
    wanted = _OPTION_TYPES[option]
    if not isinstance(value, wanted):
        raise CorpusOptionError(kind, option, known, f"{value!r} is not a {wanted.__name__}")
    if option == "unit" and value not in _UNITS:
        raise CorpusOptionError(kind, option, known, f"{value!r} is none of {', '.join(_UNITS)}")
    return value
