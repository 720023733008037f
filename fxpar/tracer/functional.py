"""No writes in place: mutated temporaries become new values, mutated buffers become results.

before  add_: f32[T, 1] = aten.add_(mean, 1e-6);  rsqrt: f32[T, 1] = aten.rsqrt(mean)
after   add: f32[T, 1] = aten.add(mean, 1e-6);    rsqrt: f32[T, 1] = aten.rsqrt(add)

Where a written tensor is not seen through any view, the rewrite is a change of names. Otherwise the whole graph is
traced again through `torch.func.functionalize`, which writes through views.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.errors import MutationError, UnsupportedOpError
from fxpar.ir.node_meta import fqn_of, source_of
from fxpar.ops.traits import is_random
from fxpar.torch_api import tracing
from fxpar.torch_api.symbolic import FakeWorld, known_equal
from fxpar.tracer.signature import Signature

aten = torch.ops.aten
_DEVICE_SPECIFIC = ("_for_cpu", "mkldnn", "cudnn", "miopen")


@dataclass
class Functional:
    """A graph without writes: its results as nodes, and the new values of the buffers that were written."""

    gm: fx.GraphModule
    results: list[fx.Node]
    buffers: dict[str, fx.Node]


def make_functional(gm: fx.GraphModule, signature: Signature, world: FakeWorld) -> Functional:
    """Remove all writes from a traced graph. Raises MutationError, UnsupportedOpError."""
    _check_ops(gm)
    written: dict[str, fx.Node] = {}
    if any(_writes(node) for node in gm.graph.nodes):
        _drop_expands(gm)
        renaming = _Renaming(gm, signature, world)
        if not renaming.possible():
            gm = _functionalize(gm, world)
            renaming = _Renaming(gm, signature, world)
            assert renaming.possible(), "functionalize left a write through a view"
        written = renaming.run()
    return Functional(gm, list(_output(gm).args[0]), written)  # type: ignore[arg-type]


def _drop_expands(gm: fx.GraphModule) -> None:
    """Take out each `expand` to the shape that a value has already. Through one torch writes a value as `base + (value
    - base)`, which no bool has, and which is NaN for two infinities.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.expand.default):
        source: Any = node.args[0]
        old, new = source.meta["val"].shape, node.meta["val"].shape
        if len(old) == len(new) and all(known_equal(a, b) for a, b in zip(old, new, strict=True)):
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)


def _output(gm: fx.GraphModule) -> fx.Node:
    (node,) = gm.graph.find_nodes(op="output")
    return node


def _schema(node: fx.Node) -> Any:
    """Schema of the ATen op of a node; None for other nodes."""
    return node.target._schema if isinstance(node.target, tracing.OpOverload) else None


def _writes(node: fx.Node) -> bool:
    schema = _schema(node)
    return schema is not None and schema.is_mutable


def _check_ops(gm: fx.GraphModule) -> None:
    """Raise UnsupportedOpError for ops that no rank could run alike."""
    for node in gm.graph.nodes:
        if isinstance(node.target, tracing.HigherOrderOperator):
            raise UnsupportedOpError(
                f"the operator {node.target}",
                "Call functions of tensors, for attention torch.nn.functional.scaled_dot_product_attention.",
                fqn_of(node),
                source_of(node),
            )
        if any(word in str(node.target) for word in _DEVICE_SPECIFIC):
            raise UnsupportedOpError(
                f"the op {node.target}, which only one kind of device has,",
                "Call the function of torch.nn.functional that it belongs to.",
                fqn_of(node),
                source_of(node),
            )
        if node.op == "call_function" and is_random(node.target):
            raise UnsupportedOpError(
                f"the random op {node.target}",
                "Each rank would draw other numbers: use dropout, or pass the noise in the batch.",
                fqn_of(node),
                source_of(node),
            )


# --------------------------------------------------------------------------------------------------- renaming
@dataclass
class _Renaming:
    """Replaces writes by new values, if no view of a written tensor is read after the write."""

    gm: fx.GraphModule
    signature: Signature
    world: FakeWorld
    bases: dict[fx.Node, fx.Node] = field(default_factory=dict)
    wholes: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # base -> its values so far

    def __post_init__(self) -> None:
        self.order = {node: i for i, node in enumerate(self.gm.graph.nodes)}
        self.family: dict[fx.Node, list[fx.Node]] = {}
        for node in self.gm.graph.nodes:
            base = self._base(node)
            self.bases[node] = base
            self.family.setdefault(base, []).append(node)
        places = self.gm.graph.find_nodes(op="placeholder")
        self.names = {node: found.fqn for node, found in zip(places, self.signature.inputs, strict=True)}

    def _base(self, node: fx.Node) -> fx.Node:
        """The node whose memory this one's result is, or may be, a part of."""
        if node.target is operator.getitem:
            several = node.all_input_nodes[0]
            whole = self.bases[several]
            return node if whole is several else whole
        schema = _schema(node)
        if schema is None:
            return node
        for argument, value in zip(schema.arguments, node.args, strict=False):
            shared = argument.alias_info is not None and any(r.alias_info is not None for r in schema.returns)
            if shared and isinstance(value, fx.Node):
                return self.bases[value]
        return node

    def possible(self) -> bool:
        return all(self._simple(node) for node in self.gm.graph.nodes if _writes(node))

    def _simple(self, node: fx.Node) -> bool:
        """Whether the write concerns a whole tensor of which no earlier view is read later."""
        target = node.args[0] if node.args else None
        if not isinstance(target, fx.Node) or _functional_form(node) is None:
            return False
        now = self.order[node]
        for relative in self.family[self.bases[target]]:
            if relative.op == "placeholder" or self._is_whole(relative) or self.order[relative] > now:
                continue
            if relative is target or any(self.order[user] > now for user in relative.users):
                return False
        return True

    def _is_whole(self, node: fx.Node) -> bool:
        """Whether a node is a base, or the result of a write to the whole of it."""
        return self.bases[node] is node or (_writes(node) and self._is_whole(node.args[0]))  # type: ignore[arg-type]

    def run(self) -> dict[str, fx.Node]:
        """Rename; the new values of buffers by name. Raises MutationError for a write to an input that is no buffer."""
        written: dict[str, fx.Node] = {}
        buffers = self.signature.of_kind("buffer")
        for node in list(self.gm.graph.nodes):
            if not _writes(node):
                continue
            base = self.bases[node.args[0]]
            if base.op == "placeholder" and self.names[base] not in buffers:
                raise MutationError(self.names[base], source_of(node))
            new = self._value(node)
            now = self.order[node]
            # Views made after the write are views of one of these, so they follow.
            for whole in (*self.wholes.setdefault(base, [base]), node):
                whole.replace_all_uses_with(new, delete_user_cb=lambda user, now=now: self.order.get(user, -1) > now)
            self.gm.graph.erase_node(node)
            self.wholes[base].append(new)
            self.order[new], self.bases[new] = now, base
            if base.op == "placeholder":
                written[self.names[base]] = new
        return written

    def _value(self, node: fx.Node) -> fx.Node:
        """A node before `node` that computes what it writes."""
        form = _functional_form(node)
        assert form is not None
        target, args = form
        to = node.args[0].meta["val"]  # type: ignore[union-attr]
        with self.gm.graph.inserting_before(node):
            new = self.gm.graph.call_function(target, args, node.kwargs)
            new.meta.update(node.meta)
            values = fx.map_arg((args, node.kwargs), lambda n: n.meta["val"])
            dtype = tracing.evaluate(self.world, target, *values).dtype
            if dtype != to.dtype:  # a write keeps the dtype, the functional op promotes it
                new.meta["val"] = tracing.evaluate(self.world, target, *values)
                new = self.gm.graph.call_function(aten._to_copy.default, (new,), {"dtype": to.dtype})
                new.meta.update(node.meta)
        return new


def _functional_form(node: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """(op, arguments) that return what this node writes; None if there is no such op."""
    target = node.target
    if target is aten.copy_.default:
        return aten.copy.default, node.args[:2]
    schema = target._schema  # type: ignore[union-attr]
    name = schema.name.removeprefix("aten::")
    writes = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if not name.endswith("_") or writes != ["self"]:
        return None
    overload = _taking(getattr(aten, name[:-1], None), schema)
    return None if overload is None else (overload, node.args)


def _taking(op: Any, schema: Any) -> Any:
    """The overload of an op that takes the arguments of `schema`; None if there is none. `pow_.Scalar` is the write of
    `pow.Tensor_Scalar`: in `pow.Scalar` the number is the base.
    """
    wanted = [str(argument.type) for argument in schema.arguments]
    for name in () if op is None else (schema.overload_name or "default", *op.overloads()):
        overload = getattr(op, name, None)
        if overload is not None and [str(argument.type) for argument in overload._schema.arguments] == wanted:
            return overload
    return None


# ---------------------------------------------------------------------------------------------- functionalize
_OF_DATA = "mutating a non-functional tensor with a functional tensor"  # what torch says of a write to a constant


class _Again(fx.Interpreter):
    """Runs a traced graph, knowing which node is running."""

    node: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        try:
            return super().run_node(n)
        except RuntimeError as error:
            if _OF_DATA not in str(error):
                raise
            what = "a write through .data into a tensor that is neither a parameter nor a buffer"
            raise UnsupportedOpError(what, "Make it a buffer.", n.meta.get("fqn"), source_of(n)) from error


def _functionalize(gm: fx.GraphModule, world: FakeWorld) -> fx.GraphModule:
    """The same graph traced through `torch.func.functionalize`; metas are those of the nodes that were running."""
    again = _Again(gm, garbage_collect_values=False)
    again.extra_traceback = False  # of nodes, which no user knows

    def stamp(node: fx.Node) -> None:
        if node.op == "call_function" and again.node is not None:
            for key in ("fqn", "source", "backward"):
                node.meta[key] = again.node.meta.get(key)

    def run(*values: Tensor) -> Any:
        with tracing.observe_nodes(stamp), torch.no_grad():
            return torch.func.functionalize(again.run, remove="mutations")(*values)

    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return tracing.trace(world, run, [f.detach() if f.requires_grad else f for f in fakes])
