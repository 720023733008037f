"""`options` of `torch.compile(model, backend="fxpar")`."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from fxpar.errors import BackendOptionError, a_type, nearest
from fxpar.ir.strategy import Strategy
from fxpar.runtime.runner import Backend

OPTIONS = ("strategy", "strategies", "overrides", "seed", "compile")
_BACKENDS = ("eager", "inductor")


@dataclass(frozen=True)
class BackendOptions:
    """`options` of `torch.compile`, checked. `limits`: the most tokens of a call under each of `strategies`, ascending;
    () with a single one, which takes all.
    """

    strategies: tuple[Strategy, ...]
    limits: tuple[int, ...] = ()
    seed: int = 0
    compile: Backend = "eager"

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> BackendOptions:
        """Raises BackendOptionError, and the errors of `Strategy.parse`."""
        given = dict(options or {})
        for name in given:
            if name not in OPTIONS:
                raise BackendOptionError(name, f"there is none of this name{nearest(name, OPTIONS)}")
        limits, strategies = _limits(given)
        seed, compile = given.get("seed", 0), given.get("compile", "eager")
        if not isinstance(seed, int):
            raise BackendOptionError("seed", f"it is {a_type(seed)}, not an integer")
        if compile not in _BACKENDS:
            raise BackendOptionError("compile", f"it is {compile!r}, not one of {', '.join(_BACKENDS)}")
        return cls(strategies, limits, seed, cast(Backend, compile))

    def number_for(self, tokens: int | None) -> int:
        """Which strategy takes a call with so many tokens (None: it has no tokens' dim). Raises BackendOptionError."""
        if not self.limits:
            return 0
        if tokens is None:
            why = "a graph of this model has no dim of tokens to choose by: ids [B, T] or activations [B, T, D]"
            raise BackendOptionError("strategies", why)
        if tokens > self.limits[-1]:
            raise BackendOptionError("strategies", f"none takes {tokens} tokens; the last limit is {self.limits[-1]}")
        return bisect.bisect_left(self.limits, tokens)


def _limits(given: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[Strategy, ...]]:
    """Limits and strategies of `strategy` or `strategies`."""
    several, overrides = given.get("strategies"), given.get("overrides")
    if several is None:
        return (), (_strategy("strategy", given.get("strategy"), overrides),)
    if given.get("strategy") is not None:
        raise BackendOptionError("strategies", "strategy is given as well; give one of the two")
    if not isinstance(several, Mapping) or not several:
        raise BackendOptionError("strategies", f"it is {several!r}, not a mapping from tokens to strategies")
    for limit in several:
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise BackendOptionError("strategies", f"{limit!r} is not a number of tokens")
    limits = tuple(sorted(several))
    return limits, tuple(_strategy("strategies", several[limit], overrides) for limit in limits)


def _strategy(option: str, value: Any, overrides: Any) -> Strategy:
    if value is None:
        raise BackendOptionError(option, "it is missing")
    if not isinstance(value, Strategy):
        if not isinstance(value, str):
            raise BackendOptionError(option, f"it is {value!r}, not a text")
        value = Strategy.parse(value, overrides=overrides)
    if value.teams:
        why = "every call brings a batch for all ranks here, and teams run batches of their own; use fxpar.parallelize"
        raise BackendOptionError(option, why)
    if value.most_zero:
        why = "weights are whole on every rank here, so there is nothing for ZeRO to shard; use fxpar.parallelize"
        raise BackendOptionError(option, why)
    return value
