"""A task graph as a JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import Any

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import TaskGraphError, nearest
from fxpar.ir.written import brief, read
from fxpar.waves.published import CASES, NODE
from fxpar.waves.work import MetaOp, TaskGraph

_LINKS = ("intra_gb_per_s", "inter_gb_per_s")
_MEMORY = "memory_gib"


@dataclass(frozen=True)
class TaskFile:
    """A graph, and what its file says of a node; a device holds `memory_bytes` (None: it does not say)."""

    graph: TaskGraph
    node: ClusterSpec = NODE
    memory_bytes: float | None = None


def read_tasks(path: str) -> TaskFile:
    """The graph of a JSON file: `metaops`, a list of objects with the fields of MetaOp, `edges`, a list of pairs of
    names, and optionally what a link sends and a device holds.

    Raises TaskGraphError that names file, MetaOp, key and value.
    """
    try:
        data = read(Path(path).read_text(encoding="utf-8"), "JSON")
    except OSError as error:
        why = f"it cannot be read: {error.strerror or error}"
        raise TaskGraphError(
            repr(path), why, "Name a JSON file of MetaOps, or the TOML configuration of a run"
        ) from error
    except ValueError as error:
        raise TaskGraphError(repr(path), str(error), "Write one JSON object with metaops and edges") from error
    known = ("metaops", "edges", *_LINKS, _MEMORY)
    _check_object(path, data, known, ("metaops",))
    metaops, edges = data["metaops"], data.get("edges", [])
    if not isinstance(metaops, list):
        raise TaskGraphError(f"{path!r}, metaops", f"it is a {type(metaops).__name__}", "Write a list of objects")
    if not isinstance(edges, list) or not all(_is_pair(one) for one in edges):
        raise TaskGraphError(f"{path!r}, edges", f"{brief(edges)[:60]} are no pairs", 'Write a list of ["from", "to"]')
    for key in (*_LINKS, _MEMORY):
        if key in data and (isinstance(data[key], bool) or not isinstance(data[key], int | float) or data[key] <= 0):
            raise TaskGraphError(f"{path!r}, {key}", f"{brief(data[key])[:60]} cannot be", "Write a number above 0")
    graph = TaskGraph(
        tuple(_metaop(f"{path!r}, metaops[{i}]", one) for i, one in enumerate(metaops)),
        tuple((one[0], one[1]) for one in edges),
    )
    node = replace(NODE, **{key: data[key] for key in _LINKS if key in data})
    return TaskFile(graph, node, data[_MEMORY] * 2**30 if _MEMORY in data else None)


def case_of(name: str) -> TaskFile:
    """The published one of this name. Raises TaskGraphError."""
    if name not in CASES:
        hint = nearest(name, CASES) or f"; there are {', '.join(CASES)}"
        raise TaskGraphError(f"case {name!r}", f"there is no such case{hint}", "Or name a JSON file")
    return TaskFile(CASES[name])


def _metaop(where: str, data: object) -> MetaOp:
    known: dict[str, Field[Any]] = {one.name: one for one in fields(MetaOp)}
    needed = [name for name, one in known.items() if one.default is MISSING]
    _check_object(where, data, known, needed)
    assert isinstance(data, dict)
    for key in ("name", "weights"):
        if not isinstance(data.get(key, ""), str):
            raise TaskGraphError(f"{where}, {key}", f"{brief(data[key])[:60]} is not a name", "Write a string")
    times = data["layer_ms"]
    if not isinstance(times, dict):
        raise TaskGraphError(f"{where}, layer_ms", f"{brief(times)[:60]} is not a table", 'Write {"1": 8.0, "2": 4.4}')
    for devices in times:
        if not (devices.isascii() and devices.isdigit() and len(devices) < 9 and int(devices) > 0):
            why = f"{devices[:40]!r} is not a number of devices"
            raise TaskGraphError(f"{where}, layer_ms", why, "Write whole numbers from 1 on")
    return MetaOp(**data | {"layer_ms": {int(devices): ms for devices, ms in times.items()}})


def _check_object(where: str, data: object, known: Mapping[str, object] | tuple[str, ...], needed: Any) -> None:
    if not isinstance(data, dict):
        raise TaskGraphError(where, f"it holds a {type(data).__name__}", f"Write an object with {', '.join(known)}")
    for key in data:
        if key not in known:
            raise TaskGraphError(where, f"key {key!r} is unknown{nearest(key, known)}", "Delete or rename it")
    if missing := [key for key in needed if key not in data]:
        raise TaskGraphError(where, f"it lacks {', '.join(missing)}", "Add it: docs/tasks.md says what it is")


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(one, str) for one in value)
