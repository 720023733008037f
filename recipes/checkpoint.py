"""torchtitan's checkpointer, whose refusals to load say what does not fit."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from fxpar.checkpoint.metadata import SafePlanner, SafeReader
from fxpar.errors import CheckpointError, CheckpointModelError
from fxpar.recipes.torchtitan_api import MODEL, CheckpointManager


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
        """Raises, on every rank, CheckpointModelError for a checkpoint of another model or another loader, and
        CorruptCheckpointError for metadata that is not as torch writes it.
        """
        try:
            return super().load(step)
        except CheckpointException as error:
            place = self.initial_load_path or self.folder
            cause, _ = next(iter(error.failures.values()))
            if isinstance(cause, CheckpointError):
                raise cause from error
            raise CheckpointModelError(str(place), _first_reason(error)) from error

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """As torchtitan's, with metadata and values that are no tensors under an allow-list: both are pickles."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        dcp.load(state_dict, storage_reader=SafeReader(checkpoint_id), planner=SafePlanner())
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)


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
