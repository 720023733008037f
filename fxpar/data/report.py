"""What reading a corpus found: files, documents, and what was skipped and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

EMPTY = "empty"
UNDECODABLE = "undecodable"
UNREADABLE = "unreadable"
BAD_JSON = "not a JSON object"
NOT_TEXT = "not a string"
NO_FIELD = "without the field"

EXAMPLES = 5


@dataclass(frozen=True)
class SkippedKind:
    """All that was skipped for one reason; `examples` are the first few, by name."""

    reason: str
    count: int
    examples: tuple[str, ...]

    def __str__(self) -> str:
        more = ", ..." if self.count > len(self.examples) else ""
        return f"{self.count:,} {self.reason} ({', '.join(self.examples)}{more})"


@dataclass(frozen=True)
class CorpusReport:
    """The outcome of reading a corpus once.

    `files` were opened and read, `documents` are usable, `text_bytes` is their size in UTF-8.
    """

    source: str
    kind: str
    files: int
    documents: int
    text_bytes: int
    skipped: tuple[SkippedKind, ...] = ()

    def count(self, reason: str) -> int:
        """How many files, lines or rows were skipped for a reason."""
        return sum(kind.count for kind in self.skipped if kind.reason == reason)

    def lines(self) -> Iterator[str]:
        """The report in words, one fact per line."""
        yield f"{self.source} ({self.kind}): {self.documents:,} documents, {self.text_bytes:,} bytes of text"
        yield f"{self.files:,} files read"
        for kind in self.skipped:
            yield f"skipped {kind}"

    def __str__(self) -> str:
        return "\n".join(self.lines())


@dataclass
class SkipCounter:
    """Collects skips while a corpus is read."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        """Count one skipped file, line or row."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        named = self.examples.setdefault(reason, [])
        if len(named) < EXAMPLES:
            named.append(name)

    def kinds(self) -> tuple[SkippedKind, ...]:
        """What was counted, most frequent first."""
        kinds = [SkippedKind(reason, count, tuple(self.examples[reason])) for reason, count in self.counts.items()]
        return tuple(sorted(kinds, key=lambda kind: (-kind.count, kind.reason)))
