"""A model of your own for the command line: `fxpar check examples/my_model.py:make -s dp2,tp2 --set width=96`."""

import torch
from torch import nn

from fxpar import losses


def make(width: int = 48):
    """Model, loss function (a sum over valid rows) and example batch: all that fxpar needs."""
    model = nn.Sequential(nn.Linear(20, width), nn.GELU(), nn.Linear(width, 10))
    batch = {"x": torch.randn(6, 20), "labels": torch.randint(0, 10, (6,))}
    return model, lambda model, batch: losses.cross_entropy_sum(model(batch["x"]), batch["labels"]), batch
