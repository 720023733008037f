"""The tables below a printed graph: collectives, pipeline stages, operands to move."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from torch import fx

from fxpar.ir.columns import columns
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.exec_graph import Program
from fxpar.ir.fqn import starred
from fxpar.ir.graph import AnnotatedGraph, Input, run_dims, run_sizes
from fxpar.ir.node_meta import is_size, wanted_dists
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.ir.sent import sent


def collective_list(graph: Program) -> list[str]:
    """Collectives in program order; those of repeated blocks share a line."""
    rows: dict[tuple[str, ...], int] = Counter()
    for c in graph.communications():
        where = starred(c.fqn) or ("several modules" if c.fused > 1 else "the root")
        fused = f" in {c.fused} tensors" if c.fused > 1 else ""
        rows[(c.part, c.kind, c.axis, f"{c.sent}{fused}", where + ", backward" * c.backward)] += 1
    cells = [(*row[:3], f"x{n}", *row[3:]) for row, n in rows.items()]
    return ["collectives in order, with what a rank puts in:", *columns(cells)] if cells else []


def collective_table(graph: Program, inputs: Sequence[Input]) -> list[str]:
    """Collectives by part, kind and axis: calls, tensors fused in them, bytes that one rank sends. What is sent per
    micro-batch and what once per mini-batch have a sum each. `inputs` are those of the whole model.
    """
    dims = run_dims(graph)
    rows: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for c in graph.communications():
        row = rows[(c.part, c.kind, c.axis)]
        row[0] += 1
        row[1] += c.fused
        row[2] += c.wire_bytes(graph.strategy.mesh.degree(c.axis), dims)
    title = f"collectives ({_micro_batch(graph)}; bytes that one rank sends):"
    if not rows:
        return [title, "  none"]
    cells = [("part", "kind", "axis", "calls", "tensors", "bytes")]
    cells += [(*key, str(calls), str(fused), f"{round(nbytes):,}") for key, (calls, fused, nbytes) in rows.items()]
    return [title, *columns(cells, right=(3, 4, 5)), *(f"  {line}" for line in sent(graph, inputs=inputs).lines())]


def stage_list(graph: PipelineGraph) -> list[str]:
    """Where each stage begins and runs, what it sends to its neighbours, and parameters that several stages have."""
    lines = [f"stages under {graph.strategy.pipeline.schedule} ({_micro_batch(graph)}; bytes that one rank sends):"]
    held = Counter(fqn for stage in graph.stages for fqn in stage.taken("param"))
    for i, stage in enumerate(graph.stages):
        share = graph.flops[i] / (sum(graph.flops) or 1)
        begins = graph.cuts[i - 1] if i else "the start"
        lines.append(f"  {i} on {ranks_text(stage.mesh.ranks)}, from {begins}, {share:.0%} of the FLOPs")
        for each in graph.handovers:
            if each.stage == i:
                size = each.bytes_of_busiest(run_dims(graph))
                lies = "" if each.alike else f", which has it as {each.taken.dist.describe(each.taken.meta.shape)}"
                lines.append(f"    %{each.fqn} : {each.given.local} to stage {each.to}{lies}, {size:,} bytes")
        lines += [f"    {fqn} is on other stages too" for fqn in stage.taken("param") if held[fqn] > 1]
    found = sent(graph)
    return [*lines, "  the busiest rank, messages and collectives:", *(f"    {line}" for line in found.lines())]


def ranks_text(ranks: Sequence[int]) -> str:
    """`ranks 2-5` of consecutive ones."""
    return f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"


def _micro_batch(graph: Program) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in run_sizes(graph).items())
    return f"one micro-batch{f', {sizes}' if sizes else ''}"


def reshard_table(graph: AnnotatedGraph) -> list[str]:
    """Number of operands that must be moved, by what they are and what is wanted."""
    counts: Counter[str] = Counter()
    for node in graph.graph.nodes:
        for operand, wanted in zip(tensor_operands_of(node), wanted_dists(node), strict=False):
            have = operand.meta.get("dist")
            if isinstance(have, DistConfig) and have != wanted:
                counts[f"{have.describe()} -> {wanted.describe()}"] += 1
    return ["operands to move:", *(f"  {n:3} x {text}" for text, n in sorted(counts.items()))] if counts else []


def tensor_operands_of(node: fx.Node) -> list[fx.Node]:
    """Operands of a node that are tensors, in the order of `dist_in`."""
    operands: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda n: operands.append(n) if not is_size(n) else None)
    return operands
