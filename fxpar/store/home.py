"""The home layout: how the optimizer sees the parameters. (The DTensors that show it are in `home_tensors`: commands
that only look at layouts do without that import.)"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fxpar.errors import HomeLayoutError, ParamDtypeError, PlacementError
from fxpar.errors.base import nearest_name
from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import Input
from fxpar.ir.mesh import Mesh
from fxpar.switch.layout import ParamLayout, PlacedParam

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


def rules_by_fqn(fqns: Sequence[str], rules: HomeRules) -> dict[str, str | DistConfig]:
    """The rule of each parameter that has one; those that match nothing by their glob."""
    found: dict[str, str | DistConfig] = {}
    for pattern, placement in rules.items():
        matched = [fqn for fqn in fqns if fnmatch.fnmatchcase(fqn, pattern)]
        for name in matched or [pattern]:
            found.setdefault(name, placement)
    return found


def _default(spec: ParamSpec, world: int) -> DistConfig:
    return _over_all(spec, world, 0 if spec.shape else None)


def _over_all(spec: ParamSpec, world: int, dim: int | None) -> DistConfig:
    dims = tuple((AxisShard(AXIS),) if d == dim else () for d in range(len(spec.shape)))
    return DistConfig(Mesh(((AXIS, world),)), dims, dtype=spec.master)


def _rule(spec: ParamSpec, world: int, pattern: str, rule: str | DistConfig) -> DistConfig:
    if isinstance(rule, DistConfig):
        from fxpar.torch_api.dtensors import placements_of

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


def param_specs(program: Program) -> list[ParamSpec]:
    """The parameters of a program as it computes with them, in its order."""
    return [
        ParamSpec(info.fqn, tuple(int(size) for size in stored.meta.shape), stored.meta.dtype)
        for info, stored in program.params()
    ]


def specs_of(programs: Iterable[Program], params: Iterable[Input] = ()) -> list[ParamSpec]:
    """The parameters of programs of one model, of which each may have its own; then those of `params` that none has.

    Raises ParamDtypeError for one that two programs compute with in different dtypes.
    """
    found: dict[str, ParamSpec] = {}
    for program in programs:
        for spec in param_specs(program):
            if (known := found.setdefault(spec.fqn, spec)) != spec:
                raise ParamDtypeError(spec.fqn, str(known.dtype), str(spec.dtype))
    for info in params:
        shape = tuple(int(size) for size in info.meta.shape)
        found.setdefault(info.fqn, ParamSpec(info.fqn, shape, info.meta.dtype))
    return list(found.values())


def home_of(layout: ParamLayout) -> tuple[ParamLayout, ParamLayout]:
    """The default home of the parameters of a layout, in the dtypes of masters and in those of this layout."""
    specs = [ParamSpec(fqn, param.shape, param.dtype) for fqn, param in layout.params.items()]
    masters = home_layout(specs, layout.world)
    return masters, wire_layout(masters, specs)


def wire_layout(home: ParamLayout, specs: Iterable[ParamSpec]) -> ParamLayout:
    """The home layout in the dtypes that the graphs compute with: casting is the sender's part."""
    dtypes = {spec.fqn: spec.dtype for spec in specs}
    known: dict[tuple[int, torch.dtype], PlacedParam] = {}  # what lies alike shares its description here too
    params = {}
    for fqn, param in home.params.items():
        key = (id(param), dtypes.get(fqn, param.dtype))
        params[fqn] = known.setdefault(key, replace(param, dtype=key[1]))
    return replace(home, params=params)
