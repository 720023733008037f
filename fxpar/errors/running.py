"""Errors of parallel models: sessions, mini-batches, ranks that are gone, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fxpar.errors.base import FxparError, a_type


# --------------------------------------------------------------------------------------------------------- running
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


# ------------------------------------------------------------------------------------------------ store and engine
class HomeLayoutError(FxparError):
    """A rule for the home layout that cannot be followed."""

    def __init__(self, pattern: str, why: str) -> None:
        super().__init__(f"home layout, rule {pattern!r}: {why}")


class MemoryBudgetError(FxparError):
    """The layouts of all strategies and the activations of the hungriest need more memory than allowed."""

    def __init__(self, needed: str, budget: str, table: str) -> None:
        super().__init__(
            f"weights, gradients, messages and activations need at least {needed} per rank, but the budget is "
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
            "which would never run: gradients go into .grad without autograd. Remove the hook and do its work on "
            ".grad after train_step or backward"
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
            f"rank {ranks} compiled another program for {strategy!r} than rank 0: the collectives would not match, or "
            "the numbers that model or loss hold as constants differ. Build the same model with the same options and "
            "the same versions on every rank"
        )


class DeviceMismatchError(FxparError):
    """The ranks run on different kinds of devices."""

    def __init__(self, kinds: Sequence[str]) -> None:
        places = {kind: [str(rank) for rank, one in enumerate(kinds) if one == kind] for kind in dict.fromkeys(kinds)}
        found = "; ".join(f"{kind!r} on rank {', '.join(ranks)}" for kind, ranks in places.items())
        super().__init__(
            f"the ranks hold their model on different kinds of devices: {found}. Every rank must pass it on the same "
            "kind (`fxpar train`: run.device), as costs are predicted for one"
        )


class ValueMismatchError(FxparError):
    """The ranks hold different values of a parameter or buffer at the start."""

    def __init__(self, kind: str, fqn: str, ranks: str) -> None:
        super().__init__(
            f"the {kind} {fqn!r} on rank {ranks} differs from rank 0's. Every rank must pass the same model: "
            "initialize it from the same seed, or load the same checkpoint, before fxpar.parallelize"
        )


class NanLossError(FxparError):
    """The loss is not a finite number."""

    def __init__(self, loss: float, step: int, group: str) -> None:
        super().__init__(
            f"the loss of step {step} is {loss} (first seen in group {group}). Gradients were not kept. Lower the "
            "learning rate, clip gradients, look at the data; or skip such mini-batches: nan='skip' "
            "(`fxpar train`: run.nan)"
        )


# -------------------------------------------------------------------------------------- length groups and batching
class NoStrategiesError(FxparError):
    """There is no length group."""

    def __init__(self) -> None:
        super().__init__(
            "strategies is empty. Name at least one: strategies={4096: 'dp4'} runs sequences of up to 4096 tokens "
            "under 'dp4'"
        )


class StrategiesTypeError(FxparError):
    """`strategies` is no mapping to strategies."""

    def __init__(self, given: object) -> None:
        super().__init__(
            f"strategies is {given!r}. Give a dict from the longest sequence that a strategy takes, in tokens, to the "
            'strategy: {1024: "dp2", 8192: "tp2"}'
        )


class LengthLimitError(FxparError):
    """The key of a strategy is no length that a sequence may have. `limit` as Python would print it."""

    def __init__(self, limit: str, longest: int) -> None:
        super().__init__(
            f"strategies has the key {limit}. A key is the longest sequence that its strategy takes, in tokens: a "
            f"whole number from 1 to {longest:,}, such as strategies={{512: 'dp2', 4096: 'tp2'}}"
        )


class StrategyWorldsError(FxparError):
    """Strategies of one mini-batch do not all take all ranks."""

    def __init__(self, worlds: Mapping[int, tuple[str, int]], world: int) -> None:
        sizes = ", ".join(f"{text!r} (up to {limit} tokens) uses {size}" for limit, (text, size) in worlds.items())
        super().__init__(
            f"each strategy must use all {world} ranks, but {sizes}. Change degrees so that each product is {world}"
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


class EmptyMiniBatchError(FxparError):
    """A mini-batch has no sequence at all."""

    def __init__(self) -> None:
        super().__init__("the mini-batch has no sequence. Skip the step, or give it at least one")


class MiniBatchError(FxparError):
    """A mini-batch is no list of sequences."""

    def __init__(self, given: object) -> None:
        hint = ""
        shape = getattr(given, "shape", None)
        if shape is not None and len(shape) < 2:
            hint = "; one sequence alone is [sequence]"
        elif shape is not None:
            hint = f"; list(batch) are the rows of this one, of shape {list(shape)}"
        elif isinstance(given, Mapping):
            hint = "; one sequence alone is [sequence], and its tensors are [T], without a dim of the batch"
        super().__init__(
            f"the mini-batch is {a_type(given)}. Give a list of sequences, each a tensor [T] of token ids or "
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


class LimitBranchError(FxparError):
    """A limit of `strategies` lies where the captured graph does not hold: the model computes otherwise there."""

    def __init__(self, limit: int, strategy: str, example: int, limits: str) -> None:
        super().__init__(
            f"strategies has the limit {limit} ({strategy}), but captured with {example} tokens the model takes "
            f"{limits}. Choose limits within that, capture the other side of the branch with an example of such a "
            "length (example=...), or let the model compute the same at all lengths, such as with torch.where"
        )


class AutocastError(FxparError):
    """`torch.autocast` is on in a step that was captured without it, or with another dtype."""

    def __init__(self, device: str, now: object, captured: object) -> None:
        super().__init__(
            f"train_step is in torch.autocast({device!r}, {now}), but was captured with {captured or 'no casts'}. "
            "Give fxpar.parallelize precision='bf16' or 'fp16', and call train_step outside"
        )


class NoGradError(FxparError):
    """A step of training where gradients are off: it would have added gradients all the same."""

    def __init__(self) -> None:
        super().__init__(
            "train_step is called with gradients off (torch.no_grad or torch.inference_mode), and all it makes is "
            "gradients. Call it outside of that block; model.evaluate(sequences) gives the loss alone"
        )


class NoValidTokenError(FxparError):
    """No token of a mini-batch has a label, so its mean loss does not exist."""

    def __init__(self, sequences: int) -> None:
        super().__init__(
            f"none of the {sequences} sequences of the mini-batch has a valid label: sequences of one token predict "
            "nothing, labels of -100 do not count. Skip the step, or give sequences of two tokens or more"
        )


class DenominatorError(FxparError):
    """What the summed losses of a mini-batch are to be divided by is no number above 0."""

    def __init__(self, given: object) -> None:
        super().__init__(
            f"denominator={given!r}: the summed loss of the mini-batch is divided by it, so give a number above 0, the "
            "same on every rank, such as the sum of all token weights; by default it is the number of valid tokens"
        )


class BatchKeyError(FxparError):
    """The graph needs a tensor that a sequence does not have; `tokens`: it takes sequences of tokens at all."""

    def __init__(self, key: str, index: int, has: Iterable[str], tokens: bool = True) -> None:
        give = f"Give each sequence as a mapping with {key!r} of its length"
        calls = "It takes no sequences of tokens: train it by calls, loss = model(...), loss.backward()"
        super().__init__(
            f"the graph needs {key!r}, which sequence {index} of the mini-batch does not have (it has "
            f"{', '.join(map(repr, has))}). {give if tokens else calls}"
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
            "documents apart, pass packed=True"
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


# ---------------------------------------------------------------------------------------- failures and checkpoints
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
            'the data; or set run.nan = "skip" to skip such mini-batches'
        )
