"""From the [data] section to a loader: one rank of a machine prepares, the others open what it left in the cache."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fxpar import data
from fxpar.checkpoint.weights import TOKENIZER
from fxpar.data import LengthHistogram, MiniBatchLoader, Tokens
from fxpar.data.sources import kind_of
from fxpar.data.tokenizer import END_TOKEN, copy_tokenizer
from fxpar.errors import OutputError
from fxpar.train.config import DataConfig, TrainConfig

# Data is prepared once per machine; a large corpus takes longer than any step.
_PREPARE_LIMIT = timedelta(hours=12)


@dataclass(frozen=True)
class Prepared:
    """What the other ranks need to know; `lines` are reports for the user."""

    folder: str
    tokenizer: str
    vocab_size: int
    lines: tuple[str, ...]

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Prepared:
        found = json.loads(text)
        return cls(found["folder"], found["tokenizer"], found["vocab_size"], tuple(found["lines"]))


NOTHING = Prepared("", "", 0, ())
"""Of tasks, which have no text."""


def prepare_once(config: DataConfig, local_rank: int, progress: Callable[[str], object]) -> Prepared:
    """One rank of each machine prepares, the others of that machine wait for it. Raises as `prepare` does."""
    group = dist.group.WORLD
    assert group is not None
    store = dist.PrefixStore("fxpar-data", group.get_group_store())
    key = f"machine/{os.environ.get('GROUP_RANK', '0')}"
    if local_rank == 0:
        prepared = prepare(config, progress)
        store.set(key, prepared.to_text())
        return prepared
    store.wait([key], _PREPARE_LIMIT)
    return Prepared.from_text(store.get(key))


def prepare(config: DataConfig, progress: Callable[[str], object]) -> Prepared:
    """Read the corpus, train or load the tokenizer, tokenise; each only if the cache has it not.

    Raises what `fxpar.data` raises for a corpus, a tokenizer or a cache folder that cannot be used.
    """
    progress("reading the corpus")
    corpus = open_corpus(config)
    if config.tokenizer is not None:
        tokenizer = data.load_tokenizer(config.tokenizer, end_token=config.end_token)
    else:
        progress(f"byte-pair tokenizer of {config.vocab:,} tokens")
        tokenizer = data.train_tokenizer(corpus, config.vocab, cache_dir=config.cache)
    progress("tokens")
    tokens = data.prepare(corpus, tokenizer, cache_dir=config.cache)
    assert tokens.folder is not None
    few = config.tokenizer is None and tokenizer.vocab_size < config.vocab
    note = f", as many as this corpus gives (data.vocab = {config.vocab:,})" * few
    lines = (*corpus.report.lines(), f"tokenizer of {tokenizer.vocab_size:,} tokens{note}: {tokenizer.name}")
    return Prepared(str(Path(tokens.folder).resolve()), tokenizer.name, tokenizer.vocab_size, lines)


def keep_tokenizer(prepared: Prepared, config: TrainConfig) -> None:
    """Put the tokenizer beside the checkpoints, where `export_checkpoint` finds it. Raises OutputError."""
    folder = config.checkpoints / TOKENIZER
    end = config.data.end_token if config.data.tokenizer is not None else END_TOKEN
    try:
        copy_tokenizer(prepared.tokenizer, folder, end)
    except OSError as error:
        raise OutputError(str(folder), error) from error


def open_corpus(config: DataConfig) -> data.Corpus:
    """Raises the errors of `fxpar.data.open_corpus`."""
    kind = None if config.kind == "auto" else config.kind
    options: dict[str, Any] = {"glob": config.glob, "unit": config.unit}
    if config.text is not None:
        guessed = kind or kind_of(Path(config.source).expanduser(), config.glob)
        options["field" if guessed == "jsonl" else "column"] = config.text
    return data.open_corpus(config.source, kind=kind, **options)


def open_tokens(prepared: Prepared, validation: int) -> tuple[Tokens, Tokens]:
    """(training, validation). Raises DataCacheError, HeldOutError."""
    return data.load(prepared.folder).hold_out(validation)


def make_loader(tokens: Tokens, config: TrainConfig, vocab_size: int) -> MiniBatchLoader:
    """Mini-batches without end, of ids below `vocab_size`. Raises OverlongError, NoSequencesError."""
    return MiniBatchLoader(
        tokens,
        max_length=config.max_length,
        batch_tokens=config.data.batch_tokens,
        batch_sequences=config.data.batch_sequences,
        overlong=config.data.overlong,
        length_multiple=config.engine.length_multiple,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        vocab_size=vocab_size,
        drop_last=config.data.drop_last,
    )


def describe(loader: MiniBatchLoader) -> Iterator[str]:
    """What became of long documents, and how long the sequences are."""
    yield from loader.report.lines()
    yield from LengthHistogram.of(loader.lengths).distribution()


def held_out_sequences(tokens: Tokens, config: TrainConfig) -> list[torch.Tensor]:
    """All sequences of the validation documents, cut as those of training are."""
    if not config.data.validation:
        return []
    loader = MiniBatchLoader(
        tokens,
        max_length=config.max_length,
        batch_sequences=1,
        overlong=config.data.overlong,
        length_multiple=config.engine.length_multiple,
        seed=config.run.seed,
        shuffle=False,
        epochs=1,
    )
    return [sequence for batch in loader for sequence in batch]
