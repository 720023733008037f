"""Mini-batches of torchtitan's datasets: drawn by one rank of each node, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxpar.checkpoint.metadata import check_plain_pickle
from fxpar.errors import DataRanksError, UnsupportedRecipeError
from fxpar.losses import IGNORE_INDEX
from fxpar.recipes.documents import Documents, split_rows
from fxpar.recipes.node import Node
from fxpar.recipes.torchtitan_api import BaseDataLoader, BaseTokenizer

K = TypeVar("K")
V = TypeVar("V")


class SharedLoaders:
    """`count` loaders of torchtitan. Each belongs to one rank of the node, which builds it, draws from it, and gives
    what it has drawn to the others; nodes draw alike, without a word between them. All ranks call each method alike.
    """

    def __init__(self, build: Callable[[int], Any], count: int) -> None:
        self.node = Node()
        self.count = count
        self.owners = range(min(count, len(self.node.ranks)))  # places in the node
        self.mine: dict[int, Any] = {}

        def build_mine() -> None:
            for number in range(self.node.place, count, len(self.node.ranks)):
                self.mine[number] = build(number)

        self.node.shared(self.owners, build_mine)

    def steps(self, turns: int) -> Iterator[list[Documents | None]]:
        """The documents of `turns` batches of each loader, in the order in which torchtitan's ranks would take them;
        None for a batch that there is no more.
        """
        sources = {number: iter(loader) for number, loader in self.mine.items()}

        def draw() -> dict[int, list[Documents | None]]:
            return {number: [_next(source) for _ in range(turns)] for number, source in sources.items()}

        while True:
            drawn = _joined(self.node.shared(self.owners, draw))
            yield [drawn[number][turn] for turn in range(turns) for number in range(self.count)]

    def state_dict(self) -> dict[str, Any]:
        """That of all loaders together, on every rank."""

        def states() -> dict[str, Any]:
            return _joined([loader.state_dict() for loader in self.mine.values()])

        return _joined(self.node.shared(self.owners, states))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for loader in self.mine.values():
            loader.load_state_dict(state)


def _joined(parts: Iterable[dict[K, V]]) -> dict[K, V]:
    return {key: value for part in parts for key, value in part.items()}


def _next(source: Iterator[tuple[dict[str, Tensor], Tensor]]) -> Documents | None:
    batch = next(source, None)
    return None if batch is None else split_rows(*batch)


class LengthGroupedDataLoader(BaseDataLoader):
    """One item per training step: the documents of the whole mini-batch, the same on every rank.

    Rows come from the recipe's own loader, so documents, packing and labels are torchtitan's; the engine groups the
    documents by length. The state is the place in the data: it does not depend on strategies or on the number of ranks,
    and has the keys of torchtitan's loader. With `data_ranks` = n rows are drawn as n data-parallel ranks of torchtitan
    would together, each from its part of the data: for going on from their checkpoint, or for comparing with them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        inner: BaseDataLoader.Config = field(default_factory=BaseDataLoader.Config)
        """The recipe's loader."""

        rows: int = 1
        """Rows of one batch of the recipe's loader (training.local_batch_size)."""

        data_ranks: int = 1
        """Data-parallel ranks of torchtitan that the data is drawn as."""

    def __init__(
        self,
        config: Config,
        *,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = 1,
        **_: Any,
    ) -> None:
        each = config.rows * config.data_ranks
        if local_batch_size % each:
            raise UnsupportedRecipeError(
                "training.global_batch_size",
                f"{local_batch_size} rows are not a multiple of training.local_batch_size ({config.rows}) times "
                f"fxpar.data_ranks ({config.data_ranks})",
                f"Set it to a multiple of {each}",
            )
        self.turns = turns = local_batch_size // each
        self.data_ranks = config.data_ranks

        def build(rank: int) -> BaseDataLoader:
            return config.inner.build(
                dp_world_size=config.data_ranks,
                dp_rank=rank,
                tokenizer=tokenizer,
                seq_len=seq_len,
                local_batch_size=config.rows,
                snapshot_every_n_steps=snapshot_every_n_steps and snapshot_every_n_steps * turns,
            )

        self.loaders = SharedLoaders(build, config.data_ranks)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """{"documents": Documents} and the stand-in for labels of `counted`. What torchtitan copies to the device of
        that is a byte per place: tokens stay here until a rank takes its own.
        """
        for batches in self.loaders.steps(self.turns):
            drawn = [batch for batch in batches if batch is not None]
            if len(drawn) < len(batches):
                return
            documents = Documents.joined(drawn)
            yield {"documents": documents}, counted(documents)

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank; all ranks call it."""
        return self.loaders.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises DataRanksError for the state of a loader with another number of data-parallel ranks,
        pickle.UnpicklingError for one that names a class or a function: torchtitan's loader unpickles it.
        """
        saved = state_dict.get("world_size", self.data_ranks)
        if saved != self.data_ranks:
            raise DataRanksError(saved, self.data_ranks)
        for key, value in state_dict.items():
            if isinstance(value, bytes):
                check_plain_pickle(value, f"the place in the data ({key})")
        self.loaders.load_state_dict(state_dict)


def counted(documents: Documents) -> Tensor:
    """What torchtitan's trainer counts in labels and no more, int8 [places]: 0 for each valid token, else -100."""
    labels = torch.full((documents.places,), IGNORE_INDEX, dtype=torch.int8)
    labels[: documents.valid_tokens] = 0
    return labels


__all__ = ["LengthGroupedDataLoader", "SharedLoaders", "counted"]
