"""`torch.compile(model, backend="fxpar", options={"strategy": "dp2.tp2"})`: a training loop as it is, in parallel.

For a plain loop on every rank of an initialised process group, as written for `DistributedDataParallel`, which this
replaces: every rank holds all weights (equal on all ranks) and its own optimizer; each data-parallel replica feeds a
batch of its own, all ranks of one replica feed the same. Forward and backward run under the strategy on pieces that
are cut from the weights without traffic. Values come back whole, gradients whole and averaged over replicas. Dropout
draws from `options["seed"]` and a count of calls, not from torch's generator. New running statistics of batch norms
are averaged over replicas.

Weights that are stored sharded, and strategies that change from batch to batch, are what `fxpar.parallelize` is for.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from fxpar.errors import BackendOptionError, SpecializedShapeError, nearest, warn
from fxpar.ir.exec_graph import PlainGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower_forward
from fxpar.runtime.bound import Backend
from fxpar.runtime.plain import PlainRunner
from fxpar.tracer import capture_forward
from fxpar.tracer.dynamic import BATCH, TOKENS
from fxpar.transport.groups import shared_groups

OPTIONS = ("strategy", "overrides", "seed", "compile")
_BACKENDS = ("eager", "inductor")
_RANDOM = ("dropout", "rand", "bernoulli", "normal")
_STEP = re.compile(r"_(?:modules|parameters|buffers)\['([^']+)'\]")
_WORD = re.compile(r"\['(\w+)'\]")
_CAPTURING = threading.RLock()  # capture changes global hooks for a while


@dataclass(frozen=True)
class Options:
    """`options` of `torch.compile`, checked."""

    strategy: Strategy
    seed: int = 0
    compile: Backend = "eager"

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> Options:
        """Raises BackendOptionError, and the errors of `Strategy.parse`."""
        given = dict(options or {})
        for name in given:
            if name not in OPTIONS:
                raise BackendOptionError(name, f"there is none of this name{nearest(name, OPTIONS) or '.'}")
        strategy = given.get("strategy")
        if strategy is None:
            raise BackendOptionError("strategy", "it is missing")
        if not isinstance(strategy, Strategy):
            if not isinstance(strategy, str):
                raise BackendOptionError("strategy", f"it is a {type(strategy).__name__}, not a text")
            strategy = Strategy.parse(strategy, overrides=given.get("overrides"))
        if strategy.zero:
            why = "weights are whole on every rank here, so there is nothing for ZeRO to shard; use fxpar.parallelize"
            raise BackendOptionError("strategy", why)
        seed, compile = given.get("seed", 0), given.get("compile", "eager")
        if not isinstance(seed, int):
            raise BackendOptionError("seed", f"it is a {type(seed).__name__}, not an integer")
        if compile not in _BACKENDS:
            raise BackendOptionError("compile", f"it is {compile!r}, not one of {', '.join(_BACKENDS)}")
        return cls(strategy, seed, cast(Backend, compile))


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend; see the module docstring.

    Options: `strategy` (text or Strategy; required), `overrides` (FQN glob -> placement), `seed` (of dropout), and
    `compile` ("eager" or "inductor", what runs the pieces).

    Each graph that Dynamo cuts the model into is captured and lowered when it first runs; one without parameters and
    random numbers runs as it is, alike on all ranks of a replica. Raises BackendOptionError and WorldSizeError here,
    and those of `capture_forward`, `lower_forward` and PlainRunner at the first run.
    """
    if mode is not None:
        raise BackendOptionError("mode", "modes are inductor's; there is options={'compile': 'inductor'}")
    checked = Options.parse(options)
    _check_world(checked.strategy)
    slots = _slots(gm, example_inputs)
    if not any(slot.kind == "param" for slot in slots) and not _is_random(gm):
        return gm.forward
    return _Compiled(gm, tuple(slots), checked)


def _check_world(strategy: Strategy) -> None:
    if dist.is_initialized():
        strategy.check_world(dist.get_world_size())
    elif strategy.world > 1:
        why = f"'{strategy}' needs {strategy.world} ranks; call torch.distributed.init_process_group before the model"
        raise BackendOptionError("strategy", why)


def _is_random(gm: fx.GraphModule) -> bool:
    return any(any(word in str(node.target) for word in _RANDOM) for node in gm.graph.nodes if node.op != "placeholder")


# ------------------------------------------------------------------------------------------------- inputs of a graph
@dataclass(frozen=True)
class _Slot:
    """One input of Dynamo's graph.

    A "size" is dim `dim` of the batch tensor `name`; a "number" is fixed in what is captured. `dims` names the dynamic
    dims of a batch tensor.
    """

    kind: Literal["param", "buffer", "batch", "size", "number"]
    name: str
    dim: int = 0
    dims: tuple[tuple[int, str], ...] = ()


def _slots(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[_Slot]:
    """What each input of the graph is, by its source in the user's program."""
    nodes = gm.graph.find_nodes(op="placeholder")
    symbols = _dim_names(nodes)
    used: set[str] = set()
    slots: list[_Slot] = []
    sizes: dict[str, tuple[str, int]] = {}
    for node, example in zip(nodes, example_inputs, strict=True):
        path, word = _source(node)
        if isinstance(example, nn.Parameter):
            slots.append(_Slot("param", _unique(path or node.name, used)))
        elif not isinstance(example, Tensor) or _is_number(node):
            slots.append(_Slot("number", node.name))
        elif path:
            slots.append(_Slot("buffer", _unique(path, used)))
        else:
            name = _unique(word or node.name, used)
            shape = [str(size) for size in _example(node).shape]
            for d, size in enumerate(shape):
                sizes.setdefault(size, (name, d))
            slots.append(_Slot("batch", name, dims=tuple((d, symbols[s]) for d, s in enumerate(shape) if s in symbols)))
    return [_as_size(slot, node, sizes, symbols) for slot, node in zip(slots, nodes, strict=True)]


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _as_size(slot: _Slot, node: fx.Node, sizes: Mapping[str, tuple[str, int]], symbols: Mapping[str, str]) -> _Slot:
    """A number that is the size of a dynamic dim, as that."""
    text = str(_example(node))
    if slot.kind != "number" or text not in symbols:
        return slot
    name, dim = sizes[text]
    return _Slot("size", name, dim)


def _is_number(node: fx.Node) -> bool:
    """Whether a tensor is a Python number that Dynamo has wrapped."""
    return (
        bool(node.users)
        and not _example(node).shape
        and all(user.op == "call_method" and user.target == "item" for user in node.users)
    )


def _dim_names(nodes: Sequence[fx.Node]) -> dict[str, str]:
    """Symbols of the graph's dynamic sizes -> names of dims: T is the tokens' dim, which cp and sp cut."""
    shapes = [(_example(n), [str(s) for s in _example(n).shape]) for n in nodes if isinstance(_example(n), Tensor)]
    symbols = dict.fromkeys(text for _, shape in shapes for text in shape if not text.isdigit())
    names = {symbol: f"D{i}" for i, symbol in enumerate(symbols)}
    tokens = next((shape[1] for value, shape in shapes if _has_tokens(value) and shape[1] in symbols), None)
    rows = next((shape[0] for _, shape in shapes if shape and shape[0] in symbols and shape[0] != tokens), None)
    if rows is not None:
        names[rows] = BATCH
    if tokens is not None:
        names[tokens] = TOKENS
    return names


def _has_tokens(value: Tensor) -> bool:
    """Ids [B, T] or activations [B, T, D]."""
    is_integer = not value.dtype.is_floating_point and value.dtype != torch.bool
    return (value.dim() == 2 and is_integer) or value.dim() == 3


def _source(node: fx.Node) -> tuple[str, str]:
    """(FQN inside the model, else "", last name) of what an input was in the user's program."""
    argument = node.meta.get("grapharg")
    name = str(argument.source.name) if argument is not None and argument.source is not None else ""
    words = _WORD.findall(name)
    return ".".join(_STEP.findall(name)), words[-1] if words else ""


def _unique(name: str, used: set[str]) -> str:
    found, count = name, 1
    while found in used:
        count += 1
        found = f"{name}_{count}"
    used.add(found)
    return found


# -------------------------------------------------------------------------------------------- the graph as a module
class _Scope(nn.Module):
    """Stands for a module of the user's model: holds its parameters, and runs the nodes that it made."""

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class _Nodes(fx.Interpreter):
    """Runs Dynamo's graph so that capture sees each node inside its module; wrapped numbers are plain ones."""

    def __init__(self, gm: fx.GraphModule, scopes: Mapping[str, nn.Module]) -> None:
        super().__init__(gm)
        self._scopes = scopes

    def run_node(self, n: fx.Node) -> Any:
        where = "" if n.op in ("placeholder", "output", "get_attr") else _scope_of(n)
        return self._scopes[where](super().run_node, n) if where else super().run_node(n)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target == "item" and not isinstance(args[0], Tensor):
            return args[0]
        return super().call_method(target, args, kwargs)


def _scope_of(node: fx.Node) -> str:
    """FQN of the module that a node was traced in."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    text = str(list(stack.values())[-1][0])
    steps = _STEP.findall(text)
    return ".".join(steps) if steps else text.partition("]")[2].lstrip(".")


class _GraphModel(nn.Module):
    """Dynamo's graph with the module tree of the user's model; called with the batch tensors."""

    def __init__(self, gm: fx.GraphModule, slots: Sequence[_Slot], values: Sequence[Any]) -> None:
        super().__init__()
        self._slots, self._values = tuple(slots), tuple(values)
        scopes: dict[str, nn.Module] = {"": self}
        self._interpreter = _Nodes(gm, scopes)
        for node in gm.graph.nodes:
            _make(scopes, _scope_of(node))
        for slot, value in zip(slots, values, strict=True):
            owner, _, name = slot.name.rpartition(".")
            if slot.kind == "param":
                _make(scopes, owner).register_parameter(name, value)
            elif slot.kind == "buffer":
                _make(scopes, owner).register_buffer(name, value)

    def forward(self, **batch: Tensor) -> Any:
        tensors = dict(self.named_parameters(remove_duplicate=False))
        tensors |= dict(self.named_buffers(remove_duplicate=False)) | batch
        arguments = []
        for slot, value in zip(self._slots, self._values, strict=True):
            if slot.kind == "number":
                arguments.append(value.item() if isinstance(value, Tensor) else value)
            else:
                tensor = tensors[slot.name]
                arguments.append(tensor.shape[slot.dim] if slot.kind == "size" else tensor)
        return self._interpreter.run(*arguments)


def _make(scopes: dict[str, nn.Module], fqn: str) -> nn.Module:
    """The scope of this FQN, made if it is not there."""
    if fqn not in scopes:
        parent, _, name = fqn.rpartition(".")
        scopes[fqn] = _Scope()
        _make(scopes, parent).add_module(name, scopes[fqn])
    return scopes[fqn]


# ------------------------------------------------------------------------------------------------------- running it
def _groups(strategy: Strategy, axes: tuple[str, ...]) -> dict[str, str]:
    """Names of the process groups that a graph needs."""
    return shared_groups().names(strategy.mesh, axes) if axes else {}


@dataclass(eq=False)
class _Compiled:
    """What Dynamo calls in place of one graph. `fixed`: it holds for one set of sizes only, and is captured anew for
    others.
    """

    gm: fx.GraphModule
    slots: tuple[_Slot, ...]
    options: Options
    programs: dict[Hashable, PlainGraph] = field(default_factory=dict)
    runners: dict[Hashable, PlainRunner] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)  # by rank
    fixed: bool = False

    def __call__(self, *values: Any) -> Any:
        _check_world(self.options.strategy)
        rank = dist.get_rank() if dist.is_initialized() else 0
        named = {
            kind: {s.name: v for s, v in zip(self.slots, values, strict=True) if s.kind == kind}
            for kind in ("param", "buffer", "batch")
        }
        runner = self._runner(rank, values, named["batch"])
        program, params = runner.program, named["param"]
        local = {
            info.fqn: stored.dist.take(params[info.fqn].detach(), rank)
            for info, stored in zip(program.inputs, program.stored_inputs, strict=True)
            if info.kind == "param"
        }
        trained = [info.fqn for info in program.inputs if info.kind == "param" and info.requires_grad]
        return runner(
            local,
            named["buffer"],
            (),
            named["batch"],
            seed=self._seed(rank),
            on_gradients=lambda grads: None,
            on_buffers=lambda new: _write(named["buffer"], new),
            weights=lambda: tuple(p._version for p in params.values()),
            roots={fqn: params[fqn] for fqn in trained} if torch.is_grad_enabled() else {},
        )

    def _key(self, values: Sequence[Any]) -> Hashable:
        """What a captured graph is good for; Dynamo's guards hold for the rest."""
        numbers = tuple(
            v.item() if isinstance(v, Tensor) else v
            for s, v in zip(self.slots, values, strict=True)
            if s.kind == "number"
        )
        grads = tuple(v.requires_grad for v in values if isinstance(v, Tensor))
        sizes = tuple(tuple(v.shape) if isinstance(v, Tensor) else v for v in values) if self.fixed else ()
        return torch.is_grad_enabled(), numbers, grads, sizes

    def _runner(self, rank: int, values: Sequence[Any], batch: Mapping[str, Tensor]) -> PlainRunner:
        key = self._key(values)
        if (rank, key) not in self.runners:
            with _CAPTURING:
                program = self._program(values, batch)
            key = self._key(values)  # the sizes may have turned out to be fixed
            groups = _groups(program.strategy, program.axes())
            self.runners[(rank, key)] = PlainRunner(program, rank, groups, compile=self.options.compile)
        return self.runners[(rank, key)]

    def _program(self, values: Sequence[Any], batch: Mapping[str, Tensor]) -> PlainGraph:
        """The program for these inputs: found, or captured and lowered."""
        dims = {s.name: dict(s.dims) for s in self.slots if s.kind == "batch" and s.dims}
        if dims and not self.fixed and self._key(values) not in self.programs:
            try:
                self.programs[self._key(values)] = self._lower(values, batch, dims)
            except SpecializedShapeError as error:
                warn(f"each new size of its inputs is captured anew: {error}")
                self.fixed = True
        key = self._key(values)
        if key not in self.programs:
            strategy = self.options.strategy
            if strategy.degree("cp") > 1 or strategy.sp:
                warn(
                    f"all sizes of this graph are fixed, so '{strategy}' has no token dim to cut over cp or sp: every "
                    "rank computes all tokens. Pass dynamic=True to torch.compile, or mark the dim with mark_dynamic"
                )
            self.programs[key] = self._lower(values, batch, None)
        return self.programs[key]

    def _lower(self, values: Sequence[Any], batch: Mapping[str, Tensor], dims: Any) -> PlainGraph:
        model = _GraphModel(self.gm, self.slots, values)
        graph = capture_forward(model, (), dict(batch), dynamic=dims, gradients=torch.is_grad_enabled(), name="graph")
        return lower_forward(graph, self.options.strategy, whole=True)

    def _seed(self, rank: int) -> int:
        """Another one for each call and replica, the same on all ranks of a replica."""
        strategy = self.options.strategy
        call = self.calls[rank] = self.calls.get(rank, -1) + 1
        replica = strategy.mesh.coordinate(rank).get("dp", 0)
        return (self.options.seed << 40) + call * strategy.degree("dp") + replica


def _write(buffers: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for fqn, value in new.items():
            buffers[fqn].copy_(value)


__all__ = ["OPTIONS", "Options", "backend"]
