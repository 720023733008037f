"""`Device`: what one device sustains, as data."""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from fxpar.errors import ClusterError, nearest
from fxpar.ir.written import brief

if TYPE_CHECKING:  # a strategy and a cluster are read without torch
    import torch

FLOATS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_LEAST, _MOST = 1e-15, 1e15  # of any figure: what is computed with such numbers is finite
_WHOLE = ("nodes", "devices_per_node")
_BACKWARD = "backward_"  # begins the key of a figure that the backward has of its own
_BY_HALF = ("tflops", "attention_tflops", "attention_block", "exposed_traffic")
_BY_DTYPE = (
    "tflops",
    "attention_tflops",
    "attention_block",
    "exposed_traffic",
    "backward_tflops",
    "backward_attention_tflops",
    "backward_attention_block",
    "backward_exposed_traffic",
)
_RATES = (
    "tflops",
    "attention_tflops",
    "backward_tflops",
    "backward_attention_tflops",
    "memory_gb_per_s",
    "cache_gb_per_s",
    "host_gb_per_s",
)
_MAY_BE_ZERO = (
    "latency_us",
    "all_reduce_latency_us",
    "launch_us",
    "attention_block",
    "exposed_traffic",
    "backward_attention_block",
    "backward_exposed_traffic",
)


@dataclass(frozen=True)
class Device:
    """What a device sustains, which is less than what its maker promises.

    `tflops` (1e12 operations per second, 2 per multiply-add) of products and attention: one number, or a table by name
    of dtype. `memory_gb_per_s` (1e9 bytes per second) counts what is read and what is written; `launch_us` is paid by
    every kernel; `memory_gb` (1e9 bytes) is how much it holds, None if that is not known.

    `attention_tflops` (as `tflops`) is what attention sustains in long documents; None: as much as products. Its
    kernels take `attention_block` keys at once (a number or a table too), so that a query computes with half a block
    more than it sees.
    Of what products and attention read and write, the share `exposed_traffic` (a number or a table too) takes time
    beside their arithmetic: none on a GPU, whose threads wait for memory in turns.

    These four are of the forward, and `backward_tflops`, `backward_attention_tflops`, `backward_attention_block` and
    `backward_exposed_traffic` the same of the backward (`fxpar.cost.ops.in_backward`); None: as in the forward.

    Tensors of up to `cache_mb` (1e6 bytes) are read and written at `cache_gb_per_s`; None: all at `memory_gb_per_s`.

    `host_gb_per_s` is what goes between it and the memory of its host, each way; 25 is about what PCIe 4.0 x16
    sustains, of 31.5 on its data sheet.

    Kernels run beside transfers (collectives, copies to the host), and while they do, both are slower by the factor
    `overlap_slowdown`; None: they take turns, as on a CPU, which does the transfers of gloo itself.

    `shared_by` ranks take turns on what computes, as several on a core of a CPU: all figures are what one of them gets
    while all are busy. While others wait, it is faster, up to `shared_by` times.

    Raises ClusterError for a number that no device can have, and for a dtype that is not in FLOATS.
    """

    tflops: float | Mapping[str, float] = field(hash=False)
    memory_gb_per_s: float
    launch_us: float
    memory_gb: float | None = None
    attention_tflops: float | Mapping[str, float] | None = field(default=None, hash=False)
    attention_block: float | Mapping[str, float] = field(default=0.0, hash=False)
    cache_mb: float | None = None
    cache_gb_per_s: float | None = None
    shared_by: float = 1.0
    exposed_traffic: float | Mapping[str, float] = field(default=0.0, hash=False)
    host_gb_per_s: float = 25.0
    overlap_slowdown: float | None = None
    backward_tflops: float | Mapping[str, float] | None = field(default=None, hash=False)
    backward_attention_tflops: float | Mapping[str, float] | None = field(default=None, hash=False)
    backward_attention_block: float | Mapping[str, float] | None = field(default=None, hash=False)
    backward_exposed_traffic: float | Mapping[str, float] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        check_numbers(self.to_json(), "description", "device.")
        if self.overlap_slowdown is not None and self.overlap_slowdown < 1:
            raise ClusterError(
                "description", f"device.overlap_slowdown = {self.overlap_slowdown:g} is a factor: it must be >= 1"
            )
        if (self.cache_mb is None) != (self.cache_gb_per_s is None):
            raise ClusterError("description", "device.cache_mb and device.cache_gb_per_s belong together: give both")

    @functools.cached_property
    def in_backward(self) -> Device:
        """As the backward has it: with the backward's figures for the forward's; itself where they are the same."""
        own = {name: getattr(self, _BACKWARD + name) for name in _BY_HALF}
        given = {name: value for name, value in own.items() if value is not None}
        return replace(self, **given, **{_BACKWARD + name: None for name in given}) if given else self

    def flops_per_s(self, dtype: torch.dtype) -> Fraction:
        """Operations per second of products in `dtype`. One that the table lacks counts as the next wider one, in which
        it would be computed; one that is wider than all of them as the widest.
        """
        return _of_dtype(self.tflops, dtype) * 10**12

    def attention_flops_per_s(self, dtype: torch.dtype) -> Fraction:
        """The same of attention."""
        return _of_dtype(self.tflops if self.attention_tflops is None else self.attention_tflops, dtype) * 10**12

    def attention_block_of(self, dtype: torch.dtype) -> float:
        """Keys that attention in `dtype` takes at once."""
        return float(_of_dtype(self.attention_block, dtype))

    def exposed_traffic_of(self, dtype: torch.dtype) -> Fraction:
        """The share of what products in `dtype` read and write that takes time beside their arithmetic."""
        return _of_dtype(self.exposed_traffic, dtype)

    def bytes_per_s_of(self, nbytes: Fraction | int) -> Fraction:
        """At which a tensor of so many bytes is read or written."""
        if self.cache_mb is None or self.cache_gb_per_s is None or nbytes > self.cache_mb * 1e6:
            return self.bytes_per_s
        return Fraction(self.cache_gb_per_s) * 10**9

    @property
    def bytes_per_s(self) -> Fraction:
        """Of its memory."""
        return Fraction(self.memory_gb_per_s) * 10**9

    @property
    def memory_bytes(self) -> int | None:
        """How much it holds, if that is known."""
        return None if self.memory_gb is None else int(self.memory_gb * 1e9)

    @property
    def host_bytes_per_s(self) -> Fraction:
        """Of its link to the host, each way."""
        return Fraction(self.host_gb_per_s) * 10**9

    @property
    def launch_s(self) -> Fraction:
        """Seconds that every kernel takes at least."""
        return Fraction(self.launch_us) / 10**6

    def taken_in_turns(self, ranks: float) -> Device:
        """What one of so many ranks gets that take turns on it, where `shared_by` do now."""
        ranks = max(1.0, ranks)
        share = self.shared_by / ranks
        rates = {name: _scaled(getattr(self, name), share) for name in _RATES}
        return replace(self, **rates, launch_us=self.launch_us / share, shared_by=ranks) if share != 1 else self

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "description") -> Device:
        """The device with these values. Raises ClusterError that names `source`."""
        check_keys(cls, data, source, "device.")
        check_numbers(data, source, "device.")
        return cls(**data)

    def to_json(self) -> dict[str, Any]:
        """What `from_dict` reads; what is as by default is left out."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        tables = {name: dict(value) for name, value in found.items() if isinstance(value, Mapping)}
        defaults = {one.name: one.default for one in fields(self)}
        return {name: value for name, value in (found | tables).items() if value != defaults[name]}

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


def check_numbers(
    data: Mapping[str, Any], source: str, prefix: str = "", may_be_zero: Container[str] = _MAY_BE_ZERO
) -> None:
    """That all values of a description are numbers that can be. Raises ClusterError."""
    for key, value in data.items():
        if key in _BY_DTYPE and isinstance(value, Mapping):
            _check_dtypes(value, source, key)
            continue
        whole, least_ok = key in _WHOLE, key in may_be_zero
        name = f"{prefix}{key} = {brief(value)}"
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise ClusterError(source, f"{name} must be {'an integer' if whole else 'a number'}")
        if not (0 < value < math.inf or (least_ok and value == 0)):  # no NaN either
            raise ClusterError(source, f"{name} must be {'>= 0' if least_ok else '> 0'} and finite")
        if value and not _LEAST <= value <= _MOST:
            raise ClusterError(source, f"{name} must be from {_LEAST:g} to {_MOST:g}")


def _check_dtypes(table: Mapping[str, Any], source: str, key: str) -> None:
    if not table:
        raise ClusterError(source, f'device.{key} is empty; write a number, or a table such as {{"bfloat16": 300}}')
    for name in table:
        if name not in FLOATS:
            hint = nearest(name, FLOATS) or f"; there are {', '.join(FLOATS)}"
            raise ClusterError(source, f"device.{key} has {name!r}, which is not a dtype{hint}")
    check_numbers(table, source, f"device.{key}.", table if key in _MAY_BE_ZERO else ())


def _scaled(rate: Any, factor: float) -> Any:
    if isinstance(rate, Mapping):
        return {name: value * factor for name, value in rate.items()}
    return None if rate is None else rate * factor


def _of_dtype(table: float | Mapping[str, float], dtype: torch.dtype) -> Fraction:
    if not isinstance(table, Mapping):
        return Fraction(table)
    import torch

    by_width = sorted((getattr(torch, name).itemsize, name) for name in table)
    exact = str(dtype).removeprefix("torch.")
    name = next((name for width, name in by_width if width >= dtype.itemsize), by_width[-1][1])
    return Fraction(table[exact if exact in table else name])


GPU = Device(tflops=300.0, memory_gb_per_s=2000.0, launch_us=4.0, overlap_slowdown=1.13)
"""Usual figures of a GPU, where nothing better is known."""
CPU = Device(tflops=0.03, memory_gb_per_s=5.0, launch_us=10.0, host_gb_per_s=2.5)
"""Usual figures of a core or two of a CPU, which is what a rank has. It is its own host: what is moved there is
read and written."""
