"""The mesh tab: which rank holds what of each parameter under each strategy and at home, and what a switch moves.

Parameters that lie alike under all strategies are one *kind* (the same weight of all layers of a stage), and layouts
that cut a tensor alike are one *placement*, so that the section stays small for deep models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxpar.cost.cluster import ClusterSpec, usual_cluster
from fxpar.explain.roles import module_roles
from fxpar.ir.axes import STAGES
from fxpar.ir.dtype_names import short_dtype
from fxpar.ir.exec_graph import Program
from fxpar.ir.fqn import numbers_in, starred, with_numbers
from fxpar.ir.strategy import Strategy
from fxpar.store import home_layout, param_specs, wire_layout
from fxpar.switch import ParamLayout, layout_of, plan_switch
from fxpar.switch.layout import PlacedParam
from fxpar.viz.transfers import MOST_RANKS, switch_json
from fxpar.viz.viewed import Viewed

HOME = "home"


@dataclass(frozen=True)
class ParamKind:
    """Parameters of one shape that lie alike everywhere; `pattern` has `*` for the number of the layer."""

    pattern: str
    members: tuple[str, ...]
    placed: tuple[PlacedParam, ...]  # by layout


@dataclass
class Placements:
    """Different ways to cut a tensor, each listed once."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    known: dict[PlacedParam, int] = field(default_factory=dict)

    def number(self, param: PlacedParam, world: int) -> int:
        """The row of a placement."""
        if param not in self.known:
            self.known[param] = len(self.rows)
            self.rows.append(placement_json(param, world))
        return self.known[param]


def mesh_section(views: Sequence[Viewed]) -> dict[str, Any] | None:
    """Where all parameters lie under the strategies, and what every switch between two of them moves. None without
    parameters. Raises ClusterError if the cluster is too small for a strategy.

    `kinds[k]` are parameters, `placements[p]` ways to cut one; `placed[k]` of a layout is the placement of kind k.
    Boxes are flat: start and stop of each dim. The switches to a strategy stand under it, and for one with rules what
    its modules use the ranks for.
    """
    layouts = {view.strategy: layout_of(view.stored or view.graph, view.strategy) for view in views}
    if not layouts or not any(layout.params for layout in layouts.values()):
        return None
    world = max(layout.world for layout in layouts.values())
    cluster = next((view.cluster for view in views if view.cluster is not None), usual_cluster(world))
    cluster.require(world)
    specs = param_specs(views[0].stored or views[0].graph)
    home = home_layout(specs, world)
    everywhere = [*layouts.values(), home]
    kinds, placements = parameter_kinds(everywhere), Placements()
    placed = [
        [placements.number(kind.placed[i], layout.world) for kind in kinds] for i, layout in enumerate(everywhere)
    ]
    switches = _switches(layouts, wire_layout(home, specs), cluster, kinds) if len(layouts) > 1 else {}
    return {
        "cluster": {**cluster.to_json(), "assumed": all(view.cluster is None for view in views)},
        "kinds": [kind_json(kind) for kind in kinds],
        "placements": placements.rows,
        "home": {"world": world, "coordinates": [""] * world, "placed": placed[-1]},
        "by_strategy": {
            view.strategy: {
                "world": layouts[view.strategy].world,
                "coordinates": coordinates(view.graph.strategy),
                "placed": placed[i],
                "switches": switches.get(view.strategy, []),
                "roles": roles_json(view.graph),
            }
            for i, view in enumerate(views)
        },
    }


def roles_json(program: Program) -> list[dict[str, Any]]:
    """Who uses which axes for what, where modules or stages differ: `atoms` inside of a replica, and a row for modules
    that do the same; of stages under strategies of their own one each, by the text of that.
    """
    strategy = program.strategy
    if not (strategy.rules or strategy.by_stage):
        return []
    return [
        {
            "stage": f"stage {number}: {part.strategy}" if strategy.by_stage else "",
            "atoms": list(part.strategy.atoms),
            "modules": [[r.modules, r.count, r.roles, r.zero, r.saves] for r in module_roles(part)],
        }
        for number, part in enumerate(program.placed if strategy.by_stage else (program,))
    ]


def parameter_kinds(layouts: Sequence[ParamLayout]) -> list[ParamKind]:
    """The parameters of the layouts (which are of one model), those together that lie alike in all of them."""
    found: dict[tuple, list[str]] = {}
    for fqn in layouts[0].params:
        placed = tuple(layout.params[fqn] for layout in layouts)
        found.setdefault((starred(fqn), placed), []).append(fqn)
    return [ParamKind(pattern, tuple(members), placed) for (pattern, placed), members in found.items()]


def placement_json(param: PlacedParam, world: int) -> dict[str, Any]:
    """How a tensor is cut: its different pieces (boxes and bytes), and which of them each rank holds (-1: none)."""
    held: list[set[tuple[tuple[int, int], ...]]] = [set() for _ in range(world)]
    for dist in param.copies:
        for rank in dist.mesh.ranks:
            boxes = dist.boxes(rank, param.shape)
            held[rank].update(box for box in boxes if all(start < stop for start, stop in box))
    pieces = sorted({tuple(sorted(boxes)) for boxes in held if boxes})
    number = {piece: i for i, piece in enumerate(pieces)}
    of_rank = [number[tuple(sorted(boxes))] if boxes else -1 for boxes in held]
    return {
        "text": list(dict.fromkeys(dist.describe(param.shape) for dist in param.copies)),
        "pieces": [[[end for side in box for end in side] for box in boxes] for boxes in pieces],
        "bytes": [param.dtype.itemsize * sum(map(_elements, boxes)) for boxes in pieces],
        "of_rank": of_rank,
    }


def _elements(box: tuple[tuple[int, int], ...]) -> int:
    count = 1
    for start, stop in box:
        count *= stop - start
    return count


def coordinates(strategy: Strategy) -> list[str]:
    """Where each rank stands: `pp1 dp0 tp3`."""
    if strategy.by_stage:
        stages = enumerate(strategy.by_stage)
        return [f"{STAGES}{number} {place}".strip() for number, stage in stages for place in coordinates(stage)]
    axes = sorted((axis for axis, degree in strategy.axes if degree > 1), key=lambda axis: axis != STAGES)
    places = [strategy.mesh.coordinate(rank) for rank in range(strategy.world)]
    return [" ".join(f"{axis}{place[axis]}" for axis in axes) for place in places]


def kind_json(kind: ParamKind) -> dict[str, Any]:
    """`drawn`: the dims of a picture, those that any layout cuts first, in order; `cut`: how many those are."""
    shape, dtype = kind.placed[0].shape, kind.placed[0].dtype
    cut = {d for param in kind.placed for dist in param.copies for d in range(len(shape)) if dist.degrees(d) > 1}
    wide = [d for d in range(len(shape)) if shape[d] > 1]
    return {
        "pattern": kind.pattern,
        "title": _title(kind),
        "members": list(kind.members),
        "shape": list(shape),
        "dtype": short_dtype(dtype),
        "bytes": _elements(tuple((0, size) for size in shape)) * dtype.itemsize,
        "drawn": sorted(sorted(wide, key=lambda d: d not in cut)[:2]),
        "cut": len(cut),
    }


def _title(kind: ParamKind) -> str:
    """`layers.0-15.wq.weight` for layers 0 to 15, the pattern where the numbers leave gaps."""
    numbers = [numbers_in(fqn) for fqn in kind.members]
    varying = [i for i in range(len(numbers[0])) if len({found[i] for found in numbers}) > 1]
    if len(kind.members) == 1:
        return kind.members[0]
    ends = [int(found[varying[0]]) for found in (numbers[0], numbers[-1])]
    if len(varying) != 1 or ends[1] - ends[0] != len(kind.members) - 1:
        return kind.pattern
    texts = [f"{ends[0]}-{ends[1]}" if i in varying else numbers[0][i] for i in range(len(numbers[0]))]
    return with_numbers(kind.members[0], texts)


def _switches(
    layouts: Mapping[str, ParamLayout], home: ParamLayout, cluster: ClusterSpec, kinds: Sequence[ParamKind]
) -> dict[str, list[dict[str, Any]]]:
    """The switches to each strategy: from home as at the start of a mini-batch, from each other strategy alone, and
    from both, as behind a group of that strategy that has kept its weights.
    """
    members = [kind.members for kind in kinds]
    found: dict[str, list[dict[str, Any]]] = {}
    for name, target in layouts.items():
        others = [(text, layout) for text, layout in layouts.items() if text != name]
        plans = [(HOME, plan_switch(home, target, cluster))]
        for text, layout in others:
            plans.append((text, plan_switch(layout, target, cluster)))
            if home.world <= MOST_RANKS:
                both = plan_switch(layout, target, cluster, extra_holders=[home])
                plans.append((f"{text} and {HOME}", both))
        found[name] = [switch_json(plan, members, source) for source, plan in plans]
    return found
