"""Graph files (`.fxpar`): a graph at any stage of the lowering, saved to be read, checked, compared and drawn later.

A zip archive with `header.json` (what it is, which fxpar wrote it), `graph.json` (see `fxpar.graph_files.codec`), the
bytes of its tensors (those of the model that are no parameters) in `graph.bin`, and the same of what the graph can be
checked against. Reading one executes nothing of it, so a file of a stranger is safe to look at: no pickle, bounded
sizes, and whatever is not as fxpar writes it is a GraphFileError.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxpar.errors import GraphFileError, GraphFormatError, OutputError, one_line
from fxpar.graph_files.codec import Decoder, Encoder
from fxpar.graph_files.structure import fits
from fxpar.ir.exec_graph import ExecGraph
from fxpar.ir.graph import AnnotatedGraph, LogicalGraph
from fxpar.ir.pipeline_graph import PipelineGraph, TeamsGraph
from fxpar.version import __version__

FORMAT, VERSION = "fxpar graph", 4
SavedGraph = LogicalGraph | AnnotatedGraph | ExecGraph | PipelineGraph | TeamsGraph
_KINDS: dict[str, type] = {
    "logical": LogicalGraph,
    "annotated": AnnotatedGraph,
    "exec": ExecGraph,
    "pipeline": PipelineGraph,
    "teams": TeamsGraph,
}


@dataclass(frozen=True)
class Origin:
    """What a graph can be checked against: the logical graph that it was made of (None: it is that itself), and
    micro-batches (tensors by name).
    """

    logical: LogicalGraph | None
    batches: tuple[dict[str, torch.Tensor], ...]


def save_graph(path: str | Path, graph: SavedGraph, origin: Origin | None = None) -> None:
    """Write the graph, and what it can be checked against; a file that was there is replaced in one step.

    Raises OutputError (cannot be written), GraphFormatError (the graph holds what the format has no form for).
    """
    strategy = {} if isinstance(graph, LogicalGraph) else graph.strategy.to_json()
    about = {"kind": kind_of(graph), "model": graph.name, **strategy}
    save_value(path, graph, about, None if origin is None else (origin.logical, origin.batches))


def load_graph(path: str | Path) -> SavedGraph:
    """Read what `save_graph` wrote. Raises GraphFileError: no such file, no graph file, of another version, damaged,
    or with an op that is not there.
    """
    graph = load_value(path)
    if not isinstance(graph, tuple(_KINDS.values())):
        raise GraphFileError(path, "it holds no graph", _MAKE)
    return graph


def load_origin(path: str | Path) -> Origin | None:
    """What the graph of a file can be checked against, if the file has it. Raises GraphFileError."""
    found = _decoded(path, _read(path), "origin")
    if found is None:
        return None
    if not fits(found, tuple[LogicalGraph | None, tuple[dict[str, torch.Tensor], ...]]):
        raise GraphFileError(path, "what it can be checked against is not a graph with batches", _MAKE)
    return Origin(*found)


def save_value(path: str | Path, value: Any, about: Mapping[str, Any], origin: Any = None) -> None:
    """Write any values that `Encoder` knows, with `about` in the header. Raises as `save_graph` does."""
    contents = {**_encoded("graph", value), **_encoded("origin", origin)}
    header = {"format": FORMAT, "version": VERSION, **about, **_versions(), "sha256": _digest(contents)}
    target = Path(path)
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(aside, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr("header.json", json.dumps(header, indent=1))
            for name, content in contents.items():
                archive.writestr(name, content)
        aside.replace(target)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise OutputError(str(path), error) from error


def load_value(path: str | Path) -> Any:
    """Read what `save_value` wrote. Raises GraphFileError."""
    return _decoded(path, _read(path), "graph")


def read_header(path: str | Path) -> dict[str, Any]:
    """What a graph file says of itself: kind, model, strategy, versions. Raises GraphFileError."""
    return _read(path)[0]


def kind_of(graph: SavedGraph) -> str:
    """One of "logical", "annotated", "exec", "pipeline"."""
    return next(name for name, kind in _KINDS.items() if isinstance(graph, kind))


_MAKE = "Make one with: fxpar dump MODEL --strategy S -o FILE.fxpar"
_MEMBERS = ("graph.json", "graph.bin", "origin.json", "origin.bin")
_HEADER = "header.json"
# A lowered 32-layer model has 3 MB of JSON. What unpacks to more than this is no graph, or meant to fill the memory.
_MOST_BYTES = {_HEADER: 2**20, "graph.json": 2**27, "origin.json": 2**27, "graph.bin": 2**30, "origin.bin": 2**30}
_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
Archive = tuple[dict[str, Any], dict[str, bytes]]


def _versions() -> dict[str, str]:
    return {"fxpar": __version__, "torch": torch.__version__}


def _encoded(name: str, value: Any) -> dict[str, bytes]:
    """A value as two members of the archive: JSON, and the bytes of the tensors in it."""
    encoder = Encoder()
    root = encoder.encode(value)
    kinds = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in encoder.tensors]
    data = {"pool": encoder.pool, "root": root, "tensors": kinds}
    body = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
    content = {f"{name}.json": body, f"{name}.bin": b"".join(map(_bytes_of, encoder.tensors))}
    for member, written in content.items():
        if len(written) > _MOST_BYTES[member]:
            raise GraphFormatError(
                f"{member} of a graph file would have {len(written):,} bytes, and may have {_MOST_BYTES[member]:,}"
            )
    return content


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensors(kinds: Any, content: bytes) -> list[torch.Tensor]:
    """The tensors that lie one behind the other in `content`. Raises GraphFormatError."""
    found, start = [], 0
    for dtype_name, shape in kinds:
        dtype = _DTYPES.get(dtype_name)
        if dtype is None or len(shape) > 64 or not all(type(size) is int and size >= 0 for size in shape):
            raise GraphFormatError(f"{str(dtype_name)[:60]!r} {str(shape)[:60]} is not a tensor")
        end = start + math.prod(shape) * dtype.itemsize
        if end > len(content):
            raise GraphFormatError("bytes of its tensors are missing")
        # A byte that is neither 0 nor 1 is no bool, so these are made anew.
        flat = torch.frombuffer(bytearray(content[start:end]) or bytearray(8), dtype=torch.uint8)[: end - start]
        found.append((flat != 0 if dtype is torch.bool else flat.view(dtype)).reshape(shape))
        start = end
    if start != len(content):
        raise GraphFormatError("there are more bytes than its tensors have")
    return found


def _decoded(path: str | Path, archive: Archive, name: str) -> Any:
    header, contents = archive
    if header.get("format") != FORMAT:
        raise GraphFileError(path, "it is not a graph of fxpar", _MAKE)
    if header.get("version") != VERSION:
        writer, version = one_line(header.get("fxpar")), one_line(header.get("version"))
        wrote = f"fxpar {writer} wrote it in version {version} of the format"
        raise GraphFileError(path, f"{wrote}, this fxpar reads version {VERSION}", "Dump it again with this fxpar")
    if contents.keys() != set(_MEMBERS):
        raise GraphFileError(path, "it is not a graph file, or it is incomplete", _MAKE)
    if _digest(contents) != header.get("sha256"):
        raise GraphFileError(path, "its content is not what was written", "Copy or dump it again")
    try:
        data = _json(contents[f"{name}.json"])
        return Decoder(data["pool"], _tensors(data["tensors"], contents[f"{name}.bin"])).decode(data["root"])
    except GraphFormatError as error:
        writer = one_line(header.get("torch"))
        do = f"It was written with torch {writer}; import what defines its ops, or dump it again"
        raise GraphFileError(path, one_line(error, 400), do) from error
    except Exception as error:  # the file is anybody's, and what it is made of meets half of torch and sympy
        why = f"it cannot be understood ({type(error).__name__}: {one_line(error, 200)})"
        raise GraphFileError(path, why, _MAKE) from error


def _digest(contents: Mapping[str, bytes]) -> str:
    total = hashlib.sha256()
    for name in _MEMBERS:
        total.update(contents[name])
    return total.hexdigest()


def _json(content: bytes) -> Any:
    """JSON in which every key and every number means one thing. Raises ValueError."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(found)) != len(found):
            raise ValueError("a key is there twice")
        return dict(found)

    def constant(name: str) -> None:
        raise ValueError(f"{name} is not a number")

    return json.loads(content, object_pairs_hook=pairs, parse_constant=constant)


def _read(path: str | Path) -> Archive:
    """The header, and the other members as they are."""
    try:
        with zipfile.ZipFile(path) as archive:
            header = _json(_member(archive, _HEADER))
            if not isinstance(header, dict):
                raise ValueError("the header is not a table")
            names = archive.namelist()
            if header.get("version") == VERSION and sorted(names) != sorted((*_MEMBERS, _HEADER)):
                raise ValueError("its members are others")
            return header, {name: _member(archive, name) for name in _MEMBERS if name in names}
    except FileNotFoundError as error:
        raise GraphFileError(path, "there is no such file", _MAKE) from error
    except OSError as error:
        why = f"it cannot be read ({error.strerror or error})"
        raise GraphFileError(path, why, "Look at its permissions") from error
    except _TooLargeError as error:
        raise GraphFileError(path, str(error), "Graphs of fxpar are smaller; ask whoever made it") from error
    except Exception as error:  # zipfile raises a dozen kinds for what is no zip archive
        raise GraphFileError(path, "it is not a graph file, or it is incomplete", _MAKE) from error


class _TooLargeError(ValueError):
    """A member unpacks to more than a graph can have."""


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    info, most = archive.getinfo(name), _MOST_BYTES[name]
    if info.file_size > most:
        raise _TooLargeError(f"its {name} unpacks to {info.file_size:,} bytes, more than {most:,}")
    with archive.open(info) as member:  # zipfile stops at the size that is stated
        return member.read(most + 1)
