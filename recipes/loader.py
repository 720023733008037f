"""Mini-batches of torchtitan's datasets, drawn alike on every rank without a word between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxpar.checkpoint.metadata import check_plain_pickle
from fxpar.errors import DataRanksError, UnsupportedRecipeError
from fxpar.recipes.torchtitan_api import BaseDataLoader, BaseTokenizer


class LengthGroupedDataLoader(BaseDataLoader):
    """One item per training step: the packed rows of the whole mini-batch, the same on every rank.

    Rows come from the recipe's own loader, so documents, packing and labels are torchtitan's; the engine finds the
    documents in them (`fxpar.recipes.documents`) and groups them by length. The state is the place in the data: it
    does not depend on strategies or on the number of ranks, and has the keys of torchtitan's loader. With
    `data_ranks` = n rows are drawn as n data-parallel ranks of torchtitan would together, each from its part of the
    data: for going on from their checkpoint, or for comparing with them.
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
        self.turns = local_batch_size // each
        self.data_ranks = config.data_ranks
        self.loaders = [
            config.inner.build(
                dp_world_size=config.data_ranks,
                dp_rank=rank,
                tokenizer=tokenizer,
                seq_len=seq_len,
                local_batch_size=config.rows,
                snapshot_every_n_steps=snapshot_every_n_steps and snapshot_every_n_steps * self.turns,
            )
            for rank in range(config.data_ranks)
        ]

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        sources = [iter(loader) for loader in self.loaders]
        while True:
            batches = []
            for source in sources * self.turns:
                batch = next(source, None)
                if batch is None:
                    return
                batches.append(batch)
            keys = batches[0][0].keys()
            inputs = {key: torch.cat([given[key] for given, _ in batches]) for key in keys}
            yield inputs, torch.cat([labels for _, labels in batches])

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for loader in self.loaders:
            found.update(loader.state_dict())
        return found

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
        for loader in self.loaders:
            loader.load_state_dict(state_dict)


__all__ = ["LengthGroupedDataLoader"]
