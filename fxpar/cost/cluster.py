"""`ClusterSpec`: nodes, devices and links of a cluster, as data; planning needs no cluster."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fxpar.errors import ClusterError, nearest


@dataclass(frozen=True)
class ClusterSpec:
    """Equal nodes with equal devices; ranks fill node after node.

    Bandwidths are in GB/s (1e9 bytes) per device and direction: links are full duplex, and `intra` (NVLink or PCIe)
    and `inter` (the network) carry traffic at the same time. `node_gb_per_s` caps what all devices of a node put on
    the network together, per direction (None: no cap). `latency_us` is paid once per step of a switch.
    """

    nodes: int
    devices_per_node: int
    intra_gb_per_s: float
    inter_gb_per_s: float
    latency_us: float
    node_gb_per_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None:
                _check_value("description", name, value)

    @property
    def world(self) -> int:
        """Number of devices."""
        return self.nodes * self.devices_per_node

    def node_of(self, rank: int) -> int:
        """Node of `rank`."""
        return rank // self.devices_per_node

    def require(self, ranks: int) -> None:
        """Raise ClusterError unless the cluster has `ranks` devices."""
        if ranks > self.world:
            raise ClusterError(
                f"of {self.nodes} x {self.devices_per_node} devices", f"is too small for strategies on {ranks} ranks"
            )

    @classmethod
    def from_file(cls, path: str | Path) -> ClusterSpec:
        """Read a .toml or .json file. Raises ClusterError for a bad file, an unknown key, a missing or bad value."""
        name = repr(str(path))
        try:
            text = Path(path).read_text(encoding="utf-8")
            data = json.loads(text) if Path(path).suffix == ".json" else tomllib.loads(text)
        except OSError as error:
            raise ClusterError(name, f"cannot be read: {error.strerror or error}") from error
        except ValueError as error:  # bad JSON, bad TOML, bytes that are no text
            raise ClusterError(name, f"cannot be parsed: {error}") from error
        if not isinstance(data, dict):
            raise ClusterError(name, "is no table of keys and values")
        return cls.from_dict(data, name)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "description") -> ClusterSpec:
        """The cluster with these values. Raises ClusterError that names `source`."""
        known = {field.name: field for field in fields(cls)}
        for key in data:
            if key not in known:
                hint = nearest(key, known) or f"; there are {', '.join(known)}"
                raise ClusterError(source, f"key {key!r} is unknown{hint}")
        missing = [name for name, field in known.items() if field.default is MISSING and name not in data]
        if missing:
            raise ClusterError(source, f"lacks {', '.join(missing)}")
        for key, value in data.items():
            _check_value(source, key, value)
        return cls(**data)

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


def _check_value(source: str, key: str, value: object) -> None:
    whole = key in ("nodes", "devices_per_node")
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise ClusterError(source, f"{key} = {value!r} must be {'an integer' if whole else 'a number'}")
    least_ok = value >= 0 if key == "latency_us" else value > 0  # type: ignore[operator]
    if not least_ok or not math.isfinite(value):  # type: ignore[arg-type]
        raise ClusterError(source, f"{key} = {value!r} must be {'>= 0' if key == 'latency_us' else '> 0'} and finite")
