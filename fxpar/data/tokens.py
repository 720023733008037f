"""All documents as token ids: one flat memory-mapped file and the places where documents begin."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fxpar.data.cache import cache_key, default_cache_dir, publish
from fxpar.data.corpus import Corpus
from fxpar.data.tokenizer import Tokenizer
from fxpar.errors import DataCacheError, HeldOutError

_FORMAT = 1
_BATCH_CHARACTERS = 4 * 2**20
_BATCH_TEXTS = 512


@dataclass(frozen=True, eq=False)
class Tokens:
    """Token ids of documents, or of some of them.

    `flat` holds the ids of all documents, `offsets` int64 [N + 1] where each begins, `documents` int64 the documents of
    this selection. `identity` names what they were made from; `folder` is where `load` finds them again.
    """

    flat: np.ndarray
    offsets: np.ndarray
    documents: np.ndarray
    name_keys: np.ndarray
    source_identity: dict[str, str]
    full_name: Callable[[int], str]
    folder: Path | None = None

    def __len__(self) -> int:
        return len(self.documents)

    def document(self, index: int) -> np.ndarray:
        """The ids of a document of this selection: a slice of the file, [T]."""
        at = self.documents[index]
        return self.flat[self.offsets[at] : self.offsets[at + 1]]

    def name(self, index: int) -> str:
        """The name of a document of this selection."""
        return self.full_name(int(self.documents[index]))

    @cached_property
    def starts(self) -> np.ndarray:
        """Where in `flat` each document of this selection begins: int64 [len]."""
        return np.asarray(self.offsets)[self.documents]

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document of this selection: int64 [len]."""
        return np.asarray(self.offsets)[self.documents + 1] - self.starts

    @cached_property
    def identity(self) -> dict[str, str]:
        """Corpus, tokenizer and selection, as short hashes; equal exactly if the tokens are."""
        chosen = hashlib.sha256(self.documents.astype("<i8").tobytes()).hexdigest()[:16]
        return {**self.source_identity, "documents": f"{len(self)} ({chosen})"}

    def hold_out(self, documents: int) -> tuple[Tokens, Tokens]:
        """(training, validation): validation are the last `documents` by a hash of the name.

        When files are added later, no document goes from training to validation. Raises HeldOutError.
        """
        if not 0 <= documents < len(self):
            raise HeldOutError(documents, len(self))
        order = np.argsort(self.name_keys[self.documents], kind="stable")
        cut = len(self) - documents
        training, validation = np.sort(self.documents[order[:cut]]), np.sort(self.documents[order[cut:]])
        return replace(self, documents=training), replace(self, documents=validation)


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    cache_dir: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tokens:
    """The tokens of a corpus: built if the cache has them not, else opened.

    Any number of processes may call this at once. Where one is enough, let one rank call it and give `folder` of the
    result to `load` on the others. `progress(done, total)` is called with numbers of documents while building.
    Raises DataCacheError, CorpusChangedError.
    """
    settings = {"format": _FORMAT, "corpus": corpus.fingerprint, "tokenizer": tokenizer.fingerprint}
    folder = Path(cache_dir or default_cache_dir()).expanduser() / "tokens" / cache_key(settings)
    if not folder.exists():
        with publish(folder) as building:
            _build(building, corpus, tokenizer, progress)
    return load(folder)


def load(folder: str | Path) -> Tokens:
    """The tokens in a folder that `prepare` made. Raises DataCacheError if they are not there or not complete."""
    path = Path(folder)
    try:
        about = json.loads((path / "about.json").read_text())
        dtype, count = np.dtype(about["dtype"]), about["tokens"]
        size_bytes = (path / "tokens.bin").stat().st_size
        if size_bytes != count * dtype.itemsize:
            raise ValueError(f"tokens.bin has {size_bytes} bytes instead of {count * dtype.itemsize}")
        offsets, keys = np.load(path / "offsets.npy"), np.load(path / "name_keys.npy")
        if not len(offsets) == len(keys) + 1 == about["documents"] + 1 or offsets[-1] != count:
            raise ValueError("offsets.npy or name_keys.npy does not fit to about.json")
        # mmap cannot map nothing; no corpus is empty, but a tokenizer may drop all characters.
        flat = np.memmap(path / "tokens.bin", dtype=dtype, mode="r") if count else np.zeros(0, dtype)
        identity = {"corpus": about["corpus"][:16], "tokenizer": about["tokenizer"][:16]}
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise DataCacheError(
            str(path), f"holds no complete tokens ({error}); remove it to have it built again"
        ) from error

    @lru_cache(maxsize=1)
    def names() -> list[str]:
        return json.loads((path / "names.json").read_text())

    return Tokens(flat, offsets, np.arange(len(keys)), keys, identity, lambda index: names()[index], path)


def name_key(name: str) -> int:
    """A 64-bit hash of a document name, the same in every process."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "little")


def _build(folder: Path, corpus: Corpus, tokenizer: Tokenizer, progress: Callable[[int, int], None] | None) -> None:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<i4")
    offsets = array("q", [0])
    with open(folder / "tokens.bin", "wb") as file:
        for texts in _batches(corpus):
            for ids in tokenizer.encode(texts):
                file.write(ids.astype(dtype).tobytes())
                offsets.append(offsets[-1] + len(ids))
            if progress is not None:
                progress(len(offsets) - 1, len(corpus))
    names = [corpus.name(index) for index in range(len(corpus))]
    np.save(folder / "offsets.npy", np.array(offsets, dtype="<i8"))
    np.save(folder / "name_keys.npy", np.array([name_key(name) for name in names], dtype="<u8"))
    (folder / "names.json").write_text(json.dumps(names))
    about: dict[str, Any] = {
        "format": _FORMAT,
        "corpus": corpus.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "documents": len(corpus),
        "tokens": offsets[-1],
        "dtype": dtype.str,
    }
    (folder / "about.json").write_text(json.dumps(about, indent=1))


def _batches(corpus: Corpus) -> Iterator[list[str]]:
    """Texts in lots that are large enough for the tokenizer's threads and small enough for memory."""
    batch: list[str] = []
    size = 0
    for index in range(len(corpus)):
        batch.append(corpus.text(index))
        size += len(batch[-1])
        if size >= _BATCH_CHARACTERS or len(batch) == _BATCH_TEXTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
