"""Errors of planning: lengths, costs, plans and their files, what is asked of a plan, models that fit nowhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fxpar.errors.base import FxparError, nearest, one_line


class GalvatronFileError(FxparError):
    """A file of Galvatron's that cannot be read, is no JSON object, or is missing from its folder."""

    def __init__(self, file: str, why: str) -> None:
        super().__init__(f"{one_line(file, None)!r}: {why}")


class GalvatronKeyError(FxparError):
    """A key of one of Galvatron's files that is not known there, is missing, or has a value that cannot be.

    `value` is what stands there, as Python would print it; `known` are keys that may stand there.
    """

    def __init__(self, file: str, key: str, value: object, why: str, known: Iterable[str] = ()) -> None:
        shown = one_line(repr(value), 60)
        super().__init__(f"{one_line(file, None)!r}, key {one_line(key, 80)!r} = {shown}: {why}{nearest(key, known)}")


class PlanOptionError(FxparError):
    """A number or word that the plan shall be made for, and with which none can be."""

    def __init__(self, option: str, value: object, why: str) -> None:
        super().__init__(f"{option} = {one_line(value)}: {why}")


class NothingFitsError(FxparError):
    """No strategy fits into the memory of a device. `least` is what the smallest needs, as text."""

    def __init__(self, memory: str, least: str, plan: str) -> None:
        super().__init__(
            f"no strategy fits into {memory} per device. The smallest is {plan} with {least}: give each device so much "
            "memory, or plan for more devices, a smaller batch or shorter sequences"
        )


class LengthsError(FxparError):
    """Lengths of sequences that a plan cannot be made for."""

    def __init__(self, source: str, why: str, do: str) -> None:
        super().__init__(f"lengths {source!r}: {why.removesuffix('?')}{'?' if why.endswith('?') else '.'} {do}")


class PlanFileError(FxparError):
    """A plan file that cannot be read, or is not for this model or number of ranks."""

    def __init__(self, path: str, why: str, do: str = "") -> None:
        super().__init__(f"plan {path!r}: {why}" + (f". {do}" if do else ""))


class AutoStrategiesError(FxparError):
    """Rank 0, which chooses the strategies for all ranks, found none; its own error says more."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"rank 0 chose no strategies: {problem}")


class SharedCaptureError(FxparError):
    """Rank 0, which captures for all ranks, could not; its own error says more."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"rank 0 could not capture: {problem}")


class SequenceFitsNowhereError(FxparError):
    """No strategy holds the longest sequence in the memory that there is; `nearest` is the one that lacks least."""

    def __init__(self, longest: int, memory_bytes: int, nearest: str, needs_bytes: int) -> None:
        needs = f"{math.ceil(needs_bytes / 1e4) / 100:.2f}MB"  # rounded up: it must be enough
        super().__init__(
            f"no strategy fits a sequence of {longest:,} tokens into {memory_bytes / 1e6:.2f}MB per device. {nearest} "
            f"needs the least, {needs}. Plan for more devices, or devices with more memory (--memory {needs}), or "
            "leave out the longest sequences"
        )


class SetDoesNotFitError(FxparError):
    """A strategy of a set does not hold a sequence of its limit beside what the others need to be kept for them."""

    def __init__(
        self, strategy: str, limit: int, memory_bytes: int, needs_bytes: int, alone_bytes: int, last: bool = False
    ) -> None:
        needs, alone = (f"{math.ceil(size / 1e4) / 100:.2f}MB" for size in (needs_bytes, alone_bytes))
        kept, instead = "", "one that needs less, such as with +remat or +zero3"
        if needs_bytes > alone_bytes:
            kept = f", {alone} without the room that is kept for the largest weights and gradients of the set"
        if alone_bytes <= memory_bytes:
            instead = "others with smaller weights (+zero3 shards them) beside it"
        super().__init__(
            f"the set does not fit into {memory_bytes / 1e6:.2f}MB per device: {strategy} needs {needs} for a sequence "
            f"of {limit:,} tokens{kept}. {'Take' if last else 'Give it a lower limit, or take'} {instead}"
        )


class NoCandidateError(FxparError):
    """The model cannot be lowered under any strategy of the search."""

    def __init__(self, reasons: Iterable[str]) -> None:
        super().__init__("the model runs under none of the strategies: " + "; ".join(reasons))


class GroupCostsError(FxparError):
    """Not one cost per length group."""

    def __init__(self, groups: int, costs: int) -> None:
        super().__init__(f"there are {groups} length groups but {costs} costs; pass one GroupCost per group, in order")


class CostModelError(FxparError):
    """A number of a cost model that no device can have."""

    def __init__(self, name: str, value: float) -> None:
        super().__init__(f"{name} = {value!r} must be finite and >= 0; measure it on one device")


class CostContractError(FxparError):
    """A cost model returned no cost."""

    def __init__(self, strategy: str, found: object) -> None:
        super().__init__(
            f"the cost model returned {type(found).__name__} for '{strategy}'. It takes (program, cluster) and returns "
            "a fxpar.batching.GroupCost"
        )


class ReplanError(FxparError):
    """Mini-batches cannot be planned with limits that are for other groups."""

    def __init__(self, limits: Sequence[int], opened: Sequence[int]) -> None:
        super().__init__(
            f"limits {', '.join(map(str, limits))} do not suit groups with limits {', '.join(map(str, opened))}: there "
            "must be as many, and the last one must stay. Take an engine state of a run with the same strategies"
        )


class ReusedMiniBatchError(FxparError):
    """Drawing a mini-batch writes to the one before, which has not been trained on."""

    def __init__(self) -> None:
        super().__init__(
            "drawing the next mini-batch changed the one before it, which would be lost: plan_ahead draws one ahead. "
            "Make new tensors and a new list for each, or iterate over the loader itself"
        )


class MiniBatchesError(FxparError):
    """What mini-batches are to be drawn from cannot be iterated over."""

    def __init__(self, kind: str) -> None:
        super().__init__(
            f"plan_ahead was given {kind!r}. Pass a loader or a list of mini-batches: for sequences in "
            "model.plan_ahead(loader): model.train_step(sequences)"
        )


class SequenceFitsNoTeamError(FxparError):
    """A sequence is longer than the largest team holds. `room` is what that holds, on all of `devices` or fewer."""

    def __init__(self, place: int, length: int, room: int, ranks: int, devices: int) -> None:
        needed = math.ceil(length * ranks / room)
        super().__init__(
            f"sequence {place + 1} has {length:,} tokens, and the largest team, of {ranks} ranks, holds {room:,}. A "
            f"team for it needs about {needed:,} devices, and there are {devices:,}: allow larger teams or plan for "
            "more devices, give each more memory, or leave out longer sequences (--max-length)"
        )


class DegreeError(FxparError):
    """A degree that no team can have."""

    def __init__(self, degree: object, why: str) -> None:
        super().__init__(f"degree {one_line(degree, 40)}: {why}")


class BatchRangeError(FxparError):
    """Batches that there are not."""

    def __init__(self, text: str, why: str, do: str) -> None:
        super().__init__(f"batches {one_line(text, 40)!r}: {why}. {do}")


class RoundCostError(FxparError):
    """A cost that no team can have, or a file of constants that cannot be read. `source` names it."""

    def __init__(self, source: str, why: str, do: str) -> None:
        super().__init__(f"cost {source}: {why}. {do}")


class UnknownRoundCostError(FxparError):
    """No published cost has this name, and no file either."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        names = list(known)
        hint = nearest(name, names) or f"; there are {', '.join(names)}."
        super().__init__(
            f"there is no cost {one_line(name, 60)!r}{hint} Or name a JSON file of constants, or a model, "
            "which is priced on a cluster: fxpar rounds MODEL --cluster h100"
        )


class TaskGraphError(FxparError):
    """A value of a MetaOp, an edge or a description of devices that cannot be. `where` names it, and its file."""

    def __init__(self, where: str, why: str, do: str) -> None:
        super().__init__(f"{one_line(where, 200)}: {why}{'' if why.endswith('?') else '.'} {do}")


class TasksFileError(FxparError):
    """A file of a model and its tasks that says what cannot be; `key` ("" for the whole of it) is where."""

    def __init__(self, path: str, key: str, why: str, do: str) -> None:
        where = one_line(repr(path) + (f", {key}" if key else ""), 200)
        super().__init__(f"{where}: {why}. {do}")


class FitsNoDevicesError(FxparError):
    """A MetaOp that no allowed number of devices can run."""

    def __init__(self, metaop: str, why: str, do: str) -> None:
        super().__init__(f"MetaOp {one_line(metaop, 80)!r} fits on no devices: {why}. {do}")


class PieceOrderError(FxparError):
    """An order of pieces that leaves layers of a MetaOp out, or begins it before what it reads: a bug of a planner."""

    def __init__(self, metaop: str, why: str) -> None:
        super().__init__(f"order of pieces: MetaOp {one_line(metaop, 80)!r} {why}")


class RunMemoryError(FxparError):
    """Tasks that no choice of their strategies lets run in the memory of a device; `parts` is what the least choice
    holds, in words.
    """

    def __init__(self, ranks: int, memory: str, needed: str, parts: Sequence[str]) -> None:
        held = ", ".join(one_line(part, 160) for part in parts)
        super().__init__(
            f"no strategies of the tasks fit on {ranks} devices of {memory}: the least choice takes {needed} of the "
            f"fullest one ({held}). Give --memory {needed} or more, more devices, or smaller batches"
        )
