"""What a user is told of placements: attention that is not cut, an axis that cuts nothing, flags without effect, ops
without a rule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import fx

from fxpar.annotate.module_rules import check_heads
from fxpar.errors import warn
from fxpar.ir.axes import USES
from fxpar.ir.dist_config import R, Shard
from fxpar.ir.fqn import starred
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.node_meta import fqn_of, is_backward, source_of, tensor_of
from fxpar.ops.traits import BATCHED_PRODUCTS
from fxpar.rules.option import Option
from fxpar.rules.table import REPLICATED_ON_PURPOSE, own, rule_of
from fxpar.rules.view import Sizes, is_op

Choice = Mapping[fx.Node, Option]  # on one axis


def note_attention(graph: AnnotatedGraph, choices: Mapping[str, Choice], sizes: Sizes) -> None:
    """Say where heads did not divide and what was done instead; once for all layers, and alike on all stages. Heads may
    be an expression of the tokens whose value does not depend on them, as a reshape with -1 gives it.
    """
    uncut: dict[fx.Node, tuple[int, int]] = {}
    for axis, choice in choices.items():
        degree = graph.strategy.degree(axis)
        places: set[tuple[str, str]] = set()
        for node, option in choice.items():
            if any(isinstance(p, Shard) for p in option.inputs):
                continue
            if node.target is own.attention.default:
                heads, kv_heads = (sizes.probe(tensor_of(node.args[i]).shape[1]) for i in (0, 1))  # type: ignore[arg-type]
                uncut[node] = heads, kv_heads
                places.add((starred(fqn_of(node)), f"{heads} query and {kv_heads} key-value heads are"))
            elif (count := _heads_of_scores(node)) % degree:
                places.add((starred(fqn_of(node)), f"{count} head{'s are' if count != 1 else ' is'}"))
        for fqn, heads in sorted(places):
            graph.notes.append(
                f"{axis} does not shard the attention of {fqn or 'the root module'}: {heads} not divisible by "
                f"{axis}={degree}, so every {axis} rank runs all of them"
            )
    check_heads(graph, uncut)


def _heads_of_scores(node: fx.Node) -> int:
    """Heads of `q @ k.T` in attention that is written out, a forward product of [heads, T, T]; 0 of any other op."""
    if node.target not in BATCHED_PRODUCTS or is_backward(node):
        return 0
    heads, *rows = tensor_of(node).shape
    return heads if isinstance(heads, int) and not any(isinstance(size, int) for size in rows) else 0


def note_uncut(graph: AnnotatedGraph, choices: Mapping[str, Choice]) -> None:
    """Say where an axis that cuts weights cuts none."""
    params = [n for n, i in zip(graph.placeholders, graph.inputs, strict=True) if i.kind == "param"]
    for axis, choice in choices.items():
        for_weights = all(USES[name] == "weights" for name in graph.strategy.atoms[axis])
        if for_weights and params and all(choice[node].outputs[0] == R for node in params):
            none = f": no parameter has a dim that {graph.strategy.degree(axis)} ranks can share"
            graph.notes.append(
                f"{axis} shards no parameter{'' if graph.strategy.overrides else none}, so every {axis} rank holds "
                "all of them and does all the work"
            )


def note_idle_flags(graph: AnnotatedGraph) -> None:
    """Say which flags of the strategy find nothing to work on."""
    strategy = graph.strategy
    uses = {USES[axis] for atom in strategy.model_axes for axis in strategy.atoms[atom]}
    if strategy.sp and "weights" not in uses:
        graph.notes.append("sp has no effect: it shards tokens over the ranks of tp, and there is no tp")
    params = [info.fqn for info in graph.inputs if info.kind == "param"]
    if strategy.zero and not any(map(strategy.data_axes_of, params)):
        graph.notes.append(
            f"zero{strategy.zero} has no effect: it shards what several replicas hold, and there is one (no dp, no cp)"
        )


def note_missing_rules(graph: AnnotatedGraph) -> None:
    """Warn of ops that run replicated only because nobody wrote their rule."""
    graph.notes += warn_of_missing_rules(graph)


def warn_of_missing_rules(graph: AnnotatedGraph) -> list[str]:
    """What is warned of."""
    if not graph.strategy.model_axes:
        return []
    missing = defaultdict(list)
    for node in graph.graph.nodes:
        if is_op(node) and rule_of(node.target) is None and node.target not in REPLICATED_ON_PURPOSE:
            missing[str(node.target)].append(node)
    notes = []
    for name, nodes in missing.items():
        where = source_of(nodes[0]) or fqn_of(nodes[0]) or "the model"
        note = f"op {name} ({len(nodes)}x, first at {where}) has no sharding rule: it runs replicated"
        notes.append(note)
        warn(note)
    return notes
