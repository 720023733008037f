"""torchtitan's validation on a model that fxpar runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

from torch import nn

from fxpar.recipes.documents import Documents
from fxpar.recipes.loader import SharedLoaders
from fxpar.recipes.torchtitan_api import Validator


class FxparValidator(Validator):
    """The loss of held-out documents, each length group under its strategy.

    A step takes `turns` batches of `rows` rows of each of `data_ranks` data-parallel ranks of torchtitan, from the part
    of the data that they would take it from.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        rows: int = 1
        """Rows of one batch of the recipe's loader (training.local_batch_size)."""

        turns: int = 1
        """Batches of each data-parallel rank in a step."""

        data_ranks: int = 1
        """Data-parallel ranks of torchtitan that the data is drawn as."""

    @classmethod
    def of(cls, config: Any, rows: int, turns: int, data_ranks: int) -> Any:
        """The recipe's own settings; a validator of the user's own stays as it is."""
        if type(config) is not Validator.Config:
            return config
        own = {f.name: getattr(config, f.name) for f in fields(config)}
        return cls.Config(**own, rows=rows, turns=turns, data_ranks=data_ranks)

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        (model,) = model_parts
        config: Any = self.config

        def build(rank: int) -> Any:
            return self.dl_config.build(
                dp_world_size=config.data_ranks,
                dp_rank=rank,
                tokenizer=self.tokenizer,
                seq_len=self.seq_len,
                local_batch_size=config.rows,
            )

        total, valid = 0.0, 0
        for documents in steps_of(SharedLoaders(build, config.data_ranks), config.turns, config.steps):
            count = documents.valid_tokens
            if count:
                total += model.evaluate(documents.sequences()) * count  # type: ignore[operator]
            valid += count
            self.metrics_processor.ntokens_since_last_log += documents.places
        self.metrics_processor.log_validation(loss=total / max(valid, 1), step=step)


def steps_of(loaders: SharedLoaders, turns: int, steps: int) -> Iterator[Documents]:
    """The documents of each step: `turns` batches of every loader. Ends after so many steps, with -1 when no loader has
    any left: to the last row, also where loaders are of different length.
    """
    for batches in islice(loaders.steps(turns), None if steps == -1 else steps):
        drawn = [batch for batch in batches if batch is not None]
        if not drawn:
            return
        yield Documents.joined(drawn)


__all__ = ["FxparValidator", "steps_of"]
