"""The passes of the lowering in order, and how they are run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.annotate import Annotate, unplaced
from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import PassContractError, a_type
from fxpar.ir.collector import collector_paused
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.exec_graph import Stored
from fxpar.ir.graph import AnnotatedGraph, LogicalGraph, Output
from fxpar.ir.node_meta import dist_of, tensor_of
from fxpar.ir.pass_base import GraphPass
from fxpar.ir.strategy import Strategy
from fxpar.lowering.needs import verify_end, verify_kept, verify_needs
from fxpar.lowering.verify import Looked, verify, verify_placements
from fxpar.passes.bucket_collectives import BucketCollectives
from fxpar.passes.casts import Casts
from fxpar.passes.chunk_experts import ChunkExperts
from fxpar.passes.chunk_loss import ChunkLoss
from fxpar.passes.cleanup import Cleanup
from fxpar.passes.compress_dispatch import CompressDispatch
from fxpar.passes.exchange_tokens import ExchangeTokens
from fxpar.passes.global_to_local import GlobalToLocal
from fxpar.passes.hide_reductions import HideReductions
from fxpar.passes.hoist_collectives import HoistCollectives
from fxpar.passes.insert_reshards import InsertReshards
from fxpar.passes.limit_experts import LimitExperts
from fxpar.passes.lower_collectives import LowerCollectives
from fxpar.passes.mask_padding import MaskPadding
from fxpar.passes.narrow_gradients import NarrowGradients
from fxpar.passes.offload import Offload
from fxpar.passes.prefetch_gathers import PrefetchGathers
from fxpar.passes.reduce_gradients import ReduceGradients
from fxpar.passes.rematerialize import Rematerialize
from fxpar.passes.reshard_to_collectives import ReshardToCollectives
from fxpar.passes.reuse_buffers import ReuseBuffers
from fxpar.passes.ring_attention import RingAttention
from fxpar.passes.sink_waits import SinkWaits
from fxpar.passes.sort_rows import SortRows
from fxpar.passes.write_in_place import WriteInPlace
from fxpar.passes.zero_shard import ZeroShard

OnPass = Callable[[str, AnnotatedGraph], None]

PLACED = ReduceGradients.name
"""The pass behind which each parameter lies as the program takes it, and each gradient as it gives it; no later one of
the ladder moves one."""


def default_passes(
    storage: torch.dtype | None = None,
    *,
    for_store: bool = False,
    sizes: Mapping[str, int] | None = None,
    accumulate: torch.dtype = torch.float32,
    reduce: torch.dtype | None = None,
    cluster: ClusterSpec | None = None,
) -> list[GraphPass]:
    """The ladder, in order; arguments as in `fxpar.lowering.driver`."""
    at = tuple((sizes or {}).items())
    narrow = [NarrowGradients(reduce)] if for_store and reduce is not None else []
    return [
        Annotate(),
        InsertReshards(),
        ZeroShard(params_from=3 if for_store else 1),
        Casts(None, gradients=accumulate) if for_store else Casts(storage),
        ReduceGradients(deferred=for_store),
        *narrow,
        ReshardToCollectives(),
        MaskPadding(),
        Cleanup(),
        GlobalToLocal(),
        RingAttention(),
        LimitExperts(),
        CompressDispatch(cluster=cluster, sizes=at),
        ChunkExperts(),
        ExchangeTokens(cluster, at),
        SortRows(),
        LowerCollectives(),
        ChunkLoss(),
        Rematerialize(at),
        BucketCollectives(),
        HoistCollectives(),
        ReuseBuffers(),
        SinkWaits(),
        PrefetchGathers(),
        HideReductions(),
        Offload(at),
        WriteInPlace(),
    ]


def checked_ladder(passes: object) -> list[GraphPass]:
    """The passes, if they are some. Raises PassContractError."""
    if not isinstance(passes, list | tuple):
        raise PassContractError(str(passes), f"passes are a list, as in [*ladder, Mine()], no {type(passes).__name__}")
    if not passes:
        raise PassContractError("an empty list", "the first pass of a ladder attaches placements, as `annotate` does")
    given: Sequence[object] = passes
    for step in given:
        if isinstance(step, type):
            raise PassContractError(step.__name__, "it is a class; make an instance with the options you want")
        if not isinstance(step, GraphPass):
            raise PassContractError(str(step), "it has no `name`, no `tier`, or cannot be called with a graph")
    return list(passes)


def run_passes(
    logical: LogicalGraph,
    strategy: Strategy | str,
    ladder: list[GraphPass],
    on_pass: OnPass | None,
    last: str | None = None,
    verified: bool = True,
) -> tuple[AnnotatedGraph, tuple[dict[str, Any], ...]]:
    """The graph after all passes, or behind the one called `last`, and a report on each of them."""
    if isinstance(strategy, str):
        strategy = Strategy.parse(strategy)
    with collector_paused():
        graph = unplaced(logical, strategy)
        return graph, climb(graph, ladder, on_pass, last, verified)


def remaining(graph: AnnotatedGraph, ladder: list[GraphPass]) -> list[GraphPass]:
    """The passes behind the last one of the ladder that has run on `graph`, which has placements; those of others count
    for nothing.
    """
    done = [i for i, step in enumerate(ladder) if step.name in graph.passes]
    return ladder[max(done, default=0) + 1 :]


def climb(
    graph: AnnotatedGraph,
    ladder: list[GraphPass],
    on_pass: OnPass | None = None,
    last: str | None = None,
    verified: bool = True,
) -> tuple[dict[str, Any], ...]:
    """Run the passes on `graph`, which is verified after each, unless `verified` is False; a report on each of them. It
    stops behind the pass called `last`, if there is one. Without `verified` there is no report either, and nodes are
    not marked with the pass that made them: nobody looks at a graph that is only priced. Raises VerifyError.
    """
    if not verified and on_pass is None:
        return _climb_alone(graph, ladder, last)
    report = []
    looked = Looked()
    for step in ladder:
        begun = time.process_time()
        known = looked.names or {node.name for node in graph.graph.nodes}  # a foreign pass may build all nodes anew
        if verified:
            verify_needs(graph, step.name)
        returned: object = step(graph)  # type: ignore[func-returns-value]
        if returned is not None:
            why = f"it returned {a_type(returned)}; a pass changes the graph in place and returns nothing"
            raise PassContractError(step.name, why)
        graph.passes.append(step.name)
        looked.look(graph.graph)
        for node in looked.fresh:
            if node.name not in known:
                node.meta.setdefault("pass", step.name)
        if verified:
            verify(graph, step.name, looked)
            verify_kept(graph, step.name, looked.fresh)
            if not graph.is_local:  # rules speak of whole tensors
                verify_placements(graph, step.name, resharded=False, nodes=looked.fresh, known=looked.legal)
        report.append(_report(step.name, looked, time.process_time() - begun))
        if on_pass:
            on_pass(step.name, graph)
        if step.name == last:
            return tuple(report)
    if verified:
        verify_end(graph)
    return tuple(report)


def _climb_alone(graph: AnnotatedGraph, ladder: list[GraphPass], last: str | None) -> tuple[dict[str, Any], ...]:
    for step in ladder:
        step(graph)
        graph.passes.append(step.name)
        if step.name == last:
            break
    return ()


def _report(name: str, looked: Looked, cpu_s: float) -> dict[str, Any]:
    kinds = Counter(looked.collectives.values())
    return {"name": name, "cpu_s": cpu_s, "nodes": len(looked.nodes), "collectives": dict(kinds)}


def common_fields(graph: AnnotatedGraph) -> dict[str, Any]:
    """The fields of every program."""
    return {
        "strategy": graph.strategy,
        "inputs": graph.inputs,
        "outputs": graph.outputs,
        "stored_inputs": tuple(Stored(tensor_of(n), dist_of(n)) for n in graph.placeholders),
        "stored_outputs": tuple(_stored(n, o, graph) for n, o in zip(graph.results, graph.outputs, strict=True)),
        "dims": graph.dims,
        "divisors": graph.divisors,
        "padding_hazard": graph.padding_hazard,
        "name": graph.name,
        "constants": graph.constants,
        "notes": tuple(graph.notes),
        "timings": graph.timings,
    }


def _stored(node: fx.Node, out: Output, graph: AnnotatedGraph) -> Stored:
    dist: DistConfig = graph.deferred.get(out.fqn, dist_of(node)) if out.kind == "grad" else dist_of(node)
    return Stored(tensor_of(node), dist)
