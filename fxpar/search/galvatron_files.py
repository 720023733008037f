"""Galvatron's profiles: a folder of flat JSON whose keys carry the meaning.

Units stand nowhere in the files, and in the field names here: `_ms`, `_mb` (2^20 bytes), `_mb_per_ms`. The formats are
those of Galvatron 3.0. Nothing of a file is run. A key that is not known is an error, so that a slip of the pen is not
taken for something that was not measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fxpar.errors import GalvatronFileError, nearest
from fxpar.search.json_file import JsonFile

T = TypeVar("T")
ByDegree = Mapping[int, float]
Times = dict[tuple[int, int], float]  # by batch and sequence length
_MODEL = re.compile(r"memory_profiling_(bf16|fp16|fp32)_(.+)_all\.json")
_NETWORK = re.compile(r"(allreduce_bandwidth|p2p_bandwidth|sp_time)_([1-9]\d*)nodes_([1-9]\d*)gpus_per_node\.json")
_TIME = re.compile(r"(?:layernum\[[\d,]+\]|layertype_(\d+|other))_bsz([1-9]\d*)_seq([1-9]\d*)")
_JOB = re.compile(r"\d+_\d+_\d+(_c)?(_vtp)?(_sp)?")
_JOB_FIGURE = re.compile(r"layernum\[[\d,]+\]_bsz\d+_seq\d+_rank\d+_(ms|act|act_peak)")
_LAYER = re.compile(r"layertype_(\d+)(_sp)?")
_ENDS = re.compile(r"other_memory_pp_(off|on_first|on_last)(_sp)?")
_COLLECTIVE = re.compile(r"(allreduce|all2all)_size_([1-9]\d*)_([1-9]\d*)MB_time")
_REDUCE = re.compile(r"allreduce_size_([1-9]\d*)_consec_([01])")
_STAGES = re.compile(r"pp_size_([1-9]\d*)")
_ONE_KIND = "models with several kinds of layers cannot be planned; the layers' keys are layertype_0..."


@dataclass(frozen=True)
class LayerMemory:
    """Of one layer at one sequence length. `activation_mb`: per sample, by degree; `remat_mb` with recomputation."""

    parameter_mb: float  # as fp32
    activation_mb: ByDegree
    remat_mb: float


@dataclass(frozen=True)
class EndsMemory:
    """Of embedding and head. `states_mb`: weights, gradients and Adam, by degree; `activation_mb`: per sample."""

    states_mb: ByDegree
    activation_mb: ByDegree


@dataclass(frozen=True)
class Network:
    """Bandwidths. `reduce_mb_per_ms`: of an all-reduce, by group size and whether its ranks are neighbours;
    `p2p_mb_per_ms`: between stages, by their number.
    """

    reduce_mb_per_ms: Mapping[tuple[int, bool], float]
    p2p_mb_per_ms: ByDegree


@dataclass(frozen=True)
class Collectives:
    """Milliseconds of an all-reduce and an all-to-all, by group size and then by MB."""

    all_reduce_ms: Mapping[int, ByDegree]
    all_to_all_ms: Mapping[int, ByDegree]


@dataclass(frozen=True)
class Profiles:
    """A folder of profiles. Times are ms of a forward per sample."""

    folder: str
    model: str
    dtype: str  # bf16, fp16 or fp32
    layer_ms: Times
    ends_ms: Times
    layer_memory: Mapping[int, LayerMemory]  # by sequence length
    ends_memory: Mapping[str, Mapping[int, EndsMemory]]  # "off", "on_first", "on_last" (pipeline), then length
    overlap: float  # how much slower compute and reduction are beside each other
    networks: Mapping[tuple[int, int], Network]  # by (nodes, devices per node)
    collectives: Mapping[tuple[int, int], Collectives]


def read_profiles(folder: str | Path, model: str | None = None) -> Profiles:
    """The profiles in `folder`; of several models that of `model`. Raises GalvatronFileError, GalvatronKeyError."""
    place = Path(folder)
    if not place.is_dir():
        raise GalvatronFileError(str(folder), "there is no such folder. Name the one with Galvatron's profiles")
    try:
        names = sorted(path.name for path in place.iterdir() if path.is_file())
    except OSError as error:
        raise GalvatronFileError(str(folder), f"it cannot be read: {error.strerror}") from error
    found = [match for match in map(_MODEL.fullmatch, names) if match and model in (None, match[2])]
    if not found:
        raise GalvatronFileError(str(folder), _missing(f"memory_profiling_bf16_{model or 'MODEL'}_all.json", names))
    if len(found) > 1:
        several = ", ".join(f"{match[2]} in {match[1]}" for match in found)
        raise GalvatronFileError(str(folder), f"it has profiles of {several}. Name one model, or move the others away")
    memory, dtype, name = found[0][0], found[0][1], found[0][2]
    times = f"computation_profiling_{dtype}_{name}_all.json"
    for needed in (times, "overlap_coefficient.json"):
        if needed not in names:
            raise GalvatronFileError(str(folder), _missing(needed, names))
    layer_ms, ends_ms = _read_times(JsonFile(place / times))
    layer_memory, ends_memory = _read_memory(JsonFile(place / memory))
    overlap = _read_overlap(JsonFile(place / "overlap_coefficient.json"))
    networks, collectives = _read_networks(place, names)
    return Profiles(
        str(folder), name, dtype, layer_ms, ends_ms, layer_memory, ends_memory, overlap, networks, collectives
    )


def _missing(name: str, names: Iterable[str]) -> str:
    return f"there is no {name} in it{nearest(name, names) or '.'} Galvatron's profiler writes it"


def _read_times(file: JsonFile) -> tuple[Times, Times]:
    """Of a layer, and of embedding and head together."""
    found: dict[str, Times] = {"0": {}, "other": {}}
    forms = ["layertype_0_bsz8_seq2048", "layertype_other_bsz8_seq2048", "layernum[2]_bsz8_seq2048"]
    for key, value in file.data.items():
        match = _TIME.fullmatch(key)
        if not match:
            known = [*forms, *(name for name in file.data if _TIME.fullmatch(name))]
            file.refuse(key, value, "not known here; a key says what was timed, its batch and its length", known)
        figure = file.number(key, value)
        if match[1] is None:
            continue  # the time of a whole model, of which Galvatron made the other two
        if match[1] not in found:
            file.refuse(key, value, _ONE_KIND)
        found[match[1]][int(match[2]), int(match[3])] = figure
    for times, form in zip(found.values(), forms, strict=False):
        if not times:
            file.refuse(form, None, "no key of this form is there. Let Galvatron's profiler process its raw figures")
    return found["0"], found["other"]


def _read_memory(file: JsonFile) -> tuple[dict[int, LayerMemory], dict[str, dict[int, EndsMemory]]]:
    """Only what was profiled with sequence parallelism is kept: Galvatron 3.0 runs no other."""
    layers: dict[int, LayerMemory] = {}
    ends: dict[str, dict[int, EndsMemory]] = {}
    needed = ["layertype_0_sp", "other_memory_pp_off_sp", "other_memory_pp_on_first_sp", "other_memory_pp_on_last_sp"]
    for key, value in file.data.items():
        table = file.table(key, value)
        if _JOB.fullmatch(key):
            for name, figure in table.items():
                if not _JOB_FIGURE.fullmatch(name):
                    file.refuse(f"{key}.{name}", figure, "not known here; such as layernum[1]_bsz8_seq2048_rank0_act")
                file.number(f"{key}.{name}", figure)
        elif match := _LAYER.fullmatch(key):
            if match[1] != "0":
                file.refuse(key, value, _ONE_KIND)
            found = _by_length(file, key, table, _layer_memory)
            layers = found if match[2] else layers
        elif match := _ENDS.fullmatch(key):
            read = _by_length(file, key, table, _ends_memory)
            if match[2]:
                ends[match[1]] = read
        else:
            why = "not known here; a key is a job (PP_TP_DP) or what was made of the jobs"
            file.refuse(key, value, why, [*needed, *file.data.keys() - {key}])
    for key in needed:
        if key not in file.data:
            why = "it is missing. Profile with sequence parallelism, which is the default of Galvatron's profiler"
            file.refuse(key, None, why, file.data)
    return layers, ends


def _by_length(file: JsonFile, key: str, table: dict, read: Callable[[JsonFile, str, dict], T]) -> dict[int, T]:
    lengths = file.by_number(key, table, "sequence lengths, such as 2048")
    return {
        length: read(file, f"{key}.{length}", file.table(f"{key}.{length}", inside))
        for length, inside in lengths.items()
    }


def _degrees(file: JsonFile, key: str, value: Any) -> dict[int, float]:
    """MB by degree of tensor parallelism or Ulysses."""
    found = file.by_number(key, value, "degrees, such as 2")
    return {degree: file.number(f"{key}.{degree}", figure) for degree, figure in found.items()}


def _layer_memory(file: JsonFile, where: str, table: dict) -> LayerMemory:
    file.exactly(where, table, ("parameter_size", "tp_activation_per_bsz_dict"))
    inside = f"{where}.tp_activation_per_bsz_dict"
    activation = dict(file.table(inside, table["tp_activation_per_bsz_dict"]))
    if "checkpoint" not in activation:
        file.refuse(f"{inside}.checkpoint", None, "it is missing: MB per sample with recomputation", activation)
    remat = file.number(f"{inside}.checkpoint", activation.pop("checkpoint"))
    parameters = file.number(f"{where}.parameter_size", table["parameter_size"], above=True)
    return LayerMemory(parameters, _degrees(file, inside, activation), remat)


def _ends_memory(file: JsonFile, where: str, table: dict) -> EndsMemory:
    file.exactly(where, table, ("model_states", "activation"))
    states, activation = (_degrees(file, f"{where}.{key}", table[key]) for key in ("model_states", "activation"))
    return EndsMemory(states, activation)


def _read_overlap(file: JsonFile) -> float:
    for key, value in file.data.items():
        if key != "overlap_coe":
            file.refuse(key, value, "not known here", ["overlap_coe"])
    if "overlap_coe" not in file.data:
        file.refuse("overlap_coe", None, "it is missing: how much slower compute is beside communication")
    return file.number("overlap_coe", file.data["overlap_coe"], least=1.0)


def _read_networks(
    folder: Path, names: list[str]
) -> tuple[dict[tuple[int, int], Network], dict[tuple[int, int], Collectives]]:
    """Of each cluster whose files are in the folder, by (nodes, devices per node)."""
    files = {(m[1], int(m[2]), int(m[3])): JsonFile(folder / m[0]) for m in map(_NETWORK.fullmatch, names) if m}
    networks, collectives = {}, {}
    for kind, nodes, devices in files:
        if kind == "allreduce_bandwidth":
            other = ("p2p_bandwidth", nodes, devices)
            if other not in files:
                expected = f"p2p_bandwidth_{nodes}nodes_{devices}gpus_per_node.json"
                raise GalvatronFileError(str(folder), _missing(expected, names))
            reduce = _read_reduce(files[kind, nodes, devices])
            networks[nodes, devices] = Network(reduce, _read_p2p(files[other]))
        elif kind == "sp_time":
            collectives[nodes, devices] = _read_collectives(files[kind, nodes, devices])
    for found, example in (
        (networks, "allreduce_bandwidth_1nodes_8gpus_per_node.json"),
        (collectives, "sp_time_1nodes_8gpus_per_node.json"),
    ):
        if not found:
            raise GalvatronFileError(str(folder), _missing(example, names))
    return networks, collectives


def _read_reduce(file: JsonFile) -> dict[tuple[int, bool], float]:
    found = {}
    for key, value in file.data.items():
        match = _REDUCE.fullmatch(key)
        if not match:
            known = ["allreduce_size_8_consec_1", *(name for name in file.data if _REDUCE.fullmatch(name))]
            file.refuse(key, value, "not known here", known)
        found[int(match[1]), match[2] == "1"] = file.number(key, value, above=True)
    return found


def _read_p2p(file: JsonFile) -> dict[int, float]:
    found = {}
    for key, value in file.data.items():
        match = _STAGES.fullmatch(key)
        if not match:
            file.refuse(key, value, "not known here", ["pp_size_2", *(n for n in file.data if _STAGES.fullmatch(n))])
        found[int(match[1])] = file.number(key, value, above=True)
    return found


def _read_collectives(file: JsonFile) -> Collectives:
    found: dict[str, dict[int, dict[int, float]]] = {"allreduce": {}, "all2all": {}}
    for key, value in file.data.items():
        match = _COLLECTIVE.fullmatch(key)
        if not match:
            known = ["allreduce_size_8_64MB_time", *(name for name in file.data if _COLLECTIVE.fullmatch(name))]
            file.refuse(key, value, "not known here", known)
        found[match[1]].setdefault(int(match[2]), {})[int(match[3])] = file.number(key, value, above=True)
    for kind, groups in found.items():
        for size, by_mb in groups.items():
            if len(by_mb) < 2:
                one = f"{kind}_size_{size}_{next(iter(by_mb))}MB_time"
                file.refuse(one, file.data[one], "one size of message says nothing of others; measure two or more")
    return Collectives(found["allreduce"], found["all2all"])
