"""From sequences to the tensors of one micro-batch: one packed row, with boundaries that attention and loss respect."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from fxpar.batching.plan import MicroBatch
from fxpar.errors import (
    BatchKeyError,
    DenominatorError,
    MiniBatchError,
    NoValidTokenError,
    SequenceError,
    UnmarkedDocumentsError,
    UnreadKeyError,
    a_type,
)
from fxpar.ir.graph import IS_TOKEN, TensorMeta
from fxpar.losses import IGNORE_INDEX, next_token_labels

Tokens = Tensor | Mapping[str, Tensor]
Columns = dict[str, Tensor]

# Batch keys that other frameworks use -> the key that is meant.
ALIASES = {"tokens": "input_ids", "targets": "labels", "target": "labels", "positions": "position_ids"}
_MARKERS = {"position_ids", "document_ids", "document_positions"}
_MORE_THAN_CHANCE = 16  # labels
_WITHOUT_TOKENS = (
    "train_step and evaluate take sequences of token ids; a model without tokens is a task, "
    "fxpar.parallelize(tasks=...), or trained by plain calls: model(x), then backward() on its loss"
)


def check_sequences(sequences: Sequence[Tokens]) -> tuple[int, ...]:
    """Lengths of the sequences in tokens.

    A sequence is a tensor [T] of token ids, or a mapping with "input_ids" [T] and further tensors [T, ...]: "labels"
    (aligned: what each position must predict, -100 where nothing), "position_ids" and "document_ids" (if it consists of
    several documents already), and any other key of the graph.

    Raises MiniBatchError for what is no list of sequences, SequenceError with the index of the first bad sequence.
    """
    if not isinstance(sequences, list | tuple):
        raise MiniBatchError(sequences)
    found = [_columns(i, sequence) for i, sequence in enumerate(sequences)]
    _check_devices(found)
    return tuple(columns["input_ids"].shape[0] for columns in found)


def _check_devices(sequences: Sequence[Columns]) -> None:
    """Raise SequenceError for a tensor that lies elsewhere than those before it: a row is made of them."""
    known: dict[str, torch.device] = {}
    for index, columns in enumerate(sequences):
        for key, value in columns.items():
            first = known.setdefault(key, value.device)
            if value.device != first:
                raise SequenceError(index, f"has {key!r} on {value.device}, those before it on {first}; move it there")


def check_keys(sequences: Sequence[Tokens], read: Mapping[str, TensorMeta]) -> None:
    """Is there what a step reads of a batch, in a form that it can read, and nothing else? `read` are its keys, whose
    shapes begin with [1, T]. Asked of all sequences on all ranks: an error of one rank alone would leave the others.

    Let pass are keys that change nothing: labels and documents, which fxpar reads itself; positions as it counts them;
    an attention mask without a zero. `sequences` are what `check_sequences` lets pass.

    Raises UnreadKeyError, BatchKeyError (a key is not there), SequenceError (it has another shape or kind of number, a
    value that the captured dtype cannot hold, positions that jump).
    """
    known = {ALIASES.get(key, key) for key in read} | {"input_ids", "labels", "document_ids", "document_positions"}
    for index, sequence in enumerate(sequences):
        for key, value in {} if isinstance(sequence, Tensor) else sequence.items():
            meant = ALIASES.get(key, key)
            if meant in known or (meant == "attention_mask" and bool((value != 0).all())):
                continue
            if meant != "position_ids" or not torch.equal(value, _within(_columns(index, sequence)).to(value.dtype)):
                hidden = int((value == 0).sum()) if meant == "attention_mask" and value.dim() == 1 else 0
                raise UnreadKeyError(key, index, sorted(read), hidden)
        if not isinstance(sequence, Tensor) and "document_ids" not in sequence:
            for key in {"position_ids", "positions"} & sequence.keys():
                _check_jumps(index, sequence[key])
    check_present(sequences, read)
    for key in not_made(read):
        for index, sequence in enumerate(sequences):
            _check_fit(index, key, sequence[key], read[key])  # type: ignore[index]
    dtypes = {ALIASES.get(key, key): meta.dtype for key, meta in read.items()}
    for index, sequence in enumerate(sequences):
        for key, value in {"input_ids": sequence}.items() if isinstance(sequence, Tensor) else sequence.items():
            dtype = dtypes.get(ALIASES.get(key, key), value.dtype)
            if value.dtype != dtype:
                _check_values(index, key, value, dtype)


def are_inputs_again(sequences: Sequence[Tokens]) -> bool:
    """Whether all labels that a mini-batch gives are the token at their own place, and not the next one: aligned labels
    never are, but for a text of one word, so somebody did not shift them. A few labels may be so by chance.
    """
    count, shifted = 0, True
    for index, sequence in enumerate(sequences):
        columns = _columns(index, sequence)
        ids, labels = columns["input_ids"], columns.get("labels")
        if labels is None:
            return False
        valid = labels != IGNORE_INDEX
        if bool((valid & (labels != ids)).any()):
            return False
        count += int(valid.sum())
        shifted = shifted and not bool((valid[:-1] & (labels[:-1] != ids[1:])).any())
    return count >= _MORE_THAN_CHANCE and not shifted


def check_present(sequences: Sequence[Tokens], keys: Collection[str]) -> None:
    """Raise BatchKeyError for the first sequence that lacks a key which `collate` cannot make."""
    for key in not_made(keys):
        for index, sequence in enumerate(sequences):
            if isinstance(sequence, Tensor) or key not in sequence:
                tokens = "input_ids" in [ALIASES.get(one, one) for one in keys]
                raise BatchKeyError(key, index, sorted(_columns(index, sequence)), tokens)


def not_made(keys: Collection[str]) -> list[str]:
    """Those that a sequence must bring, as `collate` cannot make them from token ids."""
    return [key for key in keys if ALIASES.get(key, key) not in _MADE]


def _check_fit(index: int, key: str, value: Tensor, meta: TensorMeta) -> None:
    given, more = value.shape[1:], meta.shape[2:]
    if len(given) != len(more) or any(isinstance(b, int) and a != b for a, b in zip(given, more, strict=True)):
        wanted = ", ".join(["T", *map(str, more)])
        raise SequenceError(index, f"has {key!r} of shape {list(value.shape)}; the captured step reads [{wanted}]")
    if not torch.can_cast(value.dtype, meta.dtype):
        raise SequenceError(index, f"has {key!r} of {value.dtype}; the captured step reads {meta.dtype}")


def _check_values(index: int, key: str, value: Tensor, dtype: torch.dtype) -> None:
    """Raise SequenceError for a value that does not survive the conversion to `dtype`."""
    lost = _lost(value, dtype).nonzero()
    if len(lost):
        at = tuple(lost[0].tolist())
        raise SequenceError(
            index,
            f"has {key!r} with {value[at].item()} at {list(at)}; the captured step reads {dtype}, which cannot hold it",
        )


def _lost(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Which values `dtype` cannot hold: whole numbers that would change, others that would become infinite."""
    found = value.to(dtype)
    if value.is_floating_point() or value.is_complex():
        return value.isfinite() & ~found.isfinite()
    before, after = value.long(), (found.real if found.is_complex() else found).long()
    changed = before != after
    # Only between int64 and uint64 both are the same bits.
    return changed | (before < 0) if torch.uint64 in (value.dtype, dtype) else changed


def check_denominator(given: float | None) -> None:
    """Raise DenominatorError for what the summed loss of a mini-batch cannot be divided by."""
    if given is not None and (
        isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < float("inf")
    ):
        raise DenominatorError(given)


def valid_tokens(sequences: Sequence[Tokens]) -> int:
    """Labels that are not -100 in the whole mini-batch: 1/this is the scale of every token's loss.

    A sequence without labels of its own predicts its next tokens, so one of a single token has none.
    Raises SequenceError, NoValidTokenError.
    """
    count = sum(_valid(_columns(i, sequence)) for i, sequence in enumerate(sequences))
    if not count:
        raise NoValidTokenError(len(sequences))
    return count


def collate(sequences: Sequence[Tokens], micro: MicroBatch, keys: Collection[str]) -> dict[str, Tensor]:
    """The sequences of `micro` as one packed row, with the `keys` that the graph asks for, each [1, T].

    Always there to be asked for: input_ids, labels (the next token inside of a document, -100 at its last one; or
    those that the sequence brings), position_ids (from 0 in each document), document_ids (from 1), is_token (1, and 0
    at what is padding later), all int64, also under the names in ALIASES. Any other key is the concatenation of what
    the sequences have under it.

    Raises SequenceError, BatchKeyError (a key that a sequence lacks), UnmarkedDocumentsError (several sequences for a
    graph that asks for neither positions nor documents: attention would cross the boundary).
    """
    wanted = {key: ALIASES.get(key, key) for key in keys}
    columns = [_columns(i, sequences[i]) for i in micro.sequences]
    if len(columns) > 1 and not _MARKERS & set(wanted.values()):
        raise UnmarkedDocumentsError(keys)
    rows: dict[str, Tensor] = {}
    for key, meant in wanted.items():
        if meant not in rows:
            make = _MADE.get(meant)
            rows[meant] = make(columns) if make else _joined(key, columns, micro.sequences)
    return {key: rows[meant][None] for key, meant in wanted.items()}


def documents_of(sequence: Tokens) -> list[Tokens]:
    """The documents of a sequence, each as a sequence; the sequence itself if it is one document."""
    columns = _columns(0, sequence)
    begins = torch.nonzero(_begins(columns)).flatten().tolist()
    if len(begins) == 1:
        return [sequence]
    ends = [*begins[1:], columns["input_ids"].shape[0]]
    return [{key: value[a:b] for key, value in columns.items()} for a, b in zip(begins, ends, strict=True)]


def _columns(index: int, sequence: Tokens) -> Columns:
    """A sequence as checked tensors by key."""
    given = {"input_ids": sequence} if isinstance(sequence, Tensor) else sequence
    if not isinstance(given, Mapping):
        raise SequenceError(index, f"is {a_type(given)}; give a tensor [T] or a mapping of tensors")
    columns: Columns = {}
    for key, value in given.items():
        meant = ALIASES.get(key, key)
        if meant in columns:
            raise SequenceError(index, f"has {meant!r} twice, the second time as {key!r}")
        if not isinstance(value, Tensor):
            raise SequenceError(index, f"has {key!r} as {a_type(value)}; give a tensor")
        if value.layout != torch.strided or value.is_meta:
            kind = "on the meta device" if value.is_meta else f"of layout {value.layout}"
            raise SequenceError(index, f"has {key!r} {kind}; give a dense tensor with values")
        # As int64, for torch takes -100 for 156 where it compares it with bytes.
        columns[meant] = value.long() if meant in _MADE and is_whole(value.dtype) else value
    if "input_ids" not in columns:
        raise SequenceError(
            index,
            f"has no 'input_ids' (or 'tokens'); it has {sorted(columns)}. {_WITHOUT_TOKENS}",
        )
    _check_columns(index, columns)
    return columns


def _check_columns(index: int, columns: Columns) -> None:
    length = columns["input_ids"].shape[:1].numel()
    for key, value in columns.items():
        if key in _MADE and not is_whole(value.dtype):
            images = f". {_WITHOUT_TOKENS}" if key == "input_ids" else ""
            raise SequenceError(index, f"has {key!r} of {value.dtype}; it needs integers{images}")
        if key in _MADE and value.dim() != 1:
            raise SequenceError(index, f"has {key!r} of shape {list(value.shape)}; it needs one dim, [T]")
        if key == "input_ids" and not length:
            raise SequenceError(index, "is empty; drop it before the step")
        if value.dim() == 0 or value.shape[0] != length:
            raise SequenceError(index, f"has {key!r} of shape {list(value.shape)} for {length} tokens")
    documents = columns.get("document_ids")
    if documents is not None and int(_changes(documents).sum()) != documents.unique().numel():
        raise SequenceError(
            index, "has 'document_ids' of which one comes back after another: keep documents in one piece"
        )
    positions = columns.get("position_ids")
    if positions is not None and documents is None and positions[0] != 0:
        raise SequenceError(index, f"has 'position_ids' that start at {int(positions[0])}; they start at 0")


def _check_jumps(index: int, positions: Tensor) -> None:
    """Of a sequence that does not say which documents it has. Where positions jump transformers begins another one."""
    jumps = ((positions[1:] - positions[:-1] != 1) & (positions[1:] != 0)).nonzero()
    if len(jumps):
        at = int(jumps[0]) + 1
        raise SequenceError(
            index,
            f"has 'position_ids' that go from {int(positions[at - 1])} to {int(positions[at])} at token {at}: does a "
            "document begin there? Mark them by 'document_ids', or count up by 1, from 0 in each",
        )


def is_whole(dtype: torch.dtype) -> bool:
    """Whether it is one of integers."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _valid(columns: Columns) -> int:
    labels = columns.get("labels")
    if labels is not None:
        return int((labels != IGNORE_INDEX).sum())
    if len(columns) == 1:
        return columns["input_ids"].shape[0] - 1
    return int((_labels([columns]) != IGNORE_INDEX).sum())


def _tokens(columns: Sequence[Columns]) -> Tensor:
    return torch.cat([c["input_ids"] for c in columns])


def _positions(columns: Sequence[Columns]) -> Tensor:
    return torch.cat([_positions_of(c) for c in columns])


def _positions_of(columns: Columns) -> Tensor:
    return columns["position_ids"] if "position_ids" in columns else _within(columns)


def _within(columns: Columns) -> Tensor:
    """How many tokens of its document are before each token [T]."""
    ids = columns["input_ids"]
    index = torch.arange(ids.shape[0], device=ids.device)
    return index - torch.where(_begins(columns), index, 0).cummax(0).values


def _documents(columns: Sequence[Columns]) -> Tensor:
    """Ids [T] that count the documents of the row from 1."""
    rows, count = [], 0
    for one in columns:
        ids = _begins(one).cumsum(0)
        rows.append(ids + count)
        count += int(ids.max())
    return torch.cat(rows)


def _begins(columns: Columns) -> Tensor:
    """Whether each token [T] is the first one of a document."""
    if "document_ids" in columns:
        return _changes(columns["document_ids"])
    if "position_ids" in columns:
        return columns["position_ids"] == 0
    ids = columns["input_ids"]
    begins = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    begins[0] = True
    return begins


def _changes(ids: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(ids[:1], dtype=torch.bool), ids[1:] != ids[:-1]])


def _labels(columns: Sequence[Columns]) -> Tensor:
    row = next_token_labels(_tokens(columns), document_ids=_documents(columns))
    start = 0
    for one in columns:
        stop = start + one["input_ids"].shape[0]
        if "labels" in one:
            row[start:stop] = one["labels"]
        start = stop
    return row


def _joined(key: str, columns: Sequence[Columns], indices: Sequence[int]) -> Tensor:
    for index, one in zip(indices, columns, strict=True):
        if key not in one:
            raise BatchKeyError(key, index, sorted(one))
    return torch.cat([one[key] for one in columns])


_MADE: dict[str, Callable[[Sequence[Columns]], Tensor]] = {
    "input_ids": _tokens,
    "labels": _labels,
    "position_ids": _positions,
    "document_ids": _documents,
    "document_positions": lambda columns: torch.cat([_within(c) for c in columns]),
    IS_TOKEN: lambda columns: torch.cat([c.get(IS_TOKEN, torch.ones_like(c["input_ids"])) for c in columns]),
}
