"""Devices: speeds by dtype, both forms of a file, and one clear error for each mistake."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fxpar.cost.cluster import ClusterSpec
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


def test_attention_has_its_own_speed_where_it_was_measured():
    assert TABLE.attention_flops_per_s(torch.bfloat16) == TABLE.flops_per_s(torch.bfloat16)
    measured = replace(TABLE, attention_tflops={"float32": 20})
    assert measured.attention_flops_per_s(torch.bfloat16) == 20 * 10**12
    assert hash(measured) == hash(TABLE)
    assert measured != TABLE


def test_blocks_of_attention_may_differ_by_dtype():
    assert (
        TABLE.attention_block_of(torch.float32),
        replace(TABLE, attention_block=64).attention_block_of(torch.float32),
    ) == (0, 64)
    table = replace(TABLE, attention_block={"bfloat16": 2000, "float32": 0})
    assert (table.attention_block_of(torch.float16), table.attention_block_of(torch.float32)) == (2000, 0)
    with pytest.raises(ClusterError, match=r"device.attention_block.float32 = -1 must be >= 0"):
        replace(TABLE, attention_block={"float32": -1})
    with pytest.raises(ClusterError, match=r"device.tflops.float32 = 0 must be > 0"):
        replace(TABLE, tflops={"float32": 0})
    shares = replace(TABLE, exposed_traffic={"bfloat16": 1.5, "float32": 0}, backward_exposed_traffic=0.25)
    assert [shares.exposed_traffic_of(dtype) for dtype in (torch.bfloat16, torch.float32)] == [1.5, 0]
    assert shares.in_backward.exposed_traffic_of(torch.bfloat16) == 0.25
    assert Device.from_dict(shares.to_json()) == shares
    assert isinstance(hash(shares), int)


def test_the_backward_is_as_the_forward_unless_it_has_its_own_figures():
    assert TABLE.in_backward is TABLE
    halves = replace(TABLE, backward_tflops={"float32": 20}, backward_attention_block=64, backward_exposed_traffic=0.0)
    assert halves.in_backward == replace(TABLE, tflops={"float32": 20}, attention_block=64)
    assert halves.in_backward.attention_flops_per_s(torch.float32) == 20 * 10**12  # as products of its half
    assert Device.from_dict(halves.to_json()) == halves
    own = replace(TABLE, backward_tflops=20, backward_attention_tflops={"float32": 8}).taken_in_turns(2)
    assert (own.backward_tflops, own.backward_attention_tflops) == (10, {"float32": 4})
    assert ClusterSpec(1, 1, 1, 1, 1, device=halves).sustaining(5).sustained.in_backward.tflops == 5


def test_small_tensors_are_in_a_cache():
    cached = replace(TABLE, cache_mb=32, cache_gb_per_s=8000)
    assert (cached.bytes_per_s_of(32_000_000), cached.bytes_per_s_of(32_000_001)) == (8000 * 10**9, 2000 * 10**9)
    assert TABLE.bytes_per_s_of(1) == TABLE.bytes_per_s
    with pytest.raises(ClusterError, match=r"device.cache_mb and device.cache_gb_per_s belong together"):
        replace(TABLE, cache_mb=32)


def test_ranks_take_turns():
    """Each has its share of everything but of memory; twice as many have half of that."""
    two = replace(TABLE, attention_tflops=8, cache_mb=32, cache_gb_per_s=8000).taken_in_turns(2)
    assert two.tflops == {"bfloat16": 150, "float32": 30}
    assert (two.attention_tflops, two.memory_gb_per_s, two.cache_gb_per_s, two.launch_us) == (4, 1000, 4000, 8)
    assert (two.shared_by, two.memory_gb, two.cache_mb) == (2, 80, 32)
    assert two.taken_in_turns(4).tflops["bfloat16"] == 75
    assert two.taken_in_turns(0.5) == two.taken_in_turns(1)  # a rank has one core at most
    assert two.taken_in_turns(1).launch_us == 4
    assert Device.from_dict(two.to_json()) == two


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tflop": 1}, "key 'device.tflop' is unknown; did you mean 'tflops'?"),
        ({"tflops": 0}, "device.tflops = 0 must be > 0"),
        ({"tflops": "fast"}, "device.tflops = 'fast' must be a number"),
        ({"tflops": {}}, "device.tflops is empty"),
        ({"tflops": {"bf16": 300}}, "device.tflops has 'bf16', which is not a dtype; did you mean 'bfloat16'?"),
        ({"tflops": {"float32": -1}}, "device.tflops.float32 = -1 must be > 0"),
        ({"backward_tflops": {"float32": float("nan")}}, "device.backward_tflops.float32 = nan must be > 0 and finite"),
        ({"backward_attention_tflops": -2}, "device.backward_attention_tflops = -2 must be > 0"),
        ({"backward_attention_block": {"fp32": 1}}, "'fp32', which is not a dtype"),
        ({"backward_exposed_traffic": -0.1}, "device.backward_exposed_traffic = -0.1 must be >= 0"),
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
