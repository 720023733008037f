"""`fxpar passes NAME --on FILE`: one pass on the graph of a file, and what it changed."""

from __future__ import annotations

import json
import time
import typing
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any

import torch

from fxpar.cli.after_pass import FIRST
from fxpar.cli.console import stderr_console, stdout_console
from fxpar.cli.diff_show import show
from fxpar.cli.request import check_graph_output, check_output, write_json
from fxpar.cli.run_commands import PassesRequest
from fxpar.errors import (
    FxparError,
    GraphFileError,
    ModelOptionError,
    PassContractError,
    PassNeedsError,
    PassOptionError,
    PassRunError,
    nearest,
)
from fxpar.graph_diff import compare, digest
from fxpar.graph_files import kind_of, load_graph, load_origin, save_graph
from fxpar.ir import pass_registry
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.pass_base import GraphPass
from fxpar.lowering.ladder import default_passes
from fxpar.lowering.needs import Need, lacking
from fxpar.lowering.verify import verify
from fxpar.models.options import parse_assignments, typed
from fxpar.precision.precision import parse_dtype

_DUMP = "Make one with: fxpar dump MODEL --strategy S --after PASS -o FILE.fxpar"


def run_pass(request: PassesRequest, name: str, path: str) -> None:
    """Run the pass `name` on the graph of the file `path`. Raises FxparError."""
    step = make_pass(name, request.options)
    if request.output is not None:
        check_graph_output(request.output)
    check_output(request.json)
    graph = load_graph(path)
    if not isinstance(graph, AnnotatedGraph):
        why = f"it holds the {kind_of(graph)} graph, and passes change an annotated one"
        raise GraphFileError(path, why, _DUMP)
    verify(graph, f"(read from {path})")
    check_needs(name, graph)
    strategy = str(graph.strategy)
    old = digest(graph, f"{strategy} in {path}")
    begun = time.process_time()
    try:
        step(graph)
    except FxparError:
        raise
    except Exception as error:
        raise PassRunError(name, error) from error
    cpu_s = time.process_time() - begun
    graph.passes.append(name)
    verify(graph, name)
    diff = compare(old, digest(graph, f"{strategy} after {name}"))
    if request.output is not None:
        save_graph(request.output, graph, load_origin(path))
        stderr_console().print(f"wrote the graph to {request.output}", markup=False)
    if write_json(request.json, {"pass": name, "cpu_s": cpu_s, **diff.to_json()}):
        console = stdout_console()
        console.print(f"{step!r}: {cpu_s * 1e3:.1f} CPU ms, verified", markup=False)
        show(console, diff, text=request.text)


def make_pass(name: str, options: Sequence[str]) -> GraphPass:
    """The pass with the options filled in. Raises the errors of the registry, PassOptionError, PassContractError."""
    cls = pass_registry.get(name)
    try:
        given = parse_assignments(options)
    except ModelOptionError as error:
        raise PassOptionError(name, ", ".join(options), "write field=value") from error
    known = {f.name: f for f in fields(cls)} if is_dataclass(cls) else {}
    for key in given:
        if key not in known:
            has = f"its options are {', '.join(known)}" if known else "it has no options"
            raise PassOptionError(name, key, f"there is none of this name{nearest(key, known) or ';'} {has}")
    hints = typing.get_type_hints(cls) if known else {}
    values = {key: _value(name, key, text, hints[key]) for key, text in given.items()}
    missing = [k for k, f in known.items() if f.default is MISSING and f.default_factory is MISSING and k not in given]
    if missing:
        raise PassOptionError(name, missing[0], f"it has no default; give it with --set {missing[0]}=VALUE")
    step: object = cls(**values) if isinstance(cls, type) else cls
    if not isinstance(step, GraphPass):
        raise PassContractError(name, "it does not change an annotated graph")
    return step


def _value(name: str, key: str, text: str, hint: Any) -> Any:
    """`text` as the field's type. Raises PassOptionError."""
    choices = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if text in ("None", "null") and type(None) in choices:
        return None
    if torch.dtype in choices:
        return parse_dtype(text)
    try:
        if any(choice in (bool, int, float, str) for choice in choices):
            kind = next(c for c in choices if c in (bool, int, float, str))
            return typed(key, text, kind())
        return _tuples(json.loads(text))
    except ModelOptionError as error:
        raise PassOptionError(name, key, f"{text!r} is not a {choices[0].__name__}") from error
    except ValueError as error:
        raise PassOptionError(name, key, f'{text!r} is not valid JSON; write for example [["T", 4096]]') from error


def _tuples(value: Any) -> Any:
    """Lists as tuples, so that a pass stays hashable."""
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def check_needs(name: str, graph: AnnotatedGraph) -> None:
    """Raises PassNeedsError for the first thing that a graph, picked by hand, lacks (`fxpar.lowering.needs`)."""
    need = lacking(name, graph)
    if need is not None:
        raise PassNeedsError(name, need.what, need.lack, _advice(name, need))


def _advice(name: str, need: Need) -> str:
    """What to do: run the pass that makes it so, or dump the graph as it is right before the pass."""
    ladder = [step.name for step in default_passes()]
    if name == FIRST:
        return "Give the model and --strategy instead of a file, or the graph that was captured to fxpar.lower"
    if name not in ladder:
        return f"Run {need.maker} first" if need.maker else "The runtime runs it on the body of a step"
    place = f"ump the model with --after {ladder[ladder.index(name) - 1]}, which comes before it"
    return f"Run {need.maker} first, or d{place}" if need.maker else f"D{place}"
