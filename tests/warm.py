"""Import this where ranks are forked: what `parallelize`, optimizers and DTensor import lazily is there already then,
and no rank has to import it (half a CPU second each).
"""

from __future__ import annotations

import importlib

import torch

for module in ("fxpar.api", "scipy.optimize", "scipy.sparse"):
    importlib.import_module(module)
torch.compiler.list_backends()
