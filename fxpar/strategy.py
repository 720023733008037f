"""`Strategy`: one way to train on all ranks, as a value.

Grammar: `axes ('+' flag)*` with axes `name degree ('.' name degree)*`, outermost mesh axis first:

    dp2.tp4+sp+zero1     2 replicas of a 4-way tensor-parallel model, sequence parallel, ZeRO-1

Axes: dp (data), pp (pipeline), cp (context: tokens), tp (tensor), ep (expert). Flags: sp (Megatron sequence parallel on
the tp axis), zero1 | zero2 | zero3 (optimizer state | + gradients | + parameters sharded over dp and cp).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from fxpar.dist_config import Placement, R, Shard
from fxpar.errors import OverrideError, StrategySyntaxError, WorldSizeError, nearest
from fxpar.mesh import Mesh

AXES = ("dp", "pp", "cp", "tp", "ep")
FLAGS = ("sp", "zero1", "zero2", "zero3")
_AXIS = re.compile(r"([a-z]+)(\d+)")
_OVERRIDE = re.compile(r"\s*(R|S\((\d+)\))\s*(?:@\s*tp)?\s*")


@dataclass(frozen=True)
class Strategy:
    """Mesh axes with degrees (outermost first), flags, and placement overrides by FQN glob.

    `overrides` maps a glob over parameter FQNs to `S(dim)@tp` or `R@tp`; the first glob that matches wins over what the
    search would choose.
    """

    axes: tuple[tuple[str, int], ...]
    sp: bool = False
    zero: int = 0
    overrides: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str, *, world: int | None = None, overrides: Mapping[str, str] | None = None) -> Strategy:
        """Parse `text`; with `world`, check that the degrees multiply to it.

        Raises StrategySyntaxError, WorldSizeError, OverrideError.
        """
        axis_text, *flags = text.strip().split("+")
        axes: list[tuple[str, int]] = []
        for part in axis_text.split("."):
            match = _AXIS.fullmatch(part)
            if not match:
                raise StrategySyntaxError(text, part, "an axis is a name and a degree, such as dp2")
            name, degree = match[1], int(match[2])
            if name not in AXES:
                why = f"unknown axis {name!r}{nearest(name, AXES) or '.'} Axes are {', '.join(AXES)}"
                raise StrategySyntaxError(text, part, why)
            if name in dict(axes):
                raise StrategySyntaxError(text, part, f"axis {name!r} is given twice")
            if degree < 1:
                raise StrategySyntaxError(text, part, "a degree is at least 1")
            axes.append((name, degree))
        zero, sp = _parse_flags(text, flags)
        strategy = cls(tuple(axes), sp, zero, tuple((overrides or {}).items()))
        for pattern, placement in strategy.overrides:
            parse_override(pattern, placement)
        if world is not None:
            strategy.check_world(world)
        return strategy

    def check_world(self, world: int) -> None:
        """Raise WorldSizeError unless the degrees multiply to `world`."""
        if self.world != world:
            raise WorldSizeError(str(self), self.world, world)

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.axes)

    @property
    def world(self) -> int:
        """Number of ranks the strategy needs."""
        return self.mesh.size

    def degree(self, axis: str) -> int:
        """Degree of `axis`; 1 if the strategy does not name it."""
        return dict(self.axes).get(axis, 1)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes over which parameters are replicated and gradients are summed (dp and cp), degree > 1 only."""
        return tuple(name for name, size in self.axes if name in ("dp", "cp") and size > 1)

    def __str__(self) -> str:
        flags = ["sp"] * self.sp + ([f"zero{self.zero}"] if self.zero else [])
        return "+".join([".".join(f"{name}{size}" for name, size in self.axes), *flags])

    def to_json(self) -> dict:
        data: dict = {"strategy": str(self)}
        if self.overrides:
            data["overrides"] = dict(self.overrides)
        return data

    @classmethod
    def from_json(cls, data: dict | str) -> Strategy:
        if isinstance(data, str):
            data = json.loads(data)
        return cls.parse(data["strategy"], overrides=data.get("overrides"))


def _parse_flags(text: str, flags: list[str]) -> tuple[int, bool]:
    zero, sp = 0, False
    for flag in flags:
        if flag not in FLAGS:
            why = f"unknown flag {flag!r}{nearest(flag, FLAGS) or '.'} Flags are {', '.join(FLAGS)}"
            raise StrategySyntaxError(text, flag, why)
        if flag == "sp":
            if sp:
                raise StrategySyntaxError(text, flag, "flag 'sp' is given twice")
            sp = True
        else:
            if zero:
                raise StrategySyntaxError(text, flag, "one ZeRO level at a time")
            zero = int(flag[-1])
    return zero, sp


def parse_override(pattern: str, placement: str) -> Placement:
    """Placement on the tp axis named by `S(0)@tp`, `S(1)`, `R@tp` ...; raises OverrideError."""
    match = _OVERRIDE.fullmatch(placement)
    if not match:
        raise OverrideError(pattern, f"{placement!r} is no placement.", " Write 'S(0)@tp', 'S(1)@tp' or 'R@tp'.")
    return R if match[1] == "R" else Shard(int(match[2]))
