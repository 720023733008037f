"""Recomputation: which forward values the backward reads from memory, and which it computes again."""

from fxpar.remat.choose import choose, chosen_by_module
from fxpar.remat.forward import ForwardValues, forward_values
from fxpar.remat.sized import SizedStorages, trace_sized
from fxpar.remat.storages import (
    Storages,
    run_on_meta,
    saved_bytes,
    saved_storages,
    tensors_of,
    trace_storages,
)

__all__ = [
    "ForwardValues",
    "SizedStorages",
    "Storages",
    "choose",
    "chosen_by_module",
    "forward_values",
    "run_on_meta",
    "saved_bytes",
    "saved_storages",
    "tensors_of",
    "trace_sized",
    "trace_storages",
]
