"""Mini-batches of token sequences: the same on every rank, and exactly resumable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fxpar.data.cut import CutReport, Overlong, cut
from fxpar.data.tokens import Tokens
from fxpar.errors import LoaderOptionError, LoaderStateError, TokenIdError

_FORMAT = 1
OLDER_STATES = {"length_multiple": 1}  # what states of earlier versions do not say


class MiniBatchLoader:
    """Iterates over mini-batches: lists of int64 [T_i] tensors, of any lengths from 2 to `max_length` that
    are multiples of `length_multiple`.

    A mini-batch is global and every rank gets the same one without communication: the order of an epoch is drawn from
    (seed, epoch) alone. Its budget is either `batch_tokens` (as many sequences as fit, at least one, even a longer one)
    or `batch_sequences`. It never spans two epochs, so the last one of an epoch may be smaller: with `drop_last`
    an epoch ends before it, unless it is the only one. Without `epochs` the loader goes on for ever. With `vocab_size`
    no id is that large or negative.

    The loader is its own iterator: a second `for` goes on where the first one stopped. `state_dict` taken after a
    mini-batch resumes with the next one, on any number of ranks and with another budget or `drop_last`.

    Raises LoaderOptionError, OverlongError (overlong="error"), NoSequencesError; a mini-batch raises TokenIdError.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        max_length: int,
        batch_tokens: int | None = None,
        batch_sequences: int | None = None,
        overlong: Overlong = "split",
        length_multiple: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        vocab_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if (batch_tokens is None) == (batch_sequences is None):
            raise LoaderOptionError("give the size of a mini-batch as one of batch_tokens and batch_sequences")
        for name, value, least in (
            ("batch_tokens", batch_tokens, 1),
            ("batch_sequences", batch_sequences, 1),
            ("epochs", epochs, 1),
            ("vocab_size", vocab_size, 1),
            ("length_multiple", length_multiple, 1),
            ("seed", seed, 0),
        ):
            if value is not None and value < least:
                raise LoaderOptionError(f"{name} {value} is too small: it is at least {least}")
        self._sequences = cut(tokens, max_length, overlong, length_multiple)
        self._flat = tokens.flat
        self._batch_tokens = batch_tokens
        self._batch_sequences = batch_sequences
        self._vocab_size = vocab_size
        self._drop_last = drop_last
        self._seed, self._shuffle, self._epochs = seed, shuffle, epochs
        self._fingerprint: dict[str, str | int | bool] = {
            **tokens.identity,
            "max_length": max_length,
            "overlong": overlong,
            "length_multiple": length_multiple,
            "seed": seed,
            "shuffle": shuffle,
        }
        self._epoch, self._position = 0, 0
        self._order_epoch, self._order = -1, np.zeros(0, dtype=np.int64)

    @property
    def report(self) -> CutReport:
        """What became of overlong and short documents."""
        return self._sequences.report

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence of an epoch, in the order of the documents: int64 [N]."""
        return self._sequences.lengths

    @property
    def epoch(self) -> int:
        """The epoch that the next mini-batch comes from, from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """How many sequences of this epoch have been given out."""
        return self._position

    def __iter__(self) -> MiniBatchLoader:
        return self

    def __next__(self) -> list[torch.Tensor]:
        if self._epochs is not None and self._epoch >= self._epochs:
            raise StopIteration
        order = self._epoch_order()
        chosen = order[self._position : self._batch_end(order)]
        sequences = [self._sequence(index) for index in chosen]
        self._check_ids(sequences)
        self._position += len(chosen)
        self._end_epoch(order)
        return sequences

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: a few numbers and short strings that JSON can hold."""
        return {
            "format": _FORMAT,
            "epoch": self._epoch,
            "position": self._position,
            "fingerprint": dict(self._fingerprint),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises LoaderStateError if it was taken on another corpus, tokenizer or selection of documents, or with other
        settings than this loader's; it says which. `batch_tokens`, `batch_sequences`, `drop_last` and
        `epochs` may differ.
        """
        try:
            form, epoch, position = (_integer(state[key]) for key in ("format", "epoch", "position"))
            saved = {**OLDER_STATES, **state["fingerprint"]}
        except (KeyError, TypeError, ValueError) as error:
            raise LoaderStateError(f"it is not a state of a loader ({error!r})") from error
        if form != _FORMAT:
            raise LoaderStateError(f"its format is {form}, this version reads {_FORMAT}")
        now = self._fingerprint
        differing = [key for key in {**now, **saved} if saved.get(key) != now.get(key)]
        if differing:
            each = "; ".join(f"{key} was {saved.get(key)!r} and is {now.get(key)!r}" for key in differing)
            advice = "Use the files, tokenizer and data settings of the run that saved it, or start a new run"
            raise LoaderStateError(f"it belongs to other data: {each}. {advice}")
        if epoch < 0 or not 0 <= position < len(self.lengths):
            raise LoaderStateError(f"epoch {epoch}, position {position} of {len(self.lengths)} does not exist")
        self._epoch, self._position = epoch, position
        self._end_epoch(self._epoch_order())

    def _end_epoch(self, order: np.ndarray) -> None:
        """Go to the next epoch where nothing is left of this one, or (`drop_last`) too little for a mini-batch."""
        left = order[self._position :]
        if not len(left) or (self._drop_last and self._position and self._is_too_little(left)):
            self._epoch, self._position = self._epoch + 1, 0

    def _is_too_little(self, left: np.ndarray) -> bool:
        if self._batch_sequences is not None:
            return len(left) < self._batch_sequences
        assert self._batch_tokens is not None
        return int(self.lengths[left[: self._batch_tokens // 2 + 1]].sum()) < self._batch_tokens

    def _check_ids(self, sequences: list[torch.Tensor]) -> None:
        size = self._vocab_size
        if size is None:
            return
        low, high = torch.aminmax(torch.cat(sequences))
        if int(low) >= 0 and int(high) < size:
            return
        index, bad = next((i, b) for i, ids in enumerate(sequences) if (b := (ids < 0) | (ids >= size)).any())
        position = int(bad.nonzero()[0])
        value = int(sequences[index][position])
        raise TokenIdError(index, position, "input_ids", value, size, "the vocabulary")

    def _batch_end(self, order: np.ndarray) -> int:
        if self._batch_sequences is not None:
            return self._position + self._batch_sequences
        assert self._batch_tokens is not None
        # Every sequence has two tokens, so no more than this many fit.
        window = order[self._position : self._position + self._batch_tokens // 2 + 1]
        fitting = np.searchsorted(np.cumsum(self.lengths[window]), self._batch_tokens, side="right")
        return self._position + max(int(fitting), 1)

    def _epoch_order(self) -> np.ndarray:
        """The sequences of this epoch in their order: int64 [N]."""
        if self._order_epoch != self._epoch:
            count = len(self.lengths)
            if self._shuffle:
                # Raw bits and a stable sort: numpy promises those for ever, but not its shuffle.
                bits = np.random.Philox(np.random.SeedSequence([self._seed, self._epoch]))
                self._order = np.argsort(bits.random_raw(count), kind="stable")
            else:
                self._order = np.arange(count)
            self._order_epoch = self._epoch
        return self._order

    def _sequence(self, index: np.int64) -> torch.Tensor:
        start = self._sequences.starts[index]
        return torch.from_numpy(self._flat[start : start + self.lengths[index]].astype(np.int64))


def _integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a whole number")
    return value
