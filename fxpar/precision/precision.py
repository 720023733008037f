"""`Precision`: which dtype a model computes, adds up and sends gradients in, as a value.

Grammar: `dtype ('+' flag)*`; the dtype is that of parameters and activations, `captured` leaves them as captured:

    bf16                                 bf16 with fp32 norms, softmax and loss; gradients add up and travel in fp32
    bf16+reduce=bf16                     gradients travel to the home layout in bf16
    bf16+fp32(*.router|lm_head)          further islands: modules that match by FQN, and all inside of them
    bf16+low(norms|softmax|loss)         not islands, though they are by default

Flags: reduce=DTYPE, accumulate=DTYPE, fp32(GLOB|...), low(norms|softmax|loss). Dtypes: bf16, fp32, fp64; fp16 can
only come first.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import torch

from fxpar.errors import DtypeError, PrecisionDtypeError, PrecisionSyntaxError, nearest

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_LONG = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# Sums of fp16 gradients overflow, and only the loss is scaled: it serves for parameters and activations.
_SUMS = {name: dtype for name, dtype in _DTYPES.items() if name != "fp16"}
_AS_CAPTURED = "captured"
_ISLANDS = ("norms", "softmax", "loss")
_FLAGS = ("reduce=bf16", "accumulate=fp32", "fp32(...)", "low(...)")
_GLOB = re.compile(r"[\w.*?\[\]!-]+", re.ASCII)
_LIST = re.compile(r"(fp32|low)\((.*)\)", re.DOTALL)


def parse_dtype(name: str) -> torch.dtype:
    """torch.bfloat16 for "bfloat16" and "bf16". Raises DtypeError."""
    short = _LONG.get(name, name)
    if short not in _DTYPES:
        raise DtypeError(name, _LONG)
    return _DTYPES[short]


@dataclass(frozen=True)
class Precision:
    """How a captured graph computes.

    `param_dtype`: dtype of parameters and activations outside of islands; None leaves the graph as captured.
    `accumulate_dtype`: dtype in which the gradients of micro-batches add up. `reduce_dtype`: dtype in which they travel
    to the home layout; None is `accumulate_dtype`. `fp32`: globs over module FQNs; what matches, and all inside of it,
    computes in the dtype that the model was captured in. `norms`, `softmax`, `loss`: so do these.

    Raises PrecisionDtypeError for a dtype that cannot serve, PrecisionSyntaxError for a glob that cannot be written.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype = torch.float32
    fp32: tuple[str, ...] = ()
    norms: bool = True
    softmax: bool = True
    loss: bool = True

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "accumulate_dtype"):
            _check_dtype(field, getattr(self, field))
        for glob in self.fp32:
            if not _GLOB.fullmatch(glob):
                raise PrecisionSyntaxError(f"fp32({glob})", glob, "this is not a glob over module FQNs")

    @classmethod
    def parse(cls, text: str) -> Precision:
        """The inverse of `str`; long names of dtypes (`bfloat16`) are read too.

        Raises PrecisionSyntaxError, PrecisionDtypeError.
        """
        first, *flags = (part.strip() for part in text.split("+"))
        found: dict = {"param_dtype": None if first == _AS_CAPTURED else _dtype(text, first)}
        for flag in flags:
            fields = _parse_flag(text, flag)
            if twice := found.keys() & fields:
                raise PrecisionSyntaxError(text, flag, f"{', '.join(sorted(twice))} is given twice")
            found |= fields
        return cls(**found)

    def __str__(self) -> str:
        parts = [_AS_CAPTURED if self.param_dtype is None else _name(self.param_dtype)]
        if self.reduce_dtype is not None:
            parts.append(f"reduce={_name(self.reduce_dtype)}")
        if self.accumulate_dtype != torch.float32:
            parts.append(f"accumulate={_name(self.accumulate_dtype)}")
        if self.fp32:
            parts.append(f"fp32({'|'.join(self.fp32)})")
        if low := [name for name in _ISLANDS if not getattr(self, name)]:
            parts.append(f"low({'|'.join(low)})")
        return "+".join(parts)

    def to_json(self) -> dict:
        return {"precision": str(self)}

    @classmethod
    def from_json(cls, data: dict | str) -> Precision:
        """The inverse of `to_json`, also of its text. Raises as `parse` does."""
        if isinstance(data, str):
            data = json.loads(data)
        return cls.parse(data["precision"])


def _name(dtype: torch.dtype) -> str:
    return next(name for name, known in _DTYPES.items() if known == dtype)


def _check_dtype(field: str, dtype: torch.dtype | None) -> None:
    known = _known(field)
    if dtype is not None and dtype not in known.values():
        raise PrecisionDtypeError.unusable(field, _LONG.get(name := str(dtype).removeprefix("torch."), name), known)


def _known(field: str) -> dict[str, torch.dtype]:
    return _DTYPES if field == "param_dtype" else _SUMS


def _dtype(text: str, word: str, field: str = "param_dtype") -> torch.dtype:
    word = _LONG.get(word, word)
    if word in _DTYPES and word not in _known(field):
        raise PrecisionDtypeError.unusable(field, word, _known(field))
    if word not in _DTYPES:
        known = (*_DTYPES, _AS_CAPTURED) if field == "param_dtype" else tuple(_DTYPES)
        why = f"unknown dtype {word!r}{nearest(word, (*known, *_LONG)) or '.'} Dtypes are {', '.join(known)}"
        raise PrecisionSyntaxError(text, word, why)
    return _DTYPES[word]


def _parse_flag(text: str, flag: str) -> dict:
    """The fields that a flag sets."""
    name, equals, value = flag.partition("=")
    if equals and name in ("reduce", "accumulate"):
        field = f"{name}_dtype"
        return {field: _dtype(text, value, field)}
    match = _LIST.fullmatch(flag)
    if match is None:
        raise PrecisionSyntaxError(text, flag, f"unknown flag {flag!r}{nearest(flag, _FLAGS) or '.'}")
    words = tuple(word.strip() for word in match[2].split("|"))
    if match[1] == "fp32":
        for word in words:
            if not _GLOB.fullmatch(word):
                raise PrecisionSyntaxError(text, flag, f"{word!r} is not a glob over module FQNs")
        return {"fp32": words}
    for word in words:
        if word not in _ISLANDS:
            why = f"no island is called {word!r}{nearest(word, _ISLANDS) or '.'} They are {', '.join(_ISLANDS)}"
            raise PrecisionSyntaxError(text, flag, why)
    if len(set(words)) < len(words):
        raise PrecisionSyntaxError(text, flag, "an island is named twice")
    return dict.fromkeys(words, False)
