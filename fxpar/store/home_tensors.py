"""The DTensors that show the home layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fxpar.ir.mesh import Mesh
from fxpar.switch.layout import PlacedParam
from fxpar.torch_api.dtensors import placements_of


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
