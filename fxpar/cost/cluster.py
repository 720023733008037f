"""`ClusterSpec`: nodes, devices and links of a cluster, as data; planning needs no cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from fxpar.cost.device import CPU, GPU, Device, check_keys, check_numbers
from fxpar.errors import ClusterError
from fxpar.ir.strategy_text import MOST_RANKS
from fxpar.ir.written import brief, read

_SHIPPED = Path(__file__).parent / "clusters"
MEASURED = "measured"  # a table of cluster files that says where the figures come from; nothing is predicted with it
VERSION = 5  # of that table as `fxpar profile` writes it
_HALVES = 4  # since this one it measures both halves of a step
_OF_HALVES = ("tflops", "attention_tflops", "attention_block")  # by dtype; of the backward with "backward_" before it


@dataclass(frozen=True)
class ClusterSpec:
    """Equal nodes with equal devices; ranks fill node after node.

    Bandwidths are in GB/s (1e9 bytes) per device and direction: links are full duplex, and `intra` (NVLink or PCIe)
    and `inter` (the network) carry traffic at the same time. `node_gb_per_s` caps what all devices of a node put on
    the network together, per direction (None: no cap). `latency_us` is paid by every collective and message, and once
    per step of a switch. `all_reduce_gb_per_s` and `all_reduce_latency_us` are those of all-reduces inside of a node,
    where a backend carries them out in another way (gloo does; None: as all else). `device` is what each of them
    sustains; None takes usual figures: of what ranks run on, and of a GPU where nothing runs.

    Raises ClusterError for a number that no cluster can have.
    """

    nodes: int
    devices_per_node: int
    intra_gb_per_s: float
    inter_gb_per_s: float
    latency_us: float
    node_gb_per_s: float | None = None
    device: Device | None = None
    all_reduce_gb_per_s: float | None = None
    all_reduce_latency_us: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.device, Device | None):
            raise ClusterError("description", f"device = {self.device!r} must be a fxpar.Device")
        check_numbers(_numbers(self.to_json()), "description")
        if self.world > MOST_RANKS:
            raise ClusterError("description", _too_large(self.nodes, self.devices_per_node))

    @property
    def world(self) -> int:
        """Number of devices."""
        return self.nodes * self.devices_per_node

    @property
    def sustained(self) -> Device:
        """`device`, or usual figures of a GPU."""
        return self.device or USUAL["cuda"].sustained

    def on(self, kind: str) -> ClusterSpec:
        """With usual figures of this kind of device (a `torch.device.type`), unless it has figures of its own."""
        return self if self.device else replace(self, device=_usual(kind).device)

    def sustaining(self, tflops: float | None) -> ClusterSpec:
        """With devices of so many TFLOP/s in each dtype; as it is for None. Raises ClusterError for 0."""
        if tflops is None:
            return self
        return replace(self, device=replace(self.sustained, tflops=tflops, backward_tflops=None))

    def with_nodes(self, nodes: int, devices_per_node: int) -> ClusterSpec:
        """So many, of the same kind: fewer ranks on a node take turns on its cores less often."""
        device = self.device
        if device is not None and device.shared_by > 1:
            device = device.taken_in_turns(device.shared_by * devices_per_node / self.devices_per_node)
        return replace(self, nodes=nodes, devices_per_node=devices_per_node, device=device)

    def node_of(self, rank: int) -> int:
        """Node of `rank`."""
        return rank // self.devices_per_node

    def bytes_per_s(self, between: bool) -> Fraction:
        """What a device sends over the links between nodes, or over those inside, while all devices of its node do."""
        if not between:
            return Fraction(self.intra_gb_per_s) * 10**9
        inter = Fraction(self.inter_gb_per_s)
        if self.node_gb_per_s is not None:
            inter = min(inter, Fraction(self.node_gb_per_s) / self.devices_per_node)
        return inter * 10**9

    @property
    def latency_s(self) -> Fraction:
        return Fraction(self.latency_us) / 10**6

    def collective_s(self, kind: str, between: bool) -> tuple[Fraction, Fraction]:
        """(latency, seconds per byte that a rank sends) of a collective, by links between nodes or inside of one."""
        latency_s, per_byte_s = self.latency_s, 1 / self.bytes_per_s(between)
        if kind != "all_reduce" or between:
            return latency_s, per_byte_s
        if self.all_reduce_latency_us is not None:
            latency_s = Fraction(self.all_reduce_latency_us) / 10**6
        if self.all_reduce_gb_per_s is not None:
            per_byte_s = 1 / (Fraction(self.all_reduce_gb_per_s) * 10**9)
        return latency_s, per_byte_s

    @property
    def links(self) -> str:
        """Its nodes and what connects their devices, in words."""
        between = f", {self.inter_gb_per_s:g} between" if self.nodes > 1 else ""
        return f"{self.nodes} x {self.devices_per_node} devices, {self.intra_gb_per_s:g} GB/s inside a node{between}"

    def require(self, ranks: int) -> None:
        """Raise ClusterError unless the cluster has `ranks` devices."""
        if ranks > self.world:
            raise ClusterError(
                f"of {self.nodes} x {self.devices_per_node} devices",
                f"it is too small for strategies on {ranks} ranks, one device each. Set nodes and devices_per_node in "
                "the cluster file to what there will be, or take strategies of fewer ranks",
            )

    @classmethod
    def from_file(cls, path: str | Path) -> ClusterSpec:
        """Read a .toml or .json file, or one of the `shipped` kinds of nodes by its name: as many as are needed.

        Raises ClusterError for a bad file, an unknown key, a missing or bad value.
        """
        return cls.from_dict(_content(path), repr(str(path)))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "description") -> ClusterSpec:
        """The cluster with these values. Raises ClusterError that names `source`."""
        values = {key: value for key, value in data.items() if key != MEASURED}
        of_device = {one.name for one in fields(Device)}
        for key in values.keys() & of_device:
            raise ClusterError(source, f"{key} is a figure of a device: write device.{key}, or {key} below [device]")
        check_keys(cls, values, source)
        check_numbers(_numbers(values), source)
        if values["nodes"] * values["devices_per_node"] > MOST_RANKS:
            raise ClusterError(source, _too_large(values["nodes"], values["devices_per_node"]))
        if "device" in values and not isinstance(values["device"], Mapping):
            raise ClusterError(source, f"device = {values['device']!r} must be a table: [device]")
        _check_version(data.get(MEASURED), values.get("device", {}), source)
        if "device" in values:
            values["device"] = Device.from_dict(values["device"], source)
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """What `from_dict` reads; values that are None are left out."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        found["device"] = self.device.to_json() if self.device else None
        return {key: value for key, value in found.items() if value is not None}


def measured_on(path: str | Path) -> tuple[str, str] | None:
    """(device, torch) of a file that `fxpar profile` wrote; None for one that says nothing of it. Raises ClusterError
    for what cannot be read.
    """
    about = _content(path).get(MEASURED)
    device, version = found = (about.get("device"), about.get("torch")) if isinstance(about, dict) else (None, None)
    for key, value in zip(("device", "torch"), found, strict=True):
        if not isinstance(value, str | None):
            raise ClusterError(repr(str(path)), f"{MEASURED}.{key} = {brief(value)} must be a text")
    return None if device is None or version is None else (device, version)


def _content(path: str | Path) -> dict[str, Any]:
    """The tables of a cluster file, or of the kind of nodes with this name. Raises ClusterError."""
    name = repr(str(path))
    if str(path) in shipped():
        path = _SHIPPED / f"{path}.toml"
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = read(text, "JSON" if Path(path).suffix == ".json" else "TOML")
    except OSError as error:
        kinds = "" if Path(path).suffix else f"; kinds of nodes that fxpar describes: {', '.join(shipped())}"
        raise ClusterError(name, f"cannot be read: {error.strerror or error}{kinds}") from error
    except ValueError as error:  # bad JSON, bad TOML, bytes that are no text
        why = f"it is not text: {error}" if isinstance(error, UnicodeError) else str(error)
        raise ClusterError(name, why) from error
    if not isinstance(data, dict):
        raise ClusterError(name, "is not a table of keys and values")
    return data


def _check_version(about: Any, device: Mapping[str, Any], source: str) -> None:
    """That a measured device has what `fxpar profile` measures. Before version 4 it measured attention forward and
    backward together, and products once: so these figures are of both, as they are where a file has none of the
    backward. Before version 5 `exposed_traffic` was one number for all dtypes. Raises ClusterError.
    """
    version = about.get("version") if isinstance(about, Mapping) else None
    if version is None:
        return
    again = f"Measure again with `fxpar profile`, or delete the table `{MEASURED}` if these are figures of your own"
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ClusterError(source, f"{MEASURED}.version = {brief(version)} is none: they count from 1. {again}")
    if version < _HALVES:
        return
    if version > VERSION:
        raise ClusterError(source, f"{MEASURED}.version = {brief(version)} is newer than {VERSION}. {again}")
    own = "backward_exposed_traffic"  # that of the forward is left out where it is 0
    lacks = [own] if device.get(own) is None else []
    for name in _OF_HALVES:
        halves = {key: device.get(key) for key in (name, f"backward_{name}")}
        lacks += [key for key, figures in halves.items() if figures is None]
        tables = {key: figures for key, figures in halves.items() if isinstance(figures, Mapping)}
        if len(tables) == len(halves):
            dtypes = dict.fromkeys(dtype for table in tables.values() for dtype in table)
            lacks += [f"{key}.{dtype}" for key, table in tables.items() for dtype in dtypes if dtype not in table]
    if lacks:
        raise ClusterError(source, f"was measured, and lacks device.{', device.'.join(lacks)}. {again}")


def _too_large(nodes: int, devices_per_node: int) -> str:
    return f"nodes = {nodes} times devices_per_node = {devices_per_node} is more than {MOST_RANKS:,} devices"


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != "device"}


def shipped() -> list[str]:
    """Names of the kinds of nodes that fxpar describes from data sheets."""
    return sorted(path.stem for path in _SHIPPED.glob("*.toml"))


# Where the user describes no cluster. Links of a CPU are those of gloo on one machine.
USUAL = {
    "cpu": ClusterSpec(1, 1, intra_gb_per_s=2.0, inter_gb_per_s=1.0, latency_us=200.0, device=CPU),
    "cuda": ClusterSpec(1, 1, intra_gb_per_s=200.0, inter_gb_per_s=25.0, latency_us=20.0, device=GPU),
}


def usual_cluster(world: int, devices_per_node: int = 8, kind: str = "cuda") -> ClusterSpec:
    """Nodes for `world` devices with usual figures of this kind of device (a `torch.device.type`)."""
    local = min(world, devices_per_node)
    found = replace(_usual(kind), nodes=-(-world // local), devices_per_node=local)
    return replace(found, device=found.sustained.taken_in_turns(ranks_per_core(local))) if kind == "cpu" else found


def ranks_per_core(local_world: int, threads: int = 1) -> float:
    """How many ranks of a node take turns on a core of this machine; 1 where there are cores enough."""
    return max(1.0, local_world * threads / (os.cpu_count() or 1))


def _usual(kind: str) -> ClusterSpec:
    return USUAL.get(kind, USUAL["cuda"])
