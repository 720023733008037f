"""What a graph has, in a form that does not depend on how its nodes happen to be numbered: see `Digest`.

Graphs at any stage of the lowering have one, so what a pass changes in place can be compared with what was there. The
body of a step counts as `forward` and `backward`, by the direction of each node, so that graphs with and without
pipeline stages have the same parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import sympy
from torch import fx

from fxpar.graph_diff.lines import Line, Section, packs_a_bucket, places_of, sections_of
from fxpar.graph_diff.modules import ModulePlace, part_of
from fxpar.ir import collectives
from fxpar.ir.axes import STAGES
from fxpar.ir.exec_graph import Communication, Program, Stored, collective_kind
from fxpar.ir.graph import AnnotatedGraph, Input, LogicalGraph, TensorMeta, run_dims, run_sizes
from fxpar.ir.handover import Handover
from fxpar.ir.node_meta import comm_of, dist_of, fqn_of, fused_count, local_tensor, tensor_of
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.ir.printer import AnyGraph, matches
from fxpar.ir.sent import ONCE, Sent, tokens_of, without_tokens
from fxpar.ir.strategy import Strategy

BETWEEN_STAGES = "between stages"
_SENT = {"sent": "forward", "sent_grad": "backward"}
_STEPS: dict[Any, str] = {
    collectives.all_reduce: "all_reduce",
    collectives.all_gather: "all_gather",
    collectives.reduce_scatter: "reduce_scatter",
    collectives.all_to_all: "all_to_all",
    collectives.shift: "shift",
    collectives.exchange: "all_to_all",
}
Dims = dict[sympy.Symbol, int]


Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class SentTensor:
    """One tensor that a rank sends. Several that share a collective have a part of its call each; `bytes` is 0 for a
    reshard, which is not a collective yet.
    """

    kind: str
    axis: str
    place: ModulePlace
    bytes: float
    calls: int


@dataclass(frozen=True)
class Lying:
    """How a parameter is stored: as the printer writes it, and bytes of a rank's piece."""

    text: str
    local_bytes: int


@dataclass(frozen=True)
class Digest:
    """All that a comparison needs. `ops` and `sections` by place; a pipeline's are those of all its stages, and its
    moves those of one rank of each. `stage_bytes`, `stage_fixed`, `stage_once`, `stage_weights`: what one rank of each
    stage sends per micro-batch, the part of it that does not grow with tokens, what it sends once per mini-batch, and
    the bytes of its parameters. `divisors` and `sizes` (as a run has them) of the dynamic dims by name; `tokens` of a
    replica's micro-batch, 0 without token ids.
    """

    title: str
    model: str
    strategy: Strategy | None
    divisors: dict[str, int]
    sizes: dict[str, int]
    shapes: dict[str, tuple[int, ...]]  # of all parameters, by FQN
    params: dict[str, Lying]
    ops: dict[ModulePlace, int]
    moves: tuple[SentTensor, ...]
    sections: dict[ModulePlace, Section]
    stage_bytes: tuple[float, ...]
    stage_fixed: tuple[float, ...]
    stage_once: tuple[float, ...]
    stage_weights: tuple[int, ...]
    cuts: tuple[str, ...] = ()
    tokens: int = 0

    @property
    def op_count(self) -> int:
        return sum(self.ops.values())

    @property
    def rank_bytes(self) -> int:
        """What a rank of the busiest stage sends per micro-batch, and once per mini-batch, together."""
        both = (each + once for each, once in zip(self.stage_bytes, self.stage_once, strict=True))
        return max(map(round, self._by_rank(tuple(both))))

    @property
    def sent(self) -> Sent:
        """What one rank sends, as `fxpar.ir.sent` says it."""
        each, fixed = max(zip(self._by_rank(self.stage_bytes), self._by_rank(self.stage_fixed), strict=True))
        return Sent(round(each), max(map(round, self._by_rank(self.stage_once))), self.tokens, round(fixed))

    @property
    def weight_bytes(self) -> int:
        """The parameters that the fullest rank stores."""
        return max(self._by_rank(self.stage_weights))

    def _by_rank(self, of_stages: tuple[Number, ...]) -> list[Number]:
        """Sums over the stages that the same ranks run."""
        blocks = 1 if self.strategy is None else self.strategy.pipeline_size
        return [sum(of_stages[i::blocks]) for i in range(blocks)]  # type: ignore[misc]

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values, for `from_json`."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "strategy": None if self.strategy is None else self.strategy.to_json(),
            "params": {fqn: [one.text, one.local_bytes] for fqn, one in self.params.items()},
            "ops": [[*place, count] for place, count in self.ops.items()],
            "moves": [[one.kind, one.axis, *one.place, one.bytes, one.calls] for one in self.moves],
            "sections": [[*place, lines] for place, lines in self.sections.items()],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Digest:
        """What `to_json` was taken of."""
        strategy, given = data["strategy"], data.items()
        found: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given}
        found |= {
            "strategy": None if strategy is None else Strategy.from_json(strategy),
            "shapes": {fqn: tuple(shape) for fqn, shape in data["shapes"].items()},
            "params": {fqn: Lying(*one) for fqn, one in data["params"].items()},
            "ops": {ModulePlace(block, part): count for block, part, count in data["ops"]},
            "moves": tuple(
                SentTensor(kind, axis, ModulePlace(block, part), size, calls)
                for kind, axis, block, part, size, calls in data["moves"]
            ),
            "sections": {
                ModulePlace(block, part): tuple(Line(*line) for line in lines)
                for block, part, lines in data["sections"]
            },
        }
        return cls(**found)


def digest(
    graph: AnyGraph,
    title: str = "",
    *,
    only: str | None = None,
    inputs: Sequence[Input] | None = None,
    handovers: Sequence[Handover] | None = None,
) -> Digest:
    """The digest of a graph, called `title` (by default its strategy); of the modules that the glob `only` matches.
    Of a pipeline stage `inputs` are those of the whole model, as token ids may be read by another stage, and
    `handovers` what it sends to others; by default those are taken to lie as this one.

    It keeps nothing of the graph, which a pass may change afterwards.
    """
    if isinstance(graph, PipelineGraph):
        sent_by = {s.index: [one for one in graph.handovers if one.stage == s.index] for s in graph.stages}
        stages = [
            digest(stage, only=only, inputs=graph.inputs, handovers=sent_by[stage.index]) for stage in graph.stages
        ]
        tokens = tokens_of(graph.inputs, run_dims(graph))
        return replace(
            joined(stages, graph.name, graph.strategy, title), cuts=graph.cuts, divisors=graph.divisors, tokens=tokens
        )
    strategy = None if isinstance(graph, LogicalGraph) else graph.strategy
    dims = run_dims(graph)
    places = places_of(graph)

    def moves(dims: Dims) -> list[SentTensor]:
        found = [move for node, place in places.items() for move in _moves(node, place, strategy, dims, only)]
        return found + (_messages(graph, dims, handovers) if only is None else [])

    batch = graph.inputs if inputs is None else inputs
    moved, fixed = moves(dims), moves(without_tokens(batch, dims))
    params = {fqn: lying for fqn, lying in _params(graph, dims).items() if matches(fqn, only)}
    return Digest(
        title=title or str(strategy or "logical"),
        model=graph.name,
        strategy=strategy,
        divisors=dict(graph.divisors),
        sizes=run_sizes(graph),
        shapes={info.fqn: info.meta.sizes({}) for info in graph.inputs if info.kind == "param"},
        params=params,
        ops=dict(Counter(at for n, at in places.items() if matches(fqn_of(n), only) and not packs_a_bucket(n))),
        moves=tuple(moved),
        sections=sections_of(graph, places, only),
        stage_bytes=(sum(move.bytes for move in moved if move.place.part not in ONCE),),
        stage_fixed=(sum(move.bytes for move in fixed if move.place.part not in ONCE),),
        stage_once=(sum(move.bytes for move in moved if move.place.part in ONCE),),
        tokens=tokens_of(batch, dims),
        stage_weights=(sum(lying.local_bytes for lying in params.values()),),
    )


def joined(stages: Sequence[Digest], model: str, strategy: Strategy, title: str = "") -> Digest:
    """One digest of all stages of a model under `strategy`. A parameter that several have is as in the first."""
    ops: Counter[ModulePlace] = Counter()
    sections: dict[ModulePlace, Section] = {}
    params: dict[str, Lying] = {}
    for stage in stages:
        ops.update(stage.ops)
        params = stage.params | params
        for place, lines in stage.sections.items():
            sections[place] = sections.get(place, ()) + lines
    return replace(
        stages[0],
        title=title or str(strategy),
        model=model,
        strategy=strategy,
        shapes={fqn: shape for stage in reversed(stages) for fqn, shape in stage.shapes.items()},
        params=params,
        ops=dict(ops),
        moves=tuple(move for stage in stages for move in stage.moves),
        sections=sections,
        stage_bytes=tuple(size for stage in stages for size in stage.stage_bytes),
        stage_fixed=tuple(size for stage in stages for size in stage.stage_fixed),
        stage_once=tuple(size for stage in stages for size in stage.stage_once),
        stage_weights=tuple(size for stage in stages for size in stage.stage_weights),
    )


def _moves(
    node: fx.Node, place: ModulePlace, strategy: Strategy | None, dims: Dims, only: str | None
) -> Iterator[SentTensor]:
    """What a node sends, by tensor."""
    if strategy is None:
        return
    fqn = fqn_of(node)
    if node.target is collectives.reshard:
        if matches(fqn, only):
            yield SentTensor("reshard", "", place, 0.0, 1)
        return
    found = _communication(node)
    if found is None:
        return
    kind, axis, sent = found
    nbytes = Communication(kind, axis, sent, "", "", backward=False).wire_bytes(strategy.mesh.degree(axis), dims)
    members = _members(node, dims)
    whole = sum(size for _, size in members) or 1
    shown = [(name, size) for name, size in members if matches(name, only)]
    for i, (name, size) in enumerate(shown):
        yield SentTensor(kind, axis, place._replace(block=part_of(name)), nbytes * size / whole, int(i == 0))


def _communication(node: fx.Node) -> tuple[str, str, TensorMeta] | None:
    """Kind, axes and what a rank puts in, of a collective or of the step that becomes one."""
    kind = collective_kind(node)
    if kind is not None:
        return kind, *comm_of(node)
    target: Any = node.target
    kind = _STEPS.get(target)
    if kind is None:
        return None
    value: Any = node.args[0]
    sent = value.meta.get("local")
    if sent is None:
        whole = tensor_of(value)
        sent = TensorMeta(dist_of(value).local_shape(whole.shape), whole.dtype)
    if node.args[2:3] == ("logsumexp",):
        kind = "all_gather"  # which is what it becomes: there is no such reduction
    return kind, str(node.args[1]), sent


def _members(node: fx.Node, dims: Dims) -> list[tuple[str, int]]:
    """(module, elements) of each tensor in a bucket; of a collective alone one."""
    own = fqn_of(node)
    buffer: Any = node.args[0]
    if fused_count(node) == 1:
        return [(own, 1)]
    members: list[fx.Node] = buffer.args[0]
    if collective_kind(node) == "all_reduce":  # each is lifted to a row, which stands where the bucket does
        members = [m.args[0] for m in members]  # type: ignore[misc]
    return [(m.meta.get("fqn", own), local_tensor(m).numel(dims)) for m in members]


def _messages(graph: AnyGraph, dims: Dims, handovers: Sequence[Handover] | None) -> list[SentTensor]:
    """What a pipeline stage sends to its neighbours."""
    if isinstance(graph, LogicalGraph):
        return []
    sizes = [(one.kind, one.bytes_of_busiest(dims)) for one in handovers or ()]
    if handovers is None:
        sizes = [
            (out.kind, stored.local.numel(dims) * stored.local.dtype.itemsize)
            for out, stored in zip(graph.outputs, _stored_outputs(graph), strict=True)
            if out.kind in _SENT
        ]
    return [
        SentTensor("send", STAGES, ModulePlace(BETWEEN_STAGES, _SENT[kind]), float(size), 1) for kind, size in sizes
    ]


def _stored_outputs(graph: AnnotatedGraph | Program) -> Sequence[Stored]:
    return graph.stored_outputs if isinstance(graph, Program) else [_placed(node) for node in graph.results]


def _params(graph: AnyGraph, dims: Dims) -> dict[str, Lying]:
    found = {}
    for i, info in enumerate(graph.inputs):
        if info.kind != "param":
            continue
        if isinstance(graph, LogicalGraph):
            found[info.fqn] = Lying(str(info.meta), info.meta.numel(dims) * info.meta.dtype.itemsize)
            continue
        stored = graph.stored_inputs[i] if isinstance(graph, Program) else _placed(graph.placeholders[i])
        text = stored.dist.describe(stored.meta.shape)
        text += f"   local {stored.local}" if stored.local != stored.meta else ""
        found[info.fqn] = Lying(text, stored.local.numel(dims) * stored.local.dtype.itemsize)
    return found


def _placed(node: fx.Node) -> Stored:
    return Stored(tensor_of(node), dist_of(node))
