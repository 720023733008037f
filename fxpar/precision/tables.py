"""Which modules normalise by their names, and which operands ops take as they come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import fxpar.ops  # noqa: F401 - registers torch.ops.fxpar

own = torch.ops.fxpar

# Last parts of the FQN of a module that normalises, in lower case.
NORM_NAMES = ("*norm*", "ln", "ln_*", "*_ln", "ln[0-9]*")

# Positions of operands that are taken as they come. Own ops compute in fp32 inside whatever they are given, and a mask
# or a logsumexp is never worth a copy; uncast logits save the [T, V] copy.
AS_THEY_COME: Mapping[Any, tuple[int, ...]] = {
    own.attention.default: (4,),
    own.attention_backward.default: (5, 7),
    own.cross_entropy.default: (0,),
    own.cross_entropy_backward.default: (2, 5),
}
# Operand -> the operand whose dtype it must have.
LIKE: Mapping[Any, Mapping[int, int]] = {own.cross_entropy_backward.default: {0: 5, 1: 5}}
