"""Cluster files: both formats, and one clear error for each mistake."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fxpar.cost.cluster import USUAL, VERSION, ClusterSpec, measured_on, shipped, usual_cluster
from fxpar.cost.device import CPU, GPU, Device
from fxpar.errors import ClusterError
from fxpar.runtime.options import cluster_here

GOOD = {"nodes": 4, "devices_per_node": 8, "intra_gb_per_s": 200.0, "inter_gb_per_s": 12.5, "latency_us": 10}


def toml(values: dict) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def test_both_formats(tmp_path):
    (tmp_path / "c.toml").write_text(toml(GOOD))
    (tmp_path / "c.json").write_text(json.dumps({**GOOD, "node_gb_per_s": 50}))
    spec = ClusterSpec.from_file(tmp_path / "c.toml")
    assert spec == ClusterSpec(4, 8, 200.0, 12.5, 10)
    assert spec.node_gb_per_s is None
    assert ClusterSpec.from_file(tmp_path / "c.json").node_gb_per_s == 50
    assert ClusterSpec.from_dict(spec.to_json()) == spec
    assert (spec.world, spec.node_of(7), spec.node_of(8), spec.node_of(31)) == (32, 0, 1, 3)


def test_a_device_in_both_formats(tmp_path):
    """And what `fxpar profile` writes beside it is left alone."""
    device = "[device]\nlaunch_us = 5\nmemory_gb_per_s = 1500\ntflops = { bfloat16 = 250, float32 = 40 }\n"
    (tmp_path / "c.toml").write_text(f"{toml(GOOD)}{device}[measured]\nversion = 1\n")
    spec = ClusterSpec.from_file(tmp_path / "c.toml")
    assert spec.device == Device({"bfloat16": 250, "float32": 40}, 1500, 5)
    (tmp_path / "c.json").write_text(json.dumps({**spec.to_json(), "measured": {"points": []}}))
    assert ClusterSpec.from_file(tmp_path / "c.json") == spec


TABLES = ("tflops", "attention_tflops", "attention_block")
HALVES = {half + name: {"float32": 1.0, "bfloat16": 2.0} for half in ("", "backward_") for name in TABLES}
DEVICE = {"memory_gb_per_s": 1, "launch_us": 1, "backward_exposed_traffic": 0.0, **HALVES}
MEASURED = {**GOOD, "device": DEVICE, "measured": {"version": VERSION}}


def test_what_was_measured_before_halves_were_is_of_both():
    """Attention forward and backward together, as a file of version 3 has it: nothing is predicted otherwise."""
    forward = {name: figure for name, figure in MEASURED["device"].items() if not name.startswith("backward_")}
    old = ClusterSpec.from_dict({**MEASURED, "device": forward, "measured": {"version": 3}})
    assert old.sustained.in_backward is old.sustained
    four = {**MEASURED, "device": DEVICE | {"exposed_traffic": 0.5}, "measured": {"version": 4}}
    assert ClusterSpec.from_dict(four).sustained.exposed_traffic_of(torch.bfloat16) == 0.5  # of all dtypes
    with pytest.raises(ClusterError, match=r"lacks device\.tflops\. Measure"):
        ClusterSpec.from_dict({**four, "device": {k: v for k, v in DEVICE.items() if k != "tflops"}})
    assert ClusterSpec.from_dict(MEASURED).sustained.in_backward.tflops == {"float32": 1.0, "bfloat16": 2.0}


@pytest.mark.parametrize(
    ("without", "change", "message"),
    [
        ("backward_tflops", {}, "was measured, and lacks device.backward_tflops. Measure again with `fxpar profile`"),
        ("attention_block", {}, "lacks device.attention_block"),
        ("tflops", {"backward_tflops": 5}, "lacks device.tflops"),
        ("", {"backward_attention_tflops": {"bfloat16": 1}}, "lacks device.backward_attention_tflops.float32. Measure"),
        ("", {"tflops": {"float32": 1.0}}, "lacks device.tflops.bfloat16. Measure"),
        ("backward_exposed_traffic", {}, "lacks device.backward_exposed_traffic. Measure"),
        ("", {"backward_tflops": {"bfloat16": -1, "float32": 1}}, "device.backward_tflops.bfloat16 = -1 must be > 0"),
    ],
)
def test_a_measured_file_has_both_halves(without, change, message):
    device = {name: figure for name, figure in (MEASURED["device"] | change).items() if name != without}
    with pytest.raises(ClusterError, match=r"^cluster 'c\.json': ") as error:
        ClusterSpec.from_dict({**MEASURED, "device": device}, "'c.json'")
    assert message in str(error.value)


def test_a_measured_file_of_a_newer_fxpar():
    with pytest.raises(
        ClusterError, match=rf"measured\.version = {VERSION + 1} is newer than {VERSION}\. Measure again"
    ):
        ClusterSpec.from_dict({**MEASURED, "measured": {"version": VERSION + 1}})
    for version in ("4", 4.0, True, 0, -1):
        with pytest.raises(ClusterError, match=r"measured\.version = .* is none: they count from 1\. Measure again"):
            ClusterSpec.from_dict({**MEASURED, "measured": {"version": version}})


@pytest.mark.parametrize("name", shipped())
def test_kinds_of_nodes_go_by_name(name):
    """For any number of nodes, with all that a search asks for."""
    spec = ClusterSpec.from_file(name)
    assert (spec.world, spec.devices_per_node) == (1024, 8)
    assert spec.device is not None
    assert spec.device.memory_gb >= 40
    assert spec.device.flops_per_s(torch.bfloat16) > 2 * spec.device.flops_per_s(torch.float32)


def test_of_a_name_that_is_no_file_the_kinds_are_said():
    with pytest.raises(ClusterError, match=r"'h1000': cannot be read: .*: a100-40g, a800, h100, h20, h800"):
        ClusterSpec.from_file("h1000")
    with pytest.raises(ClusterError, match=r"'h1000\.toml': cannot be read: No such file or directory$"):
        ClusterSpec.from_file("h1000.toml")


def test_devices_that_nobody_described_are_usual_ones():
    """Of what a run has, of a GPU where nothing runs; what was described stays."""
    links, own = ClusterSpec.from_dict(GOOD), Device(1.0, 10, 1)
    assert (links.device, links.sustained, "device" in links.to_json()) == (None, GPU, False)
    assert (links.on("cpu").sustained, links.on("cuda").sustained, links.on("xpu").sustained) == (CPU, GPU, GPU)
    assert replace(links, device=own).on("cpu").sustained == own
    assert links.on("cpu").intra_gb_per_s == links.intra_gb_per_s
    here = cluster_here(links, 32, torch.device("cpu"))
    assert here == replace(links, device=CPU)
    assert cluster_here(here, 32, torch.device("cuda")) == here
    assert cluster_here(None, 2, torch.device("cpu")).device == CPU


def test_usual_clusters():
    assert usual_cluster(3).world == 3
    assert (usual_cluster(12).nodes, usual_cluster(12).devices_per_node) == (2, 8)
    assert usual_cluster(4, 2, "cpu").device == USUAL["cpu"].device
    assert usual_cluster(4, 2, "xpu") == usual_cluster(4, 2)  # better than nothing


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_gb": 80}, "memory_gb is a figure of a device: write device.memory_gb"),
        ({"intra_gb_per_sec": 1}, "'intra_gb_per_sec' is unknown; did you mean 'intra_gb_per_s'?"),
        ({"nodes": 0}, "nodes = 0 must be > 0"),
        ({"nodes": 2.5}, "nodes = 2.5 must be an integer"),
        ({"nodes": True}, "nodes = True must be an integer"),
        ({"inter_gb_per_s": "fast"}, "inter_gb_per_s = 'fast' must be a number"),
        ({"inter_gb_per_s": float("inf")}, "must be > 0 and finite"),
        ({"latency_us": -1}, "latency_us = -1 must be >= 0"),
        ({"node_gb_per_s": 0}, "node_gb_per_s = 0 must be > 0"),
        ({"latency_us": float("nan")}, "latency_us = nan must be >= 0 and finite"),
        ({"nodes": 10**400}, "nodes = a number of 401 digits must be from 1e-15 to 1e+15"),
        ({"nodes": 10**19}, "nodes = 10000000000000000000 must be from 1e-15 to 1e+15"),
        ({"devices_per_node": 10**9}, "nodes = 4 times devices_per_node = 1000000000 is more than 1,048,576 devices"),
        ({"latency_us": 1e300}, "latency_us = 1e+300 must be from 1e-15 to 1e+15"),
        ({"intra_gb_per_s": 1e-300}, "intra_gb_per_s = 1e-300 must be from 1e-15 to 1e+15"),
        ({"device": 300}, "device = 300 must be a table: [device]"),
        ({"device": {"tflops": 300}}, "lacks device.memory_gb_per_s, device.launch_us"),
    ],
)
def test_bad_values(change, message):
    with pytest.raises(ClusterError) as error:
        ClusterSpec.from_dict({**GOOD, **change}, "'c.toml'")
    assert message in str(error.value)
    assert "'c.toml'" in str(error.value)


def test_missing_keys_are_named():
    with pytest.raises(ClusterError, match="lacks devices_per_node, latency_us"):
        ClusterSpec.from_dict({k: v for k, v in GOOD.items() if k not in ("devices_per_node", "latency_us")})


UNREADABLE = [("c.toml", b"nodes = "), ("c.json", b"{"), ("c.json", b"[1]"), ("c.toml", b"\xff\xfe")]
UNREADABLE += [("c.toml", b"nodes = " + b"9" * 5000), ("c.toml", b"x = " + b"[" * 5000), ("c.json", b"[" * 100_000)]


@pytest.mark.parametrize(("name", "text"), UNREADABLE)
def test_unreadable_files(tmp_path, name, text):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ClusterError, match=name):
        ClusterSpec.from_file(tmp_path / name)


def test_no_file(tmp_path):
    with pytest.raises(ClusterError, match=r"missing\.toml.*No such file"):
        ClusterSpec.from_file(tmp_path / "missing.toml")


def test_constructed_ones_are_checked_too():
    with pytest.raises(ClusterError, match="devices_per_node = 0"):
        ClusterSpec(1, 0, 1, 1, 1)
    with pytest.raises(ClusterError, match=r"device = 300 must be a fxpar\.Device"):
        ClusterSpec(1, 1, 1, 1, 1, device=300)


def test_fewer_ranks_of_a_node_take_turns_less_often():
    """Measured with 4 ranks on 2 cores: of 2 ranks, or of 1, each has a core, and is twice as fast."""
    four = ClusterSpec(1, 4, 2.0, 1.0, 200.0, device=Device(0.1, 5.0, 10.0, shared_by=2.0))
    for ranks in (2, 1):
        device = four.with_nodes(1, ranks).sustained
        assert (device.shared_by, device.tflops, device.memory_gb_per_s, device.launch_us) == (1, 0.2, 10, 5)
    assert four.with_nodes(2, 4).device == four.device
    assert four.with_nodes(1, 8).sustained.tflops == 0.05
    assert four.with_nodes(1, 2).intra_gb_per_s == 2


def test_usual_ranks_of_cpus_take_turns_on_the_cores_that_are_there(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert usual_cluster(4, 4, "cpu").sustained.shared_by == 2
    assert usual_cluster(2, 2, "cpu").sustained == CPU
    assert usual_cluster(4, 4, "cuda").sustained.shared_by == 1


@pytest.mark.parametrize(("key", "value"), [("torch", 2.13), ("device", 7)])
def test_where_it_was_measured_is_a_text(key, value, tmp_path):
    """Else nobody would be told that it was elsewhere."""
    about = {"version": VERSION, "device": "cpu", "torch": "2.13.0", key: value}
    (tmp_path / "c.json").write_text(json.dumps({**MEASURED, "measured": about}))
    with pytest.raises(ClusterError, match=rf"c\.json': measured\.{key} = {value} must be a text"):
        measured_on(tmp_path / "c.json")
