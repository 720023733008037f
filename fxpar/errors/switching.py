"""Errors of clusters, plans of transfers, and what carries them out."""

from __future__ import annotations

from collections.abc import Iterable

from fxpar.errors.base import FxparError, nearest


# ---------------------------------------------------------------------------------------------- cluster and switch
class ClusterError(FxparError):
    """A cluster file, or a cluster, that cannot be used."""

    def __init__(self, source: str, why: str) -> None:
        super().__init__(f"cluster {source}: {why}")


class ProfileError(FxparError):
    """A measurement that would not say what it should, or would write over a file."""

    def __init__(self, why: str, what_to_do: str) -> None:
        super().__init__(f"fxpar profile {why}. {what_to_do}")


class MeasuredElsewhereError(FxparError):
    """A cluster file of `fxpar profile` that was measured on other devices or with another torch than run here."""

    def __init__(self, path: str, measured: str, here: str) -> None:
        super().__init__(
            f"cluster {path!r} was measured on {measured}, and this run has {here}. Measure it here with `fxpar "
            "profile`, or delete the table `measured` from the file if its figures are meant all the same"
        )


class StagingBytesError(FxparError):
    """Memory for messages in which not even a row of a tensor has room."""

    def __init__(self, given: float, tensor: str, row_bytes: int, least: int) -> None:
        super().__init__(
            f"staging_bytes = {given:,g} is too small: a row of {tensor!r} has {row_bytes:,} bytes, and each of two "
            f"buckets holds one that is sent and one that is received. Give {least:,} bytes or more"
        )


class LayoutError(FxparError):
    """Two weight layouts that do not belong together, or a model that a strategy cannot be laid out for."""

    def __init__(self, layout: str, why: str) -> None:
        super().__init__(f"layout {layout!r}: {why}")


class NoOwnerError(FxparError):
    """A part of a tensor that a target needs and no source holds."""

    def __init__(self, tensor: str, box: str, ranks: str) -> None:
        super().__init__(
            f"{tensor}{box} is needed on rank(s) {ranks} but no source layout holds it; "
            "pass the layout that does (such as the home layout) as another holder"
        )


class PlannerError(FxparError):
    """A planner that does not exist."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        names = list(known)
        super().__init__(f"there is no planner {name!r}{nearest(name, names) or '.'} Planners are {', '.join(names)}")


class PlannerContractError(FxparError):
    """A planner of another package returned no table of transfers."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(
            f"planner {name!r} returned {what}. A planner takes a SwitchProblem and returns a numpy array of dtype "
            "fxpar.switch.transfers.TRANSFER; `rows` and `joined` there make one"
        )


class SwitchPlanError(FxparError):
    """A switch plan that would not produce its target: a bug of a planner, or a plan changed by hand."""

    def __init__(self, tensor: str, box: str, rank: int, why: str) -> None:
        super().__init__(f"switch plan: {tensor}{box} on rank {rank} {why}")


class OrderError(FxparError):
    """A request for an order of graphs that makes no sense."""

    def __init__(self, why: str) -> None:
        super().__init__(f"order of graphs: {why}")


class RankError(FxparError):
    """A local rank failed or hung."""

    def __init__(self, ranks: str, what: str) -> None:
        super().__init__(f"rank {ranks}: {what}")


class NothingToCheckError(FxparError):
    """A check in which nothing can differ."""

    def __init__(self) -> None:
        super().__init__(
            "on one device the loss and all gradients are 0, so even a wrong graph would agree. Check with batches "
            "on which the loss depends"
        )


class LossyProgramError(FxparError):
    """A check of a program that computes something else than one device, on purpose."""

    def __init__(self, strategy: str, without: str) -> None:
        super().__init__(
            f"the program of strategy {strategy!r} lets experts see means of rows, or not all of them, so one device "
            f"does not say whether it is right. Check the strategy, which runs the same passes as {without!r}, or that "
            "program."
        )


# ------------------------------------------------------------------------------------------- transport of switches
class HoldingError(FxparError):
    """Tensors given to a transport that are not what their layout says."""

    def __init__(self, layout: str, fqn: str, why: str) -> None:
        super().__init__(f"layout {layout!r}: {fqn} {why}")


class ExecutionError(FxparError):
    """A way of carrying out a switch that does not exist or does not suit the plan."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"execution {name!r}: {why}")


class FingerprintError(FxparError):
    """Ranks are about to carry out different plans; nothing has been sent."""

    def __init__(self, phase: str, ranks: str) -> None:
        super().__init__(
            f"{phase}: {ranks}; nothing was sent. Give all ranks the same model, strategies, cluster and options"
        )


class TransferError(FxparError):
    """A send or a receive of a switch failed or timed out."""

    def __init__(self, phase: str, ranks: str, cause: object) -> None:
        super().__init__(f"{phase}: transfer with rank(s) {ranks} failed: {cause}")


class RedistributeError(FxparError):
    """A DTensor that `fxpar.redistribute` cannot move, or not to where it is asked to."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"redistribute: {name!r} {why}")


class ChecksumError(FxparError):
    """A slice arrived with other bits than were sent (found in checked mode)."""

    def __init__(self, phase: str, tensor: str, box: str, src: int, dst: int) -> None:
        super().__init__(f"{phase}: {tensor}{box} from rank {src} differs on rank {dst} from what was sent")


class ReductionError(FxparError):
    """Gradients that cannot be summed into a layout."""

    def __init__(self, fqn: str, why: str) -> None:
        super().__init__(f"reduction of {fqn}: {why}")
