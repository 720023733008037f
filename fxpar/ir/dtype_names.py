"""Dtypes by name; torch is imported only where one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxpar.errors import PlacementError

if TYPE_CHECKING:  # a strategy and a cluster are read without torch
    import torch

_SHORT = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "b8",
}
SHORT_DTYPES = frozenset(_SHORT.values())


def parse_dtype_name(name: str) -> torch.dtype:
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise PlacementError(f"torch.{name} is not a dtype")
    return found


def dtype_of_short(short: str) -> torch.dtype | None:
    """torch.bfloat16 for `bf16`; None for what `short_dtype` gives to none."""
    names = [name for name, one in _SHORT.items() if one == short]
    return parse_dtype_name(names[0]) if names else None


def short_dtype(dtype: torch.dtype | None) -> str:
    """`bf16` for torch.bfloat16 and so on; empty for None."""
    if dtype is None:
        return ""
    name = str(dtype).removeprefix("torch.")
    return _SHORT.get(name, name)
