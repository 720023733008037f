"""Plain Python values as JSON and back, unchanged: tuples stay tuples, int keys ints, small tensors tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fxpar.errors import a_type

_TAG = "__fxpar__"
_MAX_NUMEL = 1024  # what is larger belongs with the tensors: JSON would be slow and long


class PlainValueError(ValueError):
    """`where` holds something that has no JSON form."""

    def __init__(self, where: str, value: object) -> None:
        super().__init__(
            f"{where} is {a_type(value)}; only None, bool, int, float, str, list, tuple, dict and tensors of "
            f"at most {_MAX_NUMEL} elements can be stored there"
        )


def encode(value: Any, where: str) -> Any:
    """The JSON form of a plain value; PlainValueError names the place (`extra.loader.rng`) of what has none."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if type(value) is tuple:
        return {_TAG: "tuple", "items": [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        pairs = [[encode(k, f"{where} (a key)"), encode(v, f"{where}[{k!r}]")] for k, v in value.items()]
        return {_TAG: "dict", "items": pairs}
    if type(value) is torch.Tensor and value.numel() <= _MAX_NUMEL and value.dtype in _DTYPES.values():
        dtype = next(name for name, known in _DTYPES.items() if known == value.dtype)
        # Double holds each of these dtypes exactly; integers go through int.
        numbers = value.detach().cpu().reshape(-1)
        return {_TAG: "tensor", "dtype": dtype, "shape": list(value.shape), "items": numbers.tolist()}
    raise PlainValueError(where, value)


def decode(value: Any) -> Any:
    """The inverse of `encode`; tensors come back on the CPU."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind == "tuple":
        return tuple(decode(item) for item in value["items"])
    if kind == "dict":
        return {decode(key): decode(item) for key, item in value["items"]}
    if kind == "tensor":
        return torch.tensor(value["items"], dtype=_DTYPES[value["dtype"]]).reshape(value["shape"])
    return {key: decode(item) for key, item in value.items()}


_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
