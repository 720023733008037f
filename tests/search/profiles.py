"""Profiles to plan with: those that Galvatron ships for LLaMA-2-7B, and small ones that are made up."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

from fxpar.search.galvatron import GalvatronCost
from fxpar.search.galvatron_files import Collectives, EndsMemory, LayerMemory, Network, Profiles, read_profiles

SHIPPED = Path(__file__).parent / "data" / "galvatron_llama2-7b"
GB = 2**30
_LENGTH = "64"
_ENDS = {"model_states": {"1": 40.0, "2": 20.5}, "activation": {"1": 8.0, "2": 4.0}}

# A folder of two devices, one layer kind, one length; `tests/search/test_galvatron_files.py` spoils it in all ways.
SMALL: dict[str, dict[str, Any]] = {
    "computation_profiling_bf16_tiny_all.json": {
        "layernum[2]_bsz1_seq64": 9.0,
        "layertype_0_bsz1_seq64": 2.0,
        "layertype_other_bsz1_seq64": 5.0,
    },
    "memory_profiling_bf16_tiny_all.json": {
        "1_1_2_c_sp": {"layernum[1]_bsz8_seq64_rank0_ms": 90.0, "layernum[1]_bsz8_seq64_rank0_act_peak": 9.5},
        "layertype_0_sp": {
            _LENGTH: {"parameter_size": 12.0, "tp_activation_per_bsz_dict": {"1": 6.0, "2": 3.0, "checkpoint": 1.0}}
        },
        "other_memory_pp_off_sp": {_LENGTH: _ENDS},
        "other_memory_pp_on_first_sp": {_LENGTH: _ENDS},
        "other_memory_pp_on_last_sp": {_LENGTH: _ENDS},
    },
    "overlap_coefficient.json": {"overlap_coe": 1.25},
    "allreduce_bandwidth_1nodes_2gpus_per_node.json": {"allreduce_size_2_consec_1": 100.0},
    "p2p_bandwidth_1nodes_2gpus_per_node.json": {"pp_size_2": 50.0},
    "sp_time_1nodes_2gpus_per_node.json": {
        "allreduce_size_2_1MB_time": 0.25,
        "allreduce_size_2_2MB_time": 0.5,
        "all2all_size_2_1MB_time": 0.125,
        "all2all_size_2_2MB_time": 0.25,
    },
}


def small() -> dict[str, dict[str, Any]]:
    """A copy of SMALL to change."""
    return copy.deepcopy(SMALL)


def write(folder: Path, files: dict[str, dict[str, Any]]) -> Path:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def shipped() -> Profiles:
    return read_profiles(SHIPPED)


def made_up(draw_number: Any, degrees: tuple[int, ...] = (1, 2, 4)) -> Profiles:
    """Profiles for one, two and four devices; `draw_number(low, high)` gives each figure."""
    n = draw_number

    def ends() -> dict[int, EndsMemory]:
        return {64: EndsMemory({k: n(1, 200) for k in degrees}, {k: n(0, 40) for k in degrees})}

    sizes = [1, 2, 4]
    layer = LayerMemory(n(1, 100), {k: n(1, 60) for k in degrees}, n(0, 20))
    networks = {
        (1, devices): Network(
            {(size, near): n(0.05, 20) for size in sizes for near in (True, False) if 1 < size <= devices},
            {stages: n(0.1, 50) for stages in sizes if 1 < stages <= devices},
        )
        for devices in (2, 4)
    }
    tables = {
        (1, devices): Collectives(
            *({size: {1: n(0.01, 2), 64: n(2, 40)} for size in sizes if 1 < size <= devices} for _ in range(2))
        )
        for devices in (2, 4)
    }
    return Profiles(
        "made up", "tiny", "bf16", {(1, 64): n(0.5, 9)}, {(1, 64): n(0, 9)}, {64: layer},
        {where: ends() for where in ("off", "on_first", "on_last")}, n(1, 1.6), networks, tables,
    )  # fmt: skip


def llama(profiles: Profiles, devices: int = 8, **options: object) -> GalvatronCost:
    return GalvatronCost(profiles, devices, 64, 2048, **options)


def tiny_cost(folder: Path) -> GalvatronCost:
    """Two devices, eight samples, four layers; a sample of activations is a MB, and a forward of one takes 2 ms."""
    return GalvatronCost(read_profiles(write(folder, small())), 2, 8, 64, layers=4, hidden=8192)


def changed(cost: GalvatronCost, **figures: object) -> GalvatronCost:
    """With other profiles."""
    return dataclasses.replace(cost, profiles=dataclasses.replace(cost.profiles, **figures))
