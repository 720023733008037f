"""torchtitan's checkpointer, whose refusals to load say what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from fxpar.checkpoint.agree import agreed, group_of, rank_in
from fxpar.checkpoint.lock import release, take
from fxpar.checkpoint.metadata import SafePlanner, SafeReader, read_metadata
from fxpar.errors import (
    CheckpointInUseError,
    CheckpointModelError,
    CheckpointWriteError,
    CorruptCheckpointError,
)
from fxpar.recipes.torchtitan_api import MODEL, CheckpointManager


class FxparCheckpointManager(CheckpointManager):
    """Saves and loads what torchtitan does, under its names: parameters are DTensors, resharded by DCP.

    The process of rank 0 locks the folder from its first step on, until `close`: saves in the background count.
    """

    locked = False

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
            raise CheckpointModelError(str(place), _first_reason(error)) from error

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """As torchtitan's, with metadata and values that are no tensors under an allow-list: both are pickles."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        if _is_remote(checkpoint_id):
            why = "is not in a folder, where its metadata, a pickle, could be checked. Copy it to one"
            raise CorruptCheckpointError(checkpoint_id, why)

        def check() -> None:
            read_metadata(Path(checkpoint_id))  # DCP would hide the reason for a refusal

        self._on_rank_0(check)
        dcp.load(state_dict, storage_reader=SafeReader(checkpoint_id), planner=SafePlanner())
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Raises CheckpointInUseError, on every rank, where another run saves to the folder."""
        if self.enable and not self.locked:
            self._lock()
        return super().save(curr_step, last_step)

    def close(self) -> None:
        super().close()
        if self.locked and not (dist.is_initialized() and dist.get_rank()):
            release(Path(self.folder))

    def _lock(self) -> None:
        self.locked = not (self.load_only or _is_remote(self.folder))
        if not self.locked:
            return

        def claim() -> None:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            other = take(Path(self.folder), "trains with torchtitan")
            if other is not None:
                why = f"{other} saves to this folder; wait until that has ended, or set checkpoint.folder"
                raise CheckpointInUseError(self.folder, why)

        self._on_rank_0(claim)

    def _on_rank_0(self, work: Callable[[], None]) -> None:
        """What rank 0 raises, every rank does."""
        group = group_of(None)
        agreed(group, work if rank_in(group)[0] == 0 else lambda: None, _Wrap(self.folder))


@dataclass(frozen=True)
class _Wrap:
    folder: str

    def __call__(self, error: Exception) -> CheckpointWriteError:
        return CheckpointWriteError(self.folder, f"cannot be locked: {type(error).__name__}: {error}")


def _is_remote(folder: str) -> bool:
    return "://" in folder


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
