"""fxpar's passes on a graph of torchtitan's graph_trainer.

Such a graph is one FX graph of forward, loss and backward on local tensors, with functional collectives. It lacks what
fxpar's passes read: which module a node is of, and which collectives move weights and gradients. `describe` derives
that, and the new nodes get graph_trainer's metadata in return. It is not functional either (a chunked loss copies
gradients into place), so what writes to memory is kept, and its order is checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from fxpar.errors import ForeignGraphPassError
from fxpar.ir import pass_registry
from fxpar.ir.exec_graph import collective_kind
from fxpar.ir.graph import TensorMeta
from fxpar.ir.node_meta import fqn_of, is_backward, local_meta
from fxpar.ir.pass_base import GraphPass
from fxpar.ir.pass_registry import GraphModulePass, as_graph_module_pass
from fxpar.passes.bucket_collectives import BucketCollectives
from fxpar.recipes.memory_order import MemoryOrder

FITTING = ("bucket_collectives", "cleanup", "reuse_buffers", "sink_waits", "write_in_place")
"""Built-in passes that rewrite local tensors and collectives; the others carry out a strategy."""

_OURS = ("tensor", "local", "dist", "phase", "sym", "comm", "fused", "fqn", "source", "backward", "bucket", "buffer")
_RESHAPE = torch.ops.aten.reshape.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_BLOCK = re.compile(r"^(.*?\.\d+)(\.|$)")


def resolve(pass_: GraphPass | str) -> GraphPass:
    """A pass by name, or the one given.

    Raises UnknownPassError; ForeignGraphPassError for one of fxpar's own that has nothing to work on here.
    """
    step = pass_registry.get(pass_)() if isinstance(pass_, str) else pass_
    name = step.name
    if name not in FITTING and pass_registry.BUILTIN.get(name, "").startswith(type(step).__module__ + ":"):
        raise ForeignGraphPassError(
            name,
            "it carries out a strategy, and there every tensor is a local one already",
            f"Name it in the passes of fxpar.lower instead; here run {', '.join(FITTING)}, or passes of your own",
        )
    return step


def for_graph_trainer(pass_: GraphPass) -> GraphModulePass:
    """A fxpar pass as graph_trainer calls it: `(gm, example_inputs) -> gm`, in place, under the name of the pass.

    At the call raises ForeignGraphPassError for a graph that the pass cannot take: a collective that is not waited for
    exactly once, calls of submodules; or when it has changed the order of writes to memory that others read.
    """
    step, name = as_graph_module_pass(pass_), pass_.name

    def run(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
        _check(gm.graph, name)
        if isinstance(pass_, BucketCollectives):
            _in_rows(gm.graph)
        order = MemoryOrder(gm.graph)
        known = set(gm.graph.nodes)
        describe(gm.graph)
        try:
            with _effects_are_results(gm.graph):
                step(gm, example_inputs)
        finally:
            _give_back(gm.graph, known)
        for problem in order.changes(gm.graph):
            raise ForeignGraphPassError(name, problem, f"Leave {name!r} out of the pipeline")
        gm.recompile()
        return gm

    run.__name__ = run.__qualname__ = name
    run.__doc__ = pass_.__doc__
    return run


def describe(graph: fx.Graph) -> None:
    """Derive `fqn`, `backward`, and a `bucket` for collectives that gather a parameter or reduce a gradient.

    A bucket is a block of the model (`layers.3`; outside of blocks a module), forward or backward, and for a parameter
    that goes through several collectives which of them: so a block is gathered when it is needed, as FSDP does it.
    """
    late = False
    for node in graph.nodes:
        fqn = node.meta["fqn"] = node.meta.get("custom", {}).get("module_fqn", "")
        if node.meta.get("autograd_backward"):
            late = node.meta["backward"] = True
        place = _gathers_a_parameter(node) or _reduces_a_gradient(node)
        if place:
            found = _BLOCK.match(fqn)
            side = "backward" if late else "forward"  # a parameter gathered again lies among backward nodes
            node.meta["bucket"] = f"{found[1] if found else fqn} {side} {place}"


def _in_rows(graph: fx.Graph) -> None:
    """Parameters and gradients travel as rows, one for each rank of the group: `[K * N, ...]` as `[K, N, ...]`.

    That is how fxpar writes collectives and what its buckets are made of; the views cost nothing.
    """
    for node in list(graph.nodes):
        kind = collective_kind(node)
        if not (_gathers_a_parameter(node) if kind == "all_gather" else _reduces_a_gradient(node)):
            continue
        (sent,) = node.all_input_nodes
        (wait,) = node.users
        if kind == "all_reduce" or not all(isinstance(size, int) for size in sent.meta["val"].shape):
            continue
        ranks: int = node.args[1] if kind == "all_gather" else node.args[2]  # type: ignore[assignment]
        shape, received = tuple(sent.meta["val"].shape), tuple(wait.meta["val"].shape)
        rows = (1, *shape) if kind == "all_gather" else (ranks, shape[0] // ranks, *shape[1:])
        back = (ranks, *shape) if kind == "all_gather" else (1, *received)
        with graph.inserting_before(node):
            node.args = (_reshaped(graph, sent, rows, like=node), *node.args[1:])
        for made in (node, wait):
            made.meta["val"] = made.meta["val"].new_empty(back)
        with graph.inserting_after(wait):
            whole = _reshaped(graph, wait, received, like=wait)
        wait.replace_all_uses_with(whole, delete_user_cb=lambda user, whole=whole: user is not whole)


def _reshaped(graph: fx.Graph, value: fx.Node, shape: tuple[int, ...], *, like: fx.Node) -> fx.Node:
    node = graph.call_function(_RESHAPE, (value, list(shape)))
    node.meta = {key: like.meta[key] for key in ("custom", "autograd_backward", "seq_nr") if key in like.meta}
    node.meta["val"] = value.meta["val"].new_empty(shape)
    return node


def _gathers_a_parameter(node: fx.Node) -> str | None:
    """ "gather 0" for an all-gather of an input, cast or viewed; "gather 1" if that came from another one."""
    if collective_kind(node) != "all_gather":
        return None
    depth = 0
    (value,) = node.all_input_nodes
    while value.op == "call_function" and len(value.all_input_nodes) == 1:
        (value,) = value.all_input_nodes
        depth += collective_kind(value) is not None
    return f"gather {depth}" if value.op == "placeholder" else None


def _reduces_a_gradient(node: fx.Node) -> str | None:
    """ "reduce 0" for a reduction that is only cast or viewed on its way to the results."""
    if collective_kind(node) not in ("reduce_scatter", "all_reduce"):
        return None
    depth, value = 0, node
    while len(value.users) == 1:
        (value,) = value.users
        if value.op == "output":
            return f"reduce {depth}"
        if len(value.all_input_nodes) != 1:
            return None
        depth += collective_kind(value) is not None
    return None


def _check(graph: fx.Graph, name: str) -> None:
    for node in graph.nodes:
        if node.op == "call_module":
            raise ForeignGraphPassError(
                name,
                f"%{node.name} calls a submodule, which it cannot look into",
                "Run it before what compiles regions",
            )
        if collective_kind(node) and [user.target for user in node.users] != [_WAIT]:
            raise ForeignGraphPassError(
                name, f"%{node.name} ({node.target}) is not waited for exactly once", "Run it on the graph as traced"
            )


@contextmanager
def _effects_are_results(graph: fx.Graph) -> Iterator[None]:
    """Ops that nobody reads but that write somewhere count as results meanwhile, so that no pass drops them."""
    (output,) = graph.find_nodes(op="output")
    results = output.args[0]
    effects = [n for n in graph.nodes if n.op == "call_function" and not n.users and n.is_impure()]
    output.args = ((*_flat(results), *effects),)
    try:
        yield
    finally:
        flat: Any = output.args[0]
        kept = iter(flat[: len(flat) - len(effects)])
        output.args = ([next(kept) for _ in results],) if isinstance(results, list) else (tuple(kept),)


def _flat(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, list | tuple) else (results,)


def _give_back(graph: fx.Graph, known: set[fx.Node]) -> None:
    """graph_trainer's metadata on new nodes, and fxpar's off all of them: it would be stale after the next pass."""
    for node in graph.nodes:
        if node not in known and node.op == "call_function":
            node.meta["val"] = _value(node)
            node.meta["custom"] = {"module_fqn": fqn_of(node)}
            if is_backward(node):
                node.meta["autograd_backward"] = True
    for node in graph.nodes:
        for key in _OURS:
            node.meta.pop(key, None)


def _value(node: fx.Node) -> Any:
    """A fake tensor of the shape that the pass has written down, made from an operand's; None if it has not."""
    like = next((o.meta["val"] for o in node.all_input_nodes if o.meta.get("val") is not None), None)
    while isinstance(like, list | tuple):
        like = like[0]

    def make(meta: Any) -> Any:
        if isinstance(meta, tuple):
            return [make(m) for m in meta]
        if not isinstance(meta, TensorMeta) or not isinstance(like, torch.Tensor):
            return None
        sizes = [size for size in meta.shape if isinstance(size, int)]
        return like.new_empty(sizes, dtype=meta.dtype) if len(sizes) == len(meta.shape) else None

    return make(local_meta(node))


__all__ = ["FITTING", "describe", "for_graph_trainer", "resolve"]
