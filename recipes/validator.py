"""torchtitan's validation on a model that fxpar runs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from fxpar.losses import IGNORE_INDEX
from fxpar.recipes.documents import split_rows
from fxpar.recipes.torchtitan_api import Validator


class FxparValidator(Validator):
    """The loss of held-out documents, each length group under its strategy; the same rows that one rank would take."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    @classmethod
    def of(cls, config: Validator.Config) -> FxparValidator.Config:
        """The recipe's own settings."""
        return cls.Config(**{f.name: getattr(config, f.name) for f in fields(config)})

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        (model,) = model_parts
        loader = self.dl_config.build(
            dp_world_size=1,
            dp_rank=0,
            tokenizer=self.tokenizer,
            seq_len=self.seq_len,
            local_batch_size=self.local_batch_size,
        )
        total, valid = 0.0, 0
        limit: Any = self.config.steps  # type: ignore[attr-defined]
        for turn, (inputs, labels) in enumerate(loader):
            if turn == limit:
                break
            count = int((labels != IGNORE_INDEX).sum())
            total += model.evaluate(split_rows(inputs, labels)) * count  # type: ignore[operator]
            valid += count
            self.metrics_processor.ntokens_since_last_log += labels.numel()
        self.metrics_processor.log_validation(loss=total / max(valid, 1), step=step)


__all__ = ["FxparValidator"]
