"""Galvatron's cost model: what a layer, the ends of the model and a pipeline cost, from its own profiles.

The formulas are those of Galvatron 3.0, faults included, so that its predictions and fxpar's search can be held against
each other. Numbers such as (2.1) are sections of `galvatron.md`, the fact sheet that they were taken from. Symbols: c
micro-batches, P stages, d replicas, k the degree of tensor parallelism t or of Ulysses u, Z = d u, b = batch // c // d
samples at a time on a device. Memory is in MB of 2^20 bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from fxpar.errors import PlanOptionError
from fxpar.search.fronts import Floats
from fxpar.search.galvatron_files import Profiles
from fxpar.search.galvatron_measured import Measured
from fxpar.search.galvatron_plan import GalvatronPlan, LayerStrategy
from fxpar.search.layered import Space

# The files do not say how many layers a model has, and how wide they are; their names say which model it is.
MODELS = {
    "llama-7b": (32, 4096),
    "llama-13b": (40, 5120),
    "llama2-7b": (32, 4096),
    "llama2-13b": (40, 5120),
    "llama2-70b": (80, 8192),
    "llama3-8b": (32, 4096),
    "llama3-70b": (80, 8192),
}
_BACKWARD = 2  # forwards
_MORE_THAN_SHARE = 0.003  # of all states
_CONTEXT_MB = 1024
_RESERVED_ABOVE_GB = 20


@dataclass(frozen=True)
class GalvatronCost:
    """Prices of one model on one cluster, with one batch. Raises PlanOptionError.

    `layers` and `hidden` are known for the models in MODELS. Degrees are powers of two up to `most_degree`. `zero`: the
    level of layers that are not ZeRO-3 (2; 0 is data parallelism without sharding). `late`: gradients are reduced once
    per step. `borders`: a change of degree between layers is priced, which Galvatron leaves out of its predictions.
    """

    profiles: Profiles
    devices: int
    batch: int
    seq_len: int
    layers: int = 0
    hidden: int = 0
    most_degree: int = 8
    zero: Literal[0, 2] = 2
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    late: bool = True
    borders: bool = False

    def __post_init__(self) -> None:
        known = MODELS.get(self.profiles.model, (0, 0))
        for option, value in zip(("layers", "hidden"), known, strict=True):
            object.__setattr__(self, option, getattr(self, option) or value)
            if not getattr(self, option):
                why = f"the profiles do not say it of {self.profiles.model!r}. Give it; known are {', '.join(MODELS)}"
                raise PlanOptionError(_flag(option), 0, why)
        for option in ("devices", "batch", "seq_len", "most_degree", "layers", "hidden"):
            if getattr(self, option) < 1:
                raise PlanOptionError(_flag(option), getattr(self, option), "write a whole number of at least 1")
        for option in ("devices", "most_degree"):
            value = getattr(self, option)
            if value & (value - 1):
                below = 1 << (value.bit_length() - 1)
                why = f"Galvatron's degrees are powers of two. Write {below} or {2 * below}"
                raise PlanOptionError(_flag(option), value, why)

    @cached_property
    def measured(self) -> Measured:
        return Measured(self.profiles, self.devices, self.seq_len)

    @property
    def _half(self) -> float:
        """Bytes of a number beside those of fp32."""
        return 1.0 if self.profiles.dtype == "fp32" else 0.5

    def _samples(self, strategy: LayerStrategy, micro_batches: int) -> int:
        return self.batch // micro_batches // strategy.dp

    def _message_mb(self, samples: float) -> float:
        """What a layer hands to the next."""
        return samples * self.seq_len * self.hidden * 4 * self._half / 2**20

    # ------------------------------------------------------------------------------------------------------------ time
    def layer_s(self, strategy: LayerStrategy, micro_batches: int) -> tuple[float, float]:
        """A layer without gradient sync, and what the sync adds (2.1).

        Forward F = x b/k + y, backward 2F, one more F with recomputation. Tensor parallelism has 6 all-gathers, Ulysses
        4 all-to-alls, and half as many again with recomputation. The sync over Z devices goes on beside the backward,
        and slows it as it is slowed itself. A ZeRO-3 layer gathers its parameters once, beside nothing.
        """
        b, k = self._samples(strategy, micro_batches), strategy.degree
        slope, height = self.measured.layer_line
        forward = slope * b / k + height
        backward = (_BACKWARD + strategy.remat) * forward
        total = forward + backward
        message = self._message_mb(b)
        redone = 1.5 if strategy.remat else 1.0
        if strategy.tp > 1:
            total += 6 * redone * self.measured.all_gather_ms(k, message)
        elif k > 1:
            total += 4 * redone * self.measured.all_to_all_ms(k, message)
        shards = strategy.shards
        parameters = self.measured.layer_memory.parameter_mb / strategy.tp * self._half
        sync = 2 * (shards - 1) / shards * parameters * self.measured.reduce_ms_per_mb(shards, strategy.tp == 1)
        if strategy.zero == 3:
            total += sync / 2
        total += 2 * strategy.stages * message * self.measured.p2p_ms_per_mb(strategy.stages) / self.layers
        slower = self.profiles.overlap
        exposed = (slower - 1) * min(sync, backward) + max(0.0, sync - backward) if strategy.dp > 1 else 0.0
        return total / 1e3, exposed / 1e3

    def ends_s(self, strategy: LayerStrategy, micro_batches: int) -> list[float]:
        """Embedding and head, per stage, without gradient sync (2.2): half of it on the first and the last stage."""
        b = self._samples(strategy, micro_batches)
        slope, height = self.measured.ends_line
        places = ["off"] if strategy.stages == 1 else ["on_first", "on_last"]
        forward = (slope * b / strategy.degree + height) / len(places)
        shards, slower = strategy.shards, self.profiles.overlap
        per_mb = self.measured.reduce_ms_per_mb(shards, strategy.tp == 1) * (shards - 1) / shards
        found = []
        for place in places:
            states = self.measured.ends_memory(place).states_mb[strategy.tp]
            gather = states / 4 * self._half * per_mb / 2 if strategy.zero == 3 else 0.0
            total = _beside(forward, gather, slower) + _beside(_BACKWARD * forward, gather, slower)
            if strategy.tp > 1:
                total += 2 / len(places) * self.measured.all_gather_ms(strategy.tp, self._message_mb(b))
            found.append(total / 1e3)
        return [found[0], *[0.0] * (strategy.stages - 2), *found[1:]]

    def border_s(self, former: int, latter: int, stages: int, micro_batches: int) -> float:
        """From a layer of degree `former` to one of `latter` (3.1, in the units in which it is seconds)."""
        larger = max(former, latter)
        if not self.borders or former == latter:
            return 0.0
        samples = self.batch / micro_batches / (self.devices // stages // larger)
        sent = (larger - 1) / larger * self._message_mb(samples) * 2**20 / 1e6
        return sent * self.measured.reduce_ms_per_mb(larger, True) / 1e3

    def step_s(self, micro_batches: int, layers_s: Floats, exposed_s: Floats, ends_s: Floats) -> Floats:
        """The whole step (2.3). Arrays [..., P]: seconds of the layers of a stage, what their sync adds, the ends.

        The first stage is taken for the slowest: a slow one in the middle is not seen.
        """
        paced, drained, flat, tails = _pipeline(micro_batches, layers_s, exposed_s, ends_s)
        return np.maximum(paced, np.maximum(drained, flat)) + np.maximum(0.0, tails.max(-1))

    def floor_s(self, micro_batches: int, layers_s: Floats, exposed_s: Floats, ends_s: Floats) -> Floats:
        """At most `step_s`, equal with one or two stages. It leaves out where a plan is called faster because a middle
        stage is slower: there a later stage's sync is counted as hidden behind it.
        """
        paced, drained, flat, tails = _pipeline(micro_batches, layers_s, exposed_s, ends_s)
        early = np.maximum(paced, np.maximum(drained, flat)) + np.maximum(0.0, tails[..., :2].max(-1))
        return np.maximum(early, np.maximum(paced, drained) + tails.max(-1))

    def hidden_s(self, layers_s: Floats, ends_s: Floats) -> Floats:
        """The sync of a stage [..., P] ends before the micro-batch has passed the stages before it and its own ends."""
        return np.cumsum(layers_s + ends_s, -1) - layers_s

    # ---------------------------------------------------------------------------------------------------------- memory
    def _kept(self, strategy: LayerStrategy, micro_batches: int) -> float:
        """The share of weights, gradients and optimizer states that a device holds (2.4)."""
        if strategy.zero == 0:
            return 1.0
        share, whole = 1 / strategy.shards + _MORE_THAN_SHARE, self._half == 1.0
        full, wide = strategy.zero == 3, micro_batches > 1
        if wide and self.late:  # gradients of all micro-batches lie there whole
            eighths = (6 if whole else 7) if full else (4 if whole else 6)
        else:
            eighths = 8 if full else (6 if whole else 7)
        kept = eighths / 8 * share + (8 - eighths) / 8
        return kept * 5 / 4 if wide and not self.late and (full or not whole) else kept  # and one gradient in fp32

    def _alive(self, stage: int, stages: int, micro_batches: int) -> int:
        """Micro-batches whose activations a stage holds at once."""
        if stages == 1:
            return 1
        return micro_batches if self.schedule == "gpipe" else stages - stage

    def layer_mb(self, strategy: LayerStrategy, micro_batches: int, stage: int) -> int:
        """A layer on `stage` (2.4): states, and the activations of all samples that are under way. What recomputing one
        layer takes for a moment is not counted.
        """
        memory = self.measured.layer_memory
        per_sample = memory.remat_mb / strategy.degree if strategy.remat else memory.activation_mb[strategy.degree]
        alive = self._samples(strategy, micro_batches) * self._alive(stage, strategy.stages, micro_batches)
        return math.ceil(
            4 * memory.parameter_mb / strategy.tp * self._kept(strategy, micro_batches) + per_sample * alive
        )

    def ends_mb(self, strategy: LayerStrategy, micro_batches: int) -> list[int]:
        """Embedding, head and the device's context, per stage (2.4)."""
        b, stages = self._samples(strategy, micro_batches), strategy.stages
        found = [_CONTEXT_MB] * stages
        places = {0: "off"} if stages == 1 else {0: "on_first", stages - 1: "on_last"}
        for stage, place in places.items():
            memory = self.measured.ends_memory(place)
            states = memory.states_mb[strategy.tp] * self._kept(strategy, micro_batches)
            alive = memory.activation_mb[strategy.degree] * b * self._alive(stage, stages, micro_batches)
            found[stage] = math.ceil(states + alive + _CONTEXT_MB)
        return found

    def gather_mb(self, degree: int, stages: int, micro_batches: int) -> int:
        """The buffer of Megatron's sequence parallelism where `degree` is the largest in a model (2.4)."""
        return math.ceil(self._message_mb(self.batch / micro_batches / (self.devices / stages / degree)))

    def reserved_mb(self, memory_mb: int) -> int:
        """What is set aside for the allocator (2.4): a fifth of more than 20 GB."""
        return int(memory_mb * 0.2) if memory_mb // 1024 > _RESERVED_ABOVE_GB else 0

    def price(self, plan: GalvatronPlan) -> tuple[float, tuple[int, ...]]:
        """Seconds of a step of a plan, and bytes per stage without what is set aside. Raises PlanOptionError."""
        for option, own in (("devices", self.devices), ("batch", self.batch), ("schedule", self.schedule)):
            if getattr(plan, option) != own:
                raise PlanOptionError(_flag(option), own, f"the plan is for {getattr(plan, option)}. Give the same")
        if len(plan.layers) != self.layers:
            raise PlanOptionError("--layers", self.layers, f"the plan has {len(plan.layers)} layers. Give the same")
        c, starts = plan.micro_batches, np.cumsum((0, *plan.division))
        stages = [plan.layers[a:b] for a, b in itertools.pairwise(starts)]
        seconds = np.array([np.sum([self.layer_s(one, c) for one in stage], 0) for stage in stages])
        every = {*plan.layers, plan.ends}
        plain = any(one.ulysses > 1 for one in every) and all(one.tp == 1 for one in every)
        beside = 0 if plain else self.gather_mb(max(one.degree for one in every), len(stages), c)
        layers_mb = [sum(self.layer_mb(one, c, i) for one in stage) for i, stage in enumerate(stages)]
        mb = np.array(layers_mb) + self.ends_mb(plan.ends, c) + beside
        step_s = self.step_s(c, seconds[:, 0], seconds[:, 1], np.array(self.ends_s(plan.ends, c)))
        return float(step_s), tuple(int(one) * 2**20 for one in mb)

    # ------------------------------------------------------------------------------------------------------- the space
    def strategies(self, stages: int, micro_batches: int) -> list[LayerStrategy]:
        """Those of a layer (1.2): powers of two, as many replicas as a micro-batch has samples."""
        inside, found = self.devices // stages, set()
        for ulysses in (False, True):
            for k in self.measured.degrees(min(self.most_degree, inside), ulysses):
                dp = inside // k
                tp, cut = (1, k) if ulysses else (k, 1)
                for zero in (self.zero, 3) if dp > 1 else (0,):
                    found |= {LayerStrategy(stages, tp, cut, dp, zero, remat) for remat in (False, True)}
        return sorted(one for one in found if one.dp <= self.batch // micro_batches)

    def spaces(self, micro_batches: int | None = None) -> list[Space]:
        """For each number of micro-batches and stages: all strategies up to a degree, with the buffer that tensor
        parallelism of this degree needs; and those without tensor parallelism, without the buffer.
        """
        counts = [c for c in range(1, self.batch + 1) if self.batch % c == 0]
        if micro_batches is not None and micro_batches not in counts:
            why = f"it must divide the batch of {self.batch}: {', '.join(map(str, counts))}"
            raise PlanOptionError("--micro-batches", micro_batches, why)
        found = [
            space
            for c in (counts if micro_batches is None else [micro_batches])
            for stages in self.measured.stages(min(self.most_degree, self.layers, c))
            for space in self._spaces(stages, c)
        ]
        if not found:
            why = (
                f"too few samples for {self.devices} devices with degrees up to {self.most_degree}. Give a larger batch"
            )
            raise PlanOptionError("--batch", self.batch, why)
        return found

    def _spaces(self, stages: int, c: int) -> Iterator[Space]:
        found = self.strategies(stages, c)
        for degree in sorted({one.degree for one in found}):
            yield self._space([one for one in found if one.degree <= degree], c, self.gather_mb(degree, stages, c))
        plain = [one for one in found if one.tp == 1]
        if plain:
            yield self._space(plain, c, 0)

    def _space(self, found: Sequence[LayerStrategy], c: int, buffer_mb: int) -> Space:
        stages = found[0].stages
        ends = [one for one in found if not one.remat]
        seconds = np.array([self.layer_s(one, c) for one in found])
        degrees = sorted({one.degree for one in found})
        return Space(
            micro_batches=c,
            layers=even(self.layers, stages),
            strategies=tuple(map(str, found)),
            layer_s=seconds[:, 0],
            exposed_s=seconds[:, 1],
            layer_mb=np.array([[self.layer_mb(one, c, stage) for one in found] for stage in range(stages)]),
            ends=tuple(map(str, ends)),
            ends_s=np.array([self.ends_s(one, c) for one in ends]),
            ends_mb=np.array([self.ends_mb(one, c) for one in ends]) + buffer_mb,
            alike=tuple((i, ends.index(replace(one, remat=False))) for i, one in enumerate(found)),
            layouts=np.array([degrees.index(one.degree) for one in found]),
            border_s=np.array([[self.border_s(a, b, stages, c) for b in degrees] for a in degrees]),
        )


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage: what is left over is on the last."""
    return (*(layers // stages,) * (stages - 1), layers - layers // stages * (stages - 1))


def _pipeline(c: int, layers_s: Floats, exposed_s: Floats, ends_s: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """What a step is made of (2.3). All stages once and then the last one's pace; all stages once and the first one's
    work; the first one's work, where it is slower than the others together; and by how long the sync of each stage
    [..., P] outlasts a micro-batch.
    """
    stage_s = layers_s + ends_s
    reached = np.cumsum(stage_s, -1)
    first, count = stage_s[..., 0], stage_s.shape[-1]
    steady = first * max(0, c + 1 - count)
    paced = reached[..., -1] + (c - 1) * stage_s[..., -1]
    drained = reached[..., -1] - first + steady
    flat = min(count - 1, c - 1) * first + steady
    return paced, drained, flat, layers_s + exposed_s - reached


def _beside(compute: float, communication: float, slower: float) -> float:
    """ms of both at a time, where only the compute is slowed down."""
    hidden = compute * slower > communication
    return compute + communication * (1 - 1 / slower) if hidden else communication


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
