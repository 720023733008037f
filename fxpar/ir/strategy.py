"""`Strategy`: one way to train on all ranks, as a value.

Grammar: `axes ('+' flag)*` with axes `name degree ('.' name degree)*`, outermost mesh axis first:

    dp2.tp4+sp+zero1     2 replicas of a 4-way tensor-parallel model, sequence parallel, ZeRO-1

Axes: dp (data), pp (pipeline), cp (context: tokens), tp (tensor), ep (expert). Flags: sp (Megatron sequence parallel on
the tp axis), zero1 | zero2 | zero3 (optimizer state | + gradients | + parameters sharded over dp and cp), remat or
remat(...) (recomputation, see `Remat`). With pp: gpipe | 1f1b | zb_h1 | interleaved_1f1b(2) (the schedule, see
`Pipeline`), cut(layers.3|layers.6) (where stages begin). role(tp=name) (what an axis is used for, where
another package says so, see `fxpar.annotate.roles`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from fxpar.errors import OverrideError, StrategySyntaxError, WorldSizeError, nearest
from fxpar.ir.dist_config import Placement, R, Shard
from fxpar.ir.mesh import Mesh

Use = Literal["replicas", "stages", "tokens", "weights", "experts"]
# What each axis is used for. Only this file and the policies of axes (`fxpar.annotate.policy`) know axes by name.
USES: dict[str, Use] = {"dp": "replicas", "pp": "stages", "cp": "tokens", "tp": "weights", "ep": "experts"}
AXES = tuple(USES)
REPLICAS, STAGES = "dp", "pp"
MOST_RANKS = 2**20  # more are a slip of the finger
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1")
ROLE_AXES = ("tp", "cp")  # inside of a replica, in the order in which placements are searched
FLAGS = ("sp", "zero1", "zero2", "zero3", "remat", *SCHEDULES, "cut", "role")
_AXIS = re.compile(r"([a-z]+)([0-9]{1,9})")
_SCHEDULE = re.compile(r"(gpipe|1f1b|zb_h1|interleaved_1f1b)(?:\((\d+)\))?")
_CUT = re.compile(r"cut\((.*)\)", re.DOTALL)
_ROLES = re.compile(r"role\((.*)\)", re.DOTALL)
_ROLE = re.compile(r"(\w+)=(\w+)", re.ASCII)
_REMAT = re.compile(r"remat(?:\((.*)\))?", re.DOTALL)
_GLOB = re.compile(r"[\w.*?\[\]!-]+", re.ASCII)
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)
_NO_SIZE = re.compile(r"[-+].*|(?:inf|infinity|nan)\s*(?:[kmgt]?b)?", re.ASCII | re.IGNORECASE)
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_FQN = re.compile(r"\w+(?:\.\w+)*", re.ASCII)
_OVERRIDE = re.compile(r"\s*(R|S\((\d+)\))\s*(?:@\s*tp)?\s*")


RematMode = Literal["full", "selective", "modules", "budget"]
_COLLECTIVES = {"keep_comm": "keep", "redo_comm": "redo"}


@dataclass(frozen=True)
class Remat:
    """What the backward computes again, instead of reading what the forward saved. Written as a flag:

        remat                       all of each repeated block; only what goes into a block is saved
        remat(selective)            what is cheap (pointwise, norms), where that saves bytes
        remat(*.ffn|*.attention)    everything inside of the modules that match, by FQN
        remat(200MB)                as little as possible, with at most so many bytes saved per micro-batch and rank

    `collectives`: "redo" runs those on the way again, "keep" saves their results instead; "auto" redoes them in whole
    blocks and modules, keeps them under `selective`, weighs them under a budget. Written `|keep_comm`, `|redo_comm`.
    """

    mode: RematMode
    globs: tuple[str, ...] = ()
    budget_bytes: int = 0
    collectives: Literal["auto", "keep", "redo"] = "auto"

    def __str__(self) -> str:
        unit = max((u for u, size in _UNITS.items() if self.budget_bytes % size == 0), key=lambda u: _UNITS[u])
        words = {
            "full": ["full"],
            "selective": ["selective"],
            "modules": list(self.globs),
            "budget": [f"{self.budget_bytes // _UNITS[unit]}{unit}"],
        }[self.mode]
        words += [word for word, choice in _COLLECTIVES.items() if choice == self.collectives]
        return "remat" if words == ["full"] else f"remat({'|'.join(words)})"


@dataclass(frozen=True)
class Pipeline:
    """How the stages of a pp axis run. `virtual` stages per rank (interleaved_1f1b only); stage i + 1 begins with
    module `cuts[i]`, by default stages are balanced.
    """

    schedule: str = "1f1b"
    virtual: int = 1
    cuts: tuple[str, ...] = ()

    def flags(self) -> list[str]:
        """As flags of a strategy; what is the default is left out."""
        found = [] if self.schedule == "1f1b" else [self.schedule]
        found = [f"{self.schedule}({self.virtual})"] if self.virtual > 1 else found
        return found + ([f"cut({'|'.join(self.cuts)})"] if self.cuts else [])


@dataclass(frozen=True)
class Strategy:
    """Mesh axes with degrees (outermost first), flags, and placement overrides by FQN glob.

    Its ranks begin at `offset`, which is not part of the text: a pipeline stage's strategy is written like any other.
    `overrides` maps a glob over parameter FQNs to `S(dim)@tp` or `R@tp`; the first glob that matches wins over what the
    search would choose. `roles` are axes with the names of their roles, where another package says what an axis
    is used for.
    """

    axes: tuple[tuple[str, int], ...]
    sp: bool = False
    zero: int = 0
    overrides: tuple[tuple[str, str], ...] = ()
    remat: Remat | None = None
    pipeline: Pipeline = Pipeline()
    roles: tuple[tuple[str, str], ...] = ()
    offset: int = 0

    @classmethod
    def parse(cls, text: str, *, world: int | None = None, overrides: Mapping[str, str] | None = None) -> Strategy:
        """Parse `text`; with `world`, check that the degrees multiply to it.

        Raises StrategySyntaxError, WorldSizeError, OverrideError.
        """
        if not isinstance(text, str):
            raise StrategySyntaxError(repr(text), repr(text), "it is not text")
        axis_text, *flags = text.strip().split("+")
        axes: list[tuple[str, int]] = []
        for part in axis_text.split("."):
            match = _AXIS.fullmatch(part)
            if not match and re.fullmatch(r"[a-z]+[0-9]+", part, re.ASCII):
                raise StrategySyntaxError(text, part, f"a degree is from 1 to {MOST_RANKS:,}")
            if not match:
                raise StrategySyntaxError(text, part, "an axis is a name and a degree, such as dp2")
            name, degree = match[1], int(match[2])
            if name not in AXES:
                why = f"unknown axis {name!r}{nearest(name, AXES) or '.'} Axes are {', '.join(AXES)}"
                raise StrategySyntaxError(text, part, why)
            if name in dict(axes):
                raise StrategySyntaxError(text, part, f"axis {name!r} is given twice")
            if degree < 1:
                raise StrategySyntaxError(text, part, f"a degree is from 1 to {MOST_RANKS:,}")
            axes.append((name, degree))
        found = _parse_flags(text, flags)
        strategy = cls(tuple(axes), **found, overrides=tuple((overrides or {}).items()))
        if strategy.world > MOST_RANKS:
            raise StrategySyntaxError(text, axis_text, f"{strategy.world:,} ranks are more than {MOST_RANKS:,}")
        _check_pipeline(text, strategy)
        _check_roles(text, strategy)
        for pattern, placement in strategy.overrides:
            parse_override(pattern, placement)
        if world is not None:
            strategy.check_world(world)
        return strategy

    def check_world(self, world: int) -> None:
        """Raise WorldSizeError unless the degrees multiply to `world`."""
        if self.world != world:
            raise WorldSizeError(str(self), self.world, world)

    @cached_property
    def mesh(self) -> Mesh:
        """The ranks. Pipeline stages are blocks of consecutive ranks wherever pp stands (Megatron's convention); inside
        of a stage, and without stages, the last axis is the fastest.
        """
        steps, step = {}, 1
        for name, degree in sorted(reversed(self.axes), key=lambda axis: axis[0] == STAGES):
            steps[name] = step
            step *= degree
        return Mesh(self.axes, self.offset, tuple(steps[name] for name, _ in self.axes))

    @property
    def world(self) -> int:
        """Number of ranks the strategy needs."""
        return math.prod(degree for _, degree in self.axes)

    def degree(self, axis: str) -> int:
        """Degree of `axis`; 1 if the strategy does not name it."""
        return dict(self.axes).get(axis, 1)

    @property
    def replicas(self) -> int:
        """Data-parallel replicas, each with micro-batches of its own."""
        return self.degree(REPLICAS)

    @property
    def pipeline_size(self) -> int:
        """Ranks that a micro-batch passes on its way through the stages; 1 without a pipeline."""
        return self.degree(STAGES)

    @property
    def stages(self) -> int:
        """Pipeline stages of the model: those of a rank, times `pipeline_size`."""
        return self.pipeline_size * self.pipeline.virtual

    def of_stage(self, stage: int) -> Strategy:
        """What a pipeline stage runs under. With several stages per rank, s, s + pp ... have the same ranks."""
        axes = tuple(axis for axis in self.axes if axis[0] != STAGES) or SINGLE.axes
        ranks = self.mesh.at(STAGES, stage % self.pipeline_size)
        return replace(self, axes=axes, pipeline=Pipeline(), offset=ranks.offset)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes over which parameters are replicated and gradients are summed (dp and cp), degree > 1 only."""
        return data_axes(self.axes)

    @property
    def model_axes(self) -> tuple[str, ...]:
        """Axes on which the values of a replica are placed (tp, then cp), degree > 1 only."""
        return tuple(axis for axis in ROLE_AXES if self.degree(axis) > 1)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Those that cut the tokens of a micro-batch between modules: cp, and tp under sequence parallelism."""
        return tuple(axis for axis in self.model_axes if self.sp or USES[axis] == "tokens")

    def __str__(self) -> str:
        flags = ["sp"] * self.sp + ([f"zero{self.zero}"] if self.zero else [])
        flags += [*([str(self.remat)] if self.remat else []), *self.pipeline.flags()]
        flags += ["role({})".format("|".join(f"{axis}={name}" for axis, name in self.roles))] if self.roles else []
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


SINGLE = Strategy(((REPLICAS, 1),))  # one rank


def of_degrees(replicas: int = 1, stages: int = 1, tokens: int = 1, weights: int = 1, zero: int = 0) -> Strategy:
    """With the axes of these uses that have a degree above 1; sp wherever weights are cut."""
    weight_axis, token_axis = ROLE_AXES
    degrees = ((REPLICAS, replicas), (STAGES, stages), (token_axis, tokens), (weight_axis, weights))
    axes = tuple((name, degree) for name, degree in degrees if degree > 1)
    return Strategy(axes or SINGLE.axes, sp=weights > 1, zero=zero)


def data_axes(axes: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Of axes with degrees those over which parameters are replicated, degree > 1 only."""
    return tuple(name for name, size in axes if USES.get(name) in ("replicas", "tokens") and size > 1)


def _parse_flags(text: str, flags: list[str]) -> dict[str, Any]:
    """The fields of a strategy that flags say."""
    zero, sp = 0, False
    remats: list[Remat | None] = []
    schedules: list[Pipeline] = []
    cuts: list[tuple[str, ...]] = []
    roles: list[tuple[tuple[str, str], ...]] = []
    for flag in flags:
        if flag in ("zero1", "zero2", "zero3"):
            if zero:
                raise StrategySyntaxError(text, flag, "one ZeRO level at a time")
            zero = int(flag[-1])
        elif flag == "sp":
            if sp:
                raise StrategySyntaxError(text, flag, "flag 'sp' is given twice")
            sp = True
        elif match := _REMAT.fullmatch(flag):
            if remats:
                raise StrategySyntaxError(text, flag, "flag 'remat' is given twice")
            remats.append(_parse_remat(text, flag, match[1]))
        elif match := _SCHEDULE.fullmatch(flag):
            schedules.append(_parse_schedule(text, flag, match[1], match[2]))
        elif match := _CUT.fullmatch(flag):
            cuts.append(tuple(word.strip() for word in match[1].split("|")))
        elif match := _ROLES.fullmatch(flag):
            roles.append(tuple(_parse_role(text, flag, word.strip()) for word in match[1].split("|")))
        elif not flag:
            raise StrategySyntaxError(text, "+", f"there is no flag behind a '+'. Flags are {', '.join(FLAGS)}")
        else:
            why = f"unknown flag {flag!r}{nearest(flag, FLAGS) or '.'} Flags are {', '.join(FLAGS)}"
            raise StrategySyntaxError(text, flag, why)
    for name, given in (("a schedule", schedules), ("flag 'cut'", cuts), ("flag 'role'", roles)):
        if len(given) > 1:
            raise StrategySyntaxError(text, text, f"{name} is given twice")
    pipeline = replace(schedules[0] if schedules else Pipeline(), cuts=cuts[0] if cuts else ())
    return {
        "zero": zero,
        "sp": sp,
        "remat": remats[0] if remats else None,
        "pipeline": pipeline,
        "roles": roles[0] if roles else (),
    }


def _parse_role(text: str, flag: str, word: str) -> tuple[str, str]:
    match = _ROLE.fullmatch(word)
    if not match:
        raise StrategySyntaxError(
            text, flag, f"{word!r} is not an axis and role; write role(tp=name), a name of letters, digits and _"
        )
    return match[1], match[2]


def _check_roles(text: str, strategy: Strategy) -> None:
    """Each role is of another axis, which the strategy has, and which a search places on."""
    axes = [axis for axis, _ in strategy.roles]
    for axis in axes:
        if axis not in ROLE_AXES:
            raise StrategySyntaxError(text, f"{axis}=", f"axes with a role are {' and '.join(ROLE_AXES)}")
        if axis not in dict(strategy.axes):
            raise StrategySyntaxError(text, f"{axis}=", f"it needs a {axis} axis, such as {axis}2")
        if axes.count(axis) > 1:
            raise StrategySyntaxError(text, f"{axis}=", f"axis {axis!r} has two roles")


def _parse_schedule(text: str, flag: str, kind: str, count: str | None) -> Pipeline:
    if kind != "interleaved_1f1b":
        if count is not None:
            raise StrategySyntaxError(text, flag, "only interleaved_1f1b(2) has several stages per rank")
        return Pipeline(kind)
    virtual = 2 if count is None else int(count)
    if virtual < 2:
        raise StrategySyntaxError(text, flag, "interleaved_1f1b needs 2 or more stages per rank; else write 1f1b")
    return Pipeline(kind, virtual)


def _check_pipeline(text: str, strategy: Strategy) -> None:
    """Schedules and cuts need stages, and cuts one per boundary."""
    flags = strategy.pipeline.flags()
    if flags and strategy.pipeline_size == 1:
        raise StrategySyntaxError(text, flags[0], "it needs a pp axis, such as pp2")
    cuts = strategy.pipeline.cuts
    for cut in cuts:
        if not _FQN.fullmatch(cut):
            raise StrategySyntaxError(text, flags[-1], f"{cut!r} is not a module; write cut(layers.3|layers.6)")
    if cuts and len(cuts) != strategy.stages - 1:
        why = f"{strategy.stages} stages have {strategy.stages - 1} cuts, not {len(cuts)}"
        raise StrategySyntaxError(text, flags[-1], why)


def _parse_remat(text: str, flag: str, inside: str | None) -> Remat | None:
    """What stands between the parentheses of `remat(...)`; None is `remat` alone."""
    words = ["full"] if inside is None else [word.strip() for word in inside.split("|")]
    choices = [_COLLECTIVES[word] for word in words if word in _COLLECTIVES]
    words = [word for word in words if word not in _COLLECTIVES]
    if len(choices) > 1:
        raise StrategySyntaxError(text, flag, "keep_comm or redo_comm, once")
    how = choices[0] if choices else "auto"
    if not words:
        words = ["full"]
    modes = ("none", "full", "selective")
    if len(words) == 1 and words[0] in modes:
        if words[0] == "none" and choices:
            raise StrategySyntaxError(text, flag, f"{inside!r} says twice what to do")
        return None if words[0] == "none" else Remat(words[0], collectives=how)  # type: ignore[arg-type]
    if len(words) == 1 and (words[0][:1].isdigit() or _NO_SIZE.fullmatch(words[0])):
        return Remat("budget", budget_bytes=_parse_bytes(text, flag, words[0]), collectives=how)  # type: ignore[arg-type]
    for word in words:
        mistyped = nearest(word, (*modes, *_COLLECTIVES)) if word.isidentifier() else ""
        if word in modes or word[:1].isdigit():
            raise StrategySyntaxError(text, flag, f"{word!r} stands alone in remat(...)")
        if mistyped or not _GLOB.fullmatch(word):
            why = f"{word!r} says nothing about recomputation{mistyped or '.'} Write full, selective, a size such as"
            raise StrategySyntaxError(text, flag, why + " 200MB, or globs of modules such as *.ffn|*.attention")
    if len(set(words)) < len(words):
        raise StrategySyntaxError(text, flag, "a glob is given twice")
    return Remat("modules", tuple(words), collectives=how)  # type: ignore[arg-type]


def _parse_bytes(text: str, flag: str, word: str) -> int:
    match = _BYTES.fullmatch(word)
    unit = next((u for u in _UNITS if match and match[2].lower() == u.lower()), None)
    if match is None or unit is None:
        raise StrategySyntaxError(text, flag, f"{word!r} is not a size; units are {', '.join(_UNITS)}, such as 200MB")
    size = Fraction(match[1]) * _UNITS[unit]
    if size < 1:
        raise StrategySyntaxError(text, flag, "a budget is at least 1 byte")
    return int(size)


def parse_override(pattern: str, placement: str) -> Placement:
    """Placement on the tp axis named by `S(0)@tp`, `S(1)`, `R@tp` ...; raises OverrideError."""
    match = _OVERRIDE.fullmatch(placement)
    if not match:
        raise OverrideError(pattern, f"{placement!r} is not a placement.", " Write 'S(0)@tp', 'S(1)@tp' or 'R@tp'.")
    return R if match[1] == "R" else Shard(int(match[2]))
