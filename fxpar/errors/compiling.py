"""Errors of strategies, placements, passes and what they make."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from fxpar.errors.base import FxparError, nearest, one_line


class NotYetError(FxparError):
    """A strategy names something that the lowering does not support yet."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(f"{what} is not supported yet. {instead}")


class NotCapturedError(FxparError):
    """`lower` or `check` was given something else than a captured graph, such as the model itself."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} is not a captured graph. Capture the model first: logical = fxpar.capture(model, loss_fn, batch)"
        )


class OverrideError(FxparError):
    """A placement override cannot be applied."""

    def __init__(self, pattern: str, why: str, hint: str = "") -> None:
        super().__init__(f"override {pattern!r}: {why}{hint}")


# -------------------------------------------------------------------------------------------------------- compiler
class PlacementError(FxparError):
    """Placements of a node do not fit the node (the graph does not type-check)."""


class GraphFormatError(FxparError):
    """A saved graph cannot be read here."""


class GraphFileError(FxparError):
    """A graph file is missing, damaged, of another version, or holds another kind of graph than is asked for."""

    def __init__(self, path: object, why: str, do: str) -> None:
        super().__init__(f"graph file {str(path)!r}: {why}. {do}.")


class OpExistsError(FxparError):
    """An op is registered that has a sharding rule, or is registered already."""

    def __init__(self, op: str, known: str) -> None:
        super().__init__(f"op {op} {known}. Pass replace=True to replace it.")


class OpContractError(FxparError):
    """What another package says of its op is not what can be said of one."""

    def __init__(self, op: str, why: str) -> None:
        super().__init__(f"op {op}: {why}.")


class NotAnOpError(FxparError):
    """Something is registered as an op that stands in no graph."""

    def __init__(self, given: object) -> None:
        super().__init__(
            f"{given!r} is not an overload of an op. Write the full name, such as torch.ops.mine.gate.default."
        )


class UnknownRoleError(FxparError):
    """A strategy names a role that is neither built in nor installed."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        names = list(known)
        super().__init__(
            f"there is no role {name!r}{nearest(name, names) or '.'} Roles are {', '.join(names)}; another package "
            "adds one through the entry-point group 'fxpar.roles'."
        )


class RoleContractError(FxparError):
    """A role of another package is not what a role is."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"role {name!r}: {why}.")


class UnknownRankError(FxparError):
    """A rank that the strategy does not have."""

    def __init__(self, rank: int, strategy: str, world: int) -> None:
        super().__init__(f"there is no rank {rank}: '{strategy}' has ranks 0 to {world - 1}.")


class NoModuleError(FxparError):
    """A glob over FQNs that matches no module and no parameter."""

    def __init__(self, glob: str, hint: str) -> None:
        super().__init__(f"no module or parameter matches {glob!r}{hint or '. Globs are matched against FQNs.'}")


class DumpOptionError(FxparError):
    """Options of `fxpar dump` that do not go together."""

    def __init__(self, option: str, why: str, do: str) -> None:
        super().__init__(f"{option} {why}. {do}.")


class StageNeedsStrategyError(FxparError):
    """A placed or lowered graph is asked for, and no strategy is named."""

    def __init__(self, stage: str) -> None:
        super().__init__(f"the {stage} graph needs a strategy. Add --strategy, such as --strategy dp2.tp2+sp.")


class VerifyError(FxparError):
    """A graph breaks an invariant; raised by the verifier between passes, always a bug of the pass it names."""


# ----------------------------------------------------------------------------- passes, and other things with names
class UnknownPassError(FxparError):
    """No pass of this name is built in or installed."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        names = list(known)
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        advice = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
        super().__init__(
            f"there is no pass {name!r}{advice} Known passes: {', '.join(names) or 'none'}. "
            "Another package adds one through the entry-point group 'fxpar.passes'."
        )


class DuplicateNameError(FxparError):
    """Two packages, or a package and fxpar itself, give different things of one kind the same name."""

    def __init__(self, noun: str, name: str, first: str, second: str) -> None:
        super().__init__(
            f"the {noun} name {name!r} is taken twice: by {first} and by {second}. "
            "Rename the entry point of one of them, or uninstall that package."
        )


class EntryLoadError(FxparError):
    """Something is known by name, but the place that its entry names cannot be imported."""

    def __init__(self, noun: str, name: str, value: str, owner: str, cause: BaseException) -> None:
        super().__init__(
            f"the {noun} {name!r} of {owner} cannot be loaded from {value!r}: "
            f"{type(cause).__name__}: {cause}. An entry is written 'module:attribute'; fix it or "
            f"install what it imports."
        )


class PassContractError(FxparError):
    """An object given as a pass, or what it returned, is not what a pass is."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"{name!r} does not behave like a pass: {why}. A pass of the lowering has a `name` and a `tier`, and is "
            "called with an AnnotatedGraph; one of graph_trainer is an object with `run(gm)`, or a callable `(gm)`, "
            "that returns the GraphModule, or True if it changed it and else False."
        )


class StorageError(FxparError):
    """What a pass of the user's has laid out does not hold the weights of all strategies."""

    def __init__(self, name: str, fqn: str, strategy: str, rank: int, why: str) -> None:
        super().__init__(
            f"pass {name!r}: {fqn} of '{strategy}' on rank {rank}: {why}. Give each parameter of a strategy a view of "
            "its own, or one inside the view of another strategy that holds this piece and more"
        )


class LayOutError(FxparError):
    """A pass of the user's raised while it laid out the weights; raised on all ranks, none of which waits then."""

    def __init__(self, name: str, rank: int, error: Exception) -> None:
        super().__init__(
            f"pass {name!r}: lay_out raised {type(error).__name__} on rank {rank}: {one_line(str(error), None)}. Mend "
            "the pass; its traceback is in the log of that rank"
        )


# ------------------------------------------------------------------------------------------------------------- ops
class OpInputError(FxparError):
    """An op of `fxpar.ops` got tensors or options that do not fit together."""

    def __init__(self, op: str, why: str) -> None:
        super().__init__(f"fxpar::{op}: {why}.")


# ---------------------------------------------------------------------------------------------- pipeline schedules
class ScheduleOptionError(FxparError):
    """A schedule of an unknown kind, or with counts that make no schedule."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"schedule: {what}. {advice}")


class MicroBatchCountError(FxparError):
    """A schedule does not work with this number of micro-batches."""

    def __init__(self, kind: str, micro_batches: int, stages: int) -> None:
        near = max(1, round(micro_batches / stages)) * stages
        super().__init__(
            f"schedule {kind!r} with {stages} pipeline ranks needs a multiple of {stages} micro-batches, got "
            f"{micro_batches}. Cut the mini-batch into {near} micro-batches, or use '1f1b', which takes any number"
        )


class ScheduleInvalidError(FxparError):
    """A schedule leaves out, repeats or misplaces an action."""

    def __init__(self, schedule: str, problem: str) -> None:
        super().__init__(f"schedule {schedule} is not valid: {problem}")


class ScheduleDeadlockError(ScheduleInvalidError):
    """Ranks of a schedule wait for each other, so that none goes on."""


class ScheduleMemoryError(FxparError):
    """A schedule keeps more micro-batches for their backward than it may."""

    def __init__(self, schedule: str, rank: int, peak: int, limit: int) -> None:
        super().__init__(
            f"schedule {schedule} keeps up to {peak} micro-batches on pipeline rank {rank}, the limit is {limit}. Use "
            "'1f1b', fewer micro-batches, more recomputation, or raise the limit"
        )


# ------------------------------------------------------------------------------------------------- pipeline stages
class StageCutError(FxparError):
    """A captured graph cannot be cut into these pipeline stages."""

    def __init__(self, model: str, why: str, advice: str) -> None:
        end = "" if why.endswith("?") else "."  # a hint: did you mean ...?
        super().__init__(f"model {model!r} cannot be cut into pipeline stages: {why}{end} {advice}")


class StageCountError(StageCutError):
    """More pipeline stages than repeated layers, or not as many cuts as there are boundaries."""


class UnknownCutError(StageCutError):
    """A cut names a module that the forward does not run, or nothing runs before it."""


class NotAChainError(StageCutError):
    """Values would have to go from a later stage to an earlier one; the message names them."""


# --------------------------------------------------------------------------------------------------- recomputation
class RematBudgetError(FxparError):
    """A budget for saved activations that recomputation cannot meet."""

    def __init__(self, budget_bytes: int, least_bytes: int, sizes: Mapping[str, int], strategy: str) -> None:
        self.least_bytes = least_bytes
        where = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        super().__init__(
            f"remat: under {strategy} the backward needs at least {least_bytes / 1e6:,.3f} MB of saved activations "
            f"per rank{f' at {where}' if where else ''}, and the budget is {budget_bytes / 1e6:,.3f} MB. Raise the "
            "budget, cut the model or its tokens over more ranks, or use shorter micro-batches"
        )


class LauncherSignalError(FxparError):
    """The launcher of local ranks was told to end."""

    def __init__(self, name: str, advice: str = "") -> None:
        """`advice` says how to go on."""
        self.name = name
        ended = f"ended by {name}; all ranks were ended too"
        super().__init__(f"{ended}. {advice}" if advice else ended)


class DimNameError(FxparError):
    """A size for something that is no dynamic dim of the model."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        names = list(known)
        super().__init__(
            f"{name!r} is not a dynamic dim of this model{nearest(name, names) or '.'} "
            + (f"They are {', '.join(names)}" if names else "It has none: its sizes are those of the example batch")
        )


class PackedCallError(FxparError):
    """A plain call of a parallel module inside a `packed` block with several documents."""

    def __init__(self) -> None:
        super().__init__(
            "model(...) was called inside fxpar.tracer.documents.packed with several documents. A plain call does not "
            "see that block: pass one sequence per row, or use train_step, whose loss is part of the graph"
        )


# ------------------------------------------------------------------------------------------------- mixed precision
class PrecisionSyntaxError(FxparError):
    """A precision string does not parse."""

    def __init__(self, text: str, part: str, why: str) -> None:
        super().__init__(
            f"precision {text!r}: {why} (at {part!r}). A precision is a dtype, then flags joined by '+', for example "
            "'bf16+reduce=bf16+fp32(*.router|lm_head)'."
        )


class PrecisionDtypeError(FxparError):
    """A dtype that cannot serve where a precision names it."""

    @classmethod
    def unusable(cls, field: str, dtype: str, known: Iterable[str]) -> PrecisionDtypeError:
        """A dtype that no field of a precision takes."""
        hint = ", since sums of fp16 gradients overflow" * (dtype == "fp16")
        return cls(f"precision: {dtype} cannot be the {field}{hint}. Use one of {', '.join(known)}")

    @classmethod
    def wider(cls, dtype: str, captured: str) -> PrecisionDtypeError:
        """A parameter dtype that is wider than the model was captured in."""
        return cls(
            f"precision: parameters cannot be {dtype} in a graph whose model was captured in {captured}. Capture the "
            f"model in {dtype} (model.to(...)), or use a param_dtype that is not wider than {captured}"
        )


class PrecisionGlobError(FxparError):
    """A glob in fp32(...) of a precision that matches no module."""

    def __init__(self, glob: str, modules: Iterable[str]) -> None:
        known = sorted(modules)
        ends = {f"*.{name.rpartition('.')[2]}" for name in known if "." in name}
        hint = (
            nearest(glob, [*known, *sorted(ends)])
            or f". Modules are {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}"
        )
        super().__init__(f"precision fp32({glob}): {glob!r} matches no module of the model{hint}")


class StageParamError(FxparError):
    """Two pipeline stages of one rank want a shared parameter in two layouts."""

    def __init__(self, fqn: str, rank: int) -> None:
        super().__init__(
            f"parameter {fqn!r} is on two pipeline stages of rank {rank}, which place it differently. Use a schedule "
            "with one stage per rank, or fix its placement with an override"
        )


class StageIndexError(FxparError):
    """A pipeline stage is asked for that the strategy does not have."""

    def __init__(self, stage: int, strategy: str, stages: int) -> None:
        have = f"stages 0 to {stages - 1}" if stages > 1 else "none; use a strategy with a pp axis, such as pp2"
        super().__init__(f"there is no pipeline stage {stage}: '{strategy}' has {have}")


class NoScheduleError(FxparError):
    """A schedule is asked for under a strategy without pipeline stages."""

    def __init__(self, strategy: str) -> None:
        super().__init__(
            f"strategy '{strategy}' has no schedule because it has no pipeline stages. Use one with a pp axis, such as "
            "pp2 or pp2+zb_h1"
        )
