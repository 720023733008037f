"""The flow of every value of a captured graph, from the batch to the loss.

Each op is run through its sharding rule: an op that may be cut along the tokens without communication treats every
document by itself, and where its rule leaves partial sums, the result is the sum over documents. What a rule cannot
say (attention, positions, counts) stands in `fxpar.flow.statements`. Anything else that touches tokens makes a value of
the row: what is not known to be harmless counts as harmful.

Only the forward is followed, recomputed parts of it included: gradients are its derivatives, so a loss that is the sum
of the documents' losses for all weights has the sum of their gradients. A backward of the model's own (an
`autograd.Function`, a hook on a gradient) may make anything of them: such a graph is of the row.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from fxpar.errors import OpContractError
from fxpar.flow import numbers, pairs, statements, unusable
from fxpar.flow.call import FlowCall, Question, Site
from fxpar.flow.statements import LINEAR, MOVES, NUMBERED, POSITION_KEYS, SIZES, STATEMENTS, UNREAD, Flows
from fxpar.flow.value import CONSTANT, Flow, row
from fxpar.ir.dist_config import Partial, Shard
from fxpar.ir.graph import IS_TOKEN, TOKEN_NUMBERS, Input, LogicalGraph, Size, TensorMeta
from fxpar.ir.node_meta import fqn_of, is_size, size_of, source_of, tensor_metas, tensor_of, whole_meta
from fxpar.ops.traits import MATRIX_PRODUCTS, ask, declared, is_random
from fxpar.rules.option import Option
from fxpar.rules.table import rule_of
from fxpar.rules.view import Sizes, is_op, make_view

aten = torch.ops.aten
own = torch.ops.fxpar

OTHER_DIM = 17  # stands for a dynamic dim that counts no tokens
DEGREE = 7  # a cut of the tokens in so many parts stands for documents; `_is_whole` sees to it that any cut would do

PADDING: dict[str, int] = {
    "input_ids": 0,
    "tokens": 0,
    "labels": -100,
    "targets": -100,
    "target": -100,
    "attention_mask": 0,
    "token_type_ids": 0,
    "loss_mask": 0,
    IS_TOKEN: 0,
    TOKEN_NUMBERS: 0,
}
"""Batch key -> what stands at padded tokens of whole numbers; in any other key, and in fractions, it is 0."""

_COUNTED = {"document_ids", "document_positions", *POSITION_KEYS}  # positions begin anew, as one document more

# Operands that are multiplied and then summed: zeros in one of them drop out.
_CONTRACTIONS = MATRIX_PRODUCTS | {aten.sum.default, aten.sum.dim_IntList}


@dataclass(frozen=True)
class TokenFlow:
    """Flows by node (a tuple for several results), and the nodes that must be rewritten for them to hold."""

    question: Question
    flows: Mapping[fx.Node, Flows]
    sites: Mapping[fx.Node, Site]
    hazard: Flow | None  # the first result of the graph that is of the row
    unusable: Flow | None  # the first op that cannot use padding, under the question of documents
    ordered: tuple[Flow, ...]  # ops, besides attention, for which tokens must lie in their order


def token_flow(logical: LogicalGraph, token: sympy.Symbol, question: Question) -> TokenFlow:
    """Follow the tokens through the forward of `logical`."""
    walk = _Walk(logical, token, question)
    walk.run()
    hazard = walk.hazard()
    if logical.own_backward is not None:
        hazard = hazard or Flow("row", why=f"{logical.own_backward} may mix tokens")
    if question == "padding":
        return TokenFlow(question, walk.flows, walk.sites, hazard or walk.unusable, None, tuple(walk.ordered))
    return TokenFlow(question, walk.flows, walk.sites, hazard, walk.unusable, tuple(walk.ordered))


def padding_of(key: str, dtype: torch.dtype) -> int | None:
    """The number that stands at padded tokens of a batch key; None where they count up (positions, documents).

    0 for a key that nobody knows: what padding has matters only where the flow proves that it adds nothing.
    """
    if key in _COUNTED:
        return None
    return 0 if dtype.is_floating_point or dtype.is_complex else PADDING.get(key, 0)


def in_words(flow: Flow) -> str:
    """What a value of the row comes from: the op, the line of source, what it does."""
    node = flow.origin
    if node is None:
        return flow.why
    where = source_of(node) or fqn_of(node) or "the model"
    return f"{node.target} at {where} {flow.why}"


@dataclass
class _Walk:
    logical: LogicalGraph
    token: sympy.Symbol
    question: Question
    flows: dict[fx.Node, Flows] = field(default_factory=dict)
    sites: dict[fx.Node, Site] = field(default_factory=dict)
    unusable: Flow | None = None
    ordered: list[Flow] = field(default_factory=list)

    def run(self) -> None:
        self.sizes = Sizes([d.symbol for d in self.logical.dims], DEGREE, self.token, others=OTHER_DIM)
        self.trained: set[fx.Node] = set()
        self.keys: dict[fx.Node, str] = {}
        late: set[fx.Node] = set()  # gradients, and what is made of them
        for node, info in zip(self.logical.placeholders, self.logical.inputs, strict=True):
            if info.kind in ("scale", "tangent"):
                late.add(node)
                self.flows[node] = CONSTANT
            else:
                self.flows[node] = self._input(node, info)
            if info.requires_grad:
                self.trained.add(node)
        loss = self._loss_nodes()
        for node in self.logical.gm.graph.nodes:
            if node.op == "get_attr":
                self.flows[node] = CONSTANT if not self._has_tokens(node) else row(node, "is as long as the example")
            if node.op != "call_function":
                continue
            self._note(node, unusable.operand(node, self.flows))
            if any(o in late for o in node.all_input_nodes) and node not in loss:
                late.add(node)
                continue
            if any(o in self.trained for o in node.all_input_nodes):
                self.trained.add(node)
            if node.target is operator.getitem:
                found = self.flows[node.args[0]]  # type: ignore[index]
                self.flows[node] = found[node.args[1]] if isinstance(found, tuple) else found  # type: ignore[index]
            elif is_op(node):
                self.flows[node] = self._op(node)

    def _note(self, node: fx.Node, why: str) -> None:
        if why and self.unusable is None:
            self.unusable = row(node, why)

    def _loss_nodes(self) -> set[fx.Node]:
        """What is between the scale and the loss."""
        found = {n for n, o in zip(self.logical.results, self.logical.outputs, strict=True) if o.kind == "loss"}
        todo = list(found)
        while todo:
            todo += [o for o in todo.pop().all_input_nodes if o not in found and not found.add(o)]  # type: ignore
        return found

    def _has_tokens(self, node: fx.Node) -> bool:
        return any(self._depends(s) for m in tensor_metas(node) if m for s in m.shape)

    def _depends(self, size: Any) -> bool:
        return self.token in getattr(size, "free_symbols", ())

    # ------------------------------------------------------------------------------------------------- inputs
    def _input(self, node: fx.Node, info: Input) -> Flow:
        if info.kind != "batch":
            return CONSTANT
        self.keys[node] = info.fqn
        dims = tuple(Shard(d) for d, size in enumerate(info.meta.shape) if self._depends(size))
        if any(not _is_whole(info.meta.shape[s.dim], s, self.token) for s in dims):
            return row(node, "has another length than the tokens")
        if info.fqn == "document_ids":
            return Flow("number", dims)
        if not dims and self.question == "documents":
            return row(node, "has no dim of tokens, so it is one for the whole row")
        if len(dims) > 2:
            return row(node, "has more than two dims of tokens")
        known = padding_of(info.fqn, info.meta.dtype)
        return Flow(dims=dims, padded=None if known is None or len(dims) != 1 else float(known))

    # ------------------------------------------------------------------------------------------------- ops
    def _op(self, node: fx.Node) -> Flows:
        view, operands = make_view(node, self.sizes)
        flows = tuple(self._flow(value) for value in operands)
        metas = [m for m in tensor_metas(node) if m]
        bad = next((f for f in flows if f.kind == "row"), None)
        if bad is not None:
            return bad
        shapes = tuple(tensor_metas(source)[i].shape for source, i in operands)  # type: ignore[union-attr]
        call = FlowCall(
            node, view, flows, shapes, self.question, self.token, self.sites, self._first_trained(operands), self.keys
        )
        if is_random(node.target):
            return row(node, "draws random numbers")
        if self._uses_length(node):
            return row(node, "computes with the number of tokens")
        said = self._declared(call)
        if said is not None:
            if declared(node.target).flow is not statements.per_token:
                self.ordered.append(row(node, "is not known to take tokens in any order"))
            return said
        if any(f.kind == "number" for f in flows) and node.target not in NUMBERED:
            return row(node, "uses the numbers of documents")
        sums = [f for f in flows if f.kind == "sum"]
        if sums:
            return self._of_sums(call, sums[0])
        statement = STATEMENTS.get(node.target)
        found = statement(call) if statement else None
        if found is not None:
            if node.target in statements.ORDERED:
                self.ordered.append(row(node, "goes by the places of tokens in the row"))
            return found
        tokens = any(self._depends(size) for meta in metas for size in meta.shape)
        if all(f.constant for f in flows) and not tokens:
            return Flow(everywhere=numbers.everywhere(call))
        return self._by_rule(call)

    def _declared(self, call: FlowCall) -> Flows | None:
        """What another package states of its op. Raises OpContractError."""
        statement = declared(call.node.target).flow
        found = ask(call.node.target, "flow", statement, call) if statement else None
        wanted = len(call.view.outputs) if isinstance(whole_meta(call.node), tuple) else None
        given = len(found) if isinstance(found, tuple) else None
        flows = found if isinstance(found, tuple) else (found,)
        if found is not None and (given != wanted or not all(isinstance(flow, Flow) for flow in flows)):
            count = "a Flow" if wanted is None else f"a tuple of {wanted} Flows"
            raise OpContractError(str(call.node.target), f"its flow statement returned {found!r}, not {count} or None")
        return found

    def _first_trained(self, operands: list[Any]) -> bool:
        return bool(operands) and operands[0][0] in self.trained

    def _flow(self, value: tuple[fx.Node, int]) -> Flow:
        found = self.flows[value[0]]
        return found[value[1]] if isinstance(found, tuple) else found

    def _uses_length(self, node: fx.Node) -> bool:
        """Whether an argument that is no size depends on the number of tokens."""
        allowed = SIZES.get(node.target, ())
        used = [value for i, value in enumerate(node.args) if i not in allowed]
        found: list[fx.Node] = []
        fx.node.map_arg((used, node.kwargs), found.append)
        return any(self._depends(size_of(n)) for n in found if is_size(n))

    def _of_sums(self, call: FlowCall, first: Flow) -> Flow:
        """Sums over documents stay sums under linear ops."""
        target, kinds = call.node.target, [f.kind for f in call.flows]
        scaled = target in (aten.mul.Tensor, aten.div.Tensor) and kinds[0] == "sum" and call.flows[1:2] != ()
        if target is aten.mul.Tensor and kinds[-1] == "sum" and call.flows[0].constant:
            scaled = True
        if target in (aten.mul.Tensor, aten.div.Tensor) and len(kinds) == 1:
            linear = True  # a number of the program
        elif scaled:
            others = [f for f in call.flows if f.kind != "sum"]
            linear = len(others) == 1 and others[0].constant and (target is aten.mul.Tensor or kinds[0] == "sum")
        elif target is aten._to_copy.default:
            linear = call.meta.dtype.is_floating_point
        else:
            linear = target in LINEAR and all(f.kind == "sum" or f.everywhere == 0 for f in call.flows)
            linear = linear and not (target in (aten.add.Tensor, aten.sub.Tensor) and len(kinds) == 1)
        if not linear or any(self._depends(size) for size in call.meta.shape):
            return row(first.origin or call.node, "sums up the tokens of the row, and more than a sum is made of it")
        zero = all(f.padded == 0 or f.everywhere == 0 for f in call.flows if not f.constant or f.everywhere == 0)
        counts = next((f for f in call.flows if f.kind == "sum" and f.padded != 0), first)  # a term that counts padding
        return Flow("sum", padded=0.0 if zero else None, origin=counts.origin)

    def _by_rule(self, call: FlowCall) -> Flows:
        """What the op's sharding rule says of a cut along all token dims at once."""
        numbered = any(f.kind == "number" for f in call.flows)
        loops = self._loops(call)
        if isinstance(loops, Flow):
            return loops
        results = []
        for j, meta in enumerate(tensor_metas(call.node)):
            results.append(CONSTANT if meta is None else self._result(call, loops, j, meta))
        if numbered and call.node.target in MOVES:
            if call.meta.dtype not in (torch.int64, torch.int32):
                return row(call.node, "rounds the numbers of documents")
            results = [replace(f, kind="number") if f.kind == "same" else f for f in results]
        return tuple(results) if isinstance(whole_meta(call.node), tuple) else results[0]

    def _loops(self, call: FlowCall) -> list[Option] | Flow:
        """One option of the rule for each loop that walks tokens; a flow of the row if there is none for some dim."""
        rule = rule_of(call.node.target)
        unknown = row(call.node, "mixes tokens, or is not known to keep them apart")
        if rule is None:
            return unknown
        loops: list[Option] = []
        for i, flow in enumerate(() if call.node.target in UNREAD else call.flows):
            for shard in flow.dims:
                if any(loop.inputs[i] == shard for loop in loops):
                    continue
                found = [o for o in rule.cuts(call.view, DEGREE, (False, i), shard) if o.inputs[i] == shard]
                if not found:
                    return unknown
                loops.append(found[0])
        for j, meta in enumerate(tensor_metas(call.node)):
            for d, size in enumerate(meta.shape if meta else ()):
                if not self._depends(size) or any(_dim(loop.outputs[j]) == d for loop in loops):
                    continue
                found = rule.cuts(call.view, DEGREE, (True, j), Shard(d))
                if not found:
                    return unknown
                loops.append(found[0])
        for loop in loops:
            for i, placed in enumerate(loop.inputs):
                if isinstance(placed, Partial) or (isinstance(placed, Shard) and placed not in call.flows[i].dims):
                    return unknown
        return loops

    def _result(self, call: FlowCall, loops: list[Option], j: int, meta: TensorMeta) -> Flow:
        """The flow of result j from the loops that walk tokens."""
        made = [loop.outputs[j] for loop in loops]
        dims = tuple(sorted((p for p in made if isinstance(p, Shard)), key=lambda s: s.dim))
        summed = [loop for loop in loops if isinstance(loop.outputs[j], Partial)]
        mixes = row(call.node, "mixes tokens, or is not known to keep them apart")
        if any(loop.outputs[j] != Partial() for loop in summed) or len(dims) > 2 or len(set(dims)) != len(dims):
            return mixes
        if any(not _is_whole(meta.shape[s.dim], s, self.token) for s in dims):
            return mixes
        if summed:
            return self._summed(call, loops, summed, dims, mixes)
        known = numbers.everywhere(call)
        padded = numbers.padded(call) if len(dims) <= 1 else None
        self._note(call.node, unusable.result(call, Flow(dims=dims, everywhere=known, padded=padded)))
        infinite = pairs.may_be_infinite(call, dims)
        inside = not infinite and pairs.stay_inside(call, dims)
        return Flow(dims=dims, inside=inside, infinite=infinite, everywhere=known, padded=padded)

    def _summed(
        self, call: FlowCall, loops: list[Option], summed: list[Option], dims: tuple[Shard, ...], mixes: Flow
    ) -> Flow:
        """A result that is a sum over tokens."""
        if len(summed) == 1 and not dims:
            nothing = call.node.target in _CONTRACTIONS and numbers.contracts_to_zero(call)
            if self.question == "padding":
                # Without padding the sum is what it was: the value does not depend on the padding.
                return CONSTANT if nothing else row(call.node, "sums up all tokens, padding included")
            return Flow("sum", padded=0.0 if nothing else None, origin=call.node)
        # A sum over keys within the document: where an operand is zero for other documents' keys.
        contraction = call.node.target in _CONTRACTIONS or call.node.target is own.embedding_backward.default
        contraction = contraction and not any(flow.infinite for flow in call.flows)
        parallel = [loop for loop in loops if loop not in summed]
        for i, flow in enumerate(call.flows):
            walked = {loop.inputs[i] for loop in summed} & set(flow.dims)
            with_query = {loop.inputs[i] for loop in parallel} & set(flow.dims)
            if contraction and flow.inside and len(walked | with_query) == 2 and (with_query or len(summed) == 2):
                inside = all(f.inside for f in call.flows)
                return Flow(dims=dims, inside=inside) if dims else Flow("sum", origin=call.node)
        return mixes

    # ------------------------------------------------------------------------------------------------- results
    def hazard(self) -> Flow | None:
        """The first result that is not what it must be."""
        for node, out in zip(self.logical.results, self.logical.outputs, strict=True):
            if out.kind not in ("loss", "value", "buffer"):
                continue
            flow: Any = self.flows.get(node, row(node, "depends on a gradient"))
            if flow.kind == "row":
                return flow
            if not self._is_wanted(flow, out.kind, node):
                is_metric = out.kind == "loss" and out.fqn != "loss"
                why = f"gives a metric {out.fqn!r} that is not a sum over tokens" if is_metric else _UNWANTED[out.kind]
                return row(flow.origin or node, why)
        return None

    def _is_wanted(self, flow: Flow, kind: str, node: fx.Node) -> bool:
        if kind == "loss" and self.question == "documents":
            return flow.kind == "sum"
        if kind == "value":
            whole = all(tensor_of(node).shape[s.dim] == self.token for s in flow.dims)
            return flow.constant or (flow.kind == "same" and whole) or (flow.kind == "sum" and flow.padded == 0)
        return flow.constant


_UNWANTED = {
    "loss": "gives a loss that is not a sum over tokens",
    "value": "gives a value in which padding cannot be cut off",
    "buffer": "writes what depends on the tokens into a buffer",
}


def _dim(placement: Any) -> int | None:
    return placement.dim if isinstance(placement, Shard) else None


def _is_whole(size: Size, shard: Shard, token: sympy.Symbol) -> bool:
    """Whether a dim is the tokens times a number, each section too: a cut at any token is a cut of the dim."""
    times = sympy.sympify(size) / token
    number = times.subs(dict.fromkeys(times.free_symbols - {token}, OTHER_DIM))
    return bool(number.is_Integer) and len(set(shard.sections)) <= 1 and int(number) % (len(shard.sections) or 1) == 0


__all__ = ["PADDING", "TokenFlow", "in_words", "padding_of", "token_flow"]
