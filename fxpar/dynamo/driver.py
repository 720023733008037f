"""The backend, and what it puts in place of a graph of Dynamo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from fxpar.dynamo.graph_model import GraphModel
from fxpar.dynamo.inputs import Slot, has_tokens, slots_of
from fxpar.dynamo.options import BackendOptions
from fxpar.errors import BackendOptionError, SpecializedShapeError, warn
from fxpar.ir.axes import REPLICAS
from fxpar.ir.exec_graph import PlainGraph
from fxpar.ir.graph import TOKENS, ForwardGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower_forward
from fxpar.runtime.plain import PlainRunner
from fxpar.torch_api.since_2_13 import all_gather_single
from fxpar.tracer import capture_forward
from fxpar.transport.groups import shared_groups

_CPU = torch.device("cpu")
_RANDOM = ("dropout", "rand", "bernoulli", "normal")
_CAPTURING = threading.RLock()  # capture changes global hooks for a while


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend; see the module docstring.

    Options: `strategy` (text or Strategy) or `strategies` (by the most tokens that each takes), `overrides` (FQN glob
    -> placement), `seed` (of dropout), and `compile` ("eager" or "inductor", what runs the pieces).

    Each graph that Dynamo cuts the model into is captured and lowered when it first runs; one without parameters and
    random numbers runs as it is, alike on all ranks of a replica. Raises BackendOptionError and WorldSizeError here,
    and those of `capture_forward`, `lower_forward` and PlainRunner at the first run.
    """
    if mode is not None:
        raise BackendOptionError("mode", "modes are inductor's; there is options={'compile': 'inductor'}")
    checked = BackendOptions.parse(options)
    for strategy in checked.strategies:
        _check_world(strategy)
    slots = slots_of(gm, example_inputs)
    if not any(slot.kind == "param" for slot in slots) and not _is_random(gm):
        return gm.forward
    return _Compiled(gm, tuple(slots), checked)


def _check_world(strategy: Strategy) -> None:
    if dist.is_initialized():
        strategy.check_world(dist.get_world_size())
    elif strategy.world > 1:
        why = f"'{strategy}' needs {strategy.world} ranks; call torch.distributed.init_process_group before the model"
        raise BackendOptionError("strategy", why)


def _agreed(options: BackendOptions, tokens: int | None, device: torch.device) -> Strategy:
    """The strategy of a call. Raises BackendOptionError on all ranks if they come to different ones, or one to none."""
    number, error = -1, None
    try:
        number = options.number_for(tokens)
    except BackendOptionError as found:
        error = found
    numbers = [number]
    if options.limits and dist.is_initialized():
        everyone = torch.empty(dist.get_world_size(), dtype=torch.int64, device=device)
        mine = torch.tensor(numbers, device=device)
        all_gather_single(everyone, mine, group=shared_groups().world("strategies"))
        numbers = everyone.tolist()
    if error is not None:
        raise error
    if set(numbers) != {number}:
        texts = ", ".join(f"{rank}: {options.strategies[at] if at >= 0 else 'none'}" for rank, at in enumerate(numbers))
        raise BackendOptionError("strategies", f"ranks come to different strategies by their tokens ({texts})")
    return options.strategies[number]


def _is_random(gm: fx.GraphModule) -> bool:
    return any(any(word in str(node.target) for word in _RANDOM) for node in gm.graph.nodes if node.op != "placeholder")


def _groups(strategy: Strategy, axes: tuple[str, ...]) -> dict[str, str]:
    """Names of the process groups that a graph needs."""
    return shared_groups().names(strategy.mesh, axes) if axes else {}


@dataclass(eq=False)
class _Compiled:
    """What Dynamo calls in place of one graph. `fixed`: it holds for one set of sizes only, and is captured again for
    others.
    """

    gm: fx.GraphModule
    slots: tuple[Slot, ...]
    options: BackendOptions
    graphs: dict[Hashable, ForwardGraph] = field(default_factory=dict)
    programs: dict[Hashable, PlainGraph] = field(default_factory=dict)
    runners: dict[Hashable, PlainRunner] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)  # by rank
    fixed: bool = False

    def __call__(self, *values: Any) -> Any:
        tokens, device = self._tokens(values), next((v.device for v in values if isinstance(v, Tensor)), _CPU)
        strategy = _agreed(self.options, tokens, device)
        _check_world(strategy)
        rank = dist.get_rank() if dist.is_initialized() else 0
        named = {
            kind: {s.name: v for s, v in zip(self.slots, values, strict=True) if s.kind == kind}
            for kind in ("param", "buffer", "batch")
        }
        runner = self._runner(strategy, rank, values, named["batch"])
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
            seed=self._seed(strategy, rank),
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

    def _tokens(self, values: Sequence[Any]) -> int | None:
        """Size of the tokens' dim of this call; None if no batch tensor has one."""
        for slot, value in zip(self.slots, values, strict=True):
            if slot.kind != "batch":
                continue
            named = [d for d, name in slot.dims if name == TOKENS]
            if named or has_tokens(value):
                return int(value.shape[named[0] if named else 1])
        return None

    def _runner(self, strategy: Strategy, rank: int, values: Sequence[Any], batch: Mapping[str, Tensor]) -> PlainRunner:
        key = strategy, self._key(values)
        if (rank, key) not in self.runners:
            with _CAPTURING:
                program = self._program(strategy, values, batch)
            key = strategy, self._key(values)  # the sizes may have turned out to be fixed
            groups = _groups(program.strategy, program.axes())
            self.runners[(rank, key)] = PlainRunner(program, rank, groups, compile=self.options.compile)
        return self.runners[(rank, key)]

    def _program(self, strategy: Strategy, values: Sequence[Any], batch: Mapping[str, Tensor]) -> PlainGraph:
        """The program for these inputs: found, or lowered from what was captured for another strategy or now."""
        graph = self._graph(values, batch)
        key = strategy, self._key(values)
        if key not in self.programs:
            is_fixed = not any(slot.dims for slot in self.slots) or self.fixed
            if is_fixed and strategy.token_axes:
                warn(
                    f"all sizes of this graph are fixed, so '{strategy}' has no token dim to cut over cp or sp: every "
                    "rank computes all tokens. Pass dynamic=True to torch.compile, or mark the dim with mark_dynamic"
                )
            program = lower_forward(graph, strategy, whole=True)
            assert isinstance(program, PlainGraph)  # options have no teams
            self.programs[key] = program
        return self.programs[key]

    def _graph(self, values: Sequence[Any], batch: Mapping[str, Tensor]) -> ForwardGraph:
        """What is captured serves all strategies."""
        dims = {s.name: dict(s.dims) for s in self.slots if s.kind == "batch" and s.dims}
        if dims and not self.fixed and self._key(values) not in self.graphs:
            try:
                self.graphs[self._key(values)] = self._capture(values, batch, dims)
            except SpecializedShapeError as error:
                warn(f"each new size of its inputs is captured again: {error}")
                self.fixed = True
        key = self._key(values)
        if key not in self.graphs:
            self.graphs[key] = self._capture(values, batch, None)
        return self.graphs[key]

    def _capture(self, values: Sequence[Any], batch: Mapping[str, Tensor], dims: Any) -> ForwardGraph:
        model = GraphModel(self.gm, self.slots, values)
        return capture_forward(model, (), dict(batch), dynamic=dims, gradients=torch.is_grad_enabled(), name="graph")

    def _seed(self, strategy: Strategy, rank: int) -> int:
        """Another one for each call and replica, the same on all ranks of a replica."""
        call = self.calls[rank] = self.calls.get(rank, -1) + 1
        replica = strategy.mesh.index(rank, REPLICAS)
        return (self.options.seed << 40) + call * max(one.replicas for one in self.options.strategies) + replica


def _write(buffers: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for fqn, value in new.items():
            buffers[fqn].copy_(value)
