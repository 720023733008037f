"""`fxpar::to_host` and `fxpar::from_host`: a value is copied to the memory of the host, and back to the device.

    to_host(x)      x, with its strides, in memory of the host; on a CPU a copy in other memory
    from_host(h)    the same on `device`; without one (a graph names none) where h is

Run as they stand, both end when the copy has ended; `fxpar.runtime.host` lets copies of a GPU run beside its kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxpar.ops.once import refuse_second_derivative

_LIB = torch.library.Library("fxpar", "FRAGMENT")
_LIB.define("to_host(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIB.define("from_host(Tensor x, *, Device? device=None) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _to_host(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu").copy_(x)


def _from_host(x: Tensor, *, device: torch.device | None = None) -> Tensor:
    return torch.empty_like(x, device=device or x.device).copy_(x)


def _fake(x: Tensor, *, device: torch.device | None = None) -> Tensor:
    return torch.empty_like(x, device=x.device if device is None or x.device.type == "meta" else device)


def _to_host_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x, device=x.device if x.device.type == "meta" else torch.device("cpu"))


for _device in ("CPU", "CUDA"):
    _LIB.impl("to_host", _to_host, _device)
    _LIB.impl("from_host", _from_host, _device)
torch.library.register_fake("fxpar::to_host", _to_host_fake, lib=_LIB)
torch.library.register_fake("fxpar::from_host", _fake, lib=_LIB)
for _name in ("to_host", "from_host"):
    refuse_second_derivative(
        _LIB, f"fxpar::{_name}", "a value that lies on the host", "A strategy moves it, not a model."
    )
