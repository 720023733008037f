"""Galvatron's profiles as its formulas need them: of one cluster and one sequence length, between what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from fxpar.errors import PlanOptionError
from fxpar.search.galvatron_files import ByDegree, Collectives, EndsMemory, LayerMemory, Network, Profiles, Times

V = TypeVar("V")
_FITTED_FROM = 8  # measured batch sizes; with fewer the largest one speaks for all


@dataclass(frozen=True)
class Measured:
    """Figures for `devices` and sequences of `seq_len` tokens. Raises PlanOptionError where none can be had."""

    profiles: Profiles
    devices: int
    seq_len: int

    # --------------------------------------------------------------------------------------------------------- compute
    @cached_property
    def layer_line(self) -> tuple[float, float]:
        """(x, y): a layer's forward of n samples takes x n + y ms."""
        return self._line(self.profiles.layer_ms, 2)

    @cached_property
    def ends_line(self) -> tuple[float, float]:
        """The same of embedding and head."""
        return self._line(self.profiles.ends_ms, 1)

    def _line(self, times: Times, power: int) -> tuple[float, float]:
        """A line over batches of this length; with few of them the largest. Of another length: a polynomial over those
        that were measured with one sample.
        """
        batches = sorted(batch for batch, length in times if length == self.seq_len)
        if len(batches) >= _FITTED_FROM:
            return _fit({batch: times[batch, self.seq_len] * batch for batch in batches})
        if batches:
            return times[batches[-1], self.seq_len], 0.0
        single = {length: ms for (batch, length), ms in times.items() if batch == 1}
        if len(single) <= power:
            lengths = ", ".join(map(str, sorted({length for _, length in times})))
            why = f"measured were sequences of {lengths} tokens, too few to tell other lengths. Profile this one"
            raise PlanOptionError("--seq-len", self.seq_len, why)
        found = np.polyfit(list(single), list(single.values()), power)
        return float(np.polyval(found, self.seq_len)), 0.0

    # ---------------------------------------------------------------------------------------------------------- memory
    @cached_property
    def layer_memory(self) -> LayerMemory:
        """Of this length; else that of the longest, with activations in proportion."""
        found = self.profiles.layer_memory
        used, scale = self._length(found)
        activation = {degree: mb * scale for degree, mb in used.activation_mb.items()}
        return LayerMemory(used.parameter_mb, activation, used.remat_mb * scale)

    def ends_memory(self, where: str) -> EndsMemory:
        """Of embedding and head: "off" a pipeline, or "on_first", "on_last" of its stages."""
        used, scale = self._length(self.profiles.ends_memory[where])
        return EndsMemory(used.states_mb, {degree: mb * scale for degree, mb in used.activation_mb.items()})

    def _length(self, by_length: Mapping[int, V]) -> tuple[V, float]:
        length = self.seq_len if self.seq_len in by_length else max(by_length)
        return by_length[length], self.seq_len / length

    # --------------------------------------------------------------------------------------------------- communication
    @cached_property
    def _cluster(self) -> tuple[int, int]:
        """Nodes, devices per node: of the measured clusters with so many devices that of the fewest nodes."""
        fits = [key for key in self.profiles.networks if math.prod(key) == self.devices]
        if not fits and self.devices > 1:
            known = ", ".join(f"{math.prod(key)} ({key[0]} x {key[1]})" for key in sorted(self.profiles.networks))
            raise PlanOptionError("--devices", self.devices, f"bandwidths were measured for {known}. Take one of them")
        return min(fits, default=(1, 1))

    @cached_property
    def network(self) -> Network:
        return self.profiles.networks.get(self._cluster, Network({}, {}))

    @cached_property
    def _collectives(self) -> Collectives:
        """Of this cluster, else of fewer nodes with as many devices: the groups stay inside of a node."""
        tables = self.profiles.collectives
        alike = [key for key in sorted(tables) if key[1] == self._cluster[1]]
        if self._cluster in tables:
            return tables[self._cluster]
        return tables[alike[0]] if alike else Collectives({}, {})

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What a reader of a plan should know about its prices."""
        name = f"sp_time_{self._cluster[0]}nodes_{self._cluster[1]}gpus_per_node.json"
        if self.devices == 1 or self._cluster in self.profiles.collectives:
            return ()
        if not self._collectives.all_reduce_ms:
            return (f"there is no {name}: neither tensor parallelism nor Ulysses is planned",)
        return (f"there is no {name}: tensor parallelism and Ulysses have the prices of fewer nodes",)

    def reduce_ms_per_mb(self, size: int, neighbours: bool) -> float:
        """Of an all-reduce over `size` devices."""
        bandwidths = self.network.reduce_mb_per_ms
        if size > 1 and (size, neighbours) not in bandwidths:
            why = f"their profile has no allreduce_size_{size}_consec_{int(neighbours)}. Measure it"
            raise PlanOptionError("--devices", self.devices, why)
        return 1.0 / bandwidths[size, neighbours] if size > 1 else 0.0

    def p2p_ms_per_mb(self, stages: int) -> float:
        """From a stage to the next."""
        return 1.0 / self.network.p2p_mb_per_ms[stages] if stages > 1 else 0.0

    def all_gather_ms(self, degree: int, mb: float) -> float:
        """Half of an all-reduce, as Galvatron has it; the same of a reduce-scatter."""
        return _latency({size: ms / 2 for size, ms in self._collectives.all_reduce_ms[degree].items()}, mb)

    def all_to_all_ms(self, degree: int, mb: float) -> float:
        return _latency(self._collectives.all_to_all_ms[degree], mb)

    # ---------------------------------------------------------------------------------------------- what can be priced
    def stages(self, most: int) -> list[int]:
        """Numbers of stages, powers of two."""
        return [p for p in _powers(min(most, self.devices)) if p == 1 or p in self.network.p2p_mb_per_ms]

    def degrees(self, most: int, ulysses: bool) -> list[int]:
        """Degrees of tensor parallelism or Ulysses, powers of two."""
        tables = self._collectives
        timed = tables.all_to_all_ms if ulysses else tables.all_reduce_ms
        ends = [self.ends_memory(where) for where in self.profiles.ends_memory]
        return [
            k
            for k in _powers(most)
            if (k == 1 or k in timed)
            and k in self.layer_memory.activation_mb
            and all(k in one.activation_mb and (ulysses or k in one.states_mb) for one in ends)
        ]


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def _fit(values: Mapping[int, float]) -> tuple[float, float]:
    """Slope and height of the line through the points."""
    slope, height = np.polyfit(list(values), list(values.values()), 1)
    return float(slope), float(height)


def _latency(by_mb: ByDegree, mb: float) -> float:
    """ms of a message: as measured, else on the line through what was measured."""
    if mb in by_mb:
        return by_mb[int(mb)]
    slope, height = _fit(by_mb)
    return slope * mb + height
