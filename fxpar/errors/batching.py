"""Errors of length groups and mini-batches: limits, budgets, sequences and what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fxpar.errors.base import FxparError, a_type, nearest


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
            f"whole number from 1 to {longest:,}, such as strategies={{512: 'dp2', 4096: 'tp2'}}. For plain calls "
            "alone, model(x), where keys only tell strategies apart, number them: {1: 'dp2', 2: 'tp2'}"
        )


class StrategyWorldsError(FxparError):
    """Strategies of one mini-batch do not all take all ranks. `unit` is what limits count."""

    def __init__(self, worlds: Mapping[int, tuple[str, int]], world: int, unit: str = "tokens") -> None:
        sizes = ", ".join(f"{text!r} (up to {limit} {unit}) uses {size}" for limit, (text, size) in worlds.items())
        ranks = "the one rank that there is" if world == 1 else f"all {world} ranks"
        super().__init__(
            f"each strategy must use {ranks}, but {sizes}. Change degrees so that each takes {world} "
            "(degrees multiply, those of stages and of strategies side by side add up), or the number of ranks"
        )


class TokenBudgetError(FxparError):
    """A token budget that cannot hold the longest sequence of its group."""

    def __init__(self, budget: object, limit: int, strategy: str, bins: int = 1) -> None:
        each = f", in each of the {bins} bins of a micro-batch" if bins > 1 else ""
        super().__init__(
            f"the token budget {budget!r} of strategy {strategy!r} must be an integer and at least {limit * bins}: the "
            f"longest sequence that the strategy takes has {limit}{each}. Raise the budget or lower the limit"
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
        self.index, self.length = index, length
        self.allowed = (
            f"the longest limit is {longest} ({strategy!r}). Add a strategy for {length} or more, or split it"
        )
        super().__init__(
            f"sequence {index} of the mini-batch has {length} tokens, but the longest limit is {longest} "
            f"({strategy!r}). Add a strategy for {length} tokens or more, or split the sequence"
        )


class LengthMultipleError(FxparError):
    """No strategy takes a sequence of this length: those that are long enough cut its tokens in equal parts."""

    def __init__(self, index: int, length: int, groups: Iterable[tuple[int, str, int]]) -> None:
        known = list(groups)
        multiples = ", ".join(f"{multiple} up to {limit} tokens ({name})" for limit, name, multiple in known)
        self.index, self.length = index, length
        self.allowed = "the model would see padding, so it must be a multiple of " + ", ".join(
            f"{multiple} up to {limit} ({name!r})" for limit, name, multiple in known
        )
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
            "length (example=...), or let the model compute the same at all lengths, such as with torch.where. For "
            "plain calls alone, where limits only tell strategies apart, any that the model takes will do"
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
    """A sequence has a tensor that the captured step does not read: training on it would leave the tensor out.
    `hidden` is how many tokens of the sequence it hides, as an attention mask does.
    """

    def __init__(self, key: str, index: int, read: Sequence[str], hidden: int = 0) -> None:
        leave = f"leave {key!r} out of the sequences"
        padded = (
            f" It hides {hidden} of its tokens. If these are padding, {leave}, and the tokens too: "
            f"input_ids[{key} != 0], labels alike. fxpar packs and pads sequences of any length by itself."
        )
        super().__init__(
            f"sequence {index} of the mini-batch has {key!r}, which the captured step does not read (it reads "
            f"{', '.join(map(repr, read))}{nearest(key, read)}).{padded if hidden else ''} An optional argument of the "
            f"forward is captured only if fxpar.parallelize(..., example=batch) has it: give such a batch"
            f"{'' if hidden else f', or {leave}'}"
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
        do = "ids that the model was made for (those of its own tokenizer)"
        if key == "position_ids":
            do = f"sequences of at most {rows:,} tokens"
        super().__init__(
            f"sequence {index} of the mini-batch, position {position}: {key!r} is {value}, but {table} has {rows:,} "
            f"rows (0 to {rows - 1}). Give {do}, or a model with more rows"
        )


class BatchIdError(FxparError):
    """A token id, class label or other index of a batch has no row in the table that it indexes."""

    def __init__(self, key: str, value: int, rows: int, table: str) -> None:
        super().__init__(
            f"{key!r} of the batch has the value {value}, but {table} has {rows:,} rows (0 to {rows - 1}). Give ids or "
            "labels that the model was made for, or a model with more rows"
        )


class WholeBatchesError(FxparError):
    """A mini-batch of whole batches is no list of them."""

    def __init__(self, given: object, keys: Iterable[str]) -> None:
        hint = "; one batch alone is [batch]" if isinstance(given, Mapping) else ""
        super().__init__(
            f"the mini-batch is {a_type(given)}. Give a list of batches like the example, each a mapping with "
            f"{', '.join(keys)}{hint}"
        )


class WholeBatchError(FxparError):
    """A batch of a mini-batch is not like the one that was captured."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(
            f"batch {index} of the mini-batch {why}. A mini-batch is a list of batches like the example, each of which "
            "runs alone"
        )


class WholeBatchSizeError(FxparError):
    """A batch of a mini-batch has a size that no strategy takes."""

    def __init__(self, index: int, key: str, dim: int, name: str, size: int, allowed: str) -> None:
        super().__init__(
            f"batch {index} of the mini-batch has {size} in dim {dim} of {key!r} (the dynamic dim {name!r}), but "
            f"{allowed}. `dynamic` of the task says which sizes may differ: limits of its strategies are about 'T', or "
            "about another one where no size is called 'T'"
        )


class UnmarkedDocumentsError(FxparError):
    """Several sequences in a row for a graph that could not tell them apart."""

    def __init__(self, keys: Iterable[str]) -> None:
        super().__init__(
            f"the graph takes {', '.join(sorted(keys))} but neither position_ids nor document_ids, so sequences packed "
            "into one row would attend to each other. Capture the model with position_ids, or do not pack"
        )
