"""Every error that fxpar raises on purpose: one class per condition.

Each message names what is wrong (node, module FQN, config key, the user's source line where it is known) and what to
do about it. All classes derive from `FxparError`, so a caller can catch the family; the CLI prints the message alone
and exits with status 1 (2 for a mistake on the command line).
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Mapping


class FxparError(Exception):
    """Base of all errors raised by fxpar for a condition that the user can act on."""


class FxparWarning(UserWarning):
    """Something runs correctly but not as a user may expect; the message names the node and the reason."""


def warn(message: str) -> None:
    """Issue an FxparWarning that points at the first caller outside of fxpar."""
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "fxpar":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, FxparWarning, stacklevel=level)


def one_line(text: object, most: int | None = 40) -> str:
    """What a file or its reader says, in a message: without what a terminal would take for orders."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text)[:most])


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known word closest to `word`, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


# ---------------------------------------------------------------------------------------------- strategy and mesh
class StrategySyntaxError(FxparError):
    """A strategy string does not parse."""

    def __init__(self, text: str, part: str, why: str) -> None:
        super().__init__(
            f"strategy {text!r}: {why} (at {part!r}). A strategy is axes joined by '.', then flags joined by '+', "
            "for example 'dp2.tp4+sp+zero1'."
        )


class WorldSizeError(FxparError):
    """The degrees of a strategy do not multiply to the number of ranks."""

    def __init__(self, strategy: str, product: int, world: int) -> None:
        super().__init__(
            f"strategy {strategy!r} needs {product} ranks (the product of its degrees), but the world has {world}. "
            f"Change a degree so that the product is {world}, or start {product} ranks."
        )


class NotYetError(FxparError):
    """A strategy names something that the lowering does not support yet."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(f"{what} is not supported yet. {instead}")


class OverrideError(FxparError):
    """A placement override cannot be applied."""

    def __init__(self, pattern: str, why: str, hint: str = "") -> None:
        super().__init__(f"override {pattern!r}: {why}{hint}")


# ------------------------------------------------------------------------------------------------------- capture
class CaptureError(FxparError):
    """Base of the errors of `fxpar.capture`."""


def _at(fqn: str | None, line: str | None) -> str:
    """` (in module 'x', at file:line)` with what is known."""
    parts = [f"in module {fqn!r}"] * bool(fqn) + [f"at {line}"] * bool(line)
    return f" ({', '.join(parts)})" if parts else ""


class BatchError(CaptureError):
    """The example batch, a parameter or a buffer cannot become an input of the graph."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(
            f"cannot use input {key}: {why}. A batch is a dict of dense tensors (or a tuple or list of them); "
            "what is not a tensor belongs into the loss function"
        )


class ForwardArgumentsError(CaptureError):
    """The model's forward does not take what it is called with."""

    def __init__(self, why: str, parameters: str, keys: Iterable[str]) -> None:
        super().__init__(
            f"{why}. The parameters of forward are {parameters or 'none'}; the keys of the batch are "
            f"{', '.join(map(repr, keys))}. Name the keys of the batch as the parameters, or write a loss function "
            "that calls the model with what its forward takes"
        )


class DynamicDimError(CaptureError):
    """The `dynamic` argument does not fit the batch, or the automatic choice is ambiguous."""


class DeviceError(CaptureError):
    """The model lies on several devices, or its code asks for a device that it is not on."""


class LossError(CaptureError):
    """The loss function does not return a differentiable scalar tensor."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the loss function returned {why}. It must return one scalar tensor that depends on the parameters: "
            "the sum of the losses of all valid tokens, not detached and without .item()"
        )


class ModelOutputError(FxparError):
    """A ready-made loss function finds no logits in what the model returns."""

    def __init__(self, function: str, outputs: object) -> None:
        keys = f" with the keys {', '.join(map(repr, outputs))}" if isinstance(outputs, Mapping) else ""
        super().__init__(
            f"{function}: the model returns no logits but a {type(outputs).__name__}{keys}. It may return logits, a "
            "tuple that begins with them, or an object or mapping with `logits`; for all else write a loss function"
        )


class EvaluateLossError(FxparError):
    """`evaluate` calls the loss function as it stands, and cannot make of its value what training makes of it."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(f"evaluate: the loss function {what}. {instead}")


class MeanLossError(CaptureError):
    """The loss averages over tokens in a way that cannot be turned into a sum exactly."""

    def __init__(self, what: str, line: str | None) -> None:
        super().__init__(
            f"the loss divides by a number that depends on the batch: {what}{_at(None, line)}. Return the sum over "
            "the valid tokens, for example F.cross_entropy(logits, labels, reduction='sum'); its gradient is then "
            "scaled by 1/(valid tokens of the whole mini-batch), whatever the micro-batches are"
        )


class SpecializedShapeError(CaptureError):
    """The model's code only holds for some sizes of a dynamic dim."""

    def __init__(self, dims: str, condition: str, line: str | None) -> None:
        super().__init__(
            f"the traced program holds only where {condition}, but {dims} should be free{_at(None, line)}. Remove the "
            "comparison or the fixed size from the model, give the dim its own name or none with `dynamic`, or use an "
            "example batch whose sizes differ from the model's widths"
        )


class DataDependentError(CaptureError):
    """Python code of the model needs a value that only the data has."""

    def __init__(self, what: str, fqn: str | None, line: str | None) -> None:
        super().__init__(
            f"the program depends on the values of a tensor: {what}{_at(fqn, line)}. One graph must hold for all "
            "batches: replace `if`, .item(), .tolist(), nonzero() and boolean indexing by torch.where or masks"
        )


class PositionTableError(CaptureError):
    """The example is longer than a table of positions: the model could not run it either."""

    def __init__(self, length: int, rows: int, fqn: str, line: str | None) -> None:
        self.rows = rows
        super().__init__(
            f"the example has {length} tokens, but the model looks up a position for each in a table of {rows} rows "
            f"(module {fqn!r}, {line}). Capture it with an example of at most {rows} tokens"
        )


class UnsupportedOpError(CaptureError):
    """The model calls something that has no place in a captured graph."""

    def __init__(self, what: str, instead: str, fqn: str | None = None, line: str | None = None) -> None:
        super().__init__(f"{what} cannot be captured{_at(fqn, line)}. {instead}")


class MutationError(CaptureError):
    """The program writes into an input that is not a buffer."""

    def __init__(self, name: str, line: str | None) -> None:
        super().__init__(
            f"the program writes into input {name!r} in place{_at(None, line)}. Only buffers may change: "
            "work on a copy (for example x = x + 1 instead of x += 1)"
        )


# ------------------------------------------------------------------------------------------------------ compiler
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
        super().__init__(f"op {op} {known}. Pass replace=True to put something else in its place.")


class OpContractError(FxparError):
    """What another package says of its op is not what can be said of one."""

    def __init__(self, op: str, why: str) -> None:
        super().__init__(f"op {op}: {why}.")


class NotAnOpError(FxparError):
    """Something is registered as an op that stands in no graph."""

    def __init__(self, given: object) -> None:
        super().__init__(
            f"{given!r} is no overload of an op. Write the whole name, such as torch.ops.mine.gate.default."
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
        super().__init__(f"no module or parameter matches {glob!r}{hint or '. Globs run over FQNs.'}")


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


# --------------------------------------------------------------------------- passes, and other things with names
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
            f"{name!r} does not behave as a pass: {why}. A pass of the lowering has a `name` and a `tier`, and is "
            "called with an AnnotatedGraph; one of graph_trainer is an object with `run(gm)`, or a callable `(gm)`, "
            "that returns the GraphModule, or True if it changed it and else False."
        )


# ------------------------------------------------------------------------------------------------------------ ops
class OpInputError(FxparError):
    """An op of `fxpar.ops` got tensors or options that do not fit together."""

    def __init__(self, op: str, why: str) -> None:
        super().__init__(f"fxpar::{op}: {why}.")


# -------------------------------------------------------------------------------------------------------- running
class MicroBatchError(FxparError):
    """A micro-batch does not fit the graph it is given to, or comes out of turn."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(f"batch key {key!r} {why}" if key else why)


class PadError(FxparError):
    """A batch must be padded for a strategy, and fxpar does not know how for one of its keys."""

    def __init__(self, key: str, why: str, hazard: str | None = None) -> None:
        """`hazard`: what in the model would see the padding."""
        reason, force = (f"; {hazard}", _FORCE_PADDING) if hazard else ("", "")
        super().__init__(
            f"batch key {key!r} cannot be padded: {why}{reason}. Give a length that divides, or use a strategy that "
            f"does not cut tokens (without cp and sp){force}"
        )


_FORCE_PADDING = ". To see what padding would change, run `fxpar check` with --force-padding"


# ---------------------------------------------------------------------------------- models and the command line
class UnknownModelError(FxparError):
    """MODEL names no built-in example, and is not written as another kind of model."""

    def __init__(self, spec: str, examples: Iterable[str], hint: str) -> None:
        super().__init__(
            f"there is no built-in model {spec!r}{hint or '.'} Built in are {', '.join(examples)}; other models are "
            "written hf:TYPE, pkg.module:function or file.py:function, or with the prefix of an installed package"
        )


class ModelTypeError(FxparError):
    """A transformers type that is unknown or not a dense decoder."""

    def __init__(self, model_type: str, why: str) -> None:
        super().__init__(f"model type {model_type!r} {why}")


class ModelConfigError(FxparError):
    """transformers refuses a configuration."""

    def __init__(self, model_type: str, cause: Exception) -> None:
        reason = " ".join(str(cause).split()) or type(cause).__name__
        super().__init__(
            f"transformers cannot build 'hf:{model_type}' with these options: {type(cause).__name__}: {reason}. "
            "Change them with --set key=value"
        )


class PresetError(FxparError):
    """A published configuration that fxpar does not know."""

    def __init__(self, model_type: str, size: str, known: Iterable[str]) -> None:
        sizes = ", ".join(f"hf:{model_type}@{name}" for name in [*known, "default"])
        super().__init__(f"there is no configuration 'hf:{model_type}@{size}'. There are {sizes}")


class ModelOptionError(FxparError):
    """A `--set` option that a model does not take, or with a value that does not fit."""

    def __init__(self, option: str, why: str) -> None:
        super().__init__(f"option {option!r} {why}")

    @classmethod
    def unknown(cls, key: str, owner: str, known: Iterable[str]) -> ModelOptionError:
        names = sorted(set(known))
        hint = nearest(key, names)
        if hint in ("", ".") and 0 < len(names) <= 12:
            hint = f"; there are {', '.join(names)}"
        return cls(key, f"is unknown to {owner}{hint}")


class ModelFunctionError(FxparError):
    """A user's model function cannot be found, or returns something else than a model, a loss and a batch."""

    def __init__(self, spec: str, why: str) -> None:
        super().__init__(f"model {spec!r}: {why}")


class MissingPackageError(FxparError):
    """A model needs a package that is not installed."""

    def __init__(self, model: str, package: str, how: str) -> None:
        super().__init__(f"models {model!r} need {package}: {how}")


class DtypeError(FxparError):
    """A dtype that a model cannot be loaded in."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        names = list(known)
        super().__init__(f"dtype {name!r} is not known{nearest(name, names) or '.'} Write one of {', '.join(names)}")


class TokensError(FxparError):
    """`--tokens` is no list of lengths."""

    def __init__(self, text: str) -> None:
        super().__init__(
            f"--tokens {text!r}: write the lengths of the micro-batches, such as 64,37,96; each is at least 2"
        )


class OutputError(FxparError):
    """A result cannot be written where the user wants it."""

    def __init__(self, path: str, cause: OSError) -> None:
        super().__init__(f"cannot write {path!r}: {cause.strerror or cause}")


# ---------------------------------------------------------------------------------------------- cluster and switch
class ClusterError(FxparError):
    """A cluster file, or a cluster, that cannot be used."""

    def __init__(self, source: str, why: str) -> None:
        super().__init__(f"cluster {source}: {why}")


class ProfileError(FxparError):
    """A measurement that would not say what it should, or would write over a file."""

    def __init__(self, why: str, what_to_do: str) -> None:
        super().__init__(f"fxpar profile {why}. {what_to_do}")


class LayoutError(FxparError):
    """Two weight layouts that do not belong together, or a model that a strategy cannot be laid out for."""

    def __init__(self, layout: str, why: str) -> None:
        super().__init__(f"layout {layout!r}: {why}")


class NoOwnerError(FxparError):
    """A part of a tensor that a target needs and no source holds."""

    def __init__(self, tensor: str, box: str, ranks: str) -> None:
        super().__init__(
            f"{tensor}{box} is needed on rank(s) {ranks} but no source layout holds it; "
            "pass the layout that does (such as the home layout) as a further holder"
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
            "on one device the loss and all gradients are 0, so a wrong graph would agree as well. Check with batches "
            "on which the loss depends"
        )


# ------------------------------------------------------------------------------------------------- store and engine
class HomeLayoutError(FxparError):
    """A rule for the home layout that cannot be followed."""

    def __init__(self, pattern: str, why: str) -> None:
        super().__init__(f"home layout, rule {pattern!r}: {why}")


class MemoryBudgetError(FxparError):
    """The layouts of all strategies and the activations of the hungriest need more memory than allowed."""

    def __init__(self, needed: str, budget: str, table: str) -> None:
        super().__init__(
            f"weights, gradients, messages and activations need {needed} per rank at least, but the budget is "
            f"{budget}. Raise memory_budget_bytes, lower token_budget, use fewer strategies, or some with more tp or "
            f"cp, with zero3 or +remat.\n{table}"
        )


class ParallelizeError(FxparError):
    """`fxpar.parallelize` was called in a way that makes no sense."""

    def __init__(self, why: str) -> None:
        super().__init__(f"parallelize: {why}")


class ChangedParameterError(FxparError):
    """A parameter of a parallel module was replaced, added, converted, frozen or thawed after `fxpar.parallelize`."""

    def __init__(self, fqn: str, how: str) -> None:
        super().__init__(
            f"the parameter {fqn} {how} at fxpar.parallelize. Make such changes before that; new values are copied "
            "into a parameter: param.copy_(...) under torch.no_grad(), or load_state_dict without assign=True"
        )


class GradientHookError(FxparError):
    """A parameter of a parallel module has a hook, but its gradient does not come from autograd."""

    def __init__(self, fqn: str) -> None:
        super().__init__(
            f"the parameter {fqn} has a hook on its gradient (register_hook or register_post_accumulate_grad_hook), "
            "which would never run: gradients go into .grad beside autograd. Remove the hook, and do its work on .grad "
            "after train_step or backward"
        )


class BatchMismatchError(FxparError):
    """The ranks were given different mini-batches, or planned them differently."""

    def __init__(self, ranks: str, what: str = "mini-batch") -> None:
        super().__init__(
            f"the {what} on rank {ranks} differs from rank 0's. Every rank must pass the same sequences in the "
            "same order to train_step and evaluate; draw them from the same seed"
        )


class ProgramMismatchError(FxparError):
    """The ranks compiled different programs."""

    def __init__(self, strategy: str, ranks: str) -> None:
        super().__init__(
            f"rank {ranks} compiled another program for {strategy!r} than rank 0: the collectives would not match. "
            "Build the same model with the same options and the same versions on every rank"
        )


class NanLossError(FxparError):
    """The loss is not a finite number."""

    def __init__(self, loss: float, step: int, group: str) -> None:
        super().__init__(
            f"the loss of step {step} is {loss} (first seen in group {group}). Gradients were not kept. Lower the "
            "learning rate, clip gradients, look at the data; or pass nan='skip' to leave such mini-batches out"
        )


# ---------------------------------------------------------------------------------------------- transport of switches
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


# ------------------------------------------------------------------------------------- length groups and batching
class NoStrategiesError(FxparError):
    """There is no length group."""

    def __init__(self) -> None:
        super().__init__(
            "strategies is empty. Name at least one: strategies={4096: 'dp4'} runs sequences of up to 4096 tokens "
            "under 'dp4'"
        )


class StrategiesTypeError(FxparError):
    """`strategies` is no mapping."""

    def __init__(self, given: object) -> None:
        super().__init__(
            f"strategies is {given!r}. Give a dict from the longest sequence that a strategy takes, in tokens, to the "
            'strategy: {1024: "dp2", 8192: "tp2"}'
        )


class LengthLimitError(FxparError):
    """The key of a strategy is no length."""

    def __init__(self, limit: object) -> None:
        super().__init__(
            f"strategies has the key {limit!r}. A key is the longest sequence that its strategy takes, "
            "in tokens: an integer >= 1"
        )


class StrategyWorldsError(FxparError):
    """Strategies of one mini-batch do not all take all ranks."""

    def __init__(self, worlds: Mapping[int, tuple[str, int]], world: int) -> None:
        sizes = ", ".join(f"{text!r} (up to {limit} tokens) takes {size}" for limit, (text, size) in worlds.items())
        super().__init__(
            f"each strategy must take all {world} ranks, but {sizes}. Change degrees so that each product is {world}"
        )


class TokenBudgetError(FxparError):
    """A token budget that cannot hold the longest sequence of its group."""

    def __init__(self, budget: object, limit: int, strategy: str) -> None:
        super().__init__(
            f"the token budget {budget!r} of strategy {strategy!r} must be an integer and at least {limit}, the "
            "longest sequence that the strategy takes. Raise the budget or lower the limit"
        )


class UnknownBudgetError(FxparError):
    """A token budget for a group that does not exist."""

    def __init__(self, limit: object, limits: Iterable[int]) -> None:
        super().__init__(
            f"token_budget names the limit {limit!r}, which no strategy has. Limits are {', '.join(map(str, limits))}"
        )


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


class EmptyMiniBatchError(FxparError):
    """A mini-batch has no sequence at all."""

    def __init__(self) -> None:
        super().__init__("the mini-batch has no sequence. Skip the step, or give it at least one")


class MiniBatchError(FxparError):
    """A mini-batch is no list of sequences."""

    def __init__(self, given: object) -> None:
        hint = ""
        shape = getattr(given, "shape", None)
        if shape is not None:
            hint = f"; list(batch) are the rows of this one, of shape {list(shape)}"
        elif isinstance(given, Mapping):
            hint = "; one sequence alone is [sequence], and its tensors are [T], without a dim of the batch"
        super().__init__(
            f"the mini-batch is a {type(given).__name__}. Give a list of sequences, each a tensor [T] of token ids or "
            f"a dict of tensors [T]{hint}"
        )


class SequenceError(FxparError):
    """A sequence of a mini-batch is not what a sequence is."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(f"sequence {index} of the mini-batch {why}")


class SequenceTooLongError(FxparError):
    """No strategy takes a sequence of this length."""

    def __init__(self, index: int, length: int, longest: int, strategy: str) -> None:
        super().__init__(
            f"sequence {index} of the mini-batch has {length} tokens, but the longest limit is {longest} "
            f"({strategy!r}). Add a strategy for {length} tokens or more, or split the sequence"
        )


class LengthMultipleError(FxparError):
    """No strategy takes a sequence of this length: those that are long enough cut its tokens in equal parts."""

    def __init__(self, index: int, length: int, groups: Iterable[tuple[int, str, int]]) -> None:
        multiples = ", ".join(f"{multiple} up to {limit} tokens ({name})" for limit, name, multiple in groups)
        super().__init__(
            f"sequence {index} of the mini-batch has {length} tokens, but the model would see padding, so its "
            f"length must be a multiple of {multiples}"
        )


class ModelLengthError(FxparError):
    """A sequence of a length that the model cannot take."""

    def __init__(self, index: int, length: int, limits: str) -> None:
        super().__init__(
            f"sequence {index} of the mini-batch has {length} tokens, but the model takes {limits}. Cut it or leave it "
            "out, or build the model for such lengths"
        )


class NoValidTokenError(FxparError):
    """No token of a mini-batch has a label, so its mean loss does not exist."""

    def __init__(self, sequences: int) -> None:
        super().__init__(
            f"none of the {sequences} sequences of the mini-batch has a valid label: sequences of one token predict "
            "nothing, labels of -100 do not count. Skip the step, or give sequences of two tokens or more"
        )


class BatchKeyError(FxparError):
    """The graph needs a tensor that a sequence does not have."""

    def __init__(self, key: str, index: int, has: Iterable[str]) -> None:
        super().__init__(
            f"the graph needs {key!r}, which sequence {index} of the mini-batch does not have (it has "
            f"{', '.join(map(repr, has))}). Give each sequence as a mapping with {key!r} of its length"
        )


class UnreadKeyError(FxparError):
    """A sequence has a tensor that the captured step does not read: training on it would leave the tensor out."""

    def __init__(self, key: str, index: int, read: Iterable[str]) -> None:
        super().__init__(
            f"sequence {index} of the mini-batch has {key!r}, which the captured step does not read (it reads "
            f"{', '.join(map(repr, read))}). An optional argument of the forward is captured only if "
            f"fxpar.parallelize(..., example=batch) has it: give such a batch, or leave {key!r} out of the sequences"
        )


class PackingError(FxparError):
    """Sequences that cannot share a row: something in the model mixes the tokens of a row."""

    def __init__(self, model: str, why: str) -> None:
        self.why = why
        super().__init__(
            f"{model}: sequences cannot share a row, since {why}. Each sequence runs alone; if you know that it keeps "
            "documents apart, say packed=True"
        )


class TokenIdError(FxparError):
    """A token id, label or other index of a sequence has no row in the table that it indexes."""

    def __init__(self, index: int, position: int, key: str, value: int, rows: int, table: str) -> None:
        super().__init__(
            f"sequence {index} of the mini-batch, position {position}: {key!r} is {value}, but {table} has {rows:,} "
            f"rows (0 to {rows - 1}). Give ids that the model was made for (those of its own tokenizer), or a model "
            "with more rows"
        )


class UnmarkedDocumentsError(FxparError):
    """Several sequences in a row for a graph that could not tell them apart."""

    def __init__(self, keys: Iterable[str]) -> None:
        super().__init__(
            f"the graph takes {', '.join(sorted(keys))} but neither position_ids nor document_ids, so sequences packed "
            "into one row would attend to each other. Capture the model with position_ids, or do not pack"
        )


# ------------------------------------------------------------------------------------------------------ fxpar train
class ConfigFileError(FxparError):
    """A configuration file that cannot be read or parsed."""

    def __init__(self, source: str, why: str) -> None:
        super().__init__(f"config {source!r}: {why}")


class ConfigError(FxparError):
    """Keys or values of a configuration that cannot be used; all of them in one message."""

    def __init__(self, source: str, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        lines = self.problems[0] if len(self.problems) == 1 else "".join(f"\n  {line}" for line in self.problems)
        super().__init__(f"config {source!r}: {lines}")


class MaxLengthError(FxparError):
    """Sequences may be longer than any strategy takes."""

    def __init__(self, max_length: int, limit: int) -> None:
        super().__init__(
            f"data.max_length = {max_length}, but the longest sequence that [strategies] takes has {limit} tokens. "
            f"Add a strategy for {max_length} tokens, or set data.max_length = {limit}: data.overlong then says what "
            "happens to longer documents (split, truncate, error)"
        )


class RunFolderError(FxparError):
    """A folder for results that cannot be used."""

    def __init__(self, folder: str, why: str) -> None:
        super().__init__(f"folder {folder!r} {why}")


class RunInUseError(FxparError):
    """Another run works in the same folder; its checkpoints and metrics would be written over."""

    def __init__(self, folder: str, holder: str) -> None:
        self.folder, self.holder = folder, holder
        super().__init__(
            f"{folder} is in use by {holder}. Wait until that run has ended, end it, or set run.folder (and "
            "checkpoint.folder) to another folder. The lock of a run that was killed does not count"
        )

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), (self.folder, self.holder)


class ResumeError(FxparError):
    """There is nothing to resume from, or it does not fit."""

    def __init__(self, folder: str, why: str) -> None:
        super().__init__(f"cannot resume from {folder!r}: {why}")


class TextModelError(FxparError):
    """A model that cannot be trained on sequences of tokens."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"model {name!r} {why}")


class DeviceCountError(FxparError):
    """More ranks than devices, or no device at all."""

    def __init__(self, ranks: int, found: int) -> None:
        super().__init__(
            f"{ranks} local ranks need {ranks} GPUs, but torch sees {found}. Use strategies of fewer ranks, start more "
            'nodes with torchrun, or set run.device = "cpu"'
        )


class LaunchError(FxparError):
    """A local rank ended in another way than by an error of its own.

    `log` is the file of what it wrote, empty if it wrote nothing; `advice` says how to go on.
    """

    def __init__(self, rank: int, how: str, log: str, advice: str = "") -> None:
        self.rank, self.how, self.log = rank, how, log
        wrote = f"what it wrote is in {log!r}" if log else "it wrote nothing"
        super().__init__(f"rank {rank} {how}; {wrote}" + (f". {advice}" if advice else ""))


class CompareError(FxparError):
    """A comparison that cannot be made, or whose losses differ."""

    def __init__(self, why: str) -> None:
        super().__init__(f"--compare: {why}")


# ------------------------------------------------------------------------------------------------------------- data
class MissingDataPackageError(MissingPackageError):
    """A source of text or a tokenizer needs a package that is not installed."""

    def __init__(self, what: str, package: str, how: str) -> None:
        FxparError.__init__(self, f"{what} need {package}: {how}")


class CorpusPathError(FxparError):
    """There is nothing at the path of a corpus."""

    def __init__(self, path: str, built_in: Iterable[str]) -> None:
        names = list(built_in)
        super().__init__(
            f"corpus {path!r}: there is no such file or folder{nearest(path, names) or '.'} "
            f"Built-in corpora are {', '.join(names)}"
        )


class CorpusKindError(FxparError):
    """A kind of corpus that does not exist."""

    def __init__(self, kind: str, known: Iterable[str]) -> None:
        names = list(known)
        super().__init__(
            f"there is no kind of corpus {kind!r}{nearest(kind, names) or '.'} Kinds are {', '.join(names)}"
        )


class CorpusOptionError(FxparError):
    """An option that a kind of corpus does not have, or a value that it cannot take."""

    def __init__(self, kind: str, option: str, known: Iterable[str], why: str = "") -> None:
        names = list(known)
        wrong = f"there is no such option{nearest(option, names) or '.'} Options are {', '.join(names)}"
        super().__init__(f"corpus of kind {kind!r}, option {option!r}: {why or wrong}")


class CorpusFormatError(FxparError):
    """A corpus that is not of the kind it should be, or lacks the part that is asked for."""

    def __init__(self, path: str, kind: str, why: str) -> None:
        super().__init__(f"corpus {path!r} (kind {kind!r}): {why}")


class EmptyCorpusError(FxparError):
    """A corpus without a single usable document."""

    def __init__(self, source: str, kind: str, skipped: Iterable[str], hint: str) -> None:
        reasons = "; ".join([*(f"skipped {one}" for one in skipped), *([hint] if hint else [])])
        super().__init__(f"corpus {source!r} (kind {kind!r}) has no usable document: {reasons or 'nothing was found'}")


class CorpusChangedError(FxparError):
    """A document changed while the corpus was in use."""

    def __init__(self, source: str, name: str) -> None:
        super().__init__(f"corpus {source!r}: {name!r} changed or went away since the corpus was opened; start again")


class TokenizerError(FxparError):
    """A tokenizer that cannot be read or trained."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"tokenizer {name!r}: {why}")


class VocabularyError(FxparError):
    """A tokenizer has more ids than the model has embeddings."""

    def __init__(self, tokenizer: str, vocab: int, model_vocab: int) -> None:
        super().__init__(
            f"tokenizer {tokenizer!r} has {vocab:,} ids, but the model's vocabulary has {model_vocab:,}: "
            f"give the model a vocabulary of at least {vocab:,}, or use a tokenizer with no more than {model_vocab:,}"
        )


class DataCacheError(FxparError):
    """The cache of tokens or tokenizers cannot be written, or something in it is damaged."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"data cache {path!r} {why}. The folder of the cache can be chosen with `cache_dir`")


class HeldOutError(FxparError):
    """More documents held out for validation than leaves any to train on."""

    def __init__(self, held_out: int, documents: int) -> None:
        super().__init__(
            f"cannot hold out {held_out} of {documents} documents: hold out 0 to {max(documents - 1, 0)}, "
            "so that one is left for training"
        )


class OverlongError(FxparError):
    """A document is longer than the longest sequence allowed, and the policy is "error"."""

    def __init__(self, name: str, length: int, limit: int, count: int) -> None:
        more = f" (the first of {count} such documents)" if count > 1 else ""
        super().__init__(
            f"document {name!r} has {length:,} tokens, the longest sequence allowed has {limit:,}{more}: "
            'raise max_length, or choose overlong="split" or "truncate"'
        )


class NoSequencesError(FxparError):
    """No document is long enough to learn from."""

    def __init__(self, documents: int, short: int) -> None:
        super().__init__(
            f"none of {documents} documents gives a sequence of two tokens or more ({short} are shorter): "
            "a shorter one has no token to predict. Give more text"
        )


class LoaderOptionError(FxparError):
    """A setting of the mini-batch loader that makes no sense."""

    def __init__(self, why: str) -> None:
        super().__init__(f"mini-batch loader: {why}")


class LoaderStateError(FxparError):
    """A saved state of the mini-batch loader that does not fit to this loader."""

    def __init__(self, why: str) -> None:
        super().__init__(f"cannot resume the mini-batch loader from this state: {why}")


# ------------------------------------------------------------------------------------------ failures and checkpoints
class PeerLostError(FxparError):
    """A rank that others wait for is dead, stopped, stuck, or ended by an error of its own.

    `ranks` are the ranks to blame, `kind` says why (see `fxpar.monitor.verdict.TEXTS`).
    """

    advice = "{log}, then start the job again: it goes on from the last checkpoint"

    def __init__(
        self,
        ranks: tuple[int, ...],
        kind: str,
        what: str,
        rank: int = -1,
        phase: str = "",
        error: str = "",
        node: str = "",
    ) -> None:
        self.ranks, self.kind = ranks, kind
        self.details = (ranks, kind, what, rank, phase, error, node)
        names = ", ".join(map(str, ranks))
        log = f"Look at the log of rank{'s' if len(ranks) > 1 else ''} {names}" if ranks else "Look at all logs"
        on, advice = f" on {node}" if node else "", self.advice.format(log=log)
        super().__init__(f"{what}. Rank {rank}{on} noticed it in phase {phase!r} by {error}. {advice}.")

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), self.details


class ConnectionLostError(PeerLostError):
    """All ranks live, but a connection between two of them broke, or their machines do not reach each other.

    `ranks` are the two ends, as far as they are known.
    """

    advice = "Look at the network between these nodes, then start the job again: it goes on from the last checkpoint"


class GradientNormError(FxparError):
    """The gradients are not finite numbers although the loss is."""

    def __init__(self, norm: float, step: int) -> None:
        super().__init__(
            f"the norm of the gradients of step {step} is {norm}; nothing was updated. Lower optimizer.lr or look at "
            'the data; or set run.nan = "skip" to leave such mini-batches out'
        )


# ---------------------------------------------------------------------------- forward alone, and as a Dynamo backend
class CallMismatchError(FxparError):
    """A call of a captured forward that differs from the call it was captured with."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"this forward was captured for other arguments: {what}. Capture it again for these arguments; only the "
            "dynamic dims may change from call to call"
        )


class StaleWeightsError(FxparError):
    """A backward comes after the weights that its forward ran with have changed."""

    def __init__(self) -> None:
        super().__init__(
            "the weights have changed since the forward whose backward runs now, so its gradients would be wrong. Call "
            "backward() before the optimizer's step and before anything else that changes weights"
        )


class BackendOptionError(FxparError):
    """An option of `torch.compile(model, backend="fxpar")` that is missing, unknown or does not fit."""

    def __init__(self, option: str, why: str) -> None:
        super().__init__(
            f"torch.compile(backend='fxpar'), option {option!r}: {why}. Write for example "
            'torch.compile(model, backend="fxpar", options={"strategy": "dp2.tp2"})'
        )


class CheckpointError(FxparError):
    """Base of the errors of `fxpar.checkpoint`; the same error is raised on all ranks."""

    def __init__(self, path: object, why: str) -> None:
        self.path, self.why = str(path), one_line(why, None)
        super().__init__(f"checkpoint {self.path!r}: {self.why}")

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), (self.path, self.why)


class CheckpointWriteError(CheckpointError):
    """A checkpoint cannot be written (disk full, no permission, no shared folder); the ones before are intact."""


class CheckpointInUseError(CheckpointError):
    """Another process, or another thread of this one, saves its checkpoints to the same folder."""


class CorruptCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, truncated or changed; nothing was loaded."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint is of another model or optimizer; nothing was loaded."""


class CheckpointValueError(CheckpointError):
    """Something to save is neither a tensor nor a plain value."""


class MetaBufferError(FxparError):
    """A buffer on the meta device that nothing would give values to."""

    def __init__(self, fqn: str) -> None:
        super().__init__(
            f"buffer {fqn!r} is on the meta device and its module has no reset_parameters that fills it. Build the "
            "model's buffers on a real device, or give the module a reset_parameters"
        )


class RankFailedError(FxparError):
    """The first error of the local ranks; `trace` is its traceback there."""

    def __init__(self, rank: int, kind: str, message: str, trace: str, *, ours: bool) -> None:
        self.rank, self.kind, self.trace = rank, kind, trace
        super().__init__(f"{kind} on rank {rank}: {message}" + ("" if ours else ". Add --debug to see where"))


class NoConfigError(FxparError):
    """`fxpar train` was given neither a configuration nor --demo, or both."""

    def __init__(self) -> None:
        super().__init__("give either a configuration file (fxpar train CONFIG.toml) or --demo")


class SecondDerivativeError(FxparError):
    """The backward of a captured forward is to be differentiated itself."""

    def __init__(self) -> None:
        super().__init__(
            "a captured forward has first derivatives only, so create_graph=True cannot go through it. Compute "
            "gradient penalties with the unwrapped model"
        )


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


# ---------------------------------------------------------------------------------------------- pipeline stages
class StageCutError(FxparError):
    """A captured graph cannot be cut into these pipeline stages."""

    def __init__(self, model: str, why: str, advice: str) -> None:
        super().__init__(f"model {model!r} cannot be cut into pipeline stages: {why}. {advice}")


class StageCountError(StageCutError):
    """More pipeline stages than repeated layers, or not as many cuts as there are boundaries."""


class UnknownCutError(StageCutError):
    """A cut names a module that the forward does not run, or nothing runs before it."""


class NotAChainError(StageCutError):
    """Values would have to go from a later stage to an earlier one; the message names them."""


# ------------------------------------------------------------------------------------------------- recomputation
class RematGlobError(FxparError):
    """A glob in remat(...) that matches no module."""

    def __init__(self, glob: str, modules: Iterable[str]) -> None:
        known = sorted(modules)
        ends = {f"*.{name.rpartition('.')[2]}" for name in known if "." in name}
        hint = (
            nearest(glob, [*known, *sorted(ends)])
            or f". Modules are {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}"
        )
        super().__init__(f"remat({glob}): {glob!r} matches no module of the model{hint}")


class RematBudgetError(FxparError):
    """A budget for saved activations that recomputation cannot meet."""

    def __init__(self, budget_bytes: int, least_bytes: int, sizes: Mapping[str, int]) -> None:
        self.least_bytes = least_bytes
        where = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        super().__init__(
            f"remat: the backward needs at least {least_bytes / 1e6:,.3f} MB of saved activations per rank"
            f"{f' at {where}' if where else ''}, and the budget is {budget_bytes / 1e6:,.3f} MB. Raise the budget, cut "
            "the model or its tokens over more ranks, or use shorter micro-batches"
        )


class LauncherSignalError(FxparError):
    """The launcher of local ranks was told to end."""

    def __init__(self, name: str) -> None:
        super().__init__(f"ended by {name}; all ranks were ended too, without a checkpoint (Ctrl-C saves one)")


class DimNameError(FxparError):
    """A size for something that is no dynamic dim of the model."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        names = list(known)
        super().__init__(
            f"{name!r} is no dynamic dim of this model{nearest(name, names) or '.'} "
            + (f"They are {', '.join(names)}" if names else "It has none: its sizes are those of the example batch")
        )


class PackedCallError(FxparError):
    """A plain call of a parallel module inside a `packed` block with several documents."""

    def __init__(self) -> None:
        super().__init__(
            "model(...) was called inside fxpar.tracer.documents.packed with several documents. A plain call does not "
            "see that block: pass one sequence per row, or use train_step, whose loss is part of the graph"
        )


# ----------------------------------------------------------------------------------------------- mixed precision
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
        have = f"stages 0 to {stages - 1}" if stages > 1 else "none; name a strategy with a pp axis, such as pp2"
        super().__init__(f"there is no pipeline stage {stage}: '{strategy}' has {have}")


class NoScheduleError(FxparError):
    """A schedule is asked for under a strategy without pipeline stages."""

    def __init__(self, strategy: str) -> None:
        super().__init__(
            f"strategy '{strategy}' has no schedule, as it has no pipeline stages. Name one with a pp axis, such as "
            "pp2 or pp2+zb_h1"
        )


# --------------------------------------------------------------------------------------------------------- torchtitan
class HostVersionError(FxparError):
    """A pair of versions of torchtitan and torch that the recipes were not made for."""

    def __init__(self, torchtitan: str, torch: str, torchtitan_range: str, torch_range: str) -> None:
        super().__init__(
            f"fxpar.recipes need torchtitan{torchtitan_range} and torch{torch_range}; found torchtitan {torchtitan} "
            f"and torch {torch}. Install a supported pair: pip install 'fxpar[torchtitan]'"
        )


class RecipeImportError(FxparError):
    """A module that a recipe imports is not there, or fails. Not an ImportError: torchtitan would hide it."""

    def __init__(self, module: str, error: Exception) -> None:
        super().__init__(f"{module} cannot be imported: {type(error).__name__}: {error}")


class UnsupportedRecipeError(FxparError):
    """An option of a torchtitan recipe that fxpar does not support."""

    def __init__(self, option: str, why: str, instead: str) -> None:
        super().__init__(f"recipe option {option}: {why}. {instead}")


class DataRanksError(FxparError):
    """A checkpoint's place in the data that this loader cannot go on from."""

    def __init__(self, saved_ranks: int, data_ranks: int) -> None:
        super().__init__(
            f"the checkpoint says where {saved_ranks} data-parallel rank(s) of torchtitan's loader were, this run "
            f"draws as {data_ranks}. Set --fxpar.data-ranks {saved_ranks} to go on from there, or "
            "--checkpoint.exclude-from-loading dataloader to begin the data anew"
        )


class CheckpointModelError(FxparError):
    """A checkpoint of another model, or of another loader."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"checkpoint {path} does not fit this run: {what}")


class ForeignGraphPassError(FxparError):
    """A pass of fxpar that cannot run on a graph of torchtitan's graph_trainer, or has done it harm."""

    def __init__(self, name: str, why: str, instead: str) -> None:
        super().__init__(f"pass {name!r} on a graph of graph_trainer: {why}. {instead}")


class PipelineNameError(FxparError):
    """A pass pipeline of graph_trainer under a name that another one has."""

    def __init__(self, name: str, other: str) -> None:
        super().__init__(
            f"graph_trainer has a pass pipeline {name!r} already ({other}). Register this one under another name"
        )


class ForeignPassError(FxparError):
    """A pass of torchtitan's graph_trainer that cannot run on a graph of fxpar, or made something else of it."""

    def __init__(self, name: str, why: str, instead: str) -> None:
        super().__init__(f"graph_trainer pass {name!r} on a graph of fxpar: {why}. {instead}")


# -------------------------------------------------------------------------------------------------------- pictures
class VizDependencyError(FxparError):
    """A package that draws is not installed."""

    def __init__(self, package: str, what: str) -> None:
        super().__init__(f'{what} need the package {package}, which is not installed: pip install "fxpar[viz]"')


class OpenStdoutError(FxparError):
    """`--open` for something that is written to stdout."""

    def __init__(self) -> None:
        super().__init__("--open opens a file, and --output is stdout. Name a file with -o")


class SameOutputError(FxparError):
    """Two results are to be written to the same place."""

    def __init__(self, path: str) -> None:
        place = "stdout" if path == "-" else repr(path)
        super().__init__(f"--output and --trace are both {place}. Name another file for one of them")


# ------------------------------------------------------------------------------------------------------ comparison
class DifferentModelsError(FxparError):
    """Two graphs that are to be compared are of different models."""

    def __init__(self, old: str, new: str, fqn: str, left: tuple | None, right: tuple | None) -> None:
        def says(shape: tuple | None) -> str:
            return "no such parameter" if shape is None else f"shape {list(shape)}"

        super().__init__(
            f"{old} and {new} are different models: {fqn!r} has {says(left)} in the first, {says(right)} in the "
            "second. Compare graphs of one model, with the same options"
        )


class SidesError(FxparError):
    """What `fxpar diff` is to compare is not said, or said twice."""

    def __init__(self, why: str, do: str) -> None:
        super().__init__(f"nothing to compare: {why}. {do}.")


class PassNeedsError(FxparError):
    """A pass was asked to run on a graph that is not what it needs."""

    def __init__(self, name: str, what: str, lack: str, do: str) -> None:
        super().__init__(f"pass {name!r} needs {what}; in this graph {lack}. {do}. See: fxpar passes {name}")


class PassOptionError(FxparError):
    """An option of a pass that it does not have, or a value that does not fit."""

    def __init__(self, name: str, option: str, why: str) -> None:
        super().__init__(f"option {option!r} of pass {name!r}: {why}")


class GivenPassesError(FxparError):
    """Options of `lower` that are options of its passes, beside passes that have theirs already."""

    def __init__(self, options: list[str]) -> None:
        given = ", ".join(f"{option}=" for option in options)
        super().__init__(
            f"lower(passes=...) cannot follow {given} which it would hand to the passes that it makes itself. Give "
            f"{given} to fxpar.lowering.ladder.default_passes, and change the list that it returns"
        )


class PassRunError(FxparError):
    """A pass failed on a graph for which it may not be meant."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(
            f"pass {name!r} cannot run on this graph ({type(error).__name__}: {error}). See what holds before it with: "
            f"fxpar passes {name}"
        )


# ----------------------------------------------------------------------------------------------------- explanations
class UnknownSubjectError(FxparError):
    """`fxpar explain` is asked about something that the graph does not have."""

    def __init__(self, name: str, model: str, known: Iterable[str]) -> None:
        close = difflib.get_close_matches(name.removeprefix("%"), list(dict.fromkeys(known)), n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
        super().__init__(
            f"{model} has nothing called {name!r}{hint} Name a parameter or a module (globs too), a node as "
            "`fxpar dump --stage annotated` prints it, or a collective as `fxpar dump` does"
        )


class SubjectStageError(FxparError):
    """A name that means something else on each pipeline stage."""

    def __init__(self, name: str, stages: Iterable[int]) -> None:
        super().__init__(f"{name!r} is on stages {', '.join(map(str, stages))} alike. Add --stage N to name one")
