"""Errors of parallel models: sessions, mini-batches, ranks that are gone, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fxpar.errors.base import FxparError


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


class TaskError(FxparError):
    """A task of `fxpar.parallelize(tasks=...)` that makes no sense."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"task {name!r} {why}" if name else f"a task {why}")


class TaskBatchError(FxparError):
    """What a step is given is not a mini-batch for each of some tasks."""

    def __init__(self, why: str, names: Iterable[str]) -> None:
        super().__init__(f"{why}. Give a dict from tasks to their mini-batches; the tasks are {', '.join(names)}")


class ParamDtypeError(FxparError):
    """Two tasks compute with one parameter in different dtypes, so no one copy of it could be sent to both."""

    def __init__(self, fqn: str, first: str, other: str) -> None:
        super().__init__(
            f"one task computes with {fqn} in {first}, another one in {other}. Give parallelize a precision that "
            "treats it alike in all tasks"
        )


class ChangedParameterError(FxparError):
    """A parameter of a parallel module was replaced, added, converted, frozen or thawed after `fxpar.parallelize`."""

    def __init__(self, fqn: str, how: str) -> None:
        super().__init__(
            f"the parameter {fqn} {how} at fxpar.parallelize. Make such changes before that; new values are copied "
            "into a parameter: param.copy_(...) under torch.no_grad(), or load_state_dict without assign=True"
        )


class StaleOptimizerError(FxparError):
    """An optimizer that was made before `fxpar.parallelize` steps: it holds parameters that the model no longer has."""

    def __init__(self, optimizer: str, fqn: str) -> None:
        super().__init__(
            f"this {optimizer} was made before fxpar.parallelize, which replaced the model's parameters by sharded "
            f"ones: it holds the old {fqn}, so its steps do not train the model. Make the optimizer after parallelize: "
            f"{optimizer}(model.parameters(), ...)"
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
            f"the {what} on rank {ranks} differs from rank 0's. Every rank must pass the same sequences in the same "
            "order, and the same denominator, to train_step and evaluate; draw them from the same seed"
        )


class ReplicaBatchError(FxparError):
    """Ranks of one replica were given different batches in a plain call."""

    def __init__(self, strategy: str, rank: int, first: int) -> None:
        super().__init__(
            f"rank {rank} calls the model with another batch than rank {first}, though both are of one replica under "
            f"{strategy!r}. Only replicas (dp) bring batches of their own; give the ranks of one replica the same one"
        )


class OptionMismatchError(FxparError):
    """The ranks were given different options."""

    def __init__(self, option: str, ranks: str, theirs: str, first: str) -> None:
        super().__init__(
            f"{option} is {theirs} on rank {ranks}, and {first} on rank 0. Every rank must call parallelize with the "
            "same strategies and options"
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
        names = ", ".join(map(str, ranks))
        log = f"Look at the log of rank{'s' if len(ranks) > 1 else ''} {names}" if ranks else "Look at all logs"
        on, advice = f" on {node}" if node else "", self.advice.format(log=log)
        super().__init__(f"{what}. Rank {rank}{on} noticed it in phase {phase!r} by {error}. {advice}.")


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


class EvaluateStagesError(FxparError):
    """Evaluation mode uses other parameters than training, so that its stages are not those that training has."""

    def __init__(self, strategy: str, fqn: str) -> None:
        super().__init__(
            f"evaluate under {strategy}: parameter {fqn!r} is on other pipeline stages than in training, as the model "
            "runs other modules in evaluation mode. Give these lengths a strategy without pp, or evaluate a copy of "
            "the model on one device"
        )


class ExactExpertsError(FxparError):
    """Experts that cannot be told when to see all rows again."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"when experts see all rows is for strategies with +lsh in a run of one loss, but {why}. Leave it out "
            "(plan.residual and plan.exact_steps of a run), or write such strategies"
        )
