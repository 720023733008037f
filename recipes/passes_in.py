"""A pass of torchtitan's graph_trainer as one of fxpar's, to be named in the `passes` of `fxpar.lower`.

Such a pass is `(gm, example_inputs) -> gm` and reads `meta["val"]` (fake tensors), `meta["custom"]["module_fqn"]` and
`meta["autograd_backward"]`. It gets a copy of the lowered graph with these, on symbolic sizes; what it returns is taken
back with fxpar's metadata, once it has been found to be the same program from outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import sympy
import torch
from torch import fx, nn

from fxpar.errors import ForeignPassError, VerifyError
from fxpar.ir.exec_graph import collective_kind
from fxpar.ir.graph import AnnotatedGraph, TensorMeta
from fxpar.ir.node_meta import dist_of, fqn_of, is_backward, is_size, local_meta, tensor_of
from fxpar.ir.pass_base import GraphPass, Tier
from fxpar.ir.serialize import OpOverload
from fxpar.lowering.verify import verify
from fxpar.torch_api.symbolic import FakeWorld, function_of

ForeignPass = Callable[..., Any]
_OURS, _THEIRS = "fxpar", "graph_trainer"  # keys of metadata under which either keeps what is the other's
_PHASES = ("prologue", "body", "epilogue")


@dataclass(frozen=True)
class AsFxparPass:
    """A graph_trainer pass in fxpar's ladder; see `as_fxpar_pass`."""

    run: ForeignPass
    name: str
    tier: Tier = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        _check_lowered(graph, self.name)
        fakes = Fakes(graph)
        copied = _copied(graph.graph, fakes)
        known = set(copied.nodes)
        module = fx.GraphModule(nn.Module(), copied)
        examples = [node.meta.get("val") for node in copied.find_nodes(op="placeholder")]
        guards = len(fakes.world.guards)
        result = self.run(module, examples)
        if not isinstance(result, fx.GraphModule):
            raise self._error(f"it returned a {type(result).__name__}", "A pass returns a GraphModule")
        for guard in fakes.world.guards[guards:]:
            if not _is_always_true(guard.condition):
                raise self._error(
                    f"it decided on {guard.condition}, which holds for some batches only",
                    "Use a pass that keeps sizes open",
                )
        _complete(result.graph, known, fakes, self._error)
        _check_ends(graph, result.graph, self._error)
        before, graph.graph = graph.graph, result.graph
        try:
            verify(graph, self.name)
        except VerifyError as error:
            graph.graph = before
            raise self._error(str(error), "The graph was left as it was") from error

    def _error(self, why: str, instead: str) -> ForeignPassError:
        return ForeignPassError(self.name, why, instead)


def as_fxpar_pass(pass_: ForeignPass, name: str | None = None, *, tier: Tier = "exact") -> GraphPass:
    """Adapt `(gm, example_inputs) -> gm`, options bound with `functools.partial`, to the passes of `fxpar.lower`.

    Put it behind `lower_collectives`: it works on local tensors and functional collectives. `name` is by default that
    of the function. Say `tier="numeric"` for a pass that may change rounding.

    At the call raises ForeignPassError when the graph is not lowered yet, and when the pass returns something else than
    a graph module, changes what goes in or comes out, calls submodules, or decides for itself how long a batch is.
    """
    if not callable(pass_):
        raise ForeignPassError(str(name or type(pass_).__name__), "it cannot be called", "Give a function (gm, inputs)")
    function = pass_.func if isinstance(pass_, functools.partial) else pass_
    adapted = AsFxparPass(pass_, name or getattr(function, "__name__", type(function).__name__), tier)
    return cast(GraphPass, adapted)  # its instances have the name that other passes have on their class


class Fakes:
    """Fake tensors for the shapes of a graph, on one symbolic size per dynamic dim."""

    def __init__(self, graph: AnnotatedGraph) -> None:
        self.world = FakeWorld(lambda: None)
        self.sizes: dict[Any, Any] = {d.symbol: self.world.symbol(d.name, max(2, d.example)) for d in graph.dims}
        self._ours: dict[Any, Any] = {self.world.expression(size): symbol for symbol, size in self.sizes.items()}

    def tensor(self, meta: Any) -> Any:
        """A fake tensor (or several) of this shape; None where a size cannot be written as torch writes it."""
        if isinstance(meta, tuple):
            return [self.tensor(m) for m in meta]
        if not isinstance(meta, TensorMeta):
            return None
        shape = [self._size(size) for size in meta.shape]
        return None if None in shape else self.world.empty(shape, meta.dtype)

    def _size(self, size: Any) -> Any:
        if not isinstance(size, sympy.Basic):
            return size
        if size not in self.sizes:
            self.sizes[size] = made = self._convert(size)
            if isinstance(made, torch.SymInt):
                self._ours[self.world.expression(made)] = size
        return self.sizes[size]

    def _convert(self, size: Any) -> Any:
        if size.is_Integer:
            return int(size)
        whole, degree = size.as_numer_denom()  # a cut dim is T/2, which is exact
        if degree != 1:
            made = self._size(whole)
            return None if made is None or not degree.is_Integer else made // int(degree)
        apply = function_of(size)
        parts = [self._size(part) for part in size.args]
        if apply is None or not parts or None in parts:
            return None
        return apply(lambda function, *operands: function(*operands), *parts)

    def meta(self, value: Any) -> Any:
        """The other way round."""
        if isinstance(value, torch.Tensor):
            return TensorMeta(tuple(map(self.size, value.shape)), value.dtype)
        return tuple(map(self.meta, value)) if isinstance(value, list | tuple) else None

    def size(self, value: Any) -> Any:
        """A symbolic size in terms of the graph's own dims."""
        found = self.world.expression(value)
        return found.xreplace(self._ours) if isinstance(found, sympy.Basic) else found


def _is_always_true(condition: Any) -> bool:
    """Sizes are compared with sys.maxsize, which stands for the end of a dim, and are smaller."""
    return isinstance(condition, sympy.Le | sympy.Lt) and bool(sympy.Ge(condition.rhs, 2**62) == sympy.true)


def _check_lowered(graph: AnnotatedGraph, name: str) -> None:
    for node in graph.graph.nodes:
        if node.op == "call_function" and not is_size(node) and "local" not in node.meta:
            raise ForeignPassError(
                name, f"%{node.name} is not lowered to local tensors yet", "Put the pass behind lower_collectives"
            )


def _copied(graph: fx.Graph, fakes: Fakes) -> fx.Graph:
    """The graph with graph_trainer's metadata, and ours under one key, which goes along when a pass copies a node."""
    copy = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        new = made[node] = copy.node_copy(node, made.__getitem__)
        value = _integer(new) if is_size(node) else fakes.tensor(_meta(node))
        new.meta = {**node.meta.get(_THEIRS, {}), _OURS: (node.meta, value)}
        if value is not None:
            new.meta["val"] = value
        if node.op == "call_function":
            new.meta["custom"] = {**new.meta.get("custom", {}), "module_fqn": fqn_of(node)}
            if is_backward(node):
                new.meta["autograd_backward"] = True
    return copy


def _integer(node: fx.Node) -> Any:
    """The symbolic value of a node that computes a size; None if an operand's is not known."""
    known = [operand.meta.get("val") for operand in node.all_input_nodes]
    if node.op != "call_function" or any(value is None for value in known):
        return None
    args: Any = fx.node.map_arg(node.args, lambda operand: operand.meta["val"])
    if node.target is torch.ops.aten.sym_size.int:
        return args[0].shape[args[1]]
    return node.target(*args) if not isinstance(node.target, OpOverload) else None  # type: ignore[operator]


def _meta(node: fx.Node) -> Any:
    return local_meta(node)


def _complete(graph: fx.Graph, known: set[fx.Node], fakes: Fakes, error: Callable[[str, str], Exception]) -> None:
    """Our metadata on every node: what it had, or had that it was copied from; of another new node what is known."""
    for node in graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise error(f"it made %{node.name}, a {node.op}", "A program of fxpar has calls of ops and functions only")
        theirs = node.meta
        ours, given = theirs.get(_OURS, ({}, None))
        node.meta = dict(ours)
        if node.op != "call_function":
            continue
        if node not in known:
            node.meta.pop("bucket", None)  # a copy is made to run at another time
            node.meta.pop("dist_in", None)  # and may have other operands
            node.meta.setdefault("phase", _phase(node))
            node.meta.setdefault("fqn", theirs.get("custom", {}).get("module_fqn", ""))
            node.meta.setdefault("source", None)
        if not ours or theirs.get("val") is not given:
            node.meta.update(_shape(node, theirs.get("val"), fakes, error))
            node.meta.pop("dist", None)
        node.meta["backward"] = bool(theirs.get("autograd_backward"))
        extra = {key: value for key, value in theirs.items() if key not in (_OURS, "val", "autograd_backward")}
        node.meta[_THEIRS] = extra  # tags of one of its passes that the next one reads


def _shape(node: fx.Node, value: Any, fakes: Fakes, error: Callable[[str, str], Exception]) -> dict[str, Any]:
    if isinstance(value, int | torch.SymInt):
        return {"sym": fakes.size(value)}
    meta = fakes.meta(value)
    if meta is None:
        raise error(f"%{node.name} ({node.target}) is new and has no meta['val']", "Let the pass set it")
    found = {"tensor": meta, "local": meta}
    if collective_kind(node):
        group = next(arg for arg in node.args if isinstance(arg, str) and arg.startswith("@"))
        found["comm"] = (group[1:], _meta(node.all_input_nodes[0]))
    return found


def _phase(node: fx.Node) -> str:
    """The latest phase of the operands; of a node that has inputs only, the earliest of its users."""

    def phases(nodes: Iterable[fx.Node]) -> list[int]:
        metas = [n.meta.get(_OURS, (n.meta, None))[0] for n in nodes if n.op == "call_function"]
        return [_PHASES.index(meta["phase"]) for meta in metas if meta.get("phase") in _PHASES]

    return _PHASES[max(phases(node.all_input_nodes), default=min(phases(node.users), default=1))]


def _check_ends(graph: AnnotatedGraph, result: fx.Graph, error: Callable[[str, str], Exception]) -> None:
    """The same inputs in the same order, and results that lie as before. New nodes that are results lie as the old."""
    inputs = list(result.find_nodes(op="placeholder"))
    names, expected = [str(n.target) for n in inputs], [str(n.target) for n in graph.placeholders]
    if names != expected:
        raise error(f"its graph takes {len(names)} inputs, {_difference(names, expected)}", "Keep the inputs")
    (output,) = result.find_nodes(op="output")
    results = output.args[0] if isinstance(output.args[0], list | tuple) else (output.args[0],)
    if len(results) != len(graph.results):
        raise error(f"its graph has {len(results)} results instead of {len(graph.results)}", "Keep the results")
    for new, old, info in zip(results, graph.results, graph.outputs, strict=True):
        what = f"result {info.kind} {info.fqn!r}"
        if not isinstance(new, fx.Node) or _meta(new) != _meta(old):
            shape = _meta(new) if isinstance(new, fx.Node) else repr(new)
            raise error(f"{what} is {shape} instead of {_meta(old)}", "Keep the results")
        if "dist" not in new.meta:
            new.meta.update(tensor=tensor_of(old), dist=dist_of(old))
        if dist_of(new) != dist_of(old) or tensor_of(new) != tensor_of(old):
            raise error(
                f"{what} is %{new.name}, which is placed as {new.meta['dist']} instead of {old.meta['dist']}",
                "Keep the results",
            )
    output.args = (tuple(results),)


def _difference(names: list[str], expected: list[str]) -> str:
    for index, (name, wanted) in enumerate(zip(names, expected, strict=False)):
        if name != wanted:
            return f"number {index} of which is {name!r} instead of {wanted!r}"
    return f"not {len(expected)}"


__all__ = ["AsFxparPass", "as_fxpar_pass"]
