"""What experts on several ranks cost: where their tokens go, how many rows there are, bytes of the exchange."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from fxpar.cost.ops import SizesAt
from fxpar.explain.document import Document
from fxpar.explain.traffic import CollectiveTraffic, traffic
from fxpar.ir.columns import human_bytes
from fxpar.ir.exec_graph import Program
from fxpar.ir.fqn import starred
from fxpar.ir.graph import run_dims
from fxpar.ir.node_meta import fqn_of, local_tensor
from fxpar.ops.copies import copies, own_ids


def experts_document(program: Program, found: Sequence[CollectiveTraffic]) -> Document:
    """{"experts": [...]}, a row for each kind of layer, with counts of one rank under balanced routes and sizes of the
    example; nothing where each rank has all experts. Tokens travel in `chunks`; counts are of all. `forward_bytes` and
    `backward_bytes` are what one rank sends to experts and back for one layer and micro-batch; `hops` are the exchanges
    on the way there, one after the other.
    """
    rows: dict[tuple[Any, ...], Document] = {}
    for layer in _layers(program):
        mine = [each for each in found if each.exchanges and each.module == layer["fqn"]]
        layer["module"] = starred(layer.pop("fqn"))
        row = rows.setdefault((*layer.values(),), {**layer, "layers": 0, "hops": layer["hops"]})
        row["layers"] += 1
        for name, backward in (("forward_bytes", False), ("backward_bytes", True)):
            row[name] = round(sum(each.wire_bytes for each in mine if each.comm.backward == backward))
    return {"experts": list(rows.values())} if rows else {}


def _layers(program: Program) -> Iterable[Document]:
    """Each of them, with its hops as a tuple of (ranks, copies of a rank's tokens), over all chunks of the tokens."""
    size = SizesAt(run_dims(program)).size
    for placed in program.placed:
        layers: dict[str, Document] = {}
        for node in (node for part in placed.parts.values() for node in part.graph.nodes if node.target is copies):
            ids, experts, ranks = node.args
            tokens, slots = local_tensor(ids).shape
            layer = layers.setdefault(fqn_of(node), {"fqn": fqn_of(node), "tokens": 0, "chunks": 0, "hops": []})
            at = int(ids.target is own_ids)  # of those that have come to a node, numbered as its experts are
            if not at:
                layer |= {"experts": experts, "slots": slots}
                layer |= {"tokens": layer["tokens"] + tokens, "chunks": layer["chunks"] + 1}
            layer["hops"] += [(ranks, 0)] * (at == len(layer["hops"]))
            layer["hops"][at] = (ranks, layer["hops"][at][1] + node.meta["local"][0].shape[0])
        for layer in layers.values():
            hops = tuple((ranks, size(count)) for ranks, count in layer["hops"])
            layer |= {"tokens": size(layer["tokens"]), "ranks": math.prod(ranks for ranks, _ in hops)}
            yield layer | {"copies": hops[-1][1], "hops": hops}


def experts_text(row: Document) -> str:
    """A row as a sentence."""
    layers = f"{row['layers']} layers of " if row["layers"] > 1 else ""
    there, back = (human_bytes(row[name]) for name in ("forward_bytes", "backward_bytes"))
    held = f"{row['experts'] // row['ranks']} of {row['experts']} experts on each of {row['ranks']} ranks"
    counts = [f"{count:,} copies" for _, count in row["hops"]]
    if len(counts) > 1:
        counts = [f"{counts[0]} to {row['hops'][0][0]} nodes, and from there in {counts[1]} to the ranks"]
    in_chunks = f", in {row['chunks']} chunks" if row["chunks"] > 1 else ""
    return (
        f"{layers}{row['module'] or 'experts'}: {held}, {row['slots']} for a token. If routes are balanced, the "
        f"{row['tokens']:,} tokens of a rank travel in {counts[0]}{in_chunks}, for which exchange_tokens sends "
        f"{there} per layer in the forward and {back} in the backward"
    )


def experts_notes(program: Program) -> Iterable[str]:
    """All rows of a program as sentences."""
    return map(experts_text, experts_document(program, traffic(program)).get("experts", ()))


__all__ = ["experts_document", "experts_notes", "experts_text"]
