"""What it saves to let experts see means in place of rows, and what it takes: LSH-MoE (arXiv 2411.08446), section 4.2.

Its model counts what travels; here the experts' work counts too, which becomes less by the same share, and so does what
hashes, means and the way back to rows take.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import fx

from fxpar.cost.calls import busy_s
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.hops import exchange_s
from fxpar.cost.ops import SizesAt
from fxpar.ir.mesh import Mesh


@dataclass(frozen=True)
class Compressed:
    """Sizes of one layer on a rank: `rows` of its tokens, `slots` of each, in `width` numbers, and `means` in their
    place, for `experts` of all ranks, which are apart over `axis` ("": each rank has all). A row of a mean travels in
    `sent_bytes`. A row is hashed with `vectors`. `ways`: 2, or 1 without a backward.
    """

    rows: int
    means: int
    slots: int
    width: int
    dtype: torch.dtype
    experts: int
    axis: str
    sent_bytes: int
    vectors: int
    ways: int


@dataclass(frozen=True)
class Gain:
    """Seconds of a micro-batch on one rank."""

    saved_s: Fraction
    spent_s: Fraction

    @property
    def pays(self) -> bool:
        return self.saved_s > self.spent_s


def gain(one: Compressed, calls: Iterable[fx.Node], sizes: SizesAt, mesh: Mesh, cluster: ClusterSpec) -> Gain:
    """Of means for a layer whose `calls` work on its rows, forward and backward. Rows are read or written three times
    more in the forward (means, and the way back to rows), and five times in the backward.
    """
    device = cluster.sustained
    work = sum((busy_s(node, sizes, cluster) for node in calls), Fraction(0))
    saved = work * (1 - Fraction(one.means, max(one.rows, 1)))
    if one.axis:
        row_bytes = one.width * one.dtype.itemsize
        here = one.rows // one.slots * row_bytes, one.means * one.sent_bytes
        exact, fewer = (
            exchange_s(mesh, one.axis, cluster, slots, one.experts, sent)
            for slots, sent in zip((one.slots, 1), here, strict=True)
        )
        saved += 2 * one.ways * (exact - fewer)
    passes = 3 + 5 * (one.ways - 1)
    moved = passes * one.rows * one.width * one.dtype.itemsize / device.bytes_per_s
    hashed = 2 * one.rows // one.slots * one.width * one.vectors / device.flops_per_s(one.dtype)
    launches = device.launch_s * (4 + 3 * (one.ways - 1))
    return Gain(saved, hashed + moved + launches)


__all__ = ["Compressed", "Gain", "gain"]
