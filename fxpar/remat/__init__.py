"""Recomputation: which forward values the backward reads from memory, and which it computes again."""

from fxpar.remat.choose import choose
from fxpar.remat.forward import ForwardValues, forward_values
from fxpar.remat.storages import Storages, saved_bytes, saved_storages, trace_storages

__all__ = [
    "ForwardValues",
    "Storages",
    "choose",
    "forward_values",
    "saved_bytes",
    "saved_storages",
    "trace_storages",
]
