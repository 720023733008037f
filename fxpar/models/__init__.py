"""Models to try fxpar on: built-in examples, decoders of transformers, and a user's own."""

from __future__ import annotations

from fxpar.models.load import load
from fxpar.models.loaded import LoadedModel

__all__ = ["LoadedModel", "load"]
