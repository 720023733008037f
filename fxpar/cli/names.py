"""Names that several files of the command line know."""

from __future__ import annotations

SUFFIX = ".fxpar"  # of graph files
EXAMPLE_NAMES = ("llama", "gpt", "vit", "mlp")  # of `fxpar.models.builtin`, which imports torch
