"""The text of a strategy, part by part: axes, flags, rules; see `fxpar.ir.strategy` for the grammar."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from fxpar.errors import OverrideError, StrategySyntaxError, nearest
from fxpar.ir.axes import AXES, ROLE_AXES, STAGES
from fxpar.ir.dist_config import Placement, R, Shard
from fxpar.ir.mesh import Axes
from fxpar.ir.module_rules import CHUNKS, SHARES, ModuleRule, check_glob, share_flag, split_outside
from fxpar.ir.remat import REMAT, Remat, parse_remat

MOST_RANKS = 2**20  # more are a slip of the finger
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1")
FLAGS = ("sp", "zero1", "zero2", "zero3", "remat", *SHARES, *CHUNKS, "tokens", *SCHEDULES, "cut", "role")
MOST_CHUNKS = 64  # each is a copy of the loss, or of the experts, in the graph
MOST_TOKENS = 2**31 - 1  # of a micro-batch
RULE_FLAGS = ("sp", "zero0", "zero1", "zero2", "zero3", "remat", *SHARES, *CHUNKS)
_AXIS = re.compile(r"([a-z]+)([0-9]{1,9})")
_ROUNDS = re.compile(r"\s*rounds?\b\s*(\(?)", re.IGNORECASE)  # several strategies: `fxpar.ir.teams.formations`
_SCHEDULE = re.compile(r"(gpipe|1f1b|zb_h1|interleaved_1f1b)(?:\((\d+)\))?")
_COUNT = re.compile(rf"({'|'.join(CHUNKS)}|tokens)(?:\((.*)\))?", re.DOTALL)
_SHARED = re.compile(rf"({'|'.join(SHARES)})(?:\((.*)\))?", re.DOTALL)
_SHARES = {"offload": ("is saved", "offload(0.5)"), "lsh": ("experts are given", "lsh(0.2)")}
_COUNTS = {
    "chunks": (
        "write in how many chunks of tokens the loss runs, such as chunks(16)",
        MOST_CHUNKS,
        f"the loss runs in 1 to {MOST_CHUNKS} chunks of tokens",
    ),
    "ep_chunks": (
        "write in how many chunks tokens travel to their experts, such as ep_chunks(2)",
        MOST_CHUNKS,
        f"tokens travel to their experts in 1 to {MOST_CHUNKS} chunks",
    ),
    "tokens": (
        "write how many tokens a micro-batch has at most, such as tokens(4096)",
        MOST_TOKENS,
        f"a micro-batch has from 1 to {MOST_TOKENS:,} tokens",
    ),
}
_SHARE = re.compile(r"1|1\.0{1,9}|0?\.[0-9]{1,9}", re.ASCII)
_TIMES = re.compile(r"[0-9]{1,4}(?:\.[0-9]{1,9})?", re.ASCII)
_CUT = re.compile(r"cut\((.*)\)", re.DOTALL)
_ROLES = re.compile(r"role\((.*)\)", re.DOTALL)
_OVERRIDE = re.compile(r"\s*(R|S\((\d+)\))\s*(?:@\s*tp)?\s*")
_FQN = re.compile(r"\w+(?:\.\w+)*", re.ASCII)
_ROLE = re.compile(r"(\w+)=(\w+)", re.ASCII)


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


def sides_of(text: str, part: str, sign: str, what: str, example: str) -> list[str]:
    """What stands between the signs of a part of the text."""
    sides = [side.strip() for side in split_outside(part, sign)]
    if len(sides) > 1 and not all(sides):
        raise StrategySyntaxError(text, sign, f"{what} stands on each side of it, such as {example}")
    return sides


def split_rules(text: str) -> tuple[str, str | None]:
    """What stands in front of the brackets at the end, and in them (None without brackets)."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "[" and not depth:
            if not text.endswith("]"):
                closed = "]" in text[at:]
                why = "flags of the strategy stand in front of the rules" if closed else "']' is missing at its end"
                raise StrategySyntaxError(text, text[at:], why)
            return text[:at], text[at + 1 : -1]
    return text, None


def parse_rules(text: str, inside: str) -> tuple[ModuleRule, ...]:
    rules: list[ModuleRule] = []
    for part in filter(None, map(str.strip, inside.split(";"))):
        glob, colon, roles = map(str.strip, part.partition(":"))
        if not colon or not roles:
            raise StrategySyntaxError(text, part, "a rule is a glob of modules, ':' and roles, such as *.mlp: tp4+sp")
        check_glob(text, glob)
        if glob in {rule.glob for rule in rules}:
            raise StrategySyntaxError(text, part, f"there are two rules for {glob!r}")
        if ":" in roles:
            raise StrategySyntaxError(text, part, "rules are separated by ';'")
        axis_text, *flags = roles.split("+")
        axes = parse_axes(text, axis_text) if axis_text else ()
        wrong = next((name for name, _ in axes if name not in ROLE_AXES), "")
        if wrong:
            why = f"axes of a rule are those inside of a replica, {', '.join(ROLE_AXES)}; {wrong} is of all modules"
            raise StrategySyntaxError(text, part, why)
        rules.append(_parse_rule(text, part, glob, axes, flags))
    if not rules:
        raise StrategySyntaxError(text, "[]", "there are no rules in the brackets")
    return tuple(rules)


def _parse_rule(text: str, part: str, glob: str, axes: Axes, flags: list[str]) -> ModuleRule:
    zero = [int(flag[-1]) for flag in flags if re.fullmatch("zero[0-3]", flag)]
    found = parse_flags(text, [flag for flag in flags if not re.fullmatch("zero[0-3]", flag)], RULE_FLAGS)
    if len(zero) > 1:
        raise StrategySyntaxError(text, part, "one ZeRO level at a time")
    if found["tokens"] or any(pattern.fullmatch(flag) for flag in flags for pattern in (_SCHEDULE, _CUT, _ROLES)):
        why = "a schedule, cuts, tokens(...) and role(...) are of all modules; write them in front"
        raise StrategySyntaxError(text, part, why)
    if found["sp"] and not axes:
        raise StrategySyntaxError(text, part, "sp goes with axes, such as tp4+sp")
    remat = found["remat"]
    if remat is None and any(flag.startswith("remat") for flag in flags):
        remat = Remat("none")
    if remat is not None and remat.mode not in ("full", "selective", "none"):
        raise StrategySyntaxError(
            text, part, "a rule recomputes all of its modules: remat, remat(selective), or remat(none)"
        )
    shares = found["chunks"], *(found[flag] for flag in SHARES), found["ep_chunks"]
    return ModuleRule(glob, axes, found["sp"], zero[0] if zero else None, remat, *shares)


def parse_axes(text: str, axis_text: str, digits: bool = False) -> Axes:
    """Axes with degrees as they are written; with `digits` one may stand in several places."""
    axes: list[tuple[str, int]] = []
    for part in axis_text.split("."):
        match = _AXIS.fullmatch(part)
        if not match and re.fullmatch(r"[a-z]+[0-9]+", part, re.ASCII):
            raise StrategySyntaxError(text, part, f"a degree is from 1 to {MOST_RANKS:,}")
        if not axis_text and "[" in text:
            why = "in front of the brackets stands what all other modules do, such as cp4[*.mlp: tp4]"
            raise StrategySyntaxError(text, text[text.index("[") :], why)
        rounds = _ROUNDS.match(part)
        if rounds and not rounds[1]:
            why = "rounds have parentheses, with one strategy or several, as in rounds(cp8) and rounds(cp8, cp2, dp1)"
            raise StrategySyntaxError(text, text, why)
        if rounds:
            why = "rounds(...) stands alone, with flags inside, as in rounds(cp8+remat); name one strategy here, as cp8"
            raise StrategySyntaxError(text, part, why if ")" in text else "')' is missing at its end")
        if not match:
            raise StrategySyntaxError(text, part, "an axis is a name and a degree, such as dp2")
        name, degree = match[1], int(match[2])
        if name not in AXES:
            why = f"unknown axis {name!r}{nearest(name, AXES) or '.'} Axes are {', '.join(AXES)}"
            raise StrategySyntaxError(text, part, why)
        if name in dict(axes) and not digits:
            raise StrategySyntaxError(text, part, f"axis {name!r} is given twice")
        if degree < 1:
            raise StrategySyntaxError(text, part, f"a degree is from 1 to {MOST_RANKS:,}")
        axes.append((name, degree))
    if len(axes) > len(dict(axes)):
        _check_digits(text, axes)
    return tuple(axes)


def _check_digits(text: str, digits: Sequence[tuple[str, int]]) -> None:
    """There is one way to write an order of ranks."""
    names = [name for name, _ in digits]
    for name, degree in digits:
        if degree == 1 and names.count(name) > 1:
            raise StrategySyntaxError(
                text, f"{name}1", f"each part of an axis in several places has 2 or more; leave {name}1 out"
            )
    if names.count(STAGES) > 1:
        why = "stages are blocks of neighbouring ranks wherever pp stands, so it stands once"
        raise StrategySyntaxError(text, STAGES, why)
    for (name, degree), (after, more) in pairwise(digit for digit in digits if digit[0] != STAGES and digit[1] > 1):
        if name == after:
            why = f"axis {name!r} stands twice without another one between; write {name}{degree * more}"
            raise StrategySyntaxError(text, f"{after}{more}", why)


def joined_digits(digits: Axes) -> Axes:
    """Axes with their degrees, in the order of their first digits."""
    found: dict[str, int] = {}
    for name, degree in digits:
        found[name] = found.get(name, 1) * degree
    return tuple(found.items())


def digits_of(axes: Axes, digits: Axes) -> Axes:
    """What is left of `digits` for these axes: those of an axis that is still of this degree. Axes that they do not
    name stand in front. () where each axis is in one place.
    """
    degrees, given = dict(axes), dict(joined_digits(digits))
    kept = [digit for digit in digits if given[digit[0]] == degrees.get(digit[0])]
    found = [axis for axis in axes if axis not in joined_digits(tuple(kept))]
    for name, degree in kept:
        if found and found[-1][0] == name:
            found[-1] = name, found[-1][1] * degree
        else:
            found.append((name, degree))
    return tuple(found) if len(found) > len(axes) and joined_digits(tuple(found)) == axes else ()


def parse_flags(text: str, flags: list[str], known: Sequence[str] = FLAGS) -> dict[str, Any]:
    """The fields of a strategy that flags say; `known` are those that an error lists."""
    zero, sp = 0, False
    remats: list[Remat | None] = []
    counts: dict[str, list[int]] = {flag: [] for flag in _COUNTS}
    shares: dict[str, list[float]] = {flag: [] for flag in SHARES}
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
        elif match := REMAT.fullmatch(flag):
            if remats:
                raise StrategySyntaxError(text, flag, "flag 'remat' is given twice")
            remats.append(parse_remat(text, flag, match[1]))
        elif match := _SHARED.fullmatch(flag):
            shares[match[1]].append(_parse_share(text, flag, match[1], match[2]))
        elif match := _COUNT.fullmatch(flag):
            counts[match[1]].append(_parse_count(text, flag, *match.groups()))
        elif match := _SCHEDULE.fullmatch(flag):
            schedules.append(_parse_schedule(text, flag, match[1], match[2]))
        elif match := _CUT.fullmatch(flag):
            cuts.append(tuple(word.strip() for word in match[1].split("|")))
        elif match := _ROLES.fullmatch(flag):
            roles.append(tuple(_parse_role(text, flag, word.strip()) for word in match[1].split("|")))
        elif not flag:
            raise StrategySyntaxError(text, "+", f"there is no flag behind a '+'. Flags are {', '.join(known)}")
        elif (axis := _AXIS.fullmatch(flag)) and axis[1] in AXES:
            why = f"{flag} is an axis, not a flag: join axes with '.', as in {AXES[0]}2.{flag}"
            raise StrategySyntaxError(text, flag, why)
        else:
            why = f"unknown flag {flag!r}{nearest(flag, known) or '.'} Flags are {', '.join(known)}"
            raise StrategySyntaxError(text, flag, why)
    given_once = {"a schedule": schedules, "flag 'cut'": cuts, "flag 'role'": roles}
    given_once |= {f"flag {flag!r}": given for flag, given in {**shares, **counts}.items()}
    for name, given in given_once.items():
        if len(given) > 1:
            raise StrategySyntaxError(text, text, f"{name} is given twice")
    pipeline = replace(schedules[0] if schedules else Pipeline(), cuts=cuts[0] if cuts else ())
    return {
        "zero": zero,
        "sp": sp,
        "remat": remats[0] if remats else None,
        **{flag: given[0] if given else None for flag, given in {**shares, **counts}.items()},
        "pipeline": pipeline,
        "roles": roles[0] if roles else (),
    }


def _parse_count(text: str, flag: str, name: str, inside: str | None) -> int:
    """The whole number of `chunks(16)`, `ep_chunks(2)` or `tokens(4096)`."""
    what, most, wrong = _COUNTS[name]
    if not re.fullmatch(r"[0-9]{1,10}", inside or "", re.ASCII):
        raise StrategySyntaxError(text, flag, what)
    if not 1 <= int(inside or "") <= most:
        raise StrategySyntaxError(text, flag, wrong)
    return int(inside or "")


def _parse_share(text: str, flag: str, name: str, inside: str | None) -> float:
    """The share of `offload`, `offload(0.5)`, or of `offload(none)`: 0. Of others a number has to be written."""
    if inside == "none" or (inside is None and name == "offload"):
        return float(inside is None)
    if name == "capacity":
        capacity = float(inside) if inside and _TIMES.fullmatch(inside) else 0.0
        if capacity < 1:
            what = "there is no capacity" if inside is None else f"{inside!r} is not a capacity"
            why = f"{what}; write a number of 1 or more, such as capacity(1.25): below 1 even routes lose tokens"
            raise StrategySyntaxError(text, flag, why)
        return capacity
    share = float(inside) if inside and _SHARE.fullmatch(inside) else 0.0
    if not 0 < share <= 1:
        what, example = _SHARES[name]
        no_share = "there is no share" if inside is None else f"{inside!r} is not a share"
        why = f"{no_share} of what {what}; write one above 0 and up to 1, such as {example}"
        raise StrategySyntaxError(text, flag, why)
    return share


def _parse_role(text: str, flag: str, word: str) -> tuple[str, str]:
    match = _ROLE.fullmatch(word)
    if not match:
        raise StrategySyntaxError(
            text, flag, f"{word!r} is not an axis and role; write role(tp=name), a name of letters, digits and _"
        )
    return match[1], match[2]


def _parse_schedule(text: str, flag: str, kind: str, count: str | None) -> Pipeline:
    if kind != "interleaved_1f1b":
        if count is not None:
            raise StrategySyntaxError(text, flag, "only interleaved_1f1b(2) has several stages per rank")
        return Pipeline(kind)
    virtual = 2 if count is None else int(count)
    if virtual < 2:
        raise StrategySyntaxError(text, flag, "interleaved_1f1b needs 2 or more stages per rank; else write 1f1b")
    return Pipeline(kind, virtual)


def flags_of(one: Any) -> list[str]:
    """The flags of a `Strategy` as they are written."""
    flags = ["sp"] * one.sp + [f"zero{one.zero}"] * (one.zero > 0)
    flags += [str(one.remat)] * (one.remat is not None)
    flags += [share_flag("offload", one.offload)] * (one.offload > 0)
    flags += [f"{flag}({count})" for flag in CHUNKS if (count := getattr(one, flag)) > 1]
    flags += [share_flag(flag, share) for flag in ("lsh", "capacity") if (share := getattr(one, flag)) > 0]
    flags += [f"tokens({one.tokens})"] * (one.tokens > 0) + one.pipeline.flags()
    flags += ["role({})".format("|".join(f"{axis}={name}" for axis, name in one.roles))] if one.roles else []
    return flags


def check_roles(text: str, roles: Sequence[tuple[str, str]], axes: Axes) -> None:
    """Each role is of another axis, which the strategy has, and which a search places on."""
    named = [axis for axis, _ in roles]
    for axis in named:
        if axis not in ROLE_AXES:
            raise StrategySyntaxError(text, f"{axis}=", f"axes with a role are {', '.join(ROLE_AXES)}")
        if axis not in dict(axes):
            raise StrategySyntaxError(text, f"{axis}=", f"it needs a {axis} axis, such as {axis}2")
        if named.count(axis) > 1:
            raise StrategySyntaxError(text, f"{axis}=", f"axis {axis!r} has two roles")


def check_pipeline(text: str, pipeline: Pipeline, ranks: int) -> None:
    """Schedules and cuts need stages, on so many ranks, and there is one cut per boundary."""
    flags = pipeline.flags()
    if flags and ranks == 1:
        raise StrategySyntaxError(text, flags[0], "it needs a pp axis, such as pp2")
    for cut in pipeline.cuts:
        if not _FQN.fullmatch(cut):
            raise StrategySyntaxError(text, flags[-1], f"{cut!r} is not a module; write cut(layers.3|layers.6)")
    stages = ranks * pipeline.virtual
    if pipeline.cuts and len(pipeline.cuts) != stages - 1:
        raise StrategySyntaxError(text, flags[-1], f"{stages} stages have {stages - 1} cuts, not {len(pipeline.cuts)}")


def parse_override(pattern: str, placement: str) -> Placement:
    """Placement on the tp axis named by `S(0)@tp`, `S(1)`, `R@tp` ...; raises OverrideError."""
    match = _OVERRIDE.fullmatch(placement)
    if not match:
        raise OverrideError(pattern, f"{placement!r} is not a placement.", " Write 'S(0)@tp', 'S(1)@tp' or 'R@tp'.")
    return R if match[1] == "R" else Shard(int(match[2]))
