"""Checkpoints that a crash at any time leaves intact, that any number of ranks can load, and that say when corrupt."""

from fxpar.checkpoint.folder import latest_checkpoint
from fxpar.checkpoint.load import load_checkpoint
from fxpar.checkpoint.save import save_checkpoint
from fxpar.checkpoint.weights import export_checkpoint, save_weights

__all__ = ["export_checkpoint", "latest_checkpoint", "load_checkpoint", "save_checkpoint", "save_weights"]
