"""torchtitan's validation on a model that fxpar runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn

from fxpar.losses import IGNORE_INDEX
from fxpar.recipes.documents import split_rows
from fxpar.recipes.torchtitan_api import Validator

Batch = tuple[dict[str, Tensor], Tensor]


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
        loaders = [
            self.dl_config.build(
                dp_world_size=config.data_ranks,
                dp_rank=rank,
                tokenizer=self.tokenizer,
                seq_len=self.seq_len,
                local_batch_size=config.rows,
            )
            for rank in range(config.data_ranks)
        ]
        total, valid = 0.0, 0
        for batches in steps_of(loaders, config.turns, config.steps):
            sequences = [one for inputs, labels in batches for one in split_rows(inputs, labels)]
            count = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in batches)
            if count:
                total += model.evaluate(sequences) * count  # type: ignore[operator]
            valid += count
            self.metrics_processor.ntokens_since_last_log += sum(labels.numel() for _, labels in batches)
        self.metrics_processor.log_validation(loss=total / max(valid, 1), step=step)


def steps_of(loaders: Iterable[Iterable[Batch]], turns: int, steps: int) -> Iterator[list[Batch]]:
    """The batches of each step: `turns` of every loader. Ends after so many steps, with -1 when no loader has any left:
    to the last row, also where loaders are of different length.
    """
    sources = [iter(loader) for loader in loaders]
    step = 0
    while step != steps:
        batches = [batch for source in sources * turns if (batch := next(source, None)) is not None]
        if not batches:
            return
        yield batches
        step += 1


__all__ = ["FxparValidator", "steps_of"]
