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
    truncated by `truncated_tokens` in all. `short` sequences of less than two tokens, `short_tokens` in all, were
    left out. tokens + truncated_tokens + short_tokens is what the documents have.
    """

    documents: int
    sequences: int
    tokens: int
    overlong: int
    pieces: int
    truncated_tokens: int
    short: int
    short_tokens: int

    def lines(self) -> Iterator[str]:
        """The report in words, one fact per line."""
        yield f"{self.documents:,} documents give {self.sequences:,} sequences, {self.tokens:,} tokens"
        if self.pieces:
            yield f"{self.overlong:,} overlong documents split into {self.pieces:,} sequences"
        elif self.overlong:
            yield f"{self.overlong:,} overlong documents truncated, {self.truncated_tokens:,} tokens left out"
        if self.short:
            yield f"{self.short:,} sequences of less than two tokens left out, {self.short_tokens:,} tokens"

    def __str__(self) -> str:
        return "\n".join(self.lines())


@dataclass(frozen=True, eq=False)
class Sequences:
    """Where each sequence lies in `Tokens.flat`: `starts` and `lengths`, int64 [N], in the order of the documents."""

    starts: np.ndarray
    lengths: np.ndarray
    report: CutReport


def cut(tokens: Tokens, max_length: int, overlong: str) -> Sequences:
    """Sequences of 2 to `max_length` tokens, each inside one document.

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
    too_long = np.flatnonzero(tokens.lengths > max_length)
    if overlong == "error" and len(too_long):
        first = int(too_long[0])
        raise OverlongError(tokens.name(first), int(tokens.lengths[first]), max_length, len(too_long))
    split = overlong == "split"
    starts, lengths = _pieces(tokens, max_length) if split else (tokens.starts, np.minimum(tokens.lengths, max_length))
    kept = lengths >= SHORTEST
    total, used = int(tokens.lengths.sum()), int(lengths.sum())
    pieces = int(np.ceil(tokens.lengths[too_long] / max_length).sum()) if split else 0
    report = CutReport(
        documents=len(tokens),
        sequences=int(kept.sum()),
        tokens=int(lengths[kept].sum()),
        overlong=len(too_long),
        pieces=pieces,
        truncated_tokens=total - used,
        short=int((~kept).sum()),
        short_tokens=int(lengths[~kept].sum()),
    )
    if not report.sequences:
        raise NoSequencesError(report.documents, report.short)
    return Sequences(starts[kept], lengths[kept], report)


def _pieces(tokens: Tokens, max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts in `flat` and lengths of consecutive pieces of all documents; an empty document is one empty piece."""
    lengths = tokens.lengths
    counts = np.maximum(-(-lengths // max_length), 1)
    document = np.repeat(np.arange(len(lengths)), counts)
    first_piece = np.cumsum(counts) - counts
    begins = (np.arange(len(document)) - first_piece[document]) * max_length
    lone = (lengths % max_length == 1) & (lengths > max_length)
    last_piece = first_piece + counts - 1
    begins[last_piece[lone]] -= 1
    ends = np.append(begins[1:], 0)
    ends[last_piece] = lengths
    return tokens.starts[document] + begins, ends - begins
