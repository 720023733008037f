"""Which stage each forward node belongs to. The forward is cut where a module begins, in the order in which it runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import fx

from fxpar.errors import NotAChainError, StageCountError, UnknownCutError, nearest
from fxpar.ir.graph import TensorMeta
from fxpar.ir.node_meta import fqn_of, tensor_of, whole_meta
from fxpar.stages.layers import find_layers, layer_cuts, module_cuts, rerun
from fxpar.stages.nodes import Nodes, nbytes, producer


def choose_cuts(nodes: Nodes, stages: int, cuts: Sequence[str] | None) -> list[tuple[int, str]]:
    """(first op, FQN) of the module with which each stage but the first begins.

    Raises StageCountError, UnknownCutError, NotAChainError.
    """
    model = nodes.logical.name
    if stages < 1:
        raise StageCountError(model, f"{stages} stages", "Ask for 1 or more")
    if cuts is not None and len(cuts) != stages - 1:
        raise StageCountError(
            model, f"{stages} stages have {stages - 1} boundaries, {len(cuts)} cuts are given", "Give one per boundary"
        )
    if cuts is None:
        cuts = layer_cuts(nodes, stages) if stages > 1 else []
    found = [(_first_op(nodes, fqn), fqn) for fqn in cuts]
    for (before, first), (after, second) in itertools.pairwise(found):
        if after <= before:
            raise UnknownCutError(model, f"cut {second!r} does not run after {first!r}", "List cuts as they run")
    again = rerun(nodes, found)
    if again:
        _raise_rerun(nodes, found, again)
    return found


def stages_of(nodes: Nodes, cuts: list[tuple[int, str]]) -> dict[fx.Node, int]:
    """Stage of each forward node that is not free."""
    found: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes.bound):
        found[node] = found.get(producer(node), sum(start <= i for start, _ in cuts))
    results = set(nodes.logical.results)
    for node in reversed(nodes.bound):
        if node not in results and producer(node) is node and isinstance(whole_meta(node), TensorMeta):
            _sink(nodes, found, node)
    return found


def _sink(nodes: Nodes, stage_of: dict[fx.Node, int], node: fx.Node) -> None:
    """Move an op behind the cut if only later stages read its result and fewer bytes cross then (what is put together
    between two layers: a concatenation, a sum with what is sent anyway).
    """
    here = stage_of[node]
    readers = [stage_of[user] for user in node.users if user in stage_of]
    if not readers or min(readers) == here or nodes.params_of(node):
        return
    new = [
        o
        for o in set(node.all_input_nodes)
        if o in stage_of and not any(stage_of.get(user, 0) > here for user in o.users if user is not node)
    ]
    if sum(nbytes(tensor_of(o), nodes.dims) for o in new) < nbytes(tensor_of(node), nodes.dims):
        stage_of[node] = min(readers)


def _first_op(nodes: Nodes, fqn: str) -> int:
    modules = [fqn_of(node) for node in nodes.bound]
    start = next((i for i, module in enumerate(modules) if module == fqn or module.startswith(f"{fqn}.")), None)
    model = nodes.logical.name
    if start is None or not fqn:
        known = dict.fromkeys(m for module in modules for m in (module, module.rpartition(".")[0]) if m)
        raise UnknownCutError(
            model, f"no module {fqn!r} runs in its forward{nearest(fqn, known)}", _suggestion(nodes, None)
        )
    if not _cuts_something_off(nodes, start):
        raise UnknownCutError(
            model,
            f"nothing with parameters runs before {fqn!r}, so there is no stage to cut off",
            _suggestion(nodes, 0),
        )
    return start


def _raise_rerun(nodes: Nodes, cuts: list[tuple[int, str]], again: dict[str, list[int]]) -> None:
    module, where = next(iter(again.items()))
    stage_of = stages_of(nodes, cuts)
    late = [n for n, stage in stage_of.items() if fqn_of(n) == module and stage > where[0]]
    values = dict.fromkeys(
        f"%{o.name} {whole_meta(o)}"
        for n in late
        for o in n.all_input_nodes
        if stage_of.get(o, 0) > where[0] and isinstance(whole_meta(o), TensorMeta)
    )
    cut = cuts[where[0]]
    what = f", which would have to go back to it: {', '.join(list(values)[:4])}" if values else ""
    raise NotAChainError(
        nodes.logical.name,
        f"module {module!r} runs before and after the cut at {cut[1]!r}; on stage {where[0]} it would need values of "
        f"stage {where[1]}{what}",
        _suggestion(nodes, cut[0]),
    )


def _cuts_something_off(nodes: Nodes, start: int) -> bool:
    """Whether anything with parameters runs before an op."""
    return any(i < start for i, *_ in nodes.reads_params)


def _suggestion(nodes: Nodes, near: int | None) -> str:
    """Cuts that work, those nearest to an op first."""
    layers = [layer for layer in find_layers(nodes) if _cuts_something_off(nodes, layer.start)]
    if near is not None:
        layers.sort(key=lambda layer: abs(layer.start - near))
    found = [layer.fqn for layer in layers[:3]] or module_cuts(nodes, 2)
    if not found:
        return "No cut works for this model; use dp, cp or tp instead of pp"
    names = ", ".join(map(repr, found))
    return f"Cuts that work are for example {names}"
