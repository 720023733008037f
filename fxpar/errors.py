"""Every error that fxpar raises on purpose: one class per condition.

Each message names what is wrong (node, module FQN, config key, the user's source line where it is known) and what to
do about it. All classes derive from `FxparError`, so a caller can catch the family; the CLI prints the message alone
and exits with status 1 (2 for a mistake on the command line).
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable


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


class VerifyError(FxparError):
    """A graph breaks an invariant; raised by the verifier between passes, always a bug of the pass it names."""


# ----------------------------------------------------------------------------------------- pass registry
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


class DuplicatePassError(FxparError):
    """Two packages, or a package and fxpar itself, give different passes the same name."""

    def __init__(self, name: str, first: str, second: str) -> None:
        super().__init__(
            f"the pass name {name!r} is taken twice: by {first} and by {second}. "
            "Rename the entry point of one of them, or uninstall that package."
        )


class PassLoadError(FxparError):
    """A pass is registered, but the place that its entry names cannot be imported."""

    def __init__(self, name: str, value: str, owner: str, cause: Exception) -> None:
        super().__init__(
            f"the pass {name!r} of {owner} cannot be loaded from {value!r}: "
            f"{type(cause).__name__}: {cause}. An entry is written 'module:attribute'; fix it or "
            f"install what it imports."
        )


class PassContractError(FxparError):
    """An object given as a pass, or what it returned, is not what a pass is."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"{name!r} does not behave as a pass: {why}. A pass is an object with `run(gm)`, or a "
            "callable `(gm)`; it returns the GraphModule, or True if it changed it and else False."
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

    def __init__(self, key: str, why: str) -> None:
        super().__init__(
            f"batch key {key!r} cannot be padded: {why}. Give a length that divides; or name the key as one with a "
            "rule for its padding (input_ids, labels, position_ids, ...); or tell attention documents or a mask."
        )


# ---------------------------------------------------------------------------------- models and the command line
class UnknownModelError(FxparError):
    """MODEL names no built-in example, and is not written as another kind of model."""

    def __init__(self, spec: str, examples: Iterable[str], hint: str) -> None:
        super().__init__(
            f"there is no built-in model {spec!r}{hint or '.'} Built in are {', '.join(examples)}; other models are "
            "written hf:TYPE, pkg.module:function or file.py:function"
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
