"""Layouts of a model under strategies without lowering it, pipeline stages included.

The tensor-parallel placement of each parameter is the one that `annotate` chooses. Repeated layers are placed alike, so
a model with many layers is captured with its first two. On meta device nothing is ever allocated.

Stages begin at the layers that `cut(...)` names; without, layers are split evenly over the stages, the first ones take
one more (a lowered graph balances predicted cost instead, which may move a boundary by a layer). What is defined before
the layers (embeddings) belongs to the first stage, what comes after them (final norm, head) to the last. A tied weight
lies on both.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fxpar.annotate import annotate
from fxpar.errors import LayoutError
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.fqn import starred
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.mesh import Mesh
from fxpar.ir.node_meta import dist_of
from fxpar.ir.strategy import SINGLE, USES, Strategy
from fxpar.passes.zero_shard import shard_over
from fxpar.switch.layout import ParamLayout, PlacedParam

_FIRST_NUMBER = re.compile(r"^(.*?)\.(\d+)\.")
LossFn = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class ParamInfo:
    """A parameter of the whole model. `layers` are the layers it belongs to: -1 before all, `count` after all."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layers: tuple[int, ...]


@dataclass
class ModelShapes:
    """What layouts are computed from: `params` of the whole model in order, and a captured graph (maybe cut short)."""

    name: str
    params: dict[str, ParamInfo]
    layer_count: int
    logical: LogicalGraph
    by_tp: dict[Strategy, dict[tuple[str, tuple[int, ...]], DistConfig]] = field(default_factory=dict)

    def layout(self, strategy: Strategy) -> ParamLayout:
        """The layout that the graph of `strategy` computes with (zero3: that it stores).

        Raises LayoutError if there are fewer layers than stages or a cut is no layer, NotYetError for axes that nothing
        places yet.
        """
        stages = strategy.stages
        if stages > 1 and self.layer_count < stages:
            raise LayoutError(str(strategy), f"{self.name} has {self.layer_count} layers for {stages} pipeline stages")
        starts = self._starts(strategy)
        placed = self._placements(strategy)
        params = {}
        for fqn, info in self.params.items():
            dist = placed[starred(fqn), info.shape]
            owners = sorted({_stage_of(layer, starts) for layer in info.layers})
            copies = dict.fromkeys(
                _on_mesh(dist, strategy.of_stage(stage).mesh, info.dtype, strategy) for stage in owners
            )
            params[fqn] = PlacedParam(info.shape, info.dtype, tuple(copies))
        return ParamLayout(str(strategy), strategy.world, params)

    def _starts(self, strategy: Strategy) -> list[int]:
        """First layer of each stage."""
        cuts = strategy.pipeline.cuts
        if not cuts:
            return stage_starts(self.layer_count, strategy.stages)
        starts = [0]
        for cut in cuts:
            number = cut.rpartition(".")[2]
            if not number.isdecimal() or not starts[-1] < int(number) < self.layer_count:
                raise LayoutError(str(strategy), f"{cut!r} is no layer of {self.name} behind the cut before it")
            starts.append(int(number))
        return starts

    def _placements(self, strategy: Strategy) -> dict[tuple[str, tuple[int, ...]], DistConfig]:
        """The placement on the tp axis by FQN pattern and shape."""
        axes = tuple(axis for axis in strategy.axes if USES[axis[0]] in ("weights", "experts"))
        alone = replace(strategy, axes=axes or SINGLE.axes, zero=0)
        if alone not in self.by_tp:
            graph = annotate(self.logical, alone)
            self.by_tp[alone] = {
                (starred(i.fqn), tuple(map(int, i.meta.shape))): dist_of(node)
                for i, node in zip(graph.inputs, graph.placeholders, strict=True)
                if i.kind == "param"
            }
        return self.by_tp[alone]


def stage_starts(layers: int, stages: int) -> list[int]:
    """First layer of each stage; the first `layers % stages` stages have one layer more."""
    each, more = divmod(layers, stages)
    return [stage * each + min(stage, more) for stage in range(stages)]


def _stage_of(layer: int, starts: list[int]) -> int:
    return max(0, sum(start <= layer for start in starts) - 1)


def _on_mesh(dist: DistConfig, mesh: Mesh, dtype: torch.dtype, strategy: Strategy) -> DistConfig:
    """A placement over tp, on the mesh of a stage."""
    placed = replace(dist, mesh=mesh, dtype=dtype)
    if strategy.zero == 3 and strategy.data_axes and dist.ndim:
        placed = shard_over(placed, ".".join(strategy.data_axes))
    return placed


def model_shapes(model: nn.Module, loss_fn: LossFn, example_batch: Mapping[str, Tensor], name: str) -> ModelShapes:
    """Read the shapes of `model` and capture it, its repeated layers cut to two meanwhile. Raises what capture
    raises.
    """
    from fxpar.tracer import capture  # loads Dynamo: a second that layouts of known shapes do not wait for

    prefix, layers = _repeated_layers(model)
    params = _read_params(model, prefix, len(layers))
    kept = _kept_layers(layers)
    if kept < len(layers):
        with _cut(model, prefix, layers, kept):
            logical = capture(model, loss_fn, example_batch, name=name)
    else:
        logical = capture(model, loss_fn, example_batch, name=name)
    return ModelShapes(name, params, len(layers), logical)


def graph_shapes(logical: LogicalGraph) -> ModelShapes:
    """The same from a graph of the whole model. Its repeated layers are the numbered modules with most parameters."""
    sizes: dict[str, int] = defaultdict(int)
    numbers: dict[str, set[int]] = defaultdict(set)
    infos = list(logical.params())
    for info in infos:
        match = _FIRST_NUMBER.match(info.fqn)
        if match:
            sizes[match[1]] += math.prod(map(int, info.meta.shape))
            numbers[match[1]].add(int(match[2]))
    repeated = [prefix for prefix in sizes if len(numbers[prefix]) > 1]
    prefix = max(repeated, key=sizes.__getitem__, default="")
    count = 1 + max(numbers[prefix]) if prefix else 0
    layer, params = -1, {}
    for info in infos:
        places = []
        for fqn in (info.fqn, *info.aliases):
            match = _FIRST_NUMBER.match(fqn)
            if match and match[1] == prefix:
                layer = int(match[2])
                places.append(layer)
            else:
                places.append(-1 if layer < 0 and fqn == info.fqn else count)
        params[info.fqn] = ParamInfo(tuple(map(int, info.meta.shape)), info.meta.dtype, tuple(places))
    return ModelShapes(logical.name, params, count, logical)


def _repeated_layers(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """The ModuleList (or Sequential) with the most parameters, and its FQN; an empty one if there is none."""
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1]
    if not lists:
        return "", []
    name, found = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    return name, list(found)


def _kept_layers(layers: list[nn.Module]) -> int:
    """How many layers show all there is: two, if every later one has the parameters of one of these."""
    shapes = [sorted((name, tuple(p.shape)) for name, p in layer.named_parameters()) for layer in layers]
    return 2 if all(shape in shapes[:2] for shape in shapes) else len(layers)


class _cut:
    """Within the block, `model` has only the first `kept` layers; modules and parameters are the same objects."""

    def __init__(self, model: nn.Module, prefix: str, layers: list[nn.Module], kept: int) -> None:
        parent, _, self.attribute = prefix.rpartition(".")
        self.owner = model.get_submodule(parent)
        self.whole = getattr(self.owner, self.attribute) if self.attribute else None
        self.layers, self.kept = layers, kept

    def __enter__(self) -> None:
        if self.whole is not None:
            setattr(self.owner, self.attribute, type(self.whole)(*self._arguments()))

    def _arguments(self) -> list:
        first = self.layers[: self.kept]
        return [first] if isinstance(self.whole, nn.ModuleList) else first

    def __exit__(self, *error: object) -> None:
        if self.whole is not None:
            setattr(self.owner, self.attribute, self.whole)


def _read_params(model: nn.Module, prefix: str, layer_count: int) -> dict[str, ParamInfo]:
    """Parameters in order, a tied one once, with all places where it is used."""
    found: dict[int, tuple[str, nn.Parameter, list[int]]] = {}
    layer, head = -1, f"{prefix}." if prefix else ""
    for fqn, param in model.named_parameters(remove_duplicate=False):
        if layer_count and fqn.startswith(head):
            layer = int(fqn[len(head) :].split(".")[0])
            place = layer
        else:
            place = -1 if layer < 0 else layer_count
        found.setdefault(id(param), (fqn, param, []))[2].append(place)
    return {fqn: ParamInfo(tuple(p.shape), p.dtype, tuple(places)) for fqn, p, places in found.values()}
