"""Check a graph between passes: well-formed, placements type-check, every collective is waited for.

A failure is a bug of the pass that ran last, never of the user's model; the error names pass, node and user's line.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar.annotate.bins import reads_bins
from fxpar.annotate.driver import degrees_product
from fxpar.annotate.nesting import together, without_experts
from fxpar.errors import VerifyError
from fxpar.ir.axes import BINS, EXPERTS, RING
from fxpar.ir.collectives import is_collective, reshard
from fxpar.ir.dist_config import DistConfig, OuterShard, R, Shard
from fxpar.ir.exec_graph import collective_kind
from fxpar.ir.graph import AnnotatedGraph, TensorMeta
from fxpar.ir.node_meta import dists_of, fqn_of, is_size, source_of, tensor_metas, tensor_of, wanted_dists, whole_meta
from fxpar.ir.pass_base import tensor_operands
from fxpar.ir.serialize import OpOverload
from fxpar.ir.strategy import Strategy
from fxpar.ops.traits import ATTENTION, BY_EXPERT, is_view
from fxpar.rules.option import Cut, Option, OpView, Seed, replicated
from fxpar.rules.own_ops import (
    attention_by_tokens,
    attention_in_ring,
    attention_options,
    experts_apart,
    narrow_attention,
)
from fxpar.rules.table import options, passing
from fxpar.rules.view import Sizes, call_key, is_op, make_view
from fxpar.torch_api.schemas import schema_of, writes

_COPIES = {torch.ops.aten.clone.default, torch.ops.aten.alias.default}


@dataclass
class Looked:
    """What was looked at behind the passes of a climb so far: a pass leaves most nodes as they were."""

    nodes: list[fx.Node] = field(default_factory=list)
    """All of the graph."""
    names: set[str] = field(default_factory=set)
    """Those of the nodes."""
    fresh: list[fx.Node] = field(default_factory=list)
    """Those that are not as they were behind the pass before, and what is checked with them: their users, through calls
    that only show another value (`_shows`)."""
    is_same: bool = False
    """Whether none is fresh, none is gone, and none was moved."""
    collectives: dict[fx.Node, str] = field(default_factory=dict)
    """Calls of process groups, and their kinds."""
    legal: set[Any] = field(default_factory=set)
    """What `verify_placements` has found legal."""
    _as_seen: dict[fx.Node, tuple[Any, ...]] = field(default_factory=dict)

    def look(self, graph: fx.Graph) -> None:
        """Look at the graph again."""
        nodes, seen = list(graph.nodes), self._as_seen
        found: dict[fx.Node, None] = {}
        due: set[fx.Node] = set()
        for node in nodes:
            meta = node.meta
            now = (node.target, node.args, node.kwargs, meta.get("dist_in"), meta.get("dist"), meta.get("tensor"))
            if seen.get(node) != now:  # mostly the same objects, which are equal at a glance
                seen[node] = now
                found[node] = None
                due.update(node.users)
            elif node in due:
                found[node] = None
                if _shows(node):
                    due.update(node.users)
        self.is_same = not found and nodes == self.nodes
        self.nodes, self.fresh, self.names = nodes, list(found), {node.name for node in nodes}
        if self.is_same:
            return
        known, self.collectives = self.collectives, {}
        for node in nodes:
            kind = collective_kind(node) if node in found else known.get(node)
            if kind is not None:
                self.collectives[node] = kind


def verify(graph: AnnotatedGraph, after: str, looked: Looked | None = None) -> None:
    """Structure: operands before their users, inputs and results, no collective without a wait, nothing in place on
    global shapes. `after` names the pass that just ran. Of a graph that was `looked` at, only what is fresh is looked
    at one by one; of any other all, by fx's own lint too.
    """
    if looked is None:
        looked, ordered = Looked(), False
        looked.look(graph.graph)
    else:
        ordered = (looked.is_same or _is_ordered(graph.graph)) and len(looked.names) == len(looked.nodes)
    if not ordered:
        try:
            graph.graph.lint()
        except RuntimeError as error:
            raise VerifyError(f"after pass {after!r}: the graph is malformed: {error}") from error
    if len(graph.placeholders) != len(graph.inputs):
        raise VerifyError(
            f"after pass {after!r}: {len(graph.placeholders)} placeholders for {len(graph.inputs)} inputs"
        )
    if len(graph.results) != len(graph.outputs):
        raise VerifyError(f"after pass {after!r}: {len(graph.results)} results for {len(graph.outputs)} outputs")
    for node in graph.placeholders:
        if "dist" not in node.meta:
            why = f"{where(node)} has no placement. The first pass of a ladder attaches them, as `annotate` does"
            raise VerifyError(f"after pass {after!r}: {why}")
    wait = torch.ops._c10d_functional.wait_tensor.default
    functional = not graph.is_local
    for node in looked.collectives:
        if [user.target for user in node.users] != [wait]:
            raise VerifyError(f"after pass {after!r}: {where(node)} is not waited for exactly once")
    for node in looked.fresh:
        if node.op not in ("placeholder", "call_function", "output"):
            raise VerifyError(
                f"after pass {after!r}: {where(node)} is a {node.op}; a program has calls of functions only"
            )
        if node.op == "call_function" and not is_size(node) and not _has_shape(node):
            raise VerifyError(f"after pass {after!r}: {where(node)} has no shape")
        if functional and writes(node):
            why = "writes in place, which no pass before global_to_local sees. Use the op that returns its result"
            raise VerifyError(f"after pass {after!r}: {where(node)} {why}")


def _shows(node: fx.Node) -> bool:
    """Whether a check of its users looks through it, at its operand."""
    if node.op != "call_function":
        return False
    target = node.target
    return target in (operator.getitem, reshard) or is_size(node) or is_view(target) or is_collective(node)


def _is_ordered(graph: fx.Graph) -> bool:
    """What fx's lint asks of the order of nodes, in a fifth of its time; it finds the words where this is False."""
    before: set[fx.Node] = set()
    for node in graph.nodes:
        if node.graph is not graph or not before.issuperset(node.all_input_nodes):
            return False
        before.add(node)
    return True


def _has_shape(node: fx.Node) -> bool:
    metas = whole_meta(node)
    if metas is None and isinstance(node.target, OpOverload) and not schema_of(node.target).results:
        return True  # an assertion
    several = metas if isinstance(metas, tuple) else ()
    return isinstance(metas, TensorMeta) or (bool(several) and all(isinstance(m, TensorMeta | None) for m in several))


def misfit(graph: AnnotatedGraph, nodes: Iterable[fx.Node] | None = None) -> str:
    """The first operand of these nodes (by default of all) that does not lie as its user wants it, in words; "" if all
    do. Among local tensors stand buffers of collectives, and calls of others, that have no placement.
    """
    local = graph.is_local
    for node in graph.graph.nodes if nodes is None else nodes:
        wanted = node.meta.get("dist_in")
        for operand, config in zip(tensor_operands(node), wanted, strict=False) if wanted else ():
            lies = operand.meta.get("dist")
            if lies is not config and lies != config and (lies is not None or not local):
                return f"{where(node)} needs {operand.name} as {config}, but it is {lies}"
    return ""


def verify_placements(
    graph: AnnotatedGraph,
    after: str,
    *,
    resharded: bool,
    nodes: Iterable[fx.Node] | None = None,
    known: set[Any] | None = None,
) -> None:
    """Type-check: each op's placements are an option of its rule on every axis; with `resharded`, operands already
    fit. Of `nodes`, by default of all; `known` keeps what was found legal for the next time.
    """
    strategy = graph.strategy
    sizes = Sizes([d.symbol for d in graph.dims], degrees_product(strategy))
    known = set() if known is None else known
    if resharded and (found := misfit(graph)):
        raise VerifyError(f"after pass {after!r}: {found}")
    for node in graph.graph.nodes if nodes is None else nodes:
        if "dist_in" not in node.meta:
            continue
        operands = tensor_operands(node)
        _check_form(node, operands, after)
        wanted = wanted_dists(node)
        if is_op(node) and node.target is not reshard:
            _check_op(node, wanted, sizes, strategy, known, after)


def _check_form(node: fx.Node, operands: list[fx.Node], after: str) -> None:
    """A placement for each operand and result, with as many dims; inputs are no terms of a sum."""
    wanted, made = node.meta["dist_in"], node.meta.get("dist")
    if not isinstance(wanted, tuple) or len(wanted) != len(operands):
        raise VerifyError(
            f"after pass {after!r}: {where(node)} needs a tuple of {len(operands)} placements in `dist_in`"
        )
    found = list(zip([tensor_of(operand) for operand in operands], wanted, strict=True))
    if node.op != "output":
        found += list(zip(tensor_metas(node), dists_of(node), strict=True))
    for meta, config in found:
        if meta is not None and not (isinstance(config, DistConfig) and config.ndim == len(meta.shape)):
            raise VerifyError(f"after pass {after!r}: {where(node)}: {config} is not a placement of {meta}")
    if node.op == "placeholder" and isinstance(made, DistConfig) and made.partial:
        raise VerifyError(f"after pass {after!r}: {where(node)} comes in whole or cut, not as terms of a sum: {made}")


def _check_op(
    node: fx.Node,
    wanted: tuple[DistConfig, ...],
    sizes: Sizes,
    strategy: Strategy,
    known: set[Any],
    after: str,
) -> None:
    made = dists_of(node)
    special = node.target in ATTENTION or node.target in BY_EXPERT
    rule = node.meta.get("rule") if special else None
    bins = node.target in ATTENTION and reads_bins(node)
    key = (node.target, tensor_metas(node), wanted, made, rule, bins, *call_key(node))
    if key in known:
        return
    others: list[tuple[dict[fx.Node, Option], int]] = []
    chosen: dict[str, Option] = {}
    for axis in strategy.model_axes:
        option = Option(
            tuple(c.placement(axis) for c in wanted),
            tuple(c.placement(axis) if c is not None else R for c in made),
        )
        view, _ = make_view(node, sizes, others)
        tokens = _by_tokens(strategy.axis_in(axis, rule), view, bins) if special else None
        if not (option == tokens or legal(view, option, strategy.degree(axis))):
            raise VerifyError(f"after pass {after!r}: {where(node)} cannot run on axis {axis} as {option}")
        others.append(({node: option}, strategy.degree(axis)))
        chosen[axis] = option
    _check_nesting(node, [*wanted, *filter(None, made)], chosen, strategy, after)
    known.add(key)


def _by_tokens(role: str, view: OpView, bins: bool) -> Option | None:
    """The option with tokens cut that attention, or a product by expert, has on an axis of this role."""
    if view.target in BY_EXPERT:
        return experts_apart(view) if role == EXPERTS else None
    if role == RING:
        return attention_in_ring(view)
    return attention_by_tokens(view) if bins and role in (BINS, EXPERTS) else None


def _check_nesting(
    node: fx.Node, configs: Iterable[DistConfig], options: Mapping[str, Option], strategy: Strategy, after: str
) -> None:
    """Axes cut in the order in which their options are legal, each on sizes local to those before, or in another that
    is as good.
    """
    options = without_experts(node.target, options)
    order = {axis: turn for turn, axis in enumerate(strategy.model_axes)}
    for config in dict.fromkeys(configs):
        for entries in config.in_parts(strategy.atoms).dims:
            names = [name for entry in entries for name in entry.axis.split(".") if name in order]
            for outer, inner in itertools.combinations(names, 2):
                if order[outer] > order[inner] and not together(options, inner, outer):
                    why = f"is cut by {outer} before {inner}, which is another piece for each of its tensors: {config}"
                    raise VerifyError(f"after pass {after!r}: {where(node)} {why}")


def legal(view: Any, option: Option, degree: int) -> bool:
    """Whether the op's rule has this option."""
    if option == replicated(view):
        return True
    if view.target in _COPIES and option.inputs == option.outputs:
        return True  # terms of whatever reduction
    seeds: list[tuple[Seed, Cut]] = []
    for is_result, placements in ((False, option.inputs), (True, option.outputs)):
        seeds += [((is_result, i), p) for i, p in enumerate(placements) if isinstance(p, Shard | OuterShard)]
    found = [*options(view, degree, seeds), *passing(view)]
    if view.target in ATTENTION:
        narrow = narrow_attention(view, degree)
        found += [*attention_options(view, degree), *([narrow] if narrow else [])]
    return option in found


def where(node: fx.Node) -> str:
    """`%mm_3 (aten.mm.default, in model.layers.0.mlp, model.py:41)`."""
    parts = [str(node.target)]
    if fqn_of(node):
        parts.append(f"in {node.meta['fqn']}")
    if source_of(node):
        parts.append(str(node.meta["source"]))
    return f"%{node.name} ({', '.join(parts)})"
