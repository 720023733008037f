"""`Device`: what one device sustains, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from fxpar.errors import ClusterError, nearest

if TYPE_CHECKING:  # a strategy and a cluster are read without torch
    import torch

FLOATS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_WHOLE = ("nodes", "devices_per_node")
_MAY_BE_ZERO = ("latency_us", "launch_us")


@dataclass(frozen=True)
class Device:
    """What a device sustains, which is less than what its maker promises.

    `tflops` (1e12 operations per second, 2 per multiply-add) of products and attention: one number, or a table by name
    of dtype. `memory_gb_per_s` (1e9 bytes per second) counts what is read and what is written; `launch_us` is paid by
    every kernel; `memory_gb` (1e9 bytes) is how much it holds, None if that is not known.

    Raises ClusterError for a number that no device can have, and for a dtype that is not in FLOATS.
    """

    tflops: float | Mapping[str, float] = field(hash=False)
    memory_gb_per_s: float
    launch_us: float
    memory_gb: float | None = None

    def __post_init__(self) -> None:
        check_numbers(self.to_json(), "description", "device.")

    def flops_per_s(self, dtype: torch.dtype) -> Fraction:
        """Operations per second in `dtype`. One that the table lacks counts as the next wider one, in which it would be
        computed; one that is wider than all of them as the widest.
        """
        if not isinstance(self.tflops, Mapping):
            return Fraction(self.tflops) * 10**12
        import torch

        by_width = sorted((getattr(torch, name).itemsize, name) for name in self.tflops)
        exact = str(dtype).removeprefix("torch.")
        name = next((name for width, name in by_width if width >= dtype.itemsize), by_width[-1][1])
        return Fraction(self.tflops[exact if exact in self.tflops else name]) * 10**12

    @property
    def bytes_per_s(self) -> Fraction:
        """Of its memory."""
        return Fraction(self.memory_gb_per_s) * 10**9

    @property
    def launch_s(self) -> Fraction:
        """Seconds that every kernel takes at least."""
        return Fraction(self.launch_us) / 10**6

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "description") -> Device:
        """The device with these values. Raises ClusterError that names `source`."""
        check_keys(cls, data, source, "device.")
        check_numbers(data, source, "device.")
        return cls(**data)

    def to_json(self) -> dict[str, Any]:
        tflops = dict(self.tflops) if isinstance(self.tflops, Mapping) else self.tflops
        rest = {"memory_gb_per_s": self.memory_gb_per_s, "launch_us": self.launch_us}
        return {"tflops": tflops, **rest} | ({} if self.memory_gb is None else {"memory_gb": self.memory_gb})

    def __str__(self) -> str:
        """`300 TFLOP/s and 2000 GB/s of memory, 4 µs per kernel`."""
        tflops = (
            f"{self.tflops:g}"
            if not isinstance(self.tflops, Mapping)
            else ", ".join(f"{value:g} ({name})" for name, value in self.tflops.items())
        )
        return f"{tflops} TFLOP/s and {self.memory_gb_per_s:g} GB/s of memory, {self.launch_us:g} µs per kernel"


def check_keys(cls: type, data: Mapping[str, Any], source: str, prefix: str = "") -> None:
    """That `data` has the fields of the dataclass `cls` and no other key. Raises ClusterError."""
    known = {one.name: one for one in fields(cls)}
    for key in data:
        if key not in known:
            hint = nearest(key, known) or f"; there are {', '.join(known)}"
            raise ClusterError(source, f"key {prefix + key!r} is unknown{hint}")
    missing = [f"{prefix}{name}" for name, one in known.items() if one.default is MISSING and name not in data]
    if missing:
        raise ClusterError(source, f"lacks {', '.join(missing)}")


def check_numbers(data: Mapping[str, Any], source: str, prefix: str = "") -> None:
    """That all values of a description are numbers that can be. Raises ClusterError."""
    for key, value in data.items():
        if key == "tflops" and isinstance(value, Mapping):
            _check_dtypes(value, source)
            continue
        whole, least_ok = key in _WHOLE, key in _MAY_BE_ZERO
        name = f"{prefix}{key} = {value!r}"
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise ClusterError(source, f"{name} must be {'an integer' if whole else 'a number'}")
        if not (value > 0 or (least_ok and value == 0)) or not math.isfinite(value):
            raise ClusterError(source, f"{name} must be {'>= 0' if least_ok else '> 0'} and finite")


def _check_dtypes(table: Mapping[str, Any], source: str) -> None:
    if not table:
        raise ClusterError(source, 'device.tflops is empty; write a number, or a table such as {"bfloat16": 300}')
    for name in table:
        if name not in FLOATS:
            hint = nearest(name, FLOATS) or f"; there are {', '.join(FLOATS)}"
            raise ClusterError(source, f"device.tflops has {name!r}, which is not a dtype{hint}")
    check_numbers(table, source, "device.tflops.")


GPU = Device(tflops=300.0, memory_gb_per_s=2000.0, launch_us=4.0)
"""Usual figures of a GPU, where nothing better is known."""
CPU = Device(tflops=0.03, memory_gb_per_s=5.0, launch_us=10.0)
"""Usual figures of a core or two of a CPU, which is what a rank has."""
