"""Errors of strategies: their text, their rules, their ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from fxpar.errors.base import FxparError, nearest


def _near_modules(glob: str, modules: Iterable[str]) -> str:
    """What may have been meant with a glob over modules that matches none."""
    known = sorted(modules)
    ends = {f"*.{name.rpartition('.')[2]}" for name in known if "." in name}
    some = f". Modules are {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}"
    return nearest(glob, [*known, *sorted(ends)]) or some


class StrategySyntaxError(FxparError):
    """A strategy string does not parse, at a `part` of it."""

    def __init__(self, text: str, part: str, why: str) -> None:
        at = f" (at {part!r})" if text.strip() else ""
        super().__init__(
            f"strategy {text!r}: {why}{at}. A strategy is axes joined by '.', then flags joined by '+', "
            "for example 'dp2.tp4+sp+zero1'."
        )


class RuleConflictError(FxparError):
    """Two rules of a strategy say different things of one module."""

    def __init__(self, module: str, what: str, rules: Iterable[str]) -> None:
        both = " and ".join(map(repr, rules))
        super().__init__(f"two rules say the {what} of module {module!r}: {both}. Narrow one of the globs.")


class RuleGlobError(FxparError):
    """A rule of a strategy whose glob matches no module."""

    def __init__(self, glob: str, modules: Iterable[str], of: str = "the model") -> None:
        super().__init__(f"rule {glob!r} of the strategy matches no module of {of}{_near_modules(glob, modules)}")


class RuleHeadsError(FxparError):
    """A rule cuts attention in more parts than its heads divide in."""

    def __init__(self, rule: str, module: str, heads: int, kv_heads: int, axis: str, nearest_axis: str) -> None:
        super().__init__(
            f"rule {rule!r}: the attention of {module!r} has {heads} query and {kv_heads} key-value heads, which "
            f"cannot be shared evenly under {axis}. The nearest degree is {nearest_axis}; other axes of the rule take "
            "the other ranks."
        )


class BinsError(FxparError):
    """A strategy packs documents in bins, and the model cannot have them."""

    def __init__(self, strategy: str, model: str, why: str) -> None:
        ep = ", and for ep a rule, such as cp2[*.experts: ep2]" if re.search(r"\bep\d", strategy) else ""
        super().__init__(
            f"strategy {strategy!r}: {'rows and ep pack' if ep else 'rows packs'} the documents of a micro-batch in "
            f"bins, which model {model!r} cannot have: {why}. Use cp in place of rows{ep}."
        )


class RingOfBinsError(FxparError):
    """A strategy cuts documents over a ring, and packs them in bins that none crosses."""

    def __init__(self, strategy: str) -> None:
        super().__init__(
            f"strategy {strategy!r}: ring cuts documents, and no document crosses a bin of rows. Use ring in place of "
            "rows, or rows in place of ring."
        )


class ExpertsOrderError(FxparError):
    """Experts lie over `axes` (joined by '.') whose ranks are not in the order of the experts, so that tokens would
    travel to other ones. `usual` are the strategy's axes, each in one place.
    """

    def __init__(self, strategy: str, module: str, axes: str, usual: str) -> None:
        super().__init__(
            f"strategy {strategy!r}: the experts of {module!r} lie over {axes}, whose ranks are not in this order "
            f"where an axis stands in several places. Write each in one place, as in {usual}."
        )


class WorldSizeError(FxparError):
    """The degrees of a strategy do not multiply to the number of ranks. `by_block` are the ranks of each of its stages
    or teams (`blocks`), where these have a strategy of their own.
    """

    def __init__(
        self, strategy: str, needed: int, world: int, by_block: Sequence[int] = (), blocks: str = "stages"
    ) -> None:
        parts = " + ".join(map(str, by_block))
        found, result = (f"its {blocks} {parts}", "sum") if parts else ("the product of its degrees", "product")
        super().__init__(
            f"strategy {strategy!r} needs {needed} ranks ({found}), but the world has {world}. "
            f"Change a degree so that the {result} is {world}, or use {needed} ranks."
        )


class TeamsBufferError(FxparError):
    """Strategies side by side, and a step that writes buffers: teams see other sequences, and would go apart."""

    def __init__(self, strategy: str, buffers: Sequence[str]) -> None:
        super().__init__(
            f"strategy {strategy!r}: a step writes {', '.join(map(repr, buffers[:3]))}"
            f"{' and others' if len(buffers) > 3 else ''}, and teams side by side run other sequences, so their "
            "buffers would differ. Give all ranks one strategy, or freeze what writes them (BatchNorm: "
            "model.eval(), or GroupNorm in its place)."
        )


class TeamsGatherError(FxparError):
    """Teams that all have ZeRO-3 gather over the ranks of all of them, and one cannot take part: `why`, and what to
    `do`.
    """

    def __init__(
        self, strategy: str, team: str, why: str, do: str = "Give all teams the same tp, sp, remat and rules"
    ) -> None:
        super().__init__(
            f"strategy {strategy!r}: teams that all have zero3 gather parameters together, over the ranks of all, and "
            f"{team!r} {why}. {do}; or write zero2 in place of zero3 for one team, and each shards over its own ranks."
        )


class UnequalWorldsError(FxparError):
    """Strategies between which weights move do not have equally many ranks."""

    def __init__(self, ranks: Mapping[str, int]) -> None:
        sizes = ", ".join(f"{strategy!r} has {count}" for strategy, count in ranks.items())
        super().__init__(
            f"strategies that take turns run on the same ranks, but {sizes}. Change degrees so that products are equal"
        )


class RematGlobError(FxparError):
    """A glob in remat(...) that matches no module."""

    def __init__(self, glob: str, modules: Iterable[str]) -> None:
        super().__init__(f"remat({glob}): {glob!r} matches no module of the model{_near_modules(glob, modules)}")


class NothingToOffloadError(FxparError):
    """A strategy, or a rule of one, wants saved activations on the host, and there are none that can go there."""

    def __init__(self, strategy: str, rule: str, model: str) -> None:
        who = f"rule {rule!r} of strategy {strategy!r}" if rule else f"strategy {strategy!r}"
        where = "of its modules" if rule else "here"
        super().__init__(
            f"{who}: offload moves what the forward saves for the backward to the host, but {where} {model!r} saves "
            "nothing that can go: values that the forward makes itself, other than for its loss. Parameters and inputs "
            "stay, and what is recomputed is not saved. Leave the flag out, or write it for modules around these."
        )


class NothingToCompressError(FxparError):
    """A strategy, or a rule of one, compresses the rows of experts or limits them, and there are no experts."""

    def __init__(self, strategy: str, rule: str, model: str, flag: str) -> None:
        who = f"rule {rule!r} of strategy {strategy!r}" if rule else f"strategy {strategy!r}"
        where = f"the modules of {model!r} that it is about have" if rule else f"model {model!r} has"
        super().__init__(
            f"{who}: {flag}(...) says which rows experts see, but {where} none. "
            "Leave the flag out, or write it for modules around experts."
        )


class ExpertRowsError(FxparError):
    """Rows of experts cannot be replaced by means, for what is made of them."""

    def __init__(self, model: str, node: str, module: str, why: str) -> None:
        super().__init__(
            f"lsh(...): in {module!r} of model {model!r} %{node} {why}; means can stand in for rows only where each is "
            f"treated by itself. Leave these experts out with a rule, such as [{module or '*'}: +lsh(none)]."
        )


class CapacityError(FxparError):
    """Rows of experts cannot be left out, for what is made of them."""

    def __init__(self, model: str, node: str, module: str, why: str) -> None:
        super().__init__(
            f"capacity(...): in {module!r} of model {model!r} %{node} {why}; a row can be left out only where it is "
            f"nothing to its token then. Leave these experts out with a rule, such as [{module or '*'}: "
            "+capacity(none)]."
        )


class NoVocabularyLossError(FxparError):
    """A strategy wants the loss in chunks of tokens, and the graph has no loss over classes."""

    def __init__(self, strategy: str, model: str) -> None:
        super().__init__(
            f"strategy {strategy!r}: chunks(...) is about the loss over a vocabulary, but no matrix product of model "
            f"{model!r} makes logits for a loss over classes (cross entropy or a softmax). Leave the flag out."
        )


class ChunkedLossError(FxparError):
    """The loss cannot run in chunks of tokens, for one of its ops."""

    def __init__(self, what: str, node: str, why: str) -> None:
        super().__init__(
            f"{what}: {node} {why}. In chunks, all that is made of the logits must be made token by token, or be a sum "
            "over tokens that is not read again. Change the loss function, or leave the flag out."
        )


class ChunkedTokensError(FxparError):
    """A fixed number of tokens that the chunks of the loss do not divide."""

    def __init__(self, strategy: str, model: str, tokens: int, chunks: int) -> None:
        near = min((n for n in range(1, tokens + 1) if tokens % n == 0), key=lambda n: (abs(n - chunks), n))
        super().__init__(
            f"strategy {strategy!r}: the loss of {model!r} is over {tokens} tokens per rank, which do not divide by "
            f"chunks({chunks}). Write chunks({near}), or capture the model with a dynamic number of tokens."
        )


class ChunkedRuleError(FxparError):
    """Rules want the loss of modules in chunks that have none."""

    def __init__(self, rules: Iterable[str], model: str, module: str) -> None:
        which = " and ".join(map(repr, rules))
        super().__init__(
            f"rule {which} wants chunks, but the loss over the vocabulary of {model!r} begins in module {module!r}. "
            "Write chunks(...) in a rule for that module, or in front of the brackets."
        )


class NoExpertsError(FxparError):
    """A strategy cuts experts, and there are none, or none that its rules leave it."""

    def __init__(self, strategy: str, model: str, rule: str | None, taken: bool = False) -> None:
        where = f"rule {rule!r} of strategy {strategy!r}" if rule else f"strategy {strategy!r}"
        what = "its modules have" if rule else f"model {model!r} has"
        none = "none that were captured as products by expert (fxpar::expert_mm)"
        if taken:
            what, none = f"all experts of model {model!r} are in modules of rules that say", "other roles"
        super().__init__(f"{where}: ep cuts experts, and {what} {none}. Write rows in place of ep to cut tokens alone.")


def _module(fqn: str) -> str:
    return repr(fqn) if fqn else "the model itself"


class ExpertsDivideError(FxparError):
    """A strategy cuts experts over ranks that do not divide them."""

    def __init__(self, strategy: str, module: str, experts: int, degree: int) -> None:
        near = max(d for d in range(1, min(experts, degree) + 1) if experts % d == 0)
        super().__init__(
            f"strategy {strategy!r}: the {experts} experts of {_module(module)} do not divide over {degree} ranks. "
            f"Write ep{near}, or another degree that divides {experts}."
        )


class ExpertWeightsError(FxparError):
    """Weights of experts that are made of a parameter by more than a view of each expert, so that experts of one rank
    are not a run of the parameter.
    """

    def __init__(self, strategy: str, module: str, node: str, op: str) -> None:
        super().__init__(
            f"strategy {strategy!r}: the weights of the experts of {_module(module)} are made by %{node} = {op}, of "
            "which it is not known that each rank can make its own experts' weights of its part of the parameter. "
            "Under ep, give each product by expert a parameter of its own, [experts, ...], transposed or cast at most; "
            "or use tp, cp or rows for these modules."
        )


class ExpertChunksError(FxparError):
    """Tokens are to travel in chunks where none travel to experts, or where means of them do."""

    def __init__(self, strategy: str, where: str, why: str, do: str) -> None:
        super().__init__(
            f"strategy {strategy!r}: ep_chunks(...) is the number of chunks in which tokens travel to experts on other "
            f"ranks, but {where} {why}. {do}"
        )


class ExpertIdsError(FxparError):
    """Experts whose tokens cannot travel, as it is not known which dim of the ids counts them."""

    def __init__(self, strategy: str, module: str, ids: str) -> None:
        super().__init__(
            f"strategy {strategy!r}: the ids of the experts of {_module(module)} are {ids}; under ep they are [tokens, "
            "slots] of a batch whose number of tokens is dynamic. Leave capture(dynamic=...) out."
        )
