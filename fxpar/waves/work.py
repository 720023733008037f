"""What is planned: chains of equal layers with their costs, and edges between them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

from fxpar.errors import TaskGraphError, nearest

_GRADIENTS = 1 / 8  # of the states of Adam in mixed precision: 2 of 16 bytes


@dataclass(frozen=True)
class MetaOp:
    """A chain of `layers` equal layers of one task, and what one layer costs.

    `layer_ms` is the time of its forward and backward, by the number of devices that share it: the keys are the numbers
    that are allowed. `output_bytes` is what a layer hands to the next one, over all devices; `state_bytes` its weights,
    gradients and optimizer states on each device that runs it; `saved_bytes` what its forward keeps for its backward,
    over all devices. MetaOps of equal `weights` have the same parameters, layer by layer; "" has its own.
    `gradient_bytes` are those that devices with the same layer add up (None: 2 of the 16 bytes that Adam in mixed
    precision holds).

    Raises TaskGraphError for a value that cannot be.
    """

    name: str
    layers: int
    layer_ms: Mapping[int, float] = field(hash=False)
    output_bytes: float = 0.0
    state_bytes: float = 0.0
    saved_bytes: float = 0.0
    weights: str = ""
    gradient_bytes: float | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise TaskGraphError("a MetaOp", "name = '' says nothing", "Give each a name")
        if not _whole(self.layers):
            raise TaskGraphError(self._key("layers"), f"{self.layers!r} is not a number of layers", "Write 1 or more")
        if not self.layer_ms:
            raise TaskGraphError(self._key("layer_ms"), "it is empty", "Give a time for one number of devices at least")
        for devices, ms in self.layer_ms.items():
            if not _whole(devices):
                why = f"{devices!r} is not a number of devices"
                raise TaskGraphError(self._key("layer_ms"), why, "Write 1 or more")
            if not (_is_number(ms) and 0 < ms < math.inf):
                raise TaskGraphError(self._key(f"layer_ms.{devices}"), f"{ms!r} is not a time in ms", "Write one > 0")
        for key in ("output_bytes", "state_bytes", "saved_bytes", "gradient_bytes"):
            value = getattr(self, key)
            if key == "gradient_bytes" and value is None:
                continue
            if not (_is_number(value) and 0 <= value < math.inf):
                raise TaskGraphError(self._key(key), f"{value!r} is not a number of bytes", "Write 0 or more")

    def _key(self, key: str) -> str:
        return f"MetaOp {self.name!r}, {key}"

    @property
    def reduced_bytes(self) -> float:
        """Of a layer, what devices that hold it add up."""
        return _GRADIENTS * self.state_bytes if self.gradient_bytes is None else self.gradient_bytes

    @property
    def parameters(self) -> str:
        """The name of what it shares."""
        return self.weights or self.name


@dataclass(frozen=True)
class TaskGraph:
    """MetaOps and edges (name, name): the second one reads what the first one makes.

    Raises TaskGraphError that names the MetaOp, key or edge: names that collide, an edge to nobody, a cycle, weights
    that are shared by unequal MetaOps.
    """

    metaops: tuple[MetaOp, ...]
    edges: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.metaops:
            raise TaskGraphError("metaops", "there is none", "Give one at least")
        names = [one.name for one in self.metaops]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise TaskGraphError(f"MetaOp {twice[0]!r}", "two have this name", "Rename one of them")
        for edge in self.edges:
            for end in edge:
                if end not in names:
                    raise TaskGraphError(
                        f"edge {edge[0]!r} -> {edge[1]!r}",
                        f"there is no MetaOp {end!r}{nearest(end, names)}",
                        "Correct it",
                    )
        try:
            TopologicalSorter({name: [a for a, b in self.edges if b == name] for name in names}).prepare()
        except CycleError as error:
            way = " -> ".join(error.args[1])
            raise TaskGraphError("edges", f"{way} is a cycle, so none of them can begin", "Remove an edge") from None
        owners: dict[str, MetaOp] = {}
        for one in self.metaops:
            first = owners.setdefault(one.parameters, one)
            alike = [(each.layers, each.state_bytes, each.reduced_bytes) for each in (first, one)]
            if alike[0] != alike[1]:
                why = f"{first.name!r} has the same weights, and other layers, state_bytes or gradient_bytes"
                raise TaskGraphError(f"MetaOp {one.name!r}, weights", why, "Make them equal, or name other weights")

    @cached_property
    def before(self) -> tuple[tuple[int, ...], ...]:
        """Places of those that each MetaOp reads from."""
        place = {one.name: i for i, one in enumerate(self.metaops)}
        return tuple(tuple(sorted({place[a] for a, b in self.edges if b == one.name})) for one in self.metaops)

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """Places of those that read from each MetaOp."""
        return tuple(
            tuple(j for j, sources in enumerate(self.before) if i in sources) for i in range(len(self.metaops))
        )

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Places, each behind those that it reads from."""
        return tuple(TopologicalSorter(dict(enumerate(self.before))).static_order())

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Places by the longest way from a MetaOp that reads from none: members of a level are independent."""
        depth: dict[int, int] = {}
        for i in self.order:
            depth[i] = max((depth[j] + 1 for j in self.before[i]), default=0)
        return tuple(
            tuple(i for i in range(len(self.metaops)) if depth[i] == level) for level in range(max(depth.values()) + 1)
        )


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
