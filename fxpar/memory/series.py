"""`Series`: what a rank holds while a graph runs, node by node, and the `Peak` of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import fx

KINDS = ("saved", "forward", "again", "backward", "result", "message", "host")
"""What memory is for: forward values that the backward reads, other forward values, those computed again or fetched
from the host, values of the backward, gradients (what the graph returns, or what a pipeline stage adds up in), and
messages with batches under way. The last is memory of the host, which is in no sum: forward values that wait there.
"""
HOST = KINDS[-1]
_HOST_AT = len(KINDS) - 1


@dataclass(frozen=True)
class Peak:
    """Bytes at the node where a graph holds most, over what its caller keeps (parameters, batch, accumulators).

    `forward_bytes`: values of the forward; `again_bytes`: those computed again in the backward, or fetched there from
    the host; `backward_bytes`: other values of the backward; `result_bytes`: what the graph returns (gradients), as far
    as it exists at that node; `workspace_bytes`: what the node's kernel allocates for itself; `message_bytes`: what
    pipeline stages have received and not used yet or are sending, and the batches of micro-batches under way.
    `kept_bytes` of the forward's values wait for the backward at that node. `saved_bytes` is what lives between forward
    and backward, in a pipeline of all micro-batches at once, at most: that may be at another node, where less is held
    in all. `host_bytes` is what lies in memory of the host, at most, and is not part of the total.

    Of a pipeline's rank, results are what its stages add up gradients in, and the forward's values those of all
    micro-batches under way.
    """

    node: str
    forward_bytes: int
    again_bytes: int
    backward_bytes: int
    result_bytes: int
    workspace_bytes: int
    saved_bytes: int
    message_bytes: int = 0
    kept_bytes: int = 0
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        parts = (self.forward_bytes, self.again_bytes, self.backward_bytes)
        return sum(parts) + self.result_bytes + self.workspace_bytes + self.message_bytes


class Moment(NamedTuple):
    """What is held while `node` runs, values made by it included: `sums[i]` bytes of kind `KINDS[i]`.

    `during` is the action of a pipeline's schedule that the node is part of; without a node, the message that arrives.
    """

    node: fx.Node | None
    sums: tuple[int, ...]
    workspace_bytes: int = 0
    during: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(self.sums[:_HOST_AT]) + self.workspace_bytes

    @property
    def host_bytes(self) -> int:
        return self.sums[_HOST_AT]

    @property
    def name(self) -> str:
        """`mm_3`, `B0@1.mm_3` or `gradient 0 1->0`."""
        return ".".join(word for word in (self.during, self.node.name if self.node else "") if word)

    def peak(self, saved_bytes: int, host_bytes: int) -> Peak:
        """This moment as the fullest one."""
        sums = {**dict(zip(KINDS, self.sums, strict=True)), HOST: host_bytes}
        kept = sums.pop("saved")
        sums["forward"] += kept
        found = {f"{kind}_bytes": size for kind, size in sums.items()}
        return Peak(self.name, **found, workspace_bytes=self.workspace_bytes, saved_bytes=saved_bytes, kept_bytes=kept)


NOTHING = Moment(None, (0,) * len(KINDS))


@dataclass(frozen=True)
class Series:
    """All moments in order; `saved_bytes` as in `Peak`."""

    moments: tuple[Moment, ...]
    saved_bytes: int

    @cached_property
    def peak(self) -> Peak:
        """The first of the fullest moments."""
        fullest = max(self.moments, key=lambda moment: moment.total_bytes, default=NOTHING)
        return fullest.peak(self.saved_bytes, max((moment.host_bytes for moment in self.moments), default=0))
