"""torchtitan's checkpointer, whose refusals to load say what does not fit."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch.distributed.checkpoint import CheckpointException

from fxpar.errors import CheckpointModelError
from fxpar.recipes.torchtitan_api import CheckpointManager


class FxparCheckpointManager(CheckpointManager):
    """Saves and loads what torchtitan does, under its names: parameters are DTensors, resharded by DCP."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    @classmethod
    def of(cls, config: Any) -> Any:
        """The recipe's own settings; another kind of checkpointer is left as it is."""
        if type(config) is not CheckpointManager.Config:
            return config
        return cls.Config(**{f.name: getattr(config, f.name) for f in fields(config)})

    def load(self, step: int = -1) -> bool:
        """Raises CheckpointModelError, on every rank, for a checkpoint of another model or another loader."""
        try:
            return super().load(step)
        except CheckpointException as error:
            place = self.initial_load_path or self.folder
            raise CheckpointModelError(str(place), _first_reason(error)) from error


def _first_reason(error: CheckpointException) -> str:
    """What the first rank says that failed, with what to do about the keys that are not the model's."""
    (cause, _), *_ = error.failures.values()
    reason = str(cause).strip()
    if "dataloader." in reason:
        reason += (
            " The place in the data is that of another number of torchtitan's data-parallel ranks: set "
            "--fxpar.data-ranks to it, or --checkpoint.exclude-from-loading dataloader"
        )
    return reason


__all__ = ["FxparCheckpointManager"]
