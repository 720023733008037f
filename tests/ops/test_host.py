"""The ops that move values to the host and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxpar.errors import UnsupportedOpError
from fxpar.ops.traits import HOST_COPIES

own = torch.ops.fxpar


@pytest.mark.parametrize("op", sorted(HOST_COPIES, key=str), ids=str)
@pytest.mark.parametrize("x", [torch.rand(3, 4).t(), torch.arange(6) > 2, torch.rand(())], ids=["t", "bool", "scalar"])
def test_a_copy_in_other_memory(op, x):
    copy: Tensor = op(x)
    assert torch.equal(copy, x)
    assert (copy.stride(), copy.dtype, copy.device) == (x.stride(), x.dtype, x.device)
    assert copy.data_ptr() != x.data_ptr()
    on_meta = op(x.to("meta"))
    assert (on_meta.stride(), on_meta.device.type) == (x.stride(), "meta")


@pytest.mark.gpu
def test_there_and_back():
    x = torch.rand(3, 4, device="cuda").t()
    host = own.to_host(x)
    assert host.device.type == "cpu"
    back = own.from_host(host, device=x.device)
    assert (back.device, back.stride()) == (x.device, x.stride())
    assert torch.equal(back, x)


def test_no_gradient():
    x = torch.rand(3, requires_grad=True)
    with pytest.raises(UnsupportedOpError, match="A strategy moves it, not a model"):
        own.to_host(x).sum().backward()
