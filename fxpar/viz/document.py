"""The data of a page: what all tabs share, and one section per tab."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.ir.sent import sent, sent_by_axis
from fxpar.viz.viewed import Viewed

FORMAT, VERSION = "fxpar view", 1
TABS = ("run", "graph", "mesh", "timeline", "memory")  # in the order of the page


def view_document(
    title: str,
    views: Sequence[Viewed],
    sections: Mapping[str, dict[str, Any] | None],
    *,
    made_with: str = "fxpar",
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The sections that have something to say, under a head with what holds for all of them.

    A section is plain JSON. One that differs by strategy has `by_strategy`, keyed by the texts in "strategies".
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "title": title,
        "made_with": made_with,
        "strategies": [view.strategy for view in views],
        "about": {view.strategy: about(view) for view in views},
        "sent": {view.strategy: sent(view.graph, view.whole_sizes()).to_json() for view in views},
        "sent_by_axis": {
            view.strategy: {axis: each.to_json() for axis, each in sent_by_axis(view.graph, view.whole_sizes()).items()}
            for view in views
        },
        "notes": list(notes),
        "sections": {name: sections[name] for name in TABS if sections.get(name) is not None},
    }


def about(view: Viewed) -> list[list[str]]:
    """(label, value) pairs of a strategy for the head of the page."""
    strategy = view.graph.strategy
    mesh = " × ".join(f"{axis} {degree}" for axis, degree in strategy.all_digits) or "one rank"
    rows = [["mesh", mesh], ["ranks", str(strategy.world)]]
    if isinstance(view.graph, PipelineGraph):
        rows.append(["stages", f"{len(view.graph.stages)} ({strategy.pipeline.schedule})"])
    rows.append(["micro-batch", size_text(view)])
    if view.runs > 1:
        rows.append(["micro-batches", str(view.runs)])
    found = sent(view.graph, view.whole_sizes())
    rows.append(["a rank sends", f"{found.micro_batch_bytes:,} bytes per micro-batch{found.each()}"])
    rows.append(["and once per mini-batch", f"{found.mini_batch_bytes:,} bytes"])
    rows.append(["device", f"{view.links.sustained}"])
    rows.append(["cluster", cluster_text(view.links) + ("" if view.cluster else " (assumed)")])
    return rows


def size_text(view: Viewed) -> str:
    """`62 tokens`; of a model without token ids its dynamic dims, such as `B = 8`."""
    if any(info.kind == "batch" and info.fqn in ("input_ids", "tokens", "position_ids") for info in view.graph.inputs):
        return f"{view.sequences.tokens:,} tokens"
    return ", ".join(f"{name} = {size:,}" for name, size in view.whole_sizes().items()) or "as captured"


def cluster_text(cluster: ClusterSpec) -> str:
    """`2 × 8 devices, 200 GB/s inside a node, 25 between, 20 µs`."""
    text = f"{cluster.nodes} × {cluster.devices_per_node} devices, {cluster.intra_gb_per_s:g} GB/s inside a node"
    if cluster.nodes > 1:
        text += f", {cluster.inter_gb_per_s:g} between"
    return f"{text}, {cluster.latency_us:g} µs"
