"""Devices: speeds by dtype, both forms of a file, and one clear error for each mistake."""

from __future__ import annotations

import pytest
import torch

from fxpar.cost.device import CPU, GPU, Device
from fxpar.errors import ClusterError

TABLE = Device({"bfloat16": 300, "float32": 60}, 2000, 4, memory_gb=80)


@pytest.mark.parametrize(
    ("dtype", "tflops"),
    [
        (torch.bfloat16, 300),
        (torch.float32, 60),
        (torch.float16, 300),  # as wide as bfloat16
        (torch.float8_e4m3fn, 300),  # computed in the next wider one
        (torch.float64, 60),  # the widest that there is
    ],
)
def test_speed_in_a_dtype(dtype, tflops):
    assert TABLE.flops_per_s(dtype) == tflops * 10**12
    assert GPU.flops_per_s(dtype) == 300 * 10**12


def test_of_equal_width_its_own_counts():
    both = Device({"bfloat16": 300, "float16": 200}, 2000, 4)
    assert (both.flops_per_s(torch.float16), both.flops_per_s(torch.bfloat16)) == (200 * 10**12, 300 * 10**12)


def test_json_and_text():
    for device in (TABLE, GPU, CPU):
        assert Device.from_dict(device.to_json()) == device
    assert hash(TABLE) == hash(Device.from_dict(TABLE.to_json()))
    assert str(GPU) == "300 TFLOP/s and 2000 GB/s of memory, 4 µs per kernel"
    assert str(TABLE).startswith("300 (bfloat16), 60 (float32) TFLOP/s")
    assert (float(GPU.bytes_per_s), float(GPU.launch_s)) == (2000e9, 4e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tflop": 1}, "key 'device.tflop' is unknown; did you mean 'tflops'?"),
        ({"tflops": 0}, "device.tflops = 0 must be > 0"),
        ({"tflops": "fast"}, "device.tflops = 'fast' must be a number"),
        ({"tflops": {}}, "device.tflops is empty"),
        ({"tflops": {"bf16": 300}}, "device.tflops has 'bf16', which is not a dtype; did you mean 'bfloat16'?"),
        ({"tflops": {"float32": -1}}, "device.tflops.float32 = -1 must be > 0"),
        ({"memory_gb_per_s": float("nan")}, "device.memory_gb_per_s = nan must be > 0 and finite"),
        ({"launch_us": -1}, "device.launch_us = -1 must be >= 0"),
        ({"memory_gb": True}, "device.memory_gb = True must be a number"),
    ],
)
def test_bad_values(change, message):
    with pytest.raises(ClusterError) as error:
        Device.from_dict({**GPU.to_json(), **change}, "'c.toml'")
    assert message in str(error.value)
    assert "'c.toml'" in str(error.value)


def test_missing_keys_are_named():
    with pytest.raises(ClusterError, match=r"lacks device\.tflops, device\.launch_us"):
        Device.from_dict({"memory_gb_per_s": 1})


def test_constructed_ones_are_checked_too():
    with pytest.raises(ClusterError, match=r"device\.launch_us = -1 must be >= 0"):
        Device(300, 2000, -1)
