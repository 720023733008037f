"""`fxpar check FILE.fxpar`: the graph of a file, run by all ranks in this process and compared with one device.

A graph file has shapes and batches but no weights, so they are random: what is checked is the graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxpar.checking import CheckResult, check
from fxpar.cli.rehearse import check_batches, look_at_labels, rehearse
from fxpar.cli.request import in_precision, parse_precision
from fxpar.cli.source import GraphSource, check_placed, read_file
from fxpar.errors import FxparError, GraphFileError
from fxpar.graph_files import Origin, load_origin
from fxpar.ir.graph import AnnotatedGraph, Input, LogicalGraph
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import finish
from fxpar.models.loaded import mean_scale
from fxpar.runtime.runner import Backend


def check_file(
    source: GraphSource, strategies: list[Strategy], *, tolerance: float | None, compile: Backend, seed: int
) -> tuple[LogicalGraph, list[CheckResult]]:
    """The logical graph of the file, and a result per strategy: those given for a file of a logical graph, else the one
    that the graph was lowered for. A graph on its way through the passes goes through those that are left.

    A file may be anybody's: what it holds is run when it is known what it calls (`fxpar.graph_files.vocabulary`), that
    its batches fit, and that this machine has the memory. Raises GraphFileError, VerifyError.
    """
    try:
        return _checked(source, strategies, tolerance, compile, seed)
    except FxparError:
        raise
    except Exception as error:  # of whatever op of torch a changed graph does not satisfy
        why = f"its graph cannot be run ({type(error).__name__}: {str(error).partition(chr(10))[0][:200]})"
        raise GraphFileError(source.model, why, "Write it again with: fxpar dump MODEL -o FILE.fxpar") from error


def _checked(
    source: GraphSource, strategies: list[Strategy], tolerance: float | None, compile: Backend, seed: int
) -> tuple[LogicalGraph, list[CheckResult]]:
    path = source.model
    graph, origin = read_file(source), load_origin(path)
    if isinstance(graph, LogicalGraph):
        graph = in_precision(graph, parse_precision(source.precision))
    else:
        check_placed(source, graph, None)
    if isinstance(graph, AnnotatedGraph):
        graph = finish(graph)
    if origin is None:
        why = "it holds no batches to check with, as a file of one pipeline stage does not"
        raise GraphFileError(path, why, "Write a whole model with: fxpar dump MODEL -o FILE.fxpar")
    logical, programs = _to_check(path, graph, origin, strategies)
    dims = check_batches(path, logical, origin.batches)
    for each in (logical, *(program for program in programs if isinstance(program, TrainGraph))):
        rehearse(path, each, dims)
        look_at_labels(path, each)
    params = {info.fqn: _random(info, seed + i) for i, info in enumerate(logical.inputs) if info.kind == "param"}
    buffers = {info.fqn: _random(info, seed + i) for i, info in enumerate(logical.inputs) if info.kind == "buffer"}
    scale = mean_scale(origin.batches)
    words = {"scale": scale, "tolerance": tolerance, "compile": compile}
    return logical, check(logical, programs, params, buffers, origin.batches, **words)


def _to_check(
    path: str, graph: LogicalGraph | TrainGraph, origin: Origin, strategies: list[Strategy]
) -> tuple[LogicalGraph, list[Strategy | TrainGraph]]:
    if isinstance(graph, LogicalGraph):
        if not strategies:
            raise GraphFileError(path, "it holds a logical graph", "Say for which strategies: --strategies dp2,tp2+sp")
        return graph, [*strategies]
    if strategies and strategies != [graph.strategy]:
        raise GraphFileError(path, f"it holds a graph under {graph.strategy}", "Leave --strategies out")
    if origin.logical is None:
        raise GraphFileError(path, "the logical graph to compare with is not in it", "Dump it again with this fxpar")
    return origin.logical, [graph]


def _random(info: Input, seed: int) -> Tensor:
    """Values in which an error shows, as `fxpar.models.loaded.perturb` makes them: weights of variance 1/D, vectors
    around 1; positive buffers, as one of them may be a variance; zeros for integers.
    """
    shape, dtype = tuple(map(int, info.meta.shape)), info.meta.dtype
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if info.kind == "buffer":
        return (0.5 + noise.abs()).to(dtype)
    return (1 + 0.1 * noise if len(shape) < 2 else noise / max(1, shape[-1]) ** 0.5).to(dtype)
