"""Errors of capturing a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fxpar.errors.base import FxparError, a_type, nearest, one_line


# --------------------------------------------------------------------------------------------------------- capture
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
            f"cannot use {key}: {why}. A batch is a dict of dense tensors (or a tuple or list of them); "
            "anything that is not a tensor belongs in the loss function"
        )


class WrappedModelError(CaptureError):
    """The model, or a module of it, is wrapped by DistributedDataParallel, DataParallel or FSDP."""

    def __init__(self, wrapper: str, fqn: str) -> None:
        what = f"module {fqn!r} of the model" if fqn else "the model"
        super().__init__(
            f"{what} is wrapped in {wrapper}, which exchanges gradients by itself. Pass the module inside, .module: "
            "fxpar does what the wrapper did, under a strategy such as 'dp2' or 'dp2+zero3'"
        )


class LazyParameterError(CaptureError):
    """A parameter or buffer of a lazy module (`nn.LazyLinear`) has no shape yet."""

    def __init__(self, fqn: str) -> None:
        super().__init__(f"{fqn!r} has no shape yet, as its module is lazy. Call the model once with a batch before")


class MixedDtypesError(CaptureError):
    """A product of tensors of two dtypes, such as a batch and a model that were made in different ones."""

    def __init__(self, dtypes: Iterable[str], batch: Mapping[str, str], fqn: str | None, line: str | None) -> None:
        has = ", ".join(f"{key!r} is {dtype}" for key, dtype in batch.items())
        batch_has = f" In the batch {has}." if has else ""
        super().__init__(
            f"a product of {' and '.join(sorted(dtypes))}{_at(fqn, line)}.{batch_has} Make the batch in the model's "
            "dtype, or convert one of the two in the model or the loss function"
        )


class ForwardArgumentsError(CaptureError):
    """The model's forward does not take what it is called with."""

    def __init__(self, why: str, parameters: str, keys: Iterable[str]) -> None:
        super().__init__(
            f"{why}. The parameters of forward are {parameters or 'none'}; the keys of the batch are "
            f"{', '.join(map(repr, keys))}. Name the keys of the batch after the parameters, or write a loss function "
            "that calls the model with what its forward takes"
        )


class MissingInputError(CaptureError):
    """Model or loss function read a `key` that the batch which is captured does not have."""

    def __init__(self, key: str, keys: Iterable[str]) -> None:
        self.key, has = key, list(keys)
        super().__init__(
            f"the model or the loss function reads {key!r}, which the batch does not have: its keys are "
            f"{', '.join(map(repr, has))}{nearest(key, has) or '.'} Give the batch that is captured (example= of "
            f"fxpar.parallelize) a tensor {key!r}, or read one of its keys"
        )


class ExampleNeededError(CaptureError):
    """Model or loss function read a key that the batch which fxpar captures with by itself does not have, or (`failed`)
    a model that takes `key` alone has failed on that batch.
    """

    def __init__(self, key: object, keys: Iterable[str], failed: Exception | None = None) -> None:
        self.key = key
        why = f"the model or the loss function reads {key!r}, which the batch that fxpar captures with does not have"
        if failed is not None:
            why = f"the model takes {key!r} and failed on the batch that fxpar captures with ({failed})"
        loss = "" if failed is None else "loss=..., "
        super().__init__(
            f"{why}: it is one of text, with {', '.join(map(repr, keys))}. Give one batch of yours, of which only "
            f"shapes and dtypes are read: {loss}example={{{key!r}: ...}}, with all other keys that model and loss read"
            f"{_OF_POSITIONS * ('pos' in str(key) and failed is None)}"
        )


_OF_POSITIONS = ". Positions that count from 0 in each document need no example if they are read as 'position_ids'"


class DynamicDimError(CaptureError):
    """The `dynamic` argument does not fit the batch, or the automatic choice is ambiguous."""


class DeviceError(CaptureError):
    """The model is on several devices, or its code asks for a device that it is not on."""


class LossError(CaptureError):
    """The loss function does not return a differentiable scalar tensor."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the loss function returned {why}. It must return one scalar tensor that depends on the parameters: "
            "the sum of the losses of all valid tokens, not detached and without .item()"
        )


class LossCallError(CaptureError):
    """The loss function fails on what it is called with, such as one that takes logits and labels."""

    def __init__(self, why: str, given: str, line: str | None) -> None:
        called = f"fxpar calls it with the model and the batch, loss(model, batch), and the batch is {given}"
        do = "Let it call the model and return the sum of the losses"
        super().__init__(f"the loss function failed{_at(None, line)}: {why}. {called}. {do}")


class MetricError(CaptureError):
    """What the loss function returns beside the loss is no metric that can be added up over ranks and micro-batches."""

    def __init__(self, name: object, why: str) -> None:
        super().__init__(
            f"metric {name!r} of the loss function {why}. A metric is a number that is summed over the mini-batch, "
            "such as (logits.argmax(-1) == labels).sum(), or a pair (sum, count) whose quotient is reported: "
            "return loss, {'accuracy': (correct, counted)}"
        )


class LossFunctionError(CaptureError):
    """What is passed as the loss function is none: nothing to call, or a function of logits and labels."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the loss is {what}, not a function of the model and a batch. Pass fxpar.losses.causal_lm, or one of your "
            "own: def loss(model, batch): return fxpar.losses.cross_entropy_sum(model(batch['x']), batch['labels'])"
        )


class ModelOutputError(FxparError):
    """A ready-made loss function finds no logits in what the model returns."""

    def __init__(self, function: str, outputs: object) -> None:
        keys = f" with the keys {', '.join(map(repr, outputs))}" if isinstance(outputs, Mapping) else ""
        super().__init__(
            f"{function}: the model returns {a_type(outputs)}{keys} without logits. It may return logits, a "
            "tuple that begins with them, or an object or mapping with `logits`; else write a loss function"
        )


class EvaluateLossError(FxparError):
    """`evaluate` calls the loss function as it stands, and cannot make of its value what training makes of it."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(f"evaluate: the loss function {what}. {instead}")


class MeanLossError(CaptureError):
    """The loss averages over tokens in a way that cannot be turned into a sum exactly."""

    def __init__(self, what: str, line: str | None) -> None:
        super().__init__(
            f"the loss is a mean, or has a factor that depends on the batch: {what}{_at(None, line)}. Return the sum "
            "over the valid tokens, for example fxpar.losses.cross_entropy_sum(logits, labels) or "
            "F.cross_entropy(logits, labels, reduction='sum'): loss and gradient are then divided by the valid tokens "
            "of the whole mini-batch, whatever the micro-batches are, or by a number of yours, "
            "train_step(sequences, denominator=number). Your own weights can be a key of the batch"
        )


class RowMeanError(CaptureError):
    """The loss of a batch is the mean over its rows."""

    def __init__(self, rows: int, whole: float, total: float) -> None:
        super().__init__(
            f"the loss is a mean over the {rows} rows of the batch: it is {whole:.6g}, and the losses of its rows add "
            f"up to {total:.6g}. Rows of a mini-batch are spread over micro-batches and replicas, so losses have to "
            "add up: return the sum over rows; loss and gradient are then divided by the number of the whole "
            "mini-batch, or by one of yours, train_step(sequences, denominator=number)"
        )


class SpecializedShapeError(CaptureError):
    """The model's code only holds for some sizes of a dynamic dim."""

    def __init__(self, dims: str, condition: str, line: str | None) -> None:
        super().__init__(
            f"the traced program holds only where {condition}, but {in_words(dims)} should be free{_at(None, line)}. "
            f"Remove the comparison or the fixed size from the model{_OF_MOD if 'Mod(' in condition else ''}, give the "
            "dim its own name or none with `dynamic`, or use an example batch whose sizes differ from the model's "
            "widths"
        )


_OF_MOD = " (a remainder may stand in sizes and numbers, such as F.pad(x, (0, 0, 0, -T % 8)), but in no `if`)"


class FixedLengthError(SpecializedShapeError):
    """`len(x)` of a tensor, or a loop over it, where the size is free: Python takes it for a number."""

    def __init__(self, what: str, dim: str, instead: str, line: str | None) -> None:
        CaptureError.__init__(
            self,
            f"{what} is a fixed number in Python, but {in_words(dim)} should be free{_at(None, line)}: {instead}. "
            "Or fix the dim: fxpar.capture(..., dynamic=None), for one length alone",
        )


class SymbolicSizeError(CaptureError):
    """Python or torch fails on a size that is free: at capture it is a symbol (a torch.SymInt), not a number."""

    def __init__(self, error: Exception, dims: str, fqn: str | None, line: str | None) -> None:
        said = one_line(str(error).partition("\n")[0], 120)
        super().__init__(
            f"{in_words(dims)} is a symbol at capture, and what is done with it fails{_at(fqn, line)}: "
            f"{type(error).__name__}{f' ({said})' if said else ''}. Use +, -, *, //, %, an `if` that compares whole "
            "numbers and, for tensors, torch.arange and torch.full. Or fix the dim: fxpar.capture(..., dynamic=None), "
            "for one length alone"
        )


_DIMS = {"T": "the sequence length", "B": "the rows of the batch", "C": "the number of document bounds"}


def in_words(dims: str) -> str:
    """Names of dynamic dims, with what those that capture has named itself stand for."""
    return " and ".join(f"{d}, {_DIMS[d]}," if d in _DIMS else d for d in dims.split(" and "))


class DataDependentError(CaptureError):
    """Python code of the model needs a value that only the data has."""

    def __init__(self, what: str, fqn: str | None, line: str | None) -> None:
        super().__init__(
            f"the program depends on the values of a tensor: {what}{_at(fqn, line)}. One graph must hold for all "
            "batches: replace `if`, .item(), nonzero(), x[mask] by torch.where, and loops over experts by expert_mm"
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


# -------------------------------------------------------------------------- forward alone, and as a Dynamo backend
class CallMismatchError(FxparError):
    """A call of a captured forward that differs from the call it was captured with."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"this forward was captured for other arguments: {what}. Capture it again for these arguments; only the "
            "dynamic dims may change from call to call"
        )


class PositionsError(FxparError):
    """Positions of a plain call jump to another number than 0, where transformers would begin a document."""

    def __init__(self, key: str, row: int, token: int, values: tuple[int, int]) -> None:
        super().__init__(
            f"{key} of row {row} go from {values[0]} to {values[1]} at token {token}: transformers would begin another "
            "document there, and fxpar begins one only where positions are 0. Let positions count up by 1 from 0 in "
            "every document, or pass an attention_mask that says which tokens see each other"
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
        example = '"strategies": {1024: "dp2", 8192: "tp2"}' if option == "strategies" else '"strategy": "dp2.tp2"'
        stop = "" if why.endswith("?") else "."
        super().__init__(
            f"torch.compile(backend='fxpar'), option {option!r}: {why}{stop} Write for example "
            f'torch.compile(model, backend="fxpar", options={{{example}}})'
        )


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
