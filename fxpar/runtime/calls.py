"""Plain calls of a parallel module, `model(x)` and `loss.backward()`, under one strategy at a time.

As with FSDP2 every data-parallel replica brings a batch of its own, the ranks of one replica the same, and the gradient
is the mean over replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import ParallelizeError, muted_warnings, warn
from fxpar.ir.exec_graph import PlainGraph
from fxpar.ir.graph import ForwardGraph, Size
from fxpar.ir.pipeline_graph import TeamsGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower_forward
from fxpar.precision import Precision, with_precision
from fxpar.runtime.agree import check_same_in_replicas
from fxpar.runtime.compiling import as_printed
from fxpar.runtime.micro import replica_of
from fxpar.runtime.plain import PlainRunner
from fxpar.runtime.runner import Backend
from fxpar.runtime.switching import Switching
from fxpar.switch import ParamLayout, layout_of, plan_large_switch
from fxpar.switch.node_first import cheapest_reduction
from fxpar.switch.terms import gradient_placements
from fxpar.torch_api.tree import flatten, flatten_call, unflatten
from fxpar.tracer.documents import without_surroundings
from fxpar.tracer.forward import call_key, capture_forward
from fxpar.transport import Holding, NodeFirstReduction, Reduction, Switch, reduction_on
from fxpar.transport.groups import ProcessGroups


@dataclass
class _Place:
    """Tensors of a layout, what fills them from home, and the state of the weights when that was done last. `in_arena`:
    others write there too.
    """

    layout: ParamLayout
    tensors: dict[str, Tensor]
    in_arena: bool
    switch: Switch | None = None
    filled: Hashable = None


@dataclass
class _Ready:
    """A forward that can run: its program, which this rank's runner runs or a team's of, where its weights are, and the
    way of its gradients home.
    """

    program: PlainGraph | TeamsGraph
    runner: PlainRunner
    weights: dict[str, Tensor]
    place: _Place
    reduction: Reduction | NodeFirstReduction | None


@dataclass
class PlainCalls:
    """Captures, lowers and runs forwards; `strategy` is the name of the one that calls run under, `captured` the dtypes
    of parameters that the model is written for, `shapes` those of the batch that it is trained with, `noted` the ops
    whose missing rules have been warned of.
    """

    strategies: Mapping[str, Strategy]
    strategy: str
    switching: Switching
    cluster: ClusterSpec
    process_groups: ProcessGroups
    compile: Backend
    seed: int
    epoch: Callable[[], Hashable]
    captured: Mapping[str, torch.dtype]
    shapes: Mapping[str, tuple[Size, ...]]
    precision: Precision
    watched: Callable[[], AbstractContextManager[object]] = nullcontext
    noted: set[str] = field(default_factory=set)
    is_tracing: bool = False
    calls: int = 0
    _logical: dict[Hashable, ForwardGraph] = field(default_factory=dict)
    _ready: dict[Hashable, _Ready] = field(default_factory=dict)
    _places: dict[str, list[_Place]] = field(default_factory=dict)
    _compared: set[str] = field(default_factory=set)  # strategies whose first batch was the same in each replica

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Run plain calls in the block under another strategy of the module."""
        name = as_printed(name)
        if name not in self.strategies:
            raise ParallelizeError(f"using({name!r}): the model was parallelized with {', '.join(self.strategies)}")
        before, self.strategy = self.strategy, name
        try:
            yield
        finally:
            self.strategy = before

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Within the block the module's own forward runs."""
        self.is_tracing = True
        try:
            yield
        finally:
            self.is_tracing = False

    def call(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`module(*args, **kwargs)` under the strategy. Raises PackedCallError, in the first call under
        a strategy ReplicaBatchError, and the errors of capture and lower; ParallelizeError without a strategy on all
        ranks.
        """
        if not self.strategies:
            raise ParallelizeError(
                "each task runs on some ranks only, so there is no strategy for plain calls, model(x)"
            )
        with without_surroundings():
            ready = self._get_ready(module, args, kwargs)
        replica = replica_of(ready.program, ready.runner.rank)
        if self.strategy not in self._compared:
            check_same_in_replicas(flatten_call(args, kwargs)[0], replica, self.strategy, self.process_groups.world())
            self._compared.add(self.strategy)
        self._fill(ready.place)
        self.calls += 1
        buffers = dict(module.named_buffers(remove_duplicate=False))

        def write_back(new: Mapping[str, Tensor]) -> None:
            with torch.no_grad():
                for fqn, value in new.items():
                    buffers[fqn].copy_(value)

        found = ready.runner(
            ready.weights,
            buffers,
            args,
            kwargs,
            # Replicas draw other dropout masks, the ranks of one replica the same.
            seed=((self.seed * 6364136223846793005 + self.calls) * 65_537 + replica) % 2**63,
            on_gradients=lambda grads: self._take_home(ready, grads),
            on_buffers=write_back,
            weights=self.switching.store.version,  # a step of the engine brings the same ones
        )
        return _apart(found, ready.weights) if ready.place.in_arena else found

    def _version(self) -> Hashable:
        """Changes with the weights, and when a mini-batch of the engine may have overwritten compute layouts."""
        return self.switching.store.version(), self.epoch()

    def _take_home(self, ready: _Ready, grads: Mapping[str, Tensor]) -> None:
        """Add the mean over replicas to `.grad`, which only parameters that the loss depends on have."""
        assert ready.reduction is not None
        store, program = self.switching.store, ready.runner.program
        store.attach_gradients(grads.keys())
        replicas = ready.program.strategy.replicas
        mean = {fqn: grad / replicas for fqn, grad in grads.items()} if replicas > 1 else dict(grads)
        for out, stored in zip(program.outputs, program.stored_outputs, strict=True):
            if out.kind == "grad" and out.fqn not in mean:  # the plan of the reduction has them all
                shape = tuple(int(size) for size in stored.local.shape)
                mean[out.fqn] = torch.zeros(shape, dtype=stored.meta.dtype, device=store.device)
        # For this rank's batch size it may be the first run, and for that of another rank not.
        ready.reduction.run(mean, accumulate=True, compared=True)

    def _get_ready(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Ready:
        gradients = torch.is_grad_enabled()
        call = (gradients, call_key(module, args, kwargs, self.shapes))
        if (self.strategy, call) not in self._ready:
            if call not in self._logical:
                with self.tracing(), self.switching.store.shown_without_values(module, self.captured):
                    logical = capture_forward(module, args, kwargs, captured=self.shapes, gradients=gradients)
                self._logical[call] = with_precision(logical, self.precision)
            with muted_warnings():
                program = lower_forward(self._logical[call], self.strategies[self.strategy])
            self._warn_of_new(program.notes)
            self._ready[self.strategy, call] = self._prepare(program, gradients)
        return self._ready[self.strategy, call]

    def _warn_of_new(self, notes: Sequence[str]) -> None:
        """Ops without a sharding rule that training does not have either: rank 0 has warned of the others."""
        for note in notes:
            op = note.partition(" (")[0]
            if "sharding rule" in note and op not in self.noted and self.switching.store.rank == 0:
                warn(note)
            self.noted.add(op)

    def _prepare(self, program: PlainGraph | TeamsGraph, gradients: bool) -> _Ready:
        store, options = self.switching.store, self.switching.options
        teams = program.teams if isinstance(program, TeamsGraph) else (program,)
        tokens = [self.process_groups.names(team.mesh, team.axes()) for team in teams]
        mine = program.team_of(store.rank) if isinstance(program, TeamsGraph) else 0
        plain = teams[mine]
        assert isinstance(plain, PlainGraph)
        runner = PlainRunner(plain, store.rank, tokens[mine], compile=self.compile, watched=self.watched)
        layout, reduction = layout_of(program, self.strategy), None
        place = self._place(layout, gradients)
        placements = gradient_placements(program)
        if placements:
            home = store.home.only(placements)
            name, planner = f"plain {self.strategy}", self.switching.schedule.planner
            plan = cheapest_reduction(placements, home, self.cluster, name, options.staging_bytes, planner)
            plan.verify()
            target = store.home_gradients(placements)
            reduction = reduction_on(plan, store.rank, Holding(home, target), **options.shared())
        weights = {fqn: place.tensors[fqn] for fqn in layout.params}
        return _Ready(program, runner, weights, place, reduction)

    def _place(self, layout: ParamLayout, gradients: bool) -> _Place:
        """Where weights of this layout go: where the training graph has them if it lies alike, else other tensors, made
        once. What waits for a backward stays out of the arena.
        """
        store, schedule = self.switching.store, self.switching.schedule
        known = self._places.setdefault(self.strategy, [])
        if not known:
            in_arena = self.strategy not in schedule.resident
            known.append(_Place(schedule.layouts[self.strategy], store.compute(self.strategy), in_arena))
        for place in sorted(known, key=lambda place: place.in_arena):
            there = place.layout.params
            alike = all(f in there and there[f].copies == param.copies for f, param in layout.params.items())
            if alike and not (place.in_arena and gradients):
                return place
        tensors = {
            fqn: torch.zeros(copy.local_shape(p.shape), dtype=p.dtype, device=store.device)
            for fqn, p in layout.params.items()
            for copy in p.copies
            if store.rank in copy.mesh
        }
        known.append(_Place(layout, tensors, in_arena=False))
        return known[-1]

    def _fill(self, place: _Place) -> None:
        """Bring the weights, unless they are there and nobody has changed any since."""
        if place.filled != (self._version(), place.in_arena and self.switching.fills):
            if place.in_arena:
                self.switching.overwrites(self.strategy)
            place.switch = place.switch or self._switch_to(place)
            place.switch.run()
            place.filled = self._version(), place.in_arena and self.switching.fills

    def _switch_to(self, place: _Place) -> Switch:
        store, options = self.switching.store, self.switching.options
        plan = plan_large_switch(store.wire, place.layout, self.cluster, self.switching.schedule.planner)
        plan.verify()
        sources = [Holding(store.wire, store.home_tensors)]
        return Switch(plan, store.rank, sources, Holding(place.layout, place.tensors), **options.of_switch())


def _apart(values: Any, weights: Mapping[str, Tensor]) -> Any:
    """Copies of what shares memory with weights that others will write over."""
    memory = {weight.untyped_storage().data_ptr() for weight in weights.values()}

    leaves, structure = flatten(values)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() in memory:
            leaves[i] = leaf.clone()
    return unflatten(leaves, structure)
