"""`SwitchPlan`: the transfers of one switch with all that is known of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fxpar.switch.bound import lower_bounds
from fxpar.switch.predict import TransferPlan
from fxpar.switch.verify import verify

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Move:
    """One slice of one tensor, as a transport needs it; `box` is in global indices, `src` equals `dst` for a copy."""

    fqn: str
    box: Box
    src: int
    dst: int
    nbytes: int
    step: int = 0


@dataclass(frozen=True, eq=False)
class SwitchPlan(TransferPlan):
    """`transfers` is a record array (see `transfers.TRANSFER`) in the order (step, tensor, slice, destination).

    What a rank both holds and needs is not among them: see `copies`.
    """

    planner: str  # as asked for
    plan_cpu_s: float = 0.0
    chosen: str = ""  # what `auto` took; else like `planner`

    most = None  # what a rank sends is in the table

    def rows_of(self, rank: int) -> np.ndarray:
        """The transfers that `rank` sends or receives, and maybe others."""
        return self.transfers

    @cached_property
    def lower_bounds(self) -> tuple[float, float]:
        """Bounds inside and between nodes; see `bound`."""
        return lower_bounds(self.problem)

    @property
    def lower_bound_bytes(self) -> float:
        """What `max_send_bytes` cannot undercut by choosing senders (relaying can)."""
        return max(self.lower_bounds)

    @property
    def steps(self) -> int:
        """Hops: 2 if slices are relayed."""
        return int(self.transfers["step"].max()) + 1 if len(self.transfers) else 0

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that are equal exactly if tensors, slices and transfers are; the same in every process."""
        digest = hashlib.sha256()
        digest.update("\0".join(self.problem.tensors).encode())
        for cls in self.problem.classes:
            for array in (cls.members, cls.boxes):
                digest.update(repr((array.shape, cls.itemsize)).encode())
                digest.update(np.ascontiguousarray(array, "<i8").tobytes())
        digest.update(np.ascontiguousarray(self.transfers).tobytes())
        return digest.hexdigest()[:16]

    def moves(self, rank: int | None = None) -> Iterator[Move]:
        """The transfers in order; with `rank`, those that it sends or receives."""
        chosen = self.transfers
        if rank is not None:
            chosen = chosen[(chosen["src"] == rank) | (chosen["dst"] == rank)]
        for tensor, piece, src, dst, nbytes, step in chosen.tolist():
            yield Move(self.problem.tensors[tensor], self.box(tensor, piece), src, dst, nbytes, step)

    def copies(self, rank: int) -> Iterator[Move]:
        """The slices that `rank` holds before and needs after, in the order of tensors."""
        for tensor, index in enumerate(self.problem.class_of.tolist()):
            cls = self.problem.classes[index]
            for piece in np.flatnonzero(cls.stays(rank)).tolist():
                yield Move(self.problem.tensors[tensor], self.box(tensor, piece), rank, rank, int(cls.nbytes[piece]))

    def box(self, tensor: int, piece: int) -> Box:
        """Global (start, stop) per dim of a slice."""
        boxes = self.problem.classes[self.problem.class_of[tensor]].boxes
        return tuple((start, stop) for start, stop in boxes[piece].tolist())

    def verify(self) -> None:
        """Raise SwitchPlanError unless each needed element is written exactly once, from a rank that has it."""
        verify(self.problem, self.transfers)

    def to_json(self) -> dict[str, Any]:
        """Numbers, not the transfers; bytes are whole, times in seconds."""
        load, (inside, between) = self.traffic, self.lower_bounds
        return {
            "planner": self.planner,
            "chosen": self.chosen,
            "from": self.problem.source,
            "to": self.problem.target,
            "cluster": self.problem.cluster.to_json(),
            "ranks": self.problem.world,
            "intra_node_bytes": self.intra_node_bytes,
            "inter_node_bytes": self.inter_node_bytes,
            "local_bytes": self.problem.local_bytes,
            "max_send_bytes": self.max_send_bytes,
            "max_send_intra_bytes": int(load.sent_inside.max()),
            "max_send_inter_bytes": int(load.sent_between.max()),
            "lower_bound_bytes": round(self.lower_bound_bytes),
            "lower_bound_intra_bytes": round(inside),
            "lower_bound_inter_bytes": round(between),
            "transfers": len(self.transfers),
            "steps": self.steps,
            "predicted_s": self.predicted_s,
            "plan_cpu_s": self.plan_cpu_s,
            "fingerprint": self.fingerprint,
            "node_matrix": load.by_node.tolist(),
            "sent_bytes": (load.sent_inside + load.sent_between).tolist(),
            "received_bytes": (load.received_inside + load.received_between).tolist(),
        }


def node_links(matrix: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    """(from node, to node, bytes) of the pairs that carry anything, the fullest first."""
    links = [(a, b, size) for a, row in enumerate(matrix) for b, size in enumerate(row) if size]
    yield from sorted(links, key=lambda link: (-link[2], link[0], link[1]))
