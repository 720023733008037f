"""Random weights in which an error shows."""

from __future__ import annotations

import torch
from torch import nn


def perturb(model: nn.Module, seed: int) -> None:
    """Add noise to all parameters, in place.

    WHY: fresh models have norm weights of one, biases of zero and projections so small that attention is uniform; a
    bias added twice or a gradient that was not reduced would hardly change the result. Matrices [.., D] get noise of
    standard deviation 0.5/sqrt(D), vectors of 0.1.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            size = 0.1 if parameter.dim() < 2 else 0.5 / max(1, parameter.shape[-1]) ** 0.5
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_((size * noise).to(parameter))
