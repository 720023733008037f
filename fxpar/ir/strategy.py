"""`Strategy`: one way to train on all ranks, as a value.

Grammar: `axes ('+' flag)*` with axes `name degree ('.' name degree)*`, outermost mesh axis first:

    dp2.tp4+sp+zero1     2 replicas of a 4-way tensor-parallel model, sequence parallel, ZeRO-1
    dp4.tp4.dp2          dp8.tp4 with its ranks in this order: 8 neighbours have the 4 parts of 2 replicas

Axes: dp (data), pp (pipeline), cp (context: tokens, heads in attention), ring (tokens, in attention too), rows (tokens,
packed so that no document is cut), tp (tensor), ep (as rows, with experts cut: tokens travel to them). Flags: sp
(Megatron sequence parallel on the tp axis), zero1 | zero2 | zero3 (optimizer state | + gradients | + parameters sharded
over dp, cp, ring, rows and ep), remat or remat(...) (recomputation, see `Remat`), offload or offload(0.5) (all, or that
share, of what the forward saves for the backward goes to the host), chunks(16) (the loss over the vocabulary, in as
many chunks of tokens), ep_chunks(2) (tokens travel to experts of other ranks in 2 chunks, one while experts compute
with another), tokens(4096) (of a micro-batch at most), lsh(0.2) (experts see means of similar rows, that share of as
many: the result is another), capacity(1.25) (an expert gets that many times the mean of rows at most, without the
others: another result too). With pp: gpipe | 1f1b | zb_h1 | interleaved_1f1b(2) (the schedule, see `Pipeline`),
cut(layers.3|layers.6) (where stages begin). role(tp=name) (what an axis is used for, where another package says so, see
`fxpar.annotate.roles`). Rules in brackets at the end say what some modules do otherwise (see `fxpar.ir.module_rules`):

    dp2.tp4+sp[*.self_attn: cp4; lm_head: tp4]

Pipeline stages that differ are written one by one, with '>' between them; they need not have as many ranks each. What
is said of the whole pipeline, the schedule and where stages begin, stands with the first of them:

    tp4+zb_h1+cut(layers.10) > tp2.rows2 > tp2+chunks(8)

One with '@' begins at that rank (see `fxpar.ir.stage_ranks`): the last stage of cp2 > cp2 > cp4@0 has all ranks.

Strategies side by side, with '|' between them, are teams: each has its sequences, and ranks behind the one before:

    cp4 | cp2 | dp2        tp4 > tp4 | tp2 > tp2 > tp2
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fxpar.errors import StrategySyntaxError, WorldSizeError
from fxpar.ir.axes import BINS, EXPERTS, RANKS, REPLICAS, RING, ROLE_AXES, STAGES, USES, data_axes
from fxpar.ir.mesh import Axes, Mesh, strides_of
from fxpar.ir.module_rules import NOTHING, ModuleRule, atoms, governing, joined
from fxpar.ir.remat import Remat
from fxpar.ir.stage_ranks import check_stages, parse_first, places_of, spans_of
from fxpar.ir.strategy_text import (
    MOST_RANKS,
    Pipeline,
    check_pipeline,
    check_roles,
    digits_of,
    flags_of,
    joined_digits,
    parse_axes,
    parse_flags,
    parse_override,
    parse_rules,
    sides_of,
    split_rules,
)

_UNSTAGED = Pipeline()


@dataclass(frozen=True)
class Strategy:
    """Mesh axes with degrees (outermost first), flags, and placement overrides by FQN glob.

    Its ranks begin at `offset`, which is not part of the text: a pipeline stage's strategy is written like any other.
    `overrides` maps a glob over parameter FQNs to `S(dim)@tp` or `R@tp`; the first glob that matches wins over what the
    search would choose. `roles` are axes with the names of their roles, where another package says what an axis is used
    for. `rules` are what some modules do otherwise. The loss over the vocabulary runs in `chunks` of tokens, and tokens
    travel to experts of other ranks in `ep_chunks`. Of the bytes that the forward saves for the backward the share
    `offload` is moved to the host. Experts see the share `lsh` of as many rows, 0: the rows themselves; each sees
    `capacity` times the mean of rows at most, 0: any number. A micro-batch of a replica has `tokens` at most, 0: as
    many as whoever plans says. `by_stage` are the strategies of pipeline stages that are written one by one, each on
    the ranks behind those of the one before: they then say all of this but `pipeline` and `overrides`, and `axes` is no
    more than their number. `teams` are strategies side by side, which say all but `overrides`. `digits` are the axes
    as they are written where one stands in several places, see `Mesh`; of other axes none are left.
    """

    axes: Axes
    sp: bool = False
    zero: int = 0
    overrides: tuple[tuple[str, str], ...] = ()
    remat: Remat | None = None
    pipeline: Pipeline = _UNSTAGED
    roles: tuple[tuple[str, str], ...] = ()
    offset: int = 0
    rules: tuple[ModuleRule, ...] = ()
    chunks: int = 1
    by_stage: tuple[Strategy, ...] = ()
    teams: tuple[Strategy, ...] = ()
    offload: float = 0.0
    lsh: float = 0.0
    capacity: float = 0.0
    tokens: int = 0
    ep_chunks: int = 1
    at: int | None = None
    digits: Axes = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "digits", self.digits and digits_of(self.axes, self.digits))

    @classmethod
    def parse(cls, text: str, *, world: int | None = None, overrides: Mapping[str, str] | None = None) -> Strategy:
        """Parse `text`; with `world`, check that the degrees multiply to it.

        Raises StrategySyntaxError, WorldSizeError, OverrideError.
        """
        if not isinstance(text, str):
            raise StrategySyntaxError(repr(text), repr(text), "it is not text")
        sides = sides_of(text, text, "|", "a strategy", "cp4|cp2|dp2")
        teams = tuple(_parse_team(text, side) for side in sides)
        strategy = teams[0] if len(teams) == 1 else Strategy((), teams=teams)
        strategy = replace(strategy, overrides=tuple((overrides or {}).items()))
        if strategy.world > MOST_RANKS:
            raise StrategySyntaxError(text, text, f"{strategy.world:,} ranks are more than {MOST_RANKS:,}")
        for pattern, placement in strategy.overrides:
            parse_override(pattern, placement)
        if world is not None:
            strategy.check_world(world)
        return strategy

    def check_world(self, world: int) -> None:
        """Raise WorldSizeError unless the degrees multiply to `world`."""
        if self.world != world:
            of = "teams" if self.teams else "stages"
            raise WorldSizeError(str(self), self.world, world, [block.world for block in self.blocks], of)

    @property
    def blocks(self) -> tuple[Strategy, ...]:
        """What is written one by one, each on the ranks behind those of the one before: stages, or teams."""
        return self.by_stage or self.teams

    @cached_property
    def mesh(self) -> Mesh:
        """The ranks. Pipeline stages are blocks of consecutive ranks wherever pp stands, as in Megatron; inside of each
        the last axis is the fastest. Blocks that are written one by one are no grid.
        """
        if self.blocks:
            return Mesh(((RANKS, self.world),), self.offset)
        return Mesh(self.axes, self.offset, strides_of(self.all_digits, STAGES), self.digits)

    @property
    def all_digits(self) -> Axes:
        """The axes as they are written: one that stands in several places with each of its digits."""
        return self.digits or self.axes

    @property
    def world(self) -> int:
        """Number of ranks the strategy needs."""
        if self.by_stage:
            return max(span.stop for span in spans_of(self.by_stage))
        if self.teams:
            return sum(team.world for team in self.teams)
        return math.prod(degree for _, degree in self.axes)

    def degree(self, axis: str) -> int:
        """Degree of `axis` or of a sub-axis; 1 if the strategy does not name it. Of several blocks the highest."""
        if self.by_stage and axis == STAGES:
            return len(self.by_stage)
        if self.blocks:
            return max(block.degree(axis) for block in self.blocks)
        return self.mesh.degree(axis)

    @property
    def replicas(self) -> int:
        """Data-parallel replicas, each with micro-batches of its own: those of all teams."""
        return sum(team.replicas for team in self.teams) if self.teams else self.degree(REPLICAS)

    @property
    def pipeline_size(self) -> int:
        """Ranks that a micro-batch passes on its way through the stages; 1 without a pipeline."""
        return self.degree(STAGES)

    @property
    def stages(self) -> int:
        """Pipeline stages of the model: those of a rank, times `pipeline_size`. Of teams the most."""
        return max(team.stages for team in self.teams) if self.teams else self.pipeline_size * self.pipeline.virtual

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """Where stages share ranks, the places that run each, see `places_of`; () for any other strategy."""
        return places_of(self.by_stage)

    def of_team(self, number: int) -> Strategy:
        """What a team runs under, on its own ranks."""
        before = sum(team.world for team in self.teams[:number])
        return replace(self.teams[number], offset=self.offset + before, overrides=self.overrides)

    def of_stage(self, stage: int) -> Strategy:
        """What a pipeline stage runs under. With several stages per rank, s, s + pp ... have the same ranks."""
        if self.by_stage:
            first = self.offset + spans_of(self.by_stage)[stage].start
            return replace(self.by_stage[stage], at=None, offset=first, overrides=self.overrides)
        axes = tuple(axis for axis in self.axes if axis[0] != STAGES) or SINGLE.axes
        ranks = self.mesh.at(STAGES, stage % self.pipeline_size)
        return replace(self, axes=axes, pipeline=Pipeline(), offset=ranks.offset)

    @cached_property
    def atoms(self) -> Mapping[str, tuple[str, ...]]:
        """The axes inside of a replica, degree > 1 only, in parts where rules split them, outermost first. To each the
        axis that it is for in the strategy itself, then in each rule.
        """
        return atoms(str(self), tuple(a for a in self.axes if a[0] in ROLE_AXES and a[1] > 1), self.rules)

    def axis_in(self, atom: str, rule: int | None) -> str:
        """The axis that `atom` is for in the modules of a rule, or (None) where no rule says something of it."""
        return self.atoms[atom][0 if rule is None else rule + 1]

    def cuts_tokens_in(self, atom: str, rule: int | None) -> bool:
        """Whether `atom` cuts tokens where no weight is involved, in the modules of a rule: cp, and tp under sp."""
        sp = self.sp if rule is None else self.rules[rule].sp
        return sp or USES[self.axis_in(atom, rule)] == "tokens"

    def rule_of(self, fqn: str, what: str = "roles") -> int | None:
        """The rule for a module, see `fxpar.ir.module_rules.governing`. Raises RuleConflictError."""
        if not self.rules:
            return None
        if (fqn, what) not in self._found_rules:
            self._found_rules[fqn, what] = governing(self.rules, fqn, what)
        return self._found_rules[fqn, what]

    @cached_property
    def _found_rules(self) -> dict[tuple[str, str], int | None]:
        """What `rule_of` has looked up: thousands of nodes are in few modules."""
        return {}

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes over which parameters of no rule are replicated, gradients summed (dp and cp), degree > 1 only."""
        return data_axes(self.axes)

    def data_axes_of(self, fqn: str) -> str:
        """The axes over which a parameter is replicated and its gradient is summed (dp, and what cuts tokens but no
        weights where the parameter is), of degree > 1, joined by '.'; "" for none.
        """
        if not self.rules:
            return ".".join(self.mesh.in_order(self.data_axes))
        rule = self.rule_of(fqn.rpartition(".")[0])
        inside = [atom for atom in self.atoms if USES[self.axis_in(atom, rule)] == "tokens"]
        whole = joined([REPLICAS] * (self.replicas > 1) + inside, self.atoms)
        return ".".join(self.mesh.in_order(whole.split(".")))

    def zero_of(self, fqn: str) -> int:
        """The ZeRO level of a parameter."""
        level = None if (rule := self.rule_of(fqn.rpartition(".")[0], "zero")) is None else self.rules[rule].zero
        return self.zero if level is None else level

    def remat_of(self, fqn: str) -> Remat | None:
        """What is recomputed of a module."""
        found = self.remat if (rule := self.rule_of(fqn, "remat")) is None else self.rules[rule].remat
        return None if found is None or found.mode == "none" else found

    def share_of(self, flag: str, rule: int | None) -> float:
        """What this rule (None: the strategy) says of `offload`, `lsh` or `capacity`; 0 for nothing."""
        return getattr(self if rule is None else self.rules[rule], flag) or 0.0

    def chunks_of(self, fqn: str, flag: str = "chunks") -> int:
        """In how many chunks of tokens the loss runs that begins with a product of this module; or its `ep_chunks`."""
        found = None if (rule := self.rule_of(fqn, flag)) is None else getattr(self.rules[rule], flag)
        return getattr(self, flag) if found is None else found

    @property
    def most_zero(self) -> int:
        """The highest ZeRO level of any parameter."""
        return self.most("zero")

    def most(self, flag: str) -> Any:
        """The highest value of a flag in any block or rule."""
        if self.blocks:
            return max(block.most(flag) for block in self.blocks)
        return max(getattr(self, flag), *(getattr(rule, flag) or 0 for rule in self.rules), 0)

    @property
    def model_axes(self) -> tuple[str, ...]:
        """Axes on which the values of a replica are placed, in the order in which they are searched: tp, then cp, of
        degree > 1 only. Of parts of an axis those first that rules use least for tokens, then the outermost.
        """

        def for_tokens(atom: str) -> int:
            return sum(USES[axis] == "tokens" for axis in self.atoms[atom])

        return tuple(sorted(self.atoms, key=lambda atom: (ROLE_AXES.index(self.atoms[atom][0]), for_tokens(atom))))

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Those that cut the tokens of a micro-batch between modules: cp, and tp under sequence parallelism."""
        return tuple(axis for axis in self.model_axes if self.cuts_tokens_in(axis, None))

    @property
    def token_parts(self) -> int:
        """In how many parts tokens are cut, where they are cut most; of several blocks what is all of theirs."""
        if self.blocks:
            return math.lcm(*(block.token_parts for block in self.blocks))
        layouts = [None, *(i for i, rule in enumerate(self.rules) if rule.axes)]
        cut = [a for a in self.atoms if any(self.cuts_tokens_in(a, layout) for layout in layouts)]
        return math.prod(map(self.degree, cut))

    @property
    def bins(self) -> int:
        """In how many bins of equal length the documents of a micro-batch are packed; none crosses two. The bins of
        every block are whole bins.
        """
        if self.blocks:
            return math.lcm(*(block.bins for block in self.blocks))
        return math.prod(map(self.degree, self.bin_axes))

    @property
    def bin_axes(self) -> tuple[str, ...]:
        """Axes and sub-axes over which bins are cut: those that are rows in any module, or ep where no rule says it."""
        layouts = [None, *(i for i, rule in enumerate(self.rules) if rule.axes)]
        rows = {atom for atom in self.atoms if any(self.axis_in(atom, layout) == BINS for layout in layouts)}
        return tuple(atom for atom in self.atoms if atom in rows or self.axis_in(atom, None) == EXPERTS)

    @property
    def ring(self) -> int:
        """Over how many ranks keys and values travel, where they do over most; 1 where they stay."""
        if self.blocks:
            return max(block.ring for block in self.blocks)
        layouts = [None, *(i for i, rule in enumerate(self.rules) if rule.axes)]
        rings = ([a for a in self.atoms if self.axis_in(a, layout) == RING] for layout in layouts)
        return max(math.prod(map(self.degree, ring)) for ring in rings)

    def placing(self) -> Strategy:
        """The same without what saves memory alone: two strategies that are equal so place every value alike."""
        placing = (rule for rule in self.rules if rule.axes)
        rules = tuple(ModuleRule(rule.glob, rule.axes, rule.sp) for rule in placing)
        by_stage, teams = (tuple(block.placing() for block in blocks) for blocks in (self.by_stage, self.teams))
        without = replace(self, zero=0, remat=None, tokens=0, **NOTHING)
        return replace(without, rules=rules, by_stage=by_stage, teams=teams)

    def __str__(self) -> str:
        if self.teams:
            return " | ".join(map(str, self.teams))
        if self.by_stage:
            first, *others = self.by_stage
            return " > ".join(map(str, [replace(first, pipeline=self.pipeline, tokens=self.tokens), *others]))
        rules = f"[{'; '.join(map(str, self.rules))}]" if self.rules else ""
        axes = ".".join(f"{name}{size}" for name, size in self.all_digits) + ("" if self.at is None else f"@{self.at}")
        return "+".join([axes, *flags_of(self)]) + rules

    def to_json(self) -> dict:
        """{"strategy": "dp2.tp4"}, with "overrides" where there are some."""
        return {"strategy": str(self)} | ({"overrides": dict(self.overrides)} if self.overrides else {})

    @classmethod
    def from_json(cls, data: dict | str) -> Strategy:
        data = json.loads(data) if isinstance(data, str) else data
        return cls.parse(data["strategy"], overrides=data.get("overrides"))


SINGLE = Strategy(((REPLICAS, 1),))  # one rank


def of_degrees(
    replicas: int = 1, stages: int = 1, tokens: int = 1, weights: int = 1, zero: int = 0, experts: int = 1
) -> Strategy:
    """With the axes of these uses that have a degree above 1; sp wherever weights are cut."""
    weight_axis, token_axis, *_ = ROLE_AXES
    degrees = (REPLICAS, replicas), (STAGES, stages), (EXPERTS, experts), (token_axis, tokens), (weight_axis, weights)
    axes = tuple((name, degree) for name, degree in degrees if degree > 1)
    return Strategy(axes or SINGLE.axes, sp=weights > 1, zero=zero)


def _parse_team(text: str, side: str) -> Strategy:
    """The strategy of all ranks, or one of several between '|'."""
    written = sides_of(text, side, ">", "a pipeline stage", "tp4 > tp2.rows2")
    parts = [_parse_part(text, part) for part in written]
    if len(parts) == 1 and parts[0].at is not None:
        raise StrategySyntaxError(text, side, "'@' says where one of several stages begins, such as cp2 > cp2 > cp4@0")
    strategy = parts[0] if len(parts) == 1 else _of_stages(text, written, parts)
    check_pipeline(text, strategy.pipeline, strategy.pipeline_size)
    return strategy


def _parse_part(text: str, part: str) -> Strategy:
    """The strategy of all ranks, or one of several between '>'."""
    outside, inside = split_rules(part)
    axis_text, *flags = outside.split("+")
    axis_text, at = parse_first(text, part, axis_text, flags)
    digits, found = parse_axes(text, axis_text, True), parse_flags(text, flags)
    found |= {flag: found[flag] or value for flag, value in (NOTHING | {"tokens": 0}).items()}
    rules = () if inside is None else parse_rules(text, inside)
    strategy = Strategy(joined_digits(digits), **found, at=at, digits=digits, rules=rules)
    if strategy.rules:
        strategy.atoms  # noqa: B018  raises where degrees do not fit
    check_roles(text, found["roles"], digits)
    return strategy


def _of_stages(text: str, written: Sequence[str], parts: Sequence[Strategy]) -> Strategy:
    """The strategy whose stages are `parts`, `written` so."""
    check_stages(text, written, parts)
    stages = (replace(parts[0], pipeline=_UNSTAGED, tokens=0), *parts[1:])
    return Strategy(((STAGES, len(parts)),), pipeline=parts[0].pipeline, tokens=parts[0].tokens, by_stage=stages)
