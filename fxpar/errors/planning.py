"""Errors of planning: lengths, profiles, plan files, and searches that find nothing."""

from __future__ import annotations

from collections.abc import Iterable

from fxpar.errors.base import FxparError


class LengthsError(FxparError):
    """Lengths of sequences that a plan cannot be made for."""

    def __init__(self, source: str, why: str, do: str) -> None:
        super().__init__(f"lengths {source!r}: {why}. {do}")


class PlanFileError(FxparError):
    """A plan file that cannot be read, or is not for this model or number of ranks."""

    def __init__(self, path: str, why: str, do: str = "") -> None:
        super().__init__(f"plan {path!r}: {why}" + (f". {do}" if do else ""))


class NothingFitsError(FxparError):
    """No strategy holds the longest sequence in the memory that there is; `nearest` is the one that lacks least."""

    def __init__(self, longest: int, memory_bytes: int, nearest: str, needs_bytes: int) -> None:
        super().__init__(
            f"no strategy holds a sequence of {longest:,} tokens in {memory_bytes / 1e9:.3g} GB per device. {nearest} "
            f"needs least, {needs_bytes / 1e9:.3g} GB. Plan for more devices, say --memory {needs_bytes / 1e9:.3g}GB "
            "for larger ones, or leave out longer sequences"
        )


class NoCandidateError(FxparError):
    """The model cannot be lowered under any strategy of the search."""

    def __init__(self, reasons: Iterable[str]) -> None:
        super().__init__("the model runs under none of the strategies: " + "; ".join(reasons))
