"""The home layout: how the optimizer sees the parameters, and the DTensors that show it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fxpar.errors import HomeLayoutError, PlacementError
from fxpar.errors.base import nearest_name
from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.mesh import Mesh
from fxpar.switch.layout import ParamLayout, PlacedParam
from fxpar.torch_api.dtensors import placements_of

AXIS = "home"
_PLACEMENT = re.compile(r"\s*(R|S\((\d+)\))\s*")
HomeRules = Mapping[str, "str | DistConfig"]


@dataclass(frozen=True)
class ParamSpec:
    """Global shape and dtype of a parameter as the graphs compute with it."""

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def master(self) -> torch.dtype:
        """The dtype of its home: fp32, or what is wider; others stay as they are."""
        narrow = self.dtype.is_floating_point and self.dtype.itemsize < 4
        return torch.float32 if narrow else self.dtype


def home_layout(params: Iterable[ParamSpec], world: int, rules: HomeRules | None = None) -> ParamLayout:
    """Every parameter cut along dim 0 over all ranks (chunks of ceil(size / world), the last ones may be empty).

    `rules` maps globs over FQNs to "S(dim)", "R", or a DistConfig over `world` ranks; the first that matches wins. A
    scalar is replicated. Raises HomeLayoutError for a rule that matches nothing, or that DTensor cannot express.
    """
    specs = list(params)
    given = dict(rules or {})
    for pattern in given:
        if not any(fnmatch.fnmatchcase(spec.fqn, pattern) for spec in specs):
            near = nearest_name(pattern, [spec.fqn for spec in specs])
            raise HomeLayoutError(pattern, f"matches no parameter{near or '. Globs run over names of parameters'}")
    placed, known = {}, {}
    for spec in specs:
        pattern = next((p for p in given if fnmatch.fnmatchcase(spec.fqn, p)), None)
        key = (
            spec.shape,
            spec.dtype,
            pattern,
        )  # what lies alike shares its description, which knows thousands of ranks
        if key not in known:
            chosen = _default(spec, world) if pattern is None else _rule(spec, world, pattern, given[pattern])
            known[key] = PlacedParam(spec.shape, spec.master, (chosen,))
        placed[spec.fqn] = known[key]
    return ParamLayout("home", world, placed)


def _default(spec: ParamSpec, world: int) -> DistConfig:
    return _over_all(spec, world, 0 if spec.shape else None)


def _over_all(spec: ParamSpec, world: int, dim: int | None) -> DistConfig:
    dims = tuple((AxisShard(AXIS),) if d == dim else () for d in range(len(spec.shape)))
    return DistConfig(Mesh(((AXIS, world),)), dims, dtype=spec.master)


def _rule(spec: ParamSpec, world: int, pattern: str, rule: str | DistConfig) -> DistConfig:
    if isinstance(rule, DistConfig):
        if rule.mesh.ranks != tuple(range(world)) or rule.ndim != len(spec.shape):
            raise HomeLayoutError(
                pattern, f"is for {rule.ndim} dims on {rule.mesh.size} ranks; {spec.fqn} has shape {spec.shape}"
            )
        try:
            placements_of(rule)
        except PlacementError as error:
            raise HomeLayoutError(pattern, f"DTensor cannot show it: {error}") from error
        nested = [d for d, entries in enumerate(rule.dims) if len(entries) > 1]
        if set(nested) & set(rule.padded_dims(spec.shape)):
            raise HomeLayoutError(pattern, f"{rule} cuts a dim of {spec.fqn} twice that does not divide")
        return rule
    match = _PLACEMENT.fullmatch(rule)
    if match is None:
        raise HomeLayoutError(pattern, f"{rule!r} is not a placement; write 'S(0)', 'R' or a DistConfig")
    dim = None if match[2] is None else int(match[2])
    if dim is not None and dim >= len(spec.shape):
        raise HomeLayoutError(pattern, f"{rule} names a dim that {spec.fqn} of shape {spec.shape} does not have")
    return _over_all(spec, world, dim)


class HomeMeshes:
    """DTensor meshes, one per fxpar mesh; every rank must ask for them in the same order."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._known: dict[Mesh, DeviceMesh] = {}

    def as_dtensor(self, local: Tensor, param: PlacedParam) -> DTensor:
        """`local` (without padding) of this rank as a DTensor of the parameter's global shape."""
        config = param.copies[0]
        if config.mesh not in self._known:
            self._known[config.mesh] = init_device_mesh(
                self._device_type, config.mesh.shape, mesh_dim_names=config.mesh.names
            )
        stride = torch.empty(param.shape, device="meta").stride()
        return DTensor.from_local(
            local,
            self._known[config.mesh],
            placements_of(config),
            run_check=False,
            shape=torch.Size(param.shape),
            stride=stride,
        )


def broadcast_replicated(tensors: Iterable[Tensor]) -> None:
    """Take rank 0's values where every rank holds the whole: ranks may have drawn different ones."""
    for tensor in tensors:
        dist.broadcast(tensor, 0)
