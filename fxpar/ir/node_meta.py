"""What a node of a graph says of itself: every key of `node.meta` that fxpar writes, and how it is read.

Metadata is light and picklable, and takes the place of fake tensors. torch.fx types `node.meta` as a dict of anything;
the functions here return what `NodeMeta` promises. Graph files are checked against it too.
"""

from __future__ import annotations

from typing import Any, TypedDict

import sympy
from torch import fx

from fxpar.ir.dist_config import DistConfig
from fxpar.ir.graph import TensorMeta

NodeMeta = TypedDict(
    "NodeMeta",
    {
        # Of the capture. `tensor` and `local` are tuples for an op with several results.
        "tensor": TensorMeta | tuple[TensorMeta | None, ...] | None,  # the whole value
        "sym": sympy.Expr | int | float | None,  # the value in the dynamic dims, on nodes that compute a size
        "fqn": str | None,  # of the module that the node was traced in, "" for the root; backward nodes too
        "source": str | None,  # "file:line" of the user's code
        "backward": bool,
        "kind": str,  # of the input, on placeholders: an `InputKind`
        # Of the lowering.
        "dist": DistConfig | tuple[DistConfig | None, ...],  # placements of the results
        "dist_in": tuple[DistConfig, ...],  # placements that the tensor operands should have
        "local": TensorMeta | tuple[TensorMeta | None, ...] | None,  # what one rank has of the value
        "phase": str,  # a `Phase`; body where it is not said
        "reader": str,  # of what brings a value to its reader: that module, within which it may be computed again
        "bucket": str | None,  # collectives of one bucket may travel together
        "comm": tuple[str, TensorMeta],  # axis of a collective, and what one rank sends (ring algorithms)
        "fused": int,  # how many collectives travel in this one
        "buffer": str,  # FQN of the buffer that this value is written to
        "chunk": int,  # the loss runs in chunks of tokens: of which this is a part, or the result of all
        "gradient": bool,  # of a part of such a chunk: does what only a backward does, although it runs in the forward
        "ep_chunk": int,  # ids of experts: of which chunk of a layer's tokens
        "again": bool,  # computed a second time, in the backward, or fetched there from the host
        "host": bool,  # the value lies in memory of the host
        # On counts of rows by expert: the axis over which experts are apart, "" for none; how many ranks have each row.
        "experts": tuple[str, int],
        "pass": str,  # name of the pass that made the node; nodes of the capture have none
        # Of the placement search: nodes that decide together.
        "class": tuple[Any, ...],
        "variant": tuple[Any, ...],
        "rule": int | None,
    },
    total=False,
)


def whole_meta(node: fx.Node) -> TensorMeta | tuple[TensorMeta | None, ...] | None:
    """Shape and dtype of a node's result, or of each result; None: an integer, or no result."""
    return node.meta.get("tensor")


def tensor_metas(node: fx.Node) -> tuple[TensorMeta | None, ...]:
    """The same as a tuple."""
    found = whole_meta(node)
    if found is None:
        return ()
    return found if isinstance(found, tuple) else (found,)


def tensor_of(node: Any) -> TensorMeta:
    """Shape and dtype of the one result of a node."""
    return node.meta["tensor"]


def local_tensor(node: Any) -> TensorMeta:
    """What one rank has of the one result of a node."""
    return node.meta["local"]


def local_meta(node: fx.Node) -> TensorMeta | tuple[TensorMeta | None, ...] | None:
    """What one rank has of a node's result, or results; the whole in a graph without local shapes. None: an integer."""
    return node.meta.get("local", node.meta.get("tensor"))


def local_metas(node: fx.Node) -> tuple[TensorMeta | None, ...]:
    """The same as a tuple, with None for an integer."""
    found = local_meta(node)
    return found if isinstance(found, tuple) else (found,)


def one_local(node: fx.Node) -> TensorMeta | None:
    """What one rank has of the one result of a node; None for several results, and for an integer."""
    found = local_meta(node)
    return found if isinstance(found, TensorMeta) else None


def dist_of(node: Any) -> DistConfig:
    """Placement of the one result of a node."""
    return node.meta["dist"]


def dists_of(node: Any) -> tuple[DistConfig | None, ...]:
    """Placement of each result; empty before annotation."""
    found = node.meta.get("dist", ())
    return found if isinstance(found, tuple) else (found,)


def wanted_dists(node: fx.Node) -> tuple[DistConfig, ...]:
    """Placements that the tensor operands should have; empty where nothing is wanted."""
    return node.meta.get("dist_in", ())


def is_size(node: fx.Node) -> bool:
    """Whether a node computes an integer, from the sizes of tensors."""
    return "sym" in node.meta


def size_of(node: Any) -> Any:
    """What such a node computes: an expression in the dynamic dims, or a number."""
    return node.meta["sym"]


def reader_of(node: fx.Node) -> str:
    """The module that a node is computed for: of what moves a value the one that reads it, else its own."""
    return node.meta.get("reader") or fqn_of(node)


def fqn_of(node: fx.Node) -> str:
    """FQN of the module that a node was traced in; "" for the root, and where none is known."""
    return node.meta.get("fqn") or ""


def source_of(node: fx.Node) -> str | None:
    """ "file:line" of the user's code."""
    return node.meta.get("source")


def is_backward(node: fx.Node) -> bool:
    return bool(node.meta.get("backward"))


def is_gradient(node: fx.Node) -> bool:
    """Whether it does what only a backward does: in the backward, but not a second time, or in a chunk of the loss."""
    return bool(node.meta.get("gradient")) or (is_backward(node) and not is_again(node))


def is_again(node: fx.Node) -> bool:
    """Whether the value is computed a second time, in the backward."""
    return bool(node.meta.get("again"))


def counted_by(node: fx.Node) -> tuple[str, int]:
    """Of counts of rows by expert: the axis over which experts are apart ("" for none), and how many ranks have each
    row: they share its work. Of any other node ("", 0).
    """
    return node.meta.get("experts", ("", 0))


def is_on_host(node: fx.Node) -> bool:
    """Whether the value lies in memory of the host: what `fxpar::to_host` has made."""
    return bool(node.meta.get("host"))


def phase_of(node: fx.Node) -> Any:
    """The part of a program that a node belongs to (a `Phase`)."""
    return node.meta.get("phase", "body")


def input_kind(node: fx.Node) -> str | None:
    """The `InputKind` of a placeholder."""
    return node.meta.get("kind")


def comm_of(node: fx.Node) -> tuple[str, TensorMeta]:
    """Axis of a collective, and what one rank sends."""
    return node.meta["comm"]


def fused_count(node: fx.Node) -> int:
    """How many collectives travel in this one."""
    return node.meta.get("fused", 1)
