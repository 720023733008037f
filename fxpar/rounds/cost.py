"""What a team takes and holds, by its degree: the only thing that a plan of rounds knows of a model and its devices."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from fxpar.errors import CostModelError, DegreeError, RoundCostError, nearest
from fxpar.ir.written import brief, read

_MIB = 1024  # in a GiB
_MOST_TOKENS = 2**40  # of a device: those of any batch, and of many devices a number of 64 bits


@dataclass(frozen=True)
class TeamCost:
    """A team of one degree in a round: it takes fixed + per_token * T + per_square * sum(len**2) ms, where T is the sum
    of the lengths of its sequences, and holds `tokens` of them. What one sequence adds does not depend on the others.

    `fxpar.cost.group_cost.GroupCost` has the same three numbers, in seconds. Raises CostModelError for one that is
    negative or not finite, and for a team that holds no token.
    """

    fixed_ms: float
    per_token_ms: float
    per_square_ms: float
    tokens: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= (name == "tokens")):
                raise CostModelError(name, value)

    def sequence_ms(self, lengths: np.ndarray) -> np.ndarray:
        """What sequences of these lengths [K] add, [K]."""
        sizes = lengths.astype(np.float64)
        return (self.per_token_ms + self.per_square_ms * sizes) * sizes


@dataclass(frozen=True)
class RoundCost:
    """A model under sequence parallelism with ZeRO-3 over all devices, by FlexSP's formulas (arXiv 2412.01523, section
    4.1, equations 11 to 14).

    A team of degree d takes (square_ms * sum(len**2) + token_ms * T) / d + fixed_ms, and T * sent_mib / d over the
    bandwidth of its degree for the all-to-alls of attention; one device alone sends nothing. A device holds
    `memory_gib`, of which 16 bytes per parameter over all devices are the states of the model; a token takes
    `token_mib` over the devices of its team.

    `gi_parameters` are those of the model (2**30 each) by the longest sequence that it is built for, as its table of
    positions grows with that; between two of them and beyond the last it grows evenly. `mib_per_ms` is the bandwidth by
    degree: another degree has that of the next larger one that is known, beyond the largest that of the largest.
    `heads` (0: any) are those of attention: a degree divides them, or, where it is larger, is a multiple of them.
    """

    square_ms: float
    token_ms: float
    fixed_ms: float
    token_mib: float
    sent_mib: float
    gi_parameters: Mapping[int, float] = field(hash=False)
    mib_per_ms: Mapping[int, float] = field(hash=False)
    heads: int = 0
    memory_gib: float = 30.0

    def states_mib(self, devices: int, longest: int) -> float:
        """Of a device, where so many share the states of a model for sequences of up to `longest` tokens."""
        known = sorted(self.gi_parameters.items())
        at, value = (np.array(numbers, dtype=np.float64) for numbers in zip(*known, strict=True))
        found = float(np.interp(longest, at, value))
        if longest > at[-1] and len(at) > 1:
            found += (longest - at[-1]) * (value[-1] - value[-2]) / (at[-1] - at[-2])
        return 16 * found * _MIB / devices

    def tokens_per_device(self, devices: int, longest: int) -> int:
        """That fit beside the states. Raises RoundCostError if none does."""
        found = int(min(_MOST_TOKENS, (self.memory_gib * _MIB - self.states_mib(devices, longest)) / self.token_mib))
        if found < 1:
            states = self.states_mib(devices, longest) / _MIB
            why = f"the states of the model take {states:.1f} GiB of each of {devices} devices, and nothing is left"
            raise RoundCostError(f"memory of {self.memory_gib:g} GiB", why, "Plan for more devices or more memory")
        return found

    def sent_ms(self, degree: int) -> float:
        """Of a token, over all-to-alls in a team of this degree."""
        if degree == 1:
            return 0.0
        larger = [known for known in self.mib_per_ms if known >= degree]
        return self.sent_mib / degree / self.mib_per_ms[min(larger) if larger else max(self.mib_per_ms)]

    def teams(self, degrees: Sequence[int], devices: int, longest: int) -> dict[int, TeamCost]:
        """By degree. Raises DegreeError, RoundCostError."""
        tokens = self.tokens_per_device(devices, longest)
        found = {}
        for degree in degrees:
            if self.heads and self.heads % degree and degree % self.heads:
                why = f"it does not divide the {self.heads} heads of attention, nor is it a multiple of them"
                raise DegreeError(degree, why)
            per_token = self.token_ms / degree + self.sent_ms(degree)
            found[degree] = TeamCost(self.fixed_ms, per_token, self.square_ms / degree, tokens * degree)
        return found

    def with_memory(self, gib: float | None) -> RoundCost:
        """On devices that have so much; None: as it is."""
        return self if gib is None else replace(self, memory_gib=gib)


_TABLES = ("gi_parameters", "mib_per_ms")
_MAY_BE_ZERO = ("square_ms", "fixed_ms", "heads")


def read_cost(path: str) -> RoundCost:
    """The constants of a JSON file: the fields of RoundCost, tables as objects with numbers as keys.

    Raises RoundCostError that names file and key.
    """
    try:
        data = read(Path(path).read_text(encoding="utf-8"), "JSON")
    except OSError as error:
        why = f"it cannot be read: {error.strerror or error}"
        raise RoundCostError(repr(path), why, "Name a JSON file of constants") from error
    except ValueError as error:
        raise RoundCostError(repr(path), str(error), "Write the constants as one JSON object") from error
    known = {one.name: one for one in fields(RoundCost)}
    if not isinstance(data, dict):
        raise RoundCostError(
            repr(path), f"it holds a {type(data).__name__}", f"Write an object with {', '.join(known)}"
        )
    if "devices_per_node" in data:
        do = "Name a model, which is priced on it: fxpar rounds MODEL --cluster FILE"
        raise RoundCostError(repr(path), "it describes a cluster, and there is no model", do)
    for key in data:
        if key not in known:
            raise RoundCostError(repr(path), f"key {key!r} is unknown{nearest(key, known)}", "Delete or rename it")
    missing = [name for name, one in known.items() if one.default is MISSING and name not in data]
    if missing:
        raise RoundCostError(repr(path), f"it lacks {', '.join(missing)}", "Add it: docs/rounds.md says what it is")
    return RoundCost(**{key: _value(path, key, value) for key, value in data.items()})


def _value(path: str, key: str, value: object) -> Any:
    if key in _TABLES:
        if key == "gi_parameters" and isinstance(value, int | float):
            value = {"1": value}
        if not isinstance(value, dict) or not value:
            why = f"{key} = {brief(value)} is not a table"
            raise RoundCostError(repr(path), why, 'Write an object such as {"8": 96.5, "16": 10.33}')
        return {_degree(path, key, name): _number(path, f"{key}.{name}", one) for name, one in value.items()}
    return _number(path, key, value, whole=key == "heads", least_ok=key in _MAY_BE_ZERO)


def _degree(path: str, key: str, name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 12 and int(name) > 0):
        raise RoundCostError(repr(path), f"{key} has {name!r} as a key", "Write a whole number from 1 on")
    return int(name)


def _number(path: str, key: str, value: object, whole: bool = False, least_ok: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        kind = "a whole number" if whole else "a number"
        raise RoundCostError(repr(path), f"{key} = {json.dumps(value)[:60]} is not {kind}", f"Write {kind}")
    if not (0 < value < math.inf or (least_ok and value == 0)):
        do = f"Write a number {'from 0 on' if least_ok else 'above 0'}"
        raise RoundCostError(repr(path), f"{key} = {brief(value)} cannot be", do)
    return value
