"""A corpus: documents that are listed once and read one at a time."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from fxpar.data.report import EMPTY, UNDECODABLE, CorpusReport, SkipCounter
from fxpar.errors import CorpusChangedError, EmptyCorpusError

# Where a document is: file, position in the file, row or line. Three numbers, so that an index of
# millions of documents is one flat array.
Place = tuple[int, int, int]
DIGEST_BYTES = 16


@dataclass(frozen=True)
class Document:
    """A text that a source found."""

    place: Place
    text: str


@dataclass(frozen=True)
class Skip:
    """A file, line or row without a usable text."""

    reason: str
    name: str


class DocumentSource(Protocol):
    """Where documents come from: one kind of file, listed in an order that no file system decides."""

    kind: str
    label: str
    files_read: int

    def scan(self) -> Iterator[Document | Skip]:
        """All documents, in order; never raises for bad content."""
        ...

    def read(self, place: Place) -> str:
        """The text at a place that `scan` gave. Raises OSError, ValueError or LookupError if it is gone."""
        ...

    def name(self, place: Place) -> str:
        """A name of the document that is unique and does not depend on where the corpus lies."""
        ...

    def hint(self) -> str:
        """What to change when nothing was found."""
        ...


class Corpus:
    """Documents of one source. Only places and digests are in memory; `text(i)` reads.

    `fingerprint` is a hash of all names and texts. A document that changes after the corpus was
    opened raises CorpusChangedError when it is read, so nothing is ever cached under a wrong hash.

    Raises EmptyCorpusError if no document is left.
    """

    def __init__(self, source: DocumentSource) -> None:
        self._source = source
        self._places = array("q")
        self._digests = bytearray()
        skips, text_bytes, total = SkipCounter(), 0, hashlib.sha256()
        for found in source.scan():
            if isinstance(found, Skip):
                skips.add(found.reason, found.name)
                continue
            name, problem, data = source.name(found.place), "", b""
            try:
                data = found.text.encode()
            except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
                problem = UNDECODABLE
            if not problem and not found.text.strip():
                problem = EMPTY
            if problem:
                skips.add(problem, name)
                continue
            digest = _digest(data)
            self._places.extend(found.place)
            self._digests += digest
            total.update(_digest(name.encode("utf-8", "surrogatepass")) + digest)
            text_bytes += len(data)
        self.fingerprint = total.hexdigest()
        self.report = CorpusReport(source.label, source.kind, source.files_read, len(self), text_bytes, skips.kinds())
        if not len(self):
            raise EmptyCorpusError(source.label, source.kind, [str(kind) for kind in skips.kinds()], source.hint())

    def __len__(self) -> int:
        return len(self._places) // 3

    def name(self, index: int) -> str:
        """The name of document `index`: its path inside the corpus, with the line or row if there is one."""
        return self._source.name(self._place(index))

    def text(self, index: int) -> str:
        """The text of document `index`. Raises CorpusChangedError if it is not what it was."""
        place = self._place(index)
        try:
            text = self._source.read(place)
            data = text.encode()
        except (OSError, ValueError, LookupError) as error:
            raise CorpusChangedError(self.report.source, self.name(index)) from error
        if _digest(data) != self._digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
            raise CorpusChangedError(self.report.source, self.name(index))
        return text

    def _place(self, index: int) -> Place:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        file, position, row = self._places[3 * index : 3 * index + 3]
        return file, position, row


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
