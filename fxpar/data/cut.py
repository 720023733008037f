"""From documents to sequences of at most `max_length` tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from fxpar.data.tokens import Tokens
from fxpar.errors import LoaderOptionError, NoSequencesError, OverlongError, nearest

Overlong = Literal["split", "truncate", "error"]
OVERLONG: tuple[str, ...] = get_args(Overlong)
SHORTEST = 2  # a shorter sequence has no token to predict


@dataclass(frozen=True)
class CutReport:
    """What became of the documents.

    `tokens` are those in sequences. `overlong` documents were longer than the limit: split into `pieces`, or
    truncated by `truncated_tokens` in all. `short` sequences of less than two tokens, or less than `multiple`,
    `short_tokens` in all, were left out, and `uneven_tokens` at the ends of others, so that lengths are multiples.
    tokens + truncated_tokens + short_tokens + uneven_tokens is what the documents have.
    """

    documents: int
    sequences: int
    tokens: int
    overlong: int
    pieces: int
    truncated_tokens: int
    short: int
    short_tokens: int
    uneven_tokens: int = 0
    multiple: int = 1

    def lines(self) -> Iterator[str]:
        """The report in words, one fact per line."""
        yield f"{self.documents:,} documents give {self.sequences:,} sequences, {self.tokens:,} tokens"
        if self.pieces:
            yield f"{self.overlong:,} overlong documents split into {self.pieces:,} sequences"
        elif self.overlong:
            yield f"{self.overlong:,} overlong documents truncated, {self.truncated_tokens:,} tokens left out"
        if self.short:
            least = "two" if self.multiple <= SHORTEST else f"{self.multiple:,}"
            yield f"{self.short:,} sequences of less than {least} tokens left out, {self.short_tokens:,} tokens"
        if self.uneven_tokens:
            why = f"lengths are multiples of {self.multiple:,}"
            yield f"{self.uneven_tokens:,} tokens at the ends of sequences left out: {why}"

    def __str__(self) -> str:
        return "\n".join(self.lines())


@dataclass(frozen=True, eq=False)
class Sequences:
    """Where each sequence lies in `Tokens.flat`: `starts` and `lengths`, int64 [N], in the order of the documents."""

    starts: np.ndarray
    lengths: np.ndarray
    report: CutReport


def cut(tokens: Tokens, max_length: int, overlong: str, multiple: int = 1) -> Sequences:
    """Sequences of 2 to `max_length` tokens, a multiple of `multiple`, each inside one document.

    Documents that are longer: "split" makes consecutive pieces and keeps every token (a last piece of a single token
    would carry no label, so the one before it gives up one of its own; only with max_length 2 one token is left out),
    "truncate" keeps the beginning, "error" raises OverlongError. Raises LoaderOptionError, NoSequencesError too.
    """
    if overlong not in OVERLONG:
        raise LoaderOptionError(
            f"overlong {overlong!r} is not known{nearest(overlong, OVERLONG) or ';'} write {', '.join(OVERLONG)}"
        )
    if max_length < SHORTEST:
        raise LoaderOptionError(f"max_length {max_length} is too small: a sequence needs {SHORTEST} tokens for a label")
    split = overlong == "split"
    limit = max_length - max_length % multiple if split else max_length
    if max_length < multiple:
        raise LoaderOptionError(f"max_length {max_length} is below length_multiple {multiple}, so no length would do")
    too_long = np.flatnonzero(tokens.lengths > limit)
    if overlong == "error" and len(too_long):
        first = int(too_long[0])
        raise OverlongError(tokens.name(first), int(tokens.lengths[first]), max_length, len(too_long))
    starts, lengths = _pieces(tokens, limit, multiple) if split else (tokens.starts, np.minimum(tokens.lengths, limit))
    kept = lengths >= max(SHORTEST, multiple)
    uneven = np.where(kept, lengths % multiple, 0)
    total, used = int(tokens.lengths.sum()), int(lengths.sum())
    pieces = int(np.ceil(tokens.lengths[too_long] / limit).sum()) if split else 0
    report = CutReport(
        documents=len(tokens),
        sequences=int(kept.sum()),
        tokens=int((lengths - uneven)[kept].sum()),
        overlong=len(too_long),
        pieces=pieces,
        truncated_tokens=total - used,
        short=int((~kept).sum()),
        short_tokens=int(lengths[~kept].sum()),
        uneven_tokens=int(uneven.sum()),
        multiple=multiple,
    )
    if not report.sequences:
        raise NoSequencesError(report.documents, report.short, max(SHORTEST, multiple))
    return Sequences(starts[kept], (lengths - uneven)[kept], report)


def _pieces(tokens: Tokens, max_length: int, multiple: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts in `flat` and lengths of consecutive pieces of all documents; an empty document is one empty piece."""
    lengths = tokens.lengths
    counts = np.maximum(-(-lengths // max_length), 1)
    document = np.repeat(np.arange(len(lengths)), counts)
    first_piece = np.cumsum(counts) - counts
    begins = (np.arange(len(document)) - first_piece[document]) * max_length
    lone = (lengths % max_length == 1) & (lengths > max_length) & (multiple == 1)
    last_piece = first_piece + counts - 1
    begins[last_piece[lone]] -= 1
    ends = np.append(begins[1:], 0)
    ends[last_piece] = lengths
    return tokens.starts[document] + begins, ends - begins
