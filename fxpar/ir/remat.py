"""`Remat`: what the backward computes again, as a value and as a flag of a strategy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from fxpar.errors import StrategySyntaxError, nearest

REMAT = re.compile(r"remat(?:\((.*)\))?", re.DOTALL)
_GLOB = re.compile(r"[\w.*?\[\]!-]+", re.ASCII)
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)
_NO_SIZE = re.compile(r"[-+].*|(?:inf|infinity|nan)\s*(?:[kmgt]?b)?", re.ASCII | re.IGNORECASE)
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


RematMode = Literal["none", "full", "selective", "modules", "budget"]  # "none" in rules of modules alone
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
            "none": ["none"],
            "full": ["full"],
            "selective": ["selective"],
            "modules": list(self.globs),
            "budget": [f"{self.budget_bytes // _UNITS[unit]}{unit}"],
        }[self.mode]
        words += [word for word, choice in _COLLECTIVES.items() if choice == self.collectives]
        return "remat" if words == ["full"] else f"remat({'|'.join(words)})"


def parse_remat(text: str, flag: str, inside: str | None) -> Remat | None:
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
