"""Tokens of given sequences, without a file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from fxpar.data.tokens import Tokens, name_key


def in_memory(documents: Iterable[Sequence[int]], names: Sequence[str] | None = None) -> Tokens:
    """Named by their number unless `names` are given."""
    arrays = [np.asarray(document, dtype=np.int64) for document in documents]
    flat = np.concatenate([np.zeros(0, dtype=np.int64), *arrays])
    offsets = np.cumsum([0, *(len(one) for one in arrays)], dtype=np.int64)
    labels = [str(i) for i in range(len(arrays))] if names is None else list(names)
    content = hashlib.sha256(flat.astype("<i8").tobytes() + offsets.astype("<i8").tobytes()).hexdigest()
    keys = np.array([name_key(name) for name in labels], dtype=np.uint64)
    identity = {"corpus": content[:16], "tokenizer": "none"}
    return Tokens(flat, offsets, np.arange(len(arrays)), keys, identity, labels.__getitem__)
