"""Which nodes compute in the captured dtype although the others do not."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import fx

from fxpar.errors import PrecisionGlobError
from fxpar.ir.graph import LogicalGraph, TensorMeta
from fxpar.ir.node_meta import fqn_of, is_backward, tensor_metas
from fxpar.ops.traits import INDEX_PUTS, RECURRENCES, computes, is_elementwise
from fxpar.precision.loss_region import is_model_op, loss_region
from fxpar.precision.precision import Precision

aten = torch.ops.aten
# Last parts of the FQN of a module that normalises, in lower case.
NORM_NAMES = ("*norm*", "ln", "ln_*", "*_ln", "ln[0-9]*")
_VALUES = ("param", "batch", "tangent")


def metas(node: fx.Node) -> tuple[TensorMeta, ...]:
    """The tensors that a node returns."""
    return tuple(m for m in tensor_metas(node) if m is not None)


def is_float(node: fx.Node) -> bool:
    """Whether a node returns a floating-point tensor."""
    return any(m.dtype.is_floating_point for m in metas(node))


def active_nodes(logical: LogicalGraph) -> set[fx.Node]:
    """Floating-point values that depend, through floating-point values, on a parameter or a floating-point input.

    All others (masks, rotary tables, what is made of positions) are exact for every batch, and small.
    """
    found = {n for n, i in zip(logical.placeholders, logical.inputs, strict=True) if i.kind in _VALUES and is_float(n)}
    for node in logical.gm.graph.nodes:
        if node.op == "call_function" and is_float(node) and any(o in found for o in node.all_input_nodes):
            found.add(node)
    return found


def find_islands(logical: LogicalGraph, precision: Precision, active: Collection[fx.Node]) -> set[fx.Node]:
    """Nodes that compute in the captured dtype. Raises PrecisionGlobError."""
    calls = [n for n in logical.gm.graph.nodes if n.op == "call_function"]
    wide = {"fp32", *(("norm",) if precision.norms else ()), *(("softmax",) if precision.softmax else ())}
    islands = {n for n in calls if computes(n.target) in wide and not _only_writes(n)}
    modules = _matching(logical, precision.fp32)
    if precision.norms:
        modules |= _norm_modules(calls)
    islands |= {n for n in calls if fqn_of(n) in modules}
    if precision.softmax:
        islands |= _logsumexp_backward(calls)
    if precision.loss:
        islands |= loss_region(logical, active)
    return islands | _decays(calls) | _averages(logical, calls)


def _only_writes(node: fx.Node) -> bool:
    """Whether the node is an `index_put` without the flag that makes it add rows into one."""
    return node.target in INDEX_PUTS and not any(a is True for a in node.args[3:])


def prefixes(fqn: str) -> Iterator[str]:
    """`a`, `a.b`, `a.b.c` of `a.b.c`."""
    parts = fqn.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def _matching(logical: LogicalGraph, globs: Iterable[str]) -> set[str]:
    """FQNs of the modules that a glob matches, and of all inside of them; that of the root is empty."""
    fqns = {fqn_of(n) for n in logical.gm.graph.nodes}
    known = {module for fqn in fqns for module in prefixes(fqn)}
    found = set()
    for glob in globs:
        hits = {module for module in known if fnmatch.fnmatchcase(module, glob)}
        if not hits:
            raise PrecisionGlobError(glob, known - {""})
        found |= {module for module in known if not hits.isdisjoint(prefixes(module))}
    return found


def _norm_modules(calls: Iterable[fx.Node]) -> set[str]:
    """FQNs of modules that normalise: by their names, or because they take a reciprocal root and make no product."""
    targets: dict[str, set] = defaultdict(set)
    for node in calls:
        if fqn := fqn_of(node):
            targets[fqn].add(node.target)
    rooted = {fqn for fqn, ops in targets.items() if aten.rsqrt.default in ops and not any(map(is_model_op, ops))}
    return rooted | {fqn for fqn in targets if _sounds_like_norm(fqn)}


def _sounds_like_norm(fqn: str) -> bool:
    last = fqn.rpartition(".")[2].lower()
    return any(fnmatch.fnmatchcase(last, name) for name in NORM_NAMES)


def _logsumexp_backward(calls: Iterable[fx.Node]) -> set[fx.Node]:
    """`exp(x - lse)` and what autograd multiplies it with: a low-precision lse would be wrong by some percent."""
    sums, shifted, weights, found = set[fx.Node](), set[fx.Node](), set[fx.Node](), set[fx.Node]()
    for node in calls:
        operands = set(node.all_input_nodes)
        if node.target is aten.logsumexp.default or (computes(node.target) == "moves" and operands & sums):
            sums.add(node)
        elif is_backward(node) and node.target is aten.sub.Tensor and operands & sums:
            shifted.add(node)
        elif node.target is aten.exp.default and operands & shifted:
            weights.add(node)
        elif node.target is aten.mul.Tensor and operands & weights:
            found.add(node)
    return shifted | weights | found


def _decays(calls: Iterable[fx.Node]) -> set[fx.Node]:
    """What makes the decays of a recurrence, element by element: they add up over tokens, and so would their errors."""
    found = set[fx.Node]()
    todo = [n.args[RECURRENCES[n.target] + 3] for n in calls if n.target in RECURRENCES]  # type: ignore[index]
    while todo:
        node = todo.pop()
        if not isinstance(node, fx.Node) or node in found or node.op != "call_function" or is_backward(node):
            continue
        if is_elementwise(node.target) or computes(node.target) == "moves":
            found.add(node)
            todo += node.all_input_nodes
    return found


def _averages(logical: LogicalGraph, calls: Iterable[fx.Node]) -> set[fx.Node]:
    """From a buffer that is written to its new value: a moving average stands still once a step rounds away."""
    written = {out.fqn for out in logical.outputs if out.kind == "buffer"}
    reached = {
        n
        for n, i in zip(logical.placeholders, logical.inputs, strict=True)
        if i.kind == "buffer" and i.fqn in written and is_float(n)
    }
    calls = list(calls)
    for node in calls:
        if any(o in reached for o in node.all_input_nodes):
            reached.add(node)
    needed = {n for n, out in zip(logical.results, logical.outputs, strict=True) if out.kind == "buffer"}
    for node in reversed(calls):
        if any(u in needed for u in node.users):
            needed.add(node)
    return {n for n in calls if n in reached and n in needed}
