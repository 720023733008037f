"""Lengths of sequences that a plan is made for: a file, a named distribution or a corpus, and the mini-batches drawn
from them.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fxpar.errors import LengthsError, nearest
from fxpar.ir.written import LONGEST

DRAWN = 100_000  # of a named distribution
SAMPLES = 8  # mini-batches that a set of strategies is priced with,
ENOUGH = 4_096  # or as few as have so many sequences,
FEWEST = 2  # but not fewer
CORPORA = (".jsonl", ".ndjson", ".parquet")  # files of documents; a folder is a corpus too
_NUMBER = re.compile(r"-?[0-9]{1,99}")
_WHOLE = f"Lengths are whole numbers of tokens, from 1 to {LONGEST:,}"


@dataclass(frozen=True)
class LogNormal:
    """Lengths whose logarithm is normal: the median in tokens, and the standard deviation of the logarithm."""

    median: float
    sigma: float

    def draw(self, count: int, longest: int, rng: np.random.Generator) -> np.ndarray:
        """[count] of them, at least 1; those above `longest` are cut to it, as a loader that truncates does."""
        found = np.exp(rng.normal(np.log(self.median), self.sigma, count))
        return np.clip(found.round(), 1, longest).astype(np.int64)


# Fitted by eye to what is published of them: RefinedWeb has about 620 tokens per document, and 97 % of them below 8K
# where 32K is the limit (HotSPa, SOSP 2024); files of code have a far longer tail; Wikipedia's articles have a median
# of 347 tokens and a mean of 1014 (the lengths that FlexSP's code ships).
NAMED = {
    "commoncrawl": LogNormal(300.0, 1.2),
    "github": LogNormal(700.0, 1.7),
    "wikipedia": LogNormal(347.0, 1.46),
}


def read_lengths(text: str, seed: int = 0, tokenizer: str | None = None) -> np.ndarray:
    """Lengths [N] in tokens that `text` names: `commoncrawl:32768` (a distribution of NAMED, cut at so many tokens),
    a file (.txt with a length per line, .json with a list, .npy, or .npz with an array `lengths`), or a corpus as
    `fxpar train` reads it, `corpus/:32768`, whose longer documents are split and whose `tokenizer` is a file.

    Raises LengthsError for a file that cannot be read, is empty, or has anything but whole numbers from 1 on; for a
    corpus what `check_lengths` and `fxpar.data` raise.
    """
    corpus = corpus_of(text)
    if corpus is not None:
        return _of_documents(text, *corpus, tokenizer)
    name, colon, longest = text.partition(":")
    is_file = len(text) < 4096 and os.path.isfile(text)
    if name in NAMED and not is_file:
        given = colon and longest.isascii() and longest.isdigit() and len(longest) < 20
        if not (given and 1 <= int(longest) <= LONGEST):
            raise LengthsError(text, "names no longest sequence", f"Write {name}:32768, in tokens")
        return NAMED[name].draw(DRAWN, int(longest), np.random.default_rng(seed))
    if not is_file:
        hint = nearest(name, NAMED)
        known = ", ".join(f"{one}:LONGEST" for one in NAMED)
        raise LengthsError(
            text,
            f"there is no such file or folder{hint}",
            f"Name a file of lengths (.txt, .json, .npy, .npz), a corpus, or {known}",
        )
    return _checked(text, _values(text))


def corpus_of(text: str) -> tuple[str, int] | None:
    """The corpus that `text` names, PATH or PATH:LONGEST, and the most tokens of a sequence; None for anything else."""
    path, colon, longest = text.rpartition(":")
    if not (colon and longest.isascii() and longest.isdigit() and len(longest) < 20):
        path, longest = text, str(LONGEST)
    found = os.path.expanduser(path)
    is_file = path.lower().endswith(CORPORA) and os.path.isfile(found)
    return (path, int(longest)) if is_file or os.path.isdir(found) else None


def check_lengths(text: str, tokenizer: str | None) -> None:
    """What can be said of lengths before documents are read. Raises LengthsError."""
    corpus = corpus_of(text)
    if corpus is None:
        read_lengths(text)
        if tokenizer is not None:
            raise LengthsError(text, "these are lengths already, in tokens", "Leave out --tokenizer")
        return
    if tokenizer is None:
        do = "Name its tokenizer.json with --tokenizer; fxpar train leaves one beside its checkpoints"
        raise LengthsError(text, "it is a corpus, whose documents become tokens by a tokenizer", do)
    if not 2 <= corpus[1] <= LONGEST:
        raise LengthsError(text, f"{corpus[1]} tokens are no sequence", f"Write from 2 to {LONGEST:,}")


def _of_documents(text: str, source: str, longest: int, tokenizer: str | None) -> np.ndarray:
    """As a run cuts them whose `data.overlong` is its default."""
    from fxpar import data  # with torch
    from fxpar.data.cut import cut

    check_lengths(text, tokenizer)
    assert tokenizer is not None
    tokens = data.prepare(data.open_corpus(source), data.load_tokenizer(tokenizer))
    return cut(tokens, longest, "split").lengths.astype(np.int64)


def as_lengths(given: object) -> np.ndarray:
    """Lengths [N] from what `read_lengths` reads (but a corpus), or from the numbers. Raises LengthsError."""
    if isinstance(given, str) and corpus_of(given) is not None:
        why = "it is a corpus, whose documents become tokens by a tokenizer"
        raise LengthsError(given, why, "Give the numbers, such as [len(ids) for ids in documents]")
    if isinstance(given, str):
        return read_lengths(given)
    values = given if isinstance(given, np.ndarray) else list(given) if isinstance(given, Iterable) else given
    return _checked("lengths=", values)


def _values(path: str) -> object:
    try:
        if path.endswith((".npy", ".npz")):
            found = np.load(path, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return found
            if "lengths" not in found:
                why = f"has no array 'lengths', but {', '.join(found) or 'nothing'}"
                raise LengthsError(path, why, "Save it with np.savez(file, lengths=lengths)")
            return found["lengths"]
        content = Path(path).read_text(encoding="utf-8")
        return json.loads(content) if path.endswith(".json") else [_number(word) for word in content.split()]
    except OSError as error:
        raise LengthsError(path, f"cannot be read: {error}", "Write a length in tokens per line") from error
    except (ValueError, EOFError, RecursionError, MemoryError, NotImplementedError, zipfile.BadZipFile) as error:
        kind = Path(path).suffix or "text"
        raise LengthsError(path, f"holds no {kind} of lengths", "Write a length in tokens per line") from error


def _number(word: str) -> int | str:
    """A word of a text as a number, if it is one."""
    return int(word) if _NUMBER.fullmatch(word) else word


def _checked(path: str, values: object) -> np.ndarray:
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise LengthsError(path, f"has an array of {values.dtype} with {values.ndim} dims", _WHOLE)
        found = values
    elif isinstance(values, list):
        found = np.array([_whole(path, number, value) for number, value in enumerate(values, 1)], object)
    else:
        raise LengthsError(path, f"holds a {type(values).__name__}, not a list of lengths", _WHOLE)
    if not len(found):
        raise LengthsError(path, "has no lengths", _WHOLE)
    for wrong in np.flatnonzero((found < 1) | (found > LONGEST))[:1]:
        raise LengthsError(path, f"has {found[wrong]} as length {wrong + 1}", _WHOLE)
    return found.astype(np.int64)


def _whole(path: str, number: int, value: object) -> int:
    try:
        if isinstance(value, bool | float | str):
            raise TypeError
        return int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        why = f"has {repr(value)[:60]} as length {number}"
        raise LengthsError(path, why, _WHOLE) from None


def mini_batches(
    lengths: np.ndarray, tokens: int, count: int | None = None, seed: int = 0
) -> tuple[tuple[int, ...], ...]:
    """`count` mini-batches in a row, as a loader cuts them from sequences in random order: as many as fit into
    `tokens`, at least one. What does not fit any more comes first in the next one: no length is drawn less often.
    Without `count` SAMPLES of them, or as few as have ENOUGH sequences: large ones differ little.
    """
    rng = np.random.default_rng(seed)
    found: list[tuple[int, ...]] = []
    following = int(rng.choice(lengths))
    while not _are_enough(found, count):
        chosen = [following]
        total = following
        while True:
            following = int(rng.choice(lengths))
            if total + following > tokens:
                break
            chosen.append(following)
            total += following
        found.append(tuple(chosen))
    return tuple(found)


def _are_enough(batches: Sequence[Sequence[int]], count: int | None) -> bool:
    if count is not None:
        return len(batches) == count
    return len(batches) == SAMPLES or (len(batches) >= FEWEST and sum(map(len, batches)) >= ENOUGH)


def length_edges(longest: int) -> tuple[int, ...]:
    """Limits that groups may have: powers of two from 32 on and points half-way, up to the longest sequence."""
    edges, at = [], 32
    while at < longest:
        edges += [at] if 3 * at // 2 >= longest else [at, 3 * at // 2]
        at *= 2
    return (*edges, longest)
