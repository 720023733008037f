"""Whether what was read from a graph file is whole: fields of the types that the classes state, graphs whose inputs,
results and sources belong together. A file that was changed is refused here, before anything looks at it.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Mapping, Set
from dataclasses import fields, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import fx

from fxpar.errors import GraphFormatError, PlacementError
from fxpar.graph_files.vocabulary import shown
from fxpar.ir.exec_graph import ExecGraph, Part, Program, collective_kind
from fxpar.ir.graph import AnnotatedGraph, Dim, LogicalGraph, TensorMeta
from fxpar.ir.mesh import Mesh
from fxpar.ir.node_meta import (
    NodeMeta,
    comm_of,
    dist_of,
    dists_of,
    is_size,
    local_meta,
    tensor_of,
    wanted_dists,
    whole_meta,
)
from fxpar.ir.pipeline_graph import PipelineGraph, TeamsGraph
from fxpar.ir.serialize import OpOverload
from fxpar.ir.strategy import Strategy
from fxpar.ir.strategy_text import MOST_RANKS
from fxpar.ir.teams import lowered_for
from fxpar.torch_api.schemas import schema_of, writes

_META = get_type_hints(NodeMeta)


def check_fields(cls: type, values: Mapping[str, Any]) -> None:
    """Whether a dataclass can have these fields. Raises GraphFormatError."""
    hints = _hints(cls)
    for name, value in values.items():
        if name not in hints:
            raise GraphFormatError(f"the fields of {cls.__name__} are others: there is no {name!r}")
        if not fits(value, hints[name]):
            raise GraphFormatError(f"{cls.__name__}.{name} cannot be of class {type(value).__name__}")


def check_value(value: Any) -> None:
    """What the types of fields do not say, for a value of a class. Raises GraphFormatError."""
    if isinstance(value, Mesh) and not _is_mesh(value):
        raise GraphFormatError(f"{value.axes!r} are no axes of a mesh of at most {MOST_RANKS:,} ranks")
    if isinstance(value, Strategy):
        check_value(value.mesh)
        if value != replace(Strategy.parse(str(value), overrides=dict(value.overrides)), offset=value.offset):
            raise GraphFormatError(f"{value} is not how its strategy is written")
    if isinstance(value, Dim) and not 1 <= value.minimum <= value.example <= (value.maximum or math.inf):
        raise GraphFormatError(f"dynamic dim {value.name!r} does not allow its own example")
    if isinstance(value, AnnotatedGraph | Program) and any(each < 1 for each in value.divisors.values()):
        raise GraphFormatError(f"dynamic dims cannot be padded to multiples of {sorted(value.divisors.values())}")
    if isinstance(value, TensorMeta) and any(isinstance(size, int) and size < 0 for size in value.shape):
        raise GraphFormatError(f"{value} has a negative size")
    if isinstance(value, LogicalGraph | AnnotatedGraph):
        graph = value.gm.graph if isinstance(value, LogicalGraph) else value.graph
        _check_ends(graph, len(value.inputs), len(value.outputs))
        for node, info in zip(graph.find_nodes(op="placeholder"), value.inputs, strict=True):
            _check_same(node, node.meta.get("tensor"), info.meta)
        _check_constants(value)
        _check_writes(graph, {node for node in graph.nodes if node.op == "placeholder"})
        _check_wanted(graph)
    elif isinstance(value, Program):
        _check_program(value)


def check_meta(node: fx.Node) -> None:
    """Whether a node's metadata is of the types that its readers count on. Raises GraphFormatError."""
    for key, value in node.meta.items():
        if not isinstance(key, str) or (key in _META and not fits(value, _META[key])):
            raise GraphFormatError(f"the metadata {key!r} of %{node.name} cannot be of class {type(value).__name__}")
    if "dist" in node.meta:
        for key in ("tensor", "local"):
            _check_dims(node, node.meta.get(key), dist_of(node))
    whole, local = node.meta.get("tensor"), node.meta.get("local")
    if isinstance(whole, tuple) and isinstance(local, tuple) and len(whole) != len(local):
        raise GraphFormatError(f"%{node.name} has {len(whole)} results, and {len(local)} of them on a rank")
    if node.op != "output" and not {"tensor", "sym"} & node.meta.keys():
        raise GraphFormatError(f"%{node.name} has neither a shape nor a size")


def _check_dims(node: fx.Node, meta: Any, dist: Any) -> None:
    """A placement says of each dim of a value how it lies."""
    metas, dists = (each if isinstance(each, tuple) else (each,) for each in (meta, dist))
    if meta is not None and (
        len(metas) != len(dists)
        or any(m is not None and d is not None and len(m.shape) != d.ndim for m, d in zip(metas, dists, strict=True))
    ):
        raise GraphFormatError(f"the placement of %{node.name} is not one of {shown(meta)}")


def _check_wanted(graph: fx.Graph) -> None:
    """What a node wants of an operand's placement is a placement of that operand."""
    for node in graph.nodes:
        operands: list[fx.Node] = []
        fx.node.map_arg((node.args, node.kwargs), lambda n: operands.append(n) if not is_size(n) else None)  # noqa: B023
        for operand, wanted in zip(operands, wanted_dists(node), strict=False):
            if isinstance(whole_meta(operand), TensorMeta):
                _check_dims(node, tensor_of(operand), wanted)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type hint, containers with all that is in them."""
    return _checker(hint)(value)


@functools.lru_cache(maxsize=1024)
def _checker(hint: Any) -> Callable[[Any], bool]:
    """`fits` for one hint, which is read once."""
    kind, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: True
    if kind in (Union, types.UnionType):
        some = tuple(map(_checker, inner))
        return lambda value: any(check(value) for check in some)
    if kind is Literal:
        return lambda value: isinstance(value, str) and value in inner
    if kind is tuple and len(inner) == 2 and inner[1] is Ellipsis:
        each = _checker(inner[0])
        return lambda value: isinstance(value, tuple) and all(map(each, value))
    if kind is tuple:
        several = tuple(map(_checker, inner))
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(several)
            and all(check(v) for check, v in zip(several, value, strict=True))
        )
    if kind is list:
        item = _checker(inner[0])
        return lambda value: isinstance(value, list) and all(map(item, value))
    if kind is dict:
        key, held = map(_checker, inner)
        return lambda value: isinstance(value, dict) and all(key(k) and held(v) for k, v in value.items())
    if hint is int:
        return lambda value: type(value) is int
    if hint is float:
        return lambda value: type(value) in (int, float)
    return lambda value: isinstance(value, hint)


@functools.lru_cache(maxsize=64)
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls, localns={"torch": torch})  # some modules import it for type checkers only
    return {field.name: hints[field.name] for field in fields(cls)}


def _is_mesh(mesh: Mesh) -> bool:
    names = [name for name, _ in mesh.axes]
    degrees = [degree for _, degree in mesh.axes]
    if (
        len(set(names)) < len(names)
        or any(d < 1 for _, d in (*mesh.axes, *mesh.digits))
        or math.prod(degrees) > MOST_RANKS
    ):
        return False
    if any(step < 1 for step in mesh.strides):
        return False
    inside = 0 <= mesh.offset < MOST_RANKS and all(rank in mesh for rank in mesh.ranks)
    return inside and len(set(mesh.ranks)) == mesh.size


def _check_ends(graph: fx.Graph, inputs: int, outputs: int) -> None:
    """As many placeholders as inputs; results, all of them nodes, one for each output."""
    found = len(graph.find_nodes(op="placeholder"))
    if found != inputs:
        raise GraphFormatError(f"a graph has {found} placeholders for {inputs} inputs")
    results = _results(graph)
    if len(results) != outputs:
        raise GraphFormatError(f"a graph has {len(results)} results for {outputs} outputs")


def _results(graph: fx.Graph) -> tuple[fx.Node, ...]:
    ends = graph.find_nodes(op="output")
    results = ends[0].args[0] if len(ends) == 1 and len(ends[0].args) == 1 else None
    if not isinstance(results, tuple) or not all(isinstance(node, fx.Node) for node in results):
        raise GraphFormatError("a graph does not end with a tuple of results")
    return results  # type: ignore[return-value]


def _check_constants(graph: LogicalGraph | AnnotatedGraph | Program) -> None:
    missing = {info.fqn for info in graph.inputs if info.kind == "constant"} - set(graph.constants)
    if missing:
        raise GraphFormatError(f"the constants {sorted(missing)} are missing")


def _check_program(program: Program) -> None:
    """The parts fit together, and speak of axes of their own mesh."""
    _check_constants(program)
    if isinstance(program, TeamsGraph):
        wanted = [lowered_for(program.strategy, number) for number in range(len(program.strategy.teams))]
        if [team.strategy for team in program.teams] != wanted:
            raise GraphFormatError(f"strategies side by side are not those of {program.strategy}")
        return
    if isinstance(program, PipelineGraph):
        if [stage.index for stage in program.stages] != list(range(program.strategy.stages)):
            raise GraphFormatError(f"a pipeline has not the {program.strategy.stages} stages of {program.strategy}")
        for stage in program.stages:
            wanted = program.strategy.of_stage(stage.index).mesh
            if stage.mesh != wanted:
                raise GraphFormatError(f"stage {stage.index} is on {stage.mesh.ranks}, its pipeline on {wanted.ranks}")
        return
    _check_meshes(program)
    if len(program.stored_inputs) != len(program.inputs) or len(program.stored_outputs) != len(program.outputs):
        raise GraphFormatError("a program does not say of each input and result how it is stored")
    parts = dict(program.parts)
    parts |= {f: getattr(program, f) for f in ("input_part", "weight_part") if hasattr(program, f)}
    values: dict[str, list[Any]] = {"input": [stored.local for stored in program.stored_inputs]}
    values |= {name: [_local(node) for node in _results(part.graph)] for name, part in parts.items()}
    for part in parts.values():
        _check_part(part, values, program.strategy.mesh)
        _check_sent(part, {dim.name for dim in program.dims})
    if isinstance(program, ExecGraph):
        _check_ends(program.epilogue.graph, len(program.epilogue.sources), len(program.outputs))


def _check_meshes(program: Program) -> None:
    """All placements of a program are on its own ranks."""
    lies = [stored.dist for stored in (*program.stored_inputs, *program.stored_outputs)]
    for part in program.parts.values():
        for node in part.graph.nodes:
            lies += [*dists_of(node), *wanted_dists(node)]
    for dist in lies:
        if dist is not None and dist.mesh != program.mesh:
            raise GraphFormatError(f"{dist} is on the ranks {dist.mesh.ranks}, its program on {program.mesh.ranks}")


def _local(node: fx.Node) -> Any:
    """What a rank holds of a value: shape and dtype, or the expression of an integer."""
    return local_meta(node) or node.meta.get("sym")


def _check_same(node: fx.Node, found: Any, given: Any) -> None:
    if found != given:
        raise GraphFormatError(f"%{node.name} is {shown(found)}, and what it is given {shown(given)}")


def _check_part(part: Part, values: Mapping[str, list[Any]], mesh: Mesh) -> None:
    places = part.graph.find_nodes(op="placeholder")
    if len(places) != len(part.sources):
        raise GraphFormatError(f"a part has {len(places)} placeholders for {len(part.sources)} sources")
    for node, (source, index) in zip(places, part.sources, strict=True):
        if not 0 <= index < len(values.get(source, ())):
            raise GraphFormatError(f"a part reads result {index} of {source!r}, which is not there")
        _check_same(node, _local(node), values[source][index])
    given = {node for node, (source, _) in zip(places, part.sources, strict=True) if source == "input"}
    _check_writes(part.graph, given)
    _check_wanted(part.graph)
    for node in part.graph.nodes:
        axes = [text[1:] for text in node.args if isinstance(text, str) and text[:1] in ("@", "#")]
        for axis in (*axes, *node.meta.get("comm", ())[:1]):
            if not _has_axes(mesh, axis):
                raise GraphFormatError(f"%{node.name} names {axis!r}, which is not an axis of {mesh.names}")
        if collective_kind(node) is not None and "comm" not in node.meta:
            raise GraphFormatError(f"%{node.name} is a collective that does not say on which axis it sends what")


def _check_sent(part: Part, dims: Set[str]) -> None:
    """What collectives send has sizes of the program."""
    for node in part.graph.nodes:
        sizes = comm_of(node)[1].shape if "comm" in node.meta else ()
        unknown = {str(symbol) for size in sizes if not isinstance(size, int) for symbol in size.free_symbols} - dims
        if unknown:
            raise GraphFormatError(f"%{node.name} sends a tensor of a size {sorted(unknown)}, which the program lacks")


def _has_axes(mesh: Mesh, axis: str) -> bool:
    """Whether these joined axes and sub-axes are of the mesh."""
    try:
        return all(mesh.part(name).axis in mesh.names for name in axis.split("."))
    except PlacementError:
        return False


def _check_writes(graph: fx.Graph, given: set[fx.Node]) -> None:
    """Nothing is written to what was given: parameters and batches are the caller's."""
    base: dict[fx.Node, set[fx.Node]] = {}  # the inputs whose memory a value may lie in
    for node in graph.nodes:
        if node.op != "call_function":
            base[node] = {node} & given
            continue
        base[node] = set().union(*(base[operand] for operand in _shared(node)))
        if writes(node) and base[node]:
            raise GraphFormatError(f"%{node.name} ({node.target}) writes to an input of the graph")


def _shared(node: fx.Node) -> list[fx.Node]:
    """The operands whose memory a result may lie in: of a function all of them."""
    if not isinstance(node.target, OpOverload):
        return node.all_input_nodes
    found: list[fx.Node] = []
    for i, argument in enumerate(schema_of(node.target).arguments):
        if argument.shared:
            fx.node.map_arg(node.args[i] if i < len(node.args) else node.kwargs.get(argument.name), found.append)
    return found
