"""What a mini-batch consists of: sequences of tokens, or whole batches like the one that was captured."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import sympy
import torch
from torch import Tensor

from fxpar.batching import GroupPlan, MicroBatch
from fxpar.batching.collate import (
    ALIASES,
    check_keys,
    check_present,
    check_sequences,
    collate,
    documents_of,
    valid_tokens,
)
from fxpar.batching.ids import IdLimit, check_ids, id_limits
from fxpar.errors import (
    BatchIdError,
    FxparError,
    LengthMultipleError,
    NoValidTokenError,
    SequenceTooLongError,
    WholeBatchError,
    WholeBatchesError,
    WholeBatchSizeError,
    a_type,
    nearest,
)
from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import TOKEN_NUMBERS, TOKENS, LogicalGraph, TensorMeta, dim_symbol
from fxpar.losses import IGNORE_INDEX
from fxpar.runtime.micro import as_one_sequence, row_of, sequence_length
from fxpar.runtime.padding import pad
from fxpar.tracer.dynamic import BATCH as ROWS

Sequence_ = Tensor | Mapping[str, Tensor]


_UNITS = {TOKENS: "tokens", ROWS: "rows", "": "batches"}


@dataclass(frozen=True)
class Reading(ABC):
    """How the items of a mini-batch become what a program takes. `keys` are what the captured step reads of a batch,
    `id_limits` says which numbers index which tables. Errors name the item, and are the same on all ranks.
    """

    keys: Mapping[str, TensorMeta] = field(default_factory=dict)
    id_limits: Mapping[str, IdLimit] = field(default_factory=dict)

    @property
    @abstractmethod
    def length_dim(self) -> str:
        """The dynamic dim that a length is of; empty if there is none."""

    @property
    def unit(self) -> str:
        """What a length counts: tokens, rows, another dim by its name, or batches of a fixed size."""
        return _UNITS.get(self.length_dim, self.length_dim)

    @abstractmethod
    def check(self, items: Sequence[Sequence_]) -> None:
        """Raise what is wrong with any of them."""

    @abstractmethod
    def check_present(self, items: Sequence[Sequence_], keys: Collection[str]) -> None:
        """Raise an error for the first item that lacks one of these keys."""

    @abstractmethod
    def apart(self, items: Sequence[Sequence_]) -> list[Sequence_]:
        """The documents of which they consist, each as an item."""

    @abstractmethod
    def length(self, item: Sequence_) -> int:
        """What limits of strategies are about."""

    @abstractmethod
    def retold(self, error: LengthMultipleError | SequenceTooLongError) -> FxparError:
        """What the planner says of a length, in terms of what has it."""

    @abstractmethod
    def check_divides(self, program: Program, items: Sequence[Sequence_], indices: Iterable[int]) -> None:
        """Raise an error for the first of these items that a program would have to pad, and may not."""

    @abstractmethod
    def valid(self, items: Sequence[Sequence_]) -> int:
        """What the summed loss of all of them is divided by."""

    @abstractmethod
    def averaged(self, items: Sequence[Sequence_], fewer: int, example: Mapping[str, Tensor] | None) -> int:
        """What the means of all of them divide by on one device, where a mean is over all tokens, with a label or
        without, but for so many `fewer` of a sequence, or of the example if batches are whole.
        """

    @abstractmethod
    def row(self, program: Program, items: Sequence[Sequence_], micro: MicroBatch) -> dict[str, Tensor]:
        """The batch of a micro-batch, padded as the program needs it."""

    @abstractmethod
    def unpadded(self, items: Sequence[Sequence_], micro: MicroBatch, keys: Collection[str]) -> dict[str, Tensor]:
        """The batch of a micro-batch as the user's loss function takes it."""

    def lengths(self, items: Sequence[Sequence_]) -> tuple[int, ...]:
        """Of each."""
        return tuple(map(self.length, items))

    def shortest(self, items: Sequence[Sequence_], group: GroupPlan) -> MicroBatch:
        """The least that a group can run."""
        length, index = min((self.length(items[i]), i) for i in group.sequences)
        return MicroBatch((index,), length)


class TokenRows(Reading):
    """Sequences of tokens, of which a row has one or several (`fxpar.batching.collate`)."""

    length_dim = TOKENS

    def check(self, items: Sequence[Sequence_]) -> None:
        check_sequences(items)
        check_keys(items, self.keys)
        check_ids(items, self.id_limits)

    def check_present(self, items: Sequence[Sequence_], keys: Collection[str]) -> None:
        check_present(items, keys)

    def apart(self, items: Sequence[Sequence_]) -> list[Sequence_]:
        return [part for one in items for part in documents_of(one)]

    def length(self, item: Sequence_) -> int:
        return sequence_length(item)

    def retold(self, error: LengthMultipleError | SequenceTooLongError) -> FxparError:
        return error

    def check_divides(self, program: Program, items: Sequence[Sequence_], indices: Iterable[int]) -> None:
        """Lengths are those of groups, which divide."""

    def valid(self, items: Sequence[Sequence_]) -> int:
        return valid_tokens(items)

    def averaged(self, items: Sequence[Sequence_], fewer: int, example: Mapping[str, Tensor] | None) -> int:
        parts = self.apart(items)
        return sum(self.lengths(parts)) - fewer * len(parts)

    def row(self, program: Program, items: Sequence[Sequence_], micro: MicroBatch) -> dict[str, Tensor]:
        return row_of(program, items, micro)

    def unpadded(self, items: Sequence[Sequence_], micro: MicroBatch, keys: Collection[str]) -> dict[str, Tensor]:
        return collate(items, micro, keys)


class WholeBatches(Reading):
    """Batches as they were captured, images or pairs or text with images, each of which runs alone. Its length is that
    of its dynamic dim (tokens, if it has any, else rows); it counts as many as it has labels other than -100, or rows.
    """

    def check(self, items: Sequence[Sequence_]) -> None:
        if not isinstance(items, list | tuple):
            raise WholeBatchesError(items, self.keys)
        for index, item in enumerate(items):
            self._check(index, item)
        for key, limit in self.id_limits.items():
            for item in items:
                values = item[key]  # type: ignore[index,call-overload]
                bad = values[limit.outside(values)]
                if bad.numel():
                    raise BatchIdError(key, int(bad.reshape(-1)[0]), limit.rows, limit.table)

    def _check(self, index: int, item: Sequence_) -> None:
        if not isinstance(item, Mapping):
            raise WholeBatchError(index, f"is {a_type(item)}; give a mapping with {', '.join(self.keys)}")
        self.check_present([item], self.keys, index)
        sizes: dict[object, tuple[int, str]] = {}
        for key, value in item.items():
            meta = self.keys.get(key)
            if meta is None:
                raise WholeBatchError(index, f"has {key!r}, which the step does not read{nearest(key, self.keys)}")
            if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
                raise WholeBatchError(index, f"has {key!r} as {a_type(value)}; give a dense tensor with values")
            if value.dtype != meta.dtype and not torch.can_cast(value.dtype, meta.dtype):
                raise WholeBatchError(index, f"has {key!r} of {value.dtype}; the captured step reads {meta.dtype}")
            wanted = ", ".join(map(str, meta.shape))
            if value.dim() != len(meta.shape) or any(
                sizes.setdefault(size, (have, key))[0] != have if not isinstance(size, int) else size != have
                for size, have in zip(meta.shape, value.shape, strict=True)
            ):
                why = f"has {key!r} of shape {list(value.shape)}; the captured step reads [{wanted}]"
                how = "where one letter is one size in all of its tensors, and numbers are fixed: `dynamic` of the task"
                raise WholeBatchError(index, f"{why}, {how} names sizes that may differ")
            if not value.numel():
                raise WholeBatchError(index, f"has {key!r} of shape {list(value.shape)}: leave empty batches out")

    def check_present(self, items: Sequence[Sequence_], keys: Collection[str], first: int = 0) -> None:
        for index, item in enumerate(items, first):
            for key in keys:
                if key not in item:
                    has = f"it has {', '.join(item)}" if len(item) else "it is empty"  # type: ignore[arg-type]
                    raise WholeBatchError(index, f"has no {key!r}, which the step reads; {has}")

    def apart(self, items: Sequence[Sequence_]) -> list[Sequence_]:
        return list(items)

    @cached_property
    def _length_at(self) -> tuple[str, str, int] | None:
        """The dynamic dim that is the length, and a key and its dim that have it; None if all sizes are fixed."""
        dynamic = [
            (str(size), key, d)
            for key, meta in self.keys.items()
            for d, size in enumerate(meta.shape)
            if isinstance(size, sympy.Symbol)
        ]
        return min(dynamic, key=lambda one: one[0] != TOKENS) if dynamic else None

    @property
    def length_dim(self) -> str:
        return self._length_at[0] if self._length_at else ""

    def length(self, item: Sequence_) -> int:
        if self._length_at is None:
            return 1
        _, key, d = self._length_at
        return item[key].shape[d]  # type: ignore[index,call-overload]

    def retold(self, error: LengthMultipleError | SequenceTooLongError) -> FxparError:
        if self._length_at is None:
            return error
        name, key, dim = self._length_at
        return WholeBatchSizeError(error.index, key, dim, name, error.length, error.allowed)

    def check_divides(self, program: Program, items: Sequence[Sequence_], indices: Iterable[int]) -> None:
        """Its length divides, as those of groups do; another one of its sizes may not."""
        if not program.padding_hazard:
            return
        for index, (key, meta) in itertools.product(indices, self.keys.items()):
            for d, size in enumerate(meta.shape):
                have, multiple = items[index][key].shape[d], program.divisors.get(str(size), 1)  # type: ignore[index,call-overload]
                if have % multiple:
                    allowed = f"the model would see padding, so it must be a multiple of {multiple}"
                    allowed += f" ({str(program.strategy)!r})"
                    raise WholeBatchSizeError(index, key, d, str(size), have, allowed)

    def valid(self, items: Sequence[Sequence_]) -> int:
        count = sum(_rows(item) if "labels" not in self.keys else _labels(item) for item in items)  # type: ignore[arg-type]
        if items and not count:
            raise NoValidTokenError(len(items))
        return count

    def averaged(self, items: Sequence[Sequence_], fewer: int, example: Mapping[str, Tensor] | None) -> int:
        if "labels" not in self.keys or example is None:  # rows count
            return self.valid(items)
        labels: list[Tensor] = [item["labels"] for item in items]  # type: ignore[index,call-overload]
        return sum(one.numel() - fewer * _rows({"": one}) // _rows({"": example["labels"]}) for one in labels)

    def row(self, program: Program, items: Sequence[Sequence_], micro: MicroBatch) -> dict[str, Tensor]:
        (index,) = micro.sequences
        return pad(program, as_one_sequence(program.inputs, items[index], index))  # type: ignore[arg-type]

    def unpadded(self, items: Sequence[Sequence_], micro: MicroBatch, keys: Collection[str]) -> dict[str, Tensor]:
        (index,) = micro.sequences
        return {key: items[index][key] for key in keys}  # type: ignore[index,call-overload]


def _labels(item: Mapping[str, Tensor]) -> int:
    return int((item["labels"] != IGNORE_INDEX).sum())


def _rows(item: Mapping[str, Tensor]) -> int:
    return next((value.shape[0] for value in item.values() if value.dim()), 1)


def is_row_of_tokens(logical: LogicalGraph) -> bool:
    """Whether what a step takes is one row of tokens, and nothing that has no part for each token: a row of which
    `train_step` makes others.
    """
    token = dim_symbol(TOKENS)
    shapes = {info.fqn: info.meta.shape for info in logical.inputs if info.kind == "batch"}
    ids = any(ALIASES.get(key, key) == "input_ids" for key in shapes)
    return ids and all(shape[:2] == (1, token) or shape[:1] == (token,) for shape in shapes.values())


def reading_of(logical: LogicalGraph, *, of_task: bool) -> Reading:
    """How the mini-batches of a captured step are read: a task's may be whole batches."""
    placed = zip(logical.placeholders, logical.inputs, strict=True)
    read = {info.fqn: info.meta for node, info in placed if info.kind == "batch" and node.users}
    read.pop(TOKEN_NUMBERS, None)
    if of_task and not is_row_of_tokens(logical):
        return WholeBatches(read, id_limits(logical, {}))
    return TokenRows(read, id_limits(logical))
