"""Graph files (`.fxpar`): a graph at any stage of the lowering, saved to be read, checked, compared and drawn later.

A zip archive with `header.json` (what it is, which fxpar wrote it), `graph.json` (see `fxpar.graph_codec`) and its
tensors (those of the model that are no parameters) in `graph.pt`, and the same of what the graph can be checked
against. Reading one executes nothing of it, so a file of a stranger is safe to look at.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxpar.errors import GraphFileError, GraphFormatError, OutputError
from fxpar.exec_graph import ExecGraph
from fxpar.graph import AnnotatedGraph, LogicalGraph
from fxpar.graph_codec import Decoder, Encoder
from fxpar.pipeline_graph import PipelineGraph
from fxpar.version import __version__

FORMAT, VERSION = "fxpar graph", 1
SavedGraph = LogicalGraph | AnnotatedGraph | ExecGraph | PipelineGraph
_KINDS: dict[str, type] = {
    "logical": LogicalGraph,
    "annotated": AnnotatedGraph,
    "exec": ExecGraph,
    "pipeline": PipelineGraph,
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
    return None if found is None else Origin(*found)


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
_MEMBERS = ("graph.json", "graph.pt", "origin.json", "origin.pt")
Archive = tuple[dict[str, Any], dict[str, bytes]]


def _versions() -> dict[str, str]:
    return {"fxpar": __version__, "torch": torch.__version__}


def _encoded(name: str, value: Any) -> dict[str, bytes]:
    """A value as two members of the archive: JSON, and the tensors in it."""
    encoder = Encoder()
    root = encoder.encode(value)
    body = json.dumps({"pool": encoder.pool, "root": root}, separators=(",", ":"), allow_nan=False).encode()
    tensors = io.BytesIO()
    if encoder.tensors:
        torch.save([tensor.detach() for tensor in encoder.tensors], tensors)
    return {f"{name}.json": body, f"{name}.pt": tensors.getvalue()}


def _decoded(path: str | Path, archive: Archive, name: str) -> Any:
    header, contents = archive
    if header.get("format") != FORMAT:
        raise GraphFileError(path, "it is no graph of fxpar", _MAKE)
    if header.get("version") != VERSION:
        wrote = f"fxpar {header.get('fxpar', '(unknown)')} wrote it in version {header.get('version')} of the format"
        raise GraphFileError(path, f"{wrote}, this fxpar reads version {VERSION}", "Dump it again with this fxpar")
    if _digest(contents) != header.get("sha256"):
        raise GraphFileError(path, "its content is not what was written", "Copy or dump it again")
    try:
        data, tensors = json.loads(contents[f"{name}.json"]), contents[f"{name}.pt"]
        held = torch.load(io.BytesIO(tensors), weights_only=True) if tensors else []
        return Decoder(data["pool"], held).decode(data["root"])
    except GraphFormatError as error:
        do = f"It was written with torch {header.get('torch')}; import what defines its ops, or dump it again"
        raise GraphFileError(path, str(error), do) from error
    except (ValueError, KeyError, IndexError, TypeError, RuntimeError, pickle.UnpicklingError) as error:
        raise GraphFileError(path, f"it cannot be understood ({type(error).__name__}: {error})", _MAKE) from error


def _digest(contents: Mapping[str, bytes]) -> str:
    total = hashlib.sha256()
    for name in _MEMBERS:
        total.update(contents[name])
    return total.hexdigest()


def _read(path: str | Path) -> Archive:
    """The header, and the other members as they are."""
    try:
        with zipfile.ZipFile(path) as archive:
            header = json.loads(archive.read("header.json"))
            if not isinstance(header, dict):
                raise ValueError("the header is no table")
            return header, {name: archive.read(name) for name in _MEMBERS}
    except FileNotFoundError as error:
        raise GraphFileError(path, "there is no such file", _MAKE) from error
    except OSError as error:
        why = f"it cannot be read ({error.strerror or error})"
        raise GraphFileError(path, why, "Look at its permissions") from error
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, zlib.error) as error:
        raise GraphFileError(path, "it is no graph file, or not all of it is there", _MAKE) from error
