"""Rules of a strategy: what the modules that a glob matches do otherwise than the rest of the model.

They stand in brackets behind the strategy, `glob: roles` each, with ';' between them:

    dp2.tp4+sp[*.self_attn: cp4; layers.{0-7}: +remat; {embed,head}: tp4]

A glob runs over FQNs of modules: `*` is any text, dots too, `?` one character, `{0-7}` a number, `{a,b}` one of these.
What it matches is meant with all modules inside. Roles are axes of the same ranks that the replica has, outermost
first (here: 4), with `+sp` or without; `+zero...`, `+remat...`, `+offload...`, `+lsh...`, `+capacity...`, `+chunks...`
and `+ep_chunks...` are of the rule alone. What a rule does not say is as around it: where several match, each property
comes from the innermost module that a rule says it of.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fxpar.errors import RuleConflictError, StrategySyntaxError
from fxpar.ir.axes import whole_axis
from fxpar.ir.mesh import Axes, sub_axis
from fxpar.ir.remat import Remat

SHARES = ("offload", "lsh", "capacity")
"""Flags whose value is a number in parentheses, 0 where nothing is said."""
CHUNKS = ("chunks", "ep_chunks")
"""Flags that say in how many chunks of tokens something runs, 1 where nothing is said."""
NOTHING: dict[str, Any] = dict.fromkeys(SHARES, 0.0) | dict.fromkeys(CHUNKS, 1)
"""What a strategy has of these flags that names none."""
PROPERTIES = ("roles", "zero", "remat", *CHUNKS, *SHARES)
"""What rules say of modules, each property by itself."""

_WORD = re.compile(r"[\w.*?{},-]+", re.ASCII)
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)-(\d+)")
_MOST_NUMBERS = 10_000  # of a range
_MOST_STARS = 6  # each multiplies the ways in which a glob may match


@dataclass(frozen=True)
class ModuleRule:
    """What modules that `glob` matches do: `axes` are those inside of a replica, () as around them, `sp` goes with
    them. Properties of None are as around them; `Remat("none")` recomputes nothing, what runs in one chunk is whole, an
    `offload` of 0 keeps all that is saved on the device, with an `lsh` of 0 experts see all rows, and with a `capacity`
    of 0 any number of them.
    """

    glob: str
    axes: Axes = ()
    sp: bool = False
    zero: int | None = None
    remat: Remat | None = None
    chunks: int | None = None
    offload: float | None = None
    lsh: float | None = None
    capacity: float | None = None
    ep_chunks: int | None = None

    def __str__(self) -> str:
        axes = ".".join(f"{name}{degree}" for name, degree in self.axes)
        flags = ["sp"] * self.sp + ([f"zero{self.zero}"] if self.zero is not None else [])
        flags += [str(self.remat)] * (self.remat is not None)
        shares = {flag: getattr(self, flag) for flag in SHARES}
        flags += [share_flag(flag, share) for flag, share in shares.items() if share is not None]
        flags += [f"{flag}({count})" for flag in CHUNKS if (count := getattr(self, flag)) is not None]
        return f"{self.glob}: {'+'.join([axes, *flags])}"

    def matches(self, module: str) -> bool:
        """Whether the glob matches the module itself."""
        return _pattern(self.glob).fullmatch(module) is not None

    @property
    def says(self) -> tuple[str, ...]:
        """What it says something about, of PROPERTIES."""
        said = {"roles": bool(self.axes), "zero": self.zero is not None, "remat": self.remat is not None}
        said |= {flag: getattr(self, flag) is not None for flag in NOTHING}
        return tuple(name for name, is_said in said.items() if is_said)


def share_flag(flag: str, share: float) -> str:
    """`offload`, `offload(0.5)`, `offload(none)`: of all, that share, nothing. Others always have a number."""
    written = f"{share:.9f}".rstrip("0").rstrip(".") if share else "none"
    return flag if share == 1 and flag == "offload" else f"{flag}({written})"


def split_outside(text: str, separator: str) -> list[str]:
    """As `text.split(separator)`, but what stands in brackets, parentheses or braces stays together."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == separator and depth <= 0:
            found.append("")
        else:
            found[-1] += letter
    return found


def check_glob(text: str, glob: str) -> None:
    """Raise StrategySyntaxError for what is no glob over modules."""
    rest = _BRACES.sub("", glob)
    if not _WORD.fullmatch(glob) or "{" in rest or "}" in rest:
        why = "a rule begins with a glob of modules, such as *.self_attn or layers.{0-7}"
        raise StrategySyntaxError(text, glob, why)
    if glob.count("*") > _MOST_STARS:
        raise StrategySyntaxError(text, glob, f"a glob has at most {_MOST_STARS} stars")
    for inside in _BRACES.findall(glob):
        words = [word.strip() for word in inside.split(",")]
        if not all(words):
            raise StrategySyntaxError(
                text, f"{{{inside}}}", "write what may stand there, such as {embed,head} or {0-7}"
            )
        for match in filter(None, map(_RANGE.fullmatch, words)):
            if max(map(len, match.groups())) > 9 or not 0 <= int(match[2]) - int(match[1]) < _MOST_NUMBERS:
                why = f"a range is from a smaller number to a larger one, {_MOST_NUMBERS:,} at most, such as {{0-7}}"
                raise StrategySyntaxError(text, f"{{{inside}}}", why)


def governing(rules: Sequence[ModuleRule], fqn: str, what: str) -> int | None:
    """The index of the rule that says `what` (one of `says`) of the module `fqn` ("" for the root), or of the
    nearest one around it; None where none does. Raises RuleConflictError where two do.
    """
    parts = fqn.split(".")
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        found = [i for i, rule in enumerate(rules) if what in rule.says and rule.matches(module)]
        if len(found) > 1:
            raise RuleConflictError(module, what, [str(rules[i]) for i in found])
        if found:
            return found[0]
    return None


def atoms(text: str, axes: Axes, rules: Sequence[ModuleRule]) -> dict[str, tuple[str, ...]]:
    """The axes of a replica, split so that the axes of all rules are made of them, by name and outermost first; to each
    the axis that it belongs to in the strategy itself and in each rule.

    `axes` are those of the strategy inside of a replica. Both have degree 1 left out. Raises StrategySyntaxError for
    degrees that do not fit.
    """
    world = math.prod(degree for _, degree in axes)
    layouts = [axes, *(tuple(a for a in rule.axes if a[1] > 1) if rule.axes else axes for rule in rules)]
    steps = {1}
    for rule, layout in zip((None, *rules), layouts, strict=True):
        if math.prod(degree for _, degree in layout) != world:
            size = math.prod(degree for _, degree in layout)
            do = f"give axes with the product {world}"
            if world == 1:
                do = f"in front of the brackets stands what all other modules do, such as cp{size}"
            raise StrategySyntaxError(text, str(rule), f"it is of {size} ranks, a replica has {world}; {do}")
        steps |= set(_steps(layout).values())
    ordered = sorted(steps | {world})
    for low, high in itertools.pairwise(ordered):
        if high % low:
            which = next((str(r) for r, a in zip(rules, layouts[1:], strict=True) if low in _steps(a).values()), text)
            raise StrategySyntaxError(
                text, which, f"degrees do not factor: ranks in runs of {low} do not fit in runs of {high}"
            )
    found: dict[str, tuple[str, ...]] = {}
    for low, high in zip(reversed(ordered[:-1]), reversed(ordered[1:]), strict=True):
        owners = tuple(_owner(layout, low) for layout in layouts)
        (name, degree, step) = owners[0]
        whole = low == step and high == step * degree
        atom = name if whole else sub_axis(name, step * degree // high, high // low)
        found[atom] = tuple(owner for owner, _, _ in owners)
    return found


def _steps(axes: Axes) -> dict[str, int]:
    """Distance of neighbours on each axis, in ranks of a replica."""
    return {name: math.prod(d for _, d in axes[i + 1 :]) for i, (name, _) in enumerate(axes)}


def _owner(axes: Axes, step: int) -> tuple[str, int, int]:
    """The axis that has neighbours at a distance of `step`, its degree, and its own step."""
    steps = _steps(axes)
    return next((n, degree, steps[n]) for n, degree in axes if steps[n] <= step < steps[n] * degree)


def joined(names: Iterable[str], split: Iterable[str]) -> str:
    """`names` as one axis joined by '.': an axis of which all parts (`split`) are there is written whole."""
    names, parts = list(names), list(split)
    found: list[str] = []
    for name in names:
        axis = whole_axis(name)
        all_parts = [part for part in parts if whole_axis(part) == axis]
        written = axis if set(all_parts) <= set(names) else name
        if written not in found:
            found.append(written)
    return ".".join(found)


@functools.lru_cache(1024)
def _pattern(glob: str) -> re.Pattern[str]:
    """The glob as a regular expression."""
    found, at = "", 0
    for match in _BRACES.finditer(glob):
        found += _translated(glob[at : match.start()]) + _alternatives(match[1])
        at = match.end()
    return re.compile(found + _translated(glob[at:]))


def _translated(text: str) -> str:
    return re.escape(text).replace(r"\*", ".*").replace(r"\?", ".")


def _alternatives(inside: str) -> str:
    words = []
    for word in inside.split(","):
        match = _RANGE.fullmatch(word.strip())
        numbers = [str(n) for n in range(int(match[1]), int(match[2]) + 1)] if match else [_translated(word.strip())]
        words += numbers
    return f"(?:{'|'.join(words)})"
