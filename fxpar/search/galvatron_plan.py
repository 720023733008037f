"""Galvatron's plan file: a strategy per layer, and what each is in fxpar's words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fxpar.ir.axes import BINS, REPLICAS, ROLE_AXES, STAGES
from fxpar.ir.module_rules import ModuleRule
from fxpar.ir.remat import Remat
from fxpar.ir.strategy import SINGLE, Strategy, of_degrees
from fxpar.ir.strategy_text import Pipeline
from fxpar.search.json_file import JsonFile
from fxpar.search.plan_file import Plan, PlanGroup

_PER_LAYER = ("tp_sizes_enc", "dp_types_enc", "use_sp", "checkpoint", "cp_sizes_enc", "tp_consecutive_flags")
_NEEDED = ("pp_deg", "tp_sizes_enc", "dp_types_enc", "global_bsz", "chunks")
_OPTIONAL = {
    "tp_consecutive_flags": "", "cp_sizes_enc": "", "use_sp": "", "checkpoint": "", "pp_division": "",
    "pipeline_type": "pipedream_flush", "default_dp_type": "zero2", "world_size": 0,
    "vtp": 1, "vsp": 0, "embed_sdp": 0, "vocab_sdp": 0,
}  # fmt: skip
_SCHEDULES: dict[str, Literal["1f1b", "gpipe"]] = {"pipedream_flush": "1f1b", "gpipe": "gpipe"}
_ZERO = {"ddp": 0, "zero2": 2, "zero3": 3}
_MOST_DEVICES = 2**20


@dataclass(frozen=True, order=True)
class LayerStrategy:
    """What Galvatron chooses for a layer: degrees, ZeRO level, recomputation. Its text is a strategy of fxpar's."""

    stages: int = 1
    tp: int = 1
    ulysses: int = 1
    dp: int = 1
    zero: int = 0
    remat: bool = False

    @property
    def degree(self) -> int:
        """Devices that share the work on one sample: tensor parallelism and Ulysses exclude each other."""
        return max(self.tp, self.ulysses)

    @property
    def shards(self) -> int:
        """Devices over which parameters are sharded, or else their gradients reduced."""
        return self.dp * self.ulysses

    def __str__(self) -> str:
        return str(of_degrees(self.dp, self.stages, self.ulysses, self.tp, self.zero)) + "+remat" * self.remat


@dataclass(frozen=True)
class GalvatronPlan:
    """`layers` has a strategy per layer; `ends` is that of embedding and head, which are never recomputed."""

    devices: int
    batch: int
    micro_batches: int
    division: tuple[int, ...]  # layers per stage
    schedule: Literal["1f1b", "gpipe"]
    layers: tuple[LayerStrategy, ...]
    ends: LayerStrategy


def as_strategy(plan: GalvatronPlan, layers: str = "model.layers") -> Strategy:
    """The plan as one strategy of fxpar's: what the ends have for the whole model, and a rule for each run of layers
    that has something else. `layers` is the FQN of the list of layers.

    Replicas are as many as all layers have. Where a layer has more, they are the bins of one (rows): the work and the
    weights are divided as in the plan, and documents are not cut.
    """
    replicas = math.gcd(plan.ends.dp, *(layer.dp for layer in plan.layers))
    schedule = "1f1b" if plan.ends.stages == 1 else plan.schedule
    first, cuts = 0, []
    for count in plan.division[:-1]:
        first += count
        cuts.append(f"{layers}.{first}")
    rules, base = [], _roles(plan.ends, replicas)
    for layer, group in itertools.groupby(enumerate(plan.layers), lambda one: one[1]):
        places = [place for place, _ in group]
        numbers = f"{{{places[0]}-{places[-1]}}}" if len(places) > 1 else str(places[0])
        axes, sp = _roles(layer, replicas)
        other = () if (axes, sp) == base else axes
        zero = None if layer.zero == plan.ends.zero else layer.zero
        remat = Remat("full") if layer.remat else None
        if other or zero is not None or remat:
            rules.append(ModuleRule(f"{layers}.{numbers}", other, sp and bool(other), zero, remat))
    axes, sp = base
    outer = tuple(axis for axis in ((REPLICAS, replicas), (STAGES, plan.ends.stages)) if axis[1] > 1)
    pipeline = Pipeline(schedule, cuts=tuple(cuts))
    return Strategy((*outer, *axes) or SINGLE.axes, sp, plan.ends.zero, pipeline=pipeline, rules=tuple(rules))


def as_plan(plan: GalvatronPlan, layers: str, seq_len: int, model: str, options: Sequence[str]) -> Plan:
    """As `fxpar train --plan` takes it, for a model whose layers are in the list `layers`, and sequences of at most
    `seq_len` tokens. A micro-batch holds as many sequences as in the plan.
    """
    strategy = as_strategy(plan, layers)
    each = math.ceil(plan.batch / plan.micro_batches / strategy.replicas)  # sequences
    group = PlanGroup(seq_len, str(strategy), max(each, strategy.bins) * seq_len)
    return Plan(model, plan.devices, plan.batch * seq_len, (group,), tuple(options))


def _roles(layer: LayerStrategy, replicas: int) -> tuple[tuple[tuple[str, int], ...], bool]:
    """The axes inside of a replica, and whether tokens are cut beside weights."""
    weights, tokens, *_ = ROLE_AXES
    degrees = ((BINS, layer.dp // replicas), (tokens, layer.ulysses), (weights, layer.tp))
    return tuple(axis for axis in degrees if axis[1] > 1), layer.tp > 1


def read_galvatron_plan(path: str | Path, devices: int | None = None) -> GalvatronPlan:
    """The plan in `path`. `devices` is needed where the file does not say `world_size`, as those of Galvatron 3.0.

    Raises GalvatronFileError, GalvatronKeyError.
    """
    file = _PlanFile(Path(path))
    world = file.devices(devices)
    stages, layers = file.whole("pp_deg"), len(file.per_layer("tp_sizes_enc"))
    if world % stages:
        file.refuse("pp_deg", stages, f"{world} devices cannot be {stages} equal stages")
    division = file.division(stages, layers)
    default = _ZERO[file.word("default_dp_type", tuple(_ZERO))]
    degrees, sharded, ulysses, remat = (file.per_layer(key) for key in _PER_LAYER[:4])
    file.only_ones("cp_sizes_enc", "it is ring attention, and this reads no such degree yet")
    file.only_ones("tp_consecutive_flags", "tensor parallelism is between neighbouring ranks only")
    strategies = tuple(
        file.strategy("tp_sizes_enc", world // stages, stages, degree, bool(cut), 3 if full else default, bool(redo))
        for degree, cut, full, redo in zip(degrees, ulysses, sharded, remat, strict=True)
    )
    full = 3 if file.whole("embed_sdp", 0, 1) or file.whole("vocab_sdp", 0, 1) else default
    degree, cut = file.whole("vtp"), bool(file.whole("vsp", 0, 1))
    ends = file.strategy("vtp", world // stages, stages, degree, cut, full, False)
    batch = file.whole("global_bsz")
    schedule = _SCHEDULES[file.word("pipeline_type", tuple(_SCHEDULES))]
    return GalvatronPlan(world, batch, file.whole("chunks", 1, batch), division, schedule, strategies, ends)


class _PlanFile(JsonFile):
    """The values of a plan. Keys that may be left out have Galvatron's defaults."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        known = [*_NEEDED, *_OPTIONAL]
        for key, value in self.data.items():
            if key not in known:
                self.refuse(key, value, f"not known in a plan. Keys are {', '.join(known)}", known)
        for key in _NEEDED:
            if key not in self.data:
                self.refuse(key, None, "it is missing, and no plan without it", self.data)

    def whole(self, key: str, least: int = 1, most: int = 2**31) -> int:
        value = self.data.get(key, _OPTIONAL.get(key))
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.refuse(key, value, f"write a whole number from {least} to {most}")
        return value

    def word(self, key: str, words: tuple[str, ...]) -> str:
        value = self.data.get(key, _OPTIONAL[key])
        if value not in words:
            self.refuse(key, value, f"write one of {', '.join(words)}")
        return value

    def numbers(self, key: str) -> tuple[int, ...]:
        value = self.data[key]
        parts = value.split(",") if isinstance(value, str) else []
        if not parts or not all(part.strip().isdecimal() and len(part) < 10 for part in parts):
            self.refuse(key, value, "write whole numbers with commas between them, such as '2,2,1,1'")
        return tuple(int(part) for part in parts)

    def per_layer(self, key: str) -> tuple[int, ...]:
        """One number per layer; flags are 0 or 1."""
        layers = self.numbers("tp_sizes_enc")
        values = self.numbers(key) if self.data.get(key, "") != "" else (0,) * len(layers)
        if len(values) != len(layers):
            self.refuse(key, self.data[key], f"{len(values)} numbers, but tp_sizes_enc has {len(layers)} layers")
        if not key.endswith("sizes_enc") and not set(values) <= {0, 1}:
            self.refuse(key, self.data[key], "numbers here are 0 or 1")
        return values

    def devices(self, given: int | None) -> int:
        written = self.whole("world_size", 0, _MOST_DEVICES)
        if given is not None and written not in (0, given):
            self.refuse("world_size", written, f"asked for is a plan on {given} devices. Leave that away")
        if not written and given is None:
            self.refuse(
                "world_size", None, "it is missing; say for how many devices the plan is (--devices)", self.data
            )
        return written or given or 0

    def division(self, stages: int, layers: int) -> tuple[int, ...]:
        """Layers per stage; without pp_division as Galvatron cuts, what is left over on the last stage."""
        if self.data.get("pp_division", "") == "":
            if stages > layers:
                self.refuse("pp_deg", stages, f"more stages than layers ({layers})")
            return (*(layers // stages,) * (stages - 1), layers - layers // stages * (stages - 1))
        found = self.numbers("pp_division")
        if len(found) != stages or sum(found) != layers or 0 in found:
            self.refuse("pp_division", self.data["pp_division"], f"write {stages} numbers with the sum {layers}")
        return found

    def only_ones(self, key: str, why: str) -> None:
        if self.data.get(key, "") != "" and set(self.per_layer(key)) != {1}:
            self.refuse(key, self.data[key], f"{why}. Write only 1")

    def strategy(
        self, key: str, devices: int, stages: int, degree: int, ulysses: bool, zero: int, remat: bool
    ) -> LayerStrategy:
        """Of `devices` per stage `degree` share a sample; with one replica there is nothing to shard."""
        if degree < 1 or devices % degree:
            self.refuse(key, self.data.get(key), f"degree {degree} does not divide the {devices} devices of a stage")
        dp = devices // degree
        tp, cut = (1, degree) if ulysses else (degree, 1)
        return LayerStrategy(stages, tp, cut, dp, zero if dp > 1 else 0, remat)
