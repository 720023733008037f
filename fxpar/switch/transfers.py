"""The rows of a plan: one transfer each, as a numpy record, and helpers to make many of them."""

from __future__ import annotations

import numpy as np

from fxpar.switch.problem import TensorClass

# `slice` counts the boxes of the tensor's class; `step` is the hop: a later one may send on what an earlier one
# brought.
TRANSFER = np.dtype(
    [("tensor", "<i4"), ("slice", "<i4"), ("src", "<i4"), ("dst", "<i4"), ("nbytes", "<i8"), ("step", "<i4")]
)
TERM_TRANSFER = np.dtype([*TRANSFER.descr, ("term", "<i4")])  # of a sum


def rows(cls: TensorClass, slices: np.ndarray, src: np.ndarray, dst: np.ndarray, step: int) -> np.ndarray:
    """Transfers of all members of a class: `slices` [groups], `src` and `dst` [members, groups, receivers]."""
    shape = np.broadcast_shapes(src.shape, dst.shape)
    out = np.empty(shape, TRANSFER)
    out["tensor"] = cls.members[:, None, None]
    out["slice"] = slices[:, None]
    out["src"], out["dst"], out["step"] = src, dst, step
    out["nbytes"] = cls.nbytes[slices][:, None]
    return out.ravel()


def joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, TRANSFER)


def ordered(table: np.ndarray, world: int) -> np.ndarray:
    """The transfers in the order (step, tensor, slice, destination), which no planner can influence."""
    if not len(table):
        return table
    slices = int(table["slice"].max()) + 1
    tensors = int(table["tensor"].max()) + 1
    tensor = table["step"].astype(np.int64) * tensors + table["tensor"]
    key = (tensor * slices + table["slice"]) * world + table["dst"]
    return table[key.argsort(kind="stable")]
