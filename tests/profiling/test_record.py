"""From points to a cluster file: lines through points, usual figures where nothing was measured."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction

import pytest
import torch

from fxpar.cost.cluster import USUAL, ClusterSpec
from fxpar.cost.device import GPU
from fxpar.profiling.points import Point
from fxpar.profiling.record import (
    VERSION,
    _device,
    _overlap_slowdown,
    described,
    device_name,
    file_content,
    fitted_attention,
    fitted_link,
    memory_rates,
)
from fxpar.profiling.trials import THIN_ROWS

CPU = torch.device("cpu")
HALVES = [
    Point("product", "float32", 256, 2 * 256**3, 1e-3),
    Point("product", "float32", 512, 2 * 512**3, 4e-3),
    Point("product", "bfloat16", 256, 2 * 256**3, 5e-4),
    Point("attention", "float32", 256, 7 * 256**2, (256**2 + 512 * 256) / 1e9),
    Point("attention", "float32", 1024, 7 * 1024**2, (1024**2 + 512 * 1024) / 1e9),
    Point("attention", "bfloat16", 256, 7 * 256**2, (256**2 + 512 * 256) / 2e9),
    Point("attention", "bfloat16", 1024, 7 * 1024**2, (1024**2 + 512 * 1024) / 2e9),
    # Backward: twice the operations of products, half as fast in bfloat16; of attention 2.5 times, at half the rate.
    Point("backward product", "float32", 256, 4 * 256**3, 2e-3),
    Point("backward product", "bfloat16", 256, 4 * 256**3, 2e-3),
    Point("backward attention", "float32", 256, 17.5 * 256**2, (256**2 + 1024 * 256) / 2e8),
    Point("backward attention", "float32", 1024, 17.5 * 1024**2, (1024**2 + 1024 * 1024) / 2e8),
    Point("backward attention", "bfloat16", 256, 17.5 * 256**2, (256**2 + 512 * 256) / 4e8),
    Point("backward attention", "bfloat16", 1024, 17.5 * 1024**2, (1024**2 + 512 * 1024) / 4e8),
]
DEVICE_POINTS = [
    *HALVES,
    Point("copy", "memory", 1 << 20, 2e6, 1e-3),
    Point("copy", "memory", 1 << 27, 2e8, 1e-2),
    Point("add", "memory", 1 << 27, 3e8, 1.5e-2),
    Point("launch", "kernel", 1, 1, 2.5e-6),
]


KINDS = ("send", "all_reduce", "all_gather")


def link_points(level: str, latency_s: float, bytes_per_s: float, kinds=KINDS):
    sizes = (1 << 10, 1 << 16, 1 << 24)
    return [Point(kind, level, size, size, latency_s + size / bytes_per_s) for kind in kinds for size in sizes]


def test_a_line_is_found_again():
    link = fitted_link(link_points("intra", 50e-6, 3e9))
    assert (link.latency_us, link.gb_per_s) == (50, 3)


def test_small_messages_count_as_much_as_large_ones():
    """A tenth more at the largest size moves the latency by less than a tenth."""
    points = link_points("intra", 50e-6, 3e9, kinds=("send",))
    last = points[-1]
    noisy = [*points[:-1], Point(last.kind, last.of, last.size, last.amount, 1.1 * last.seconds)]
    assert fitted_link(noisy).latency_us == pytest.approx(50, rel=0.1)


def test_no_latency_below_zero():
    """Small messages that are faster than the line of the large ones."""
    points = [Point("send", "intra", n, n, seconds) for n, seconds in ((1e3, 1e-7), (1e6, 1e-3), (1e7, 1e-2))]
    link = fitted_link(points)
    assert link.latency_us == 0
    assert link.gb_per_s > 0
    with pytest.raises(ValueError, match="no points"):
        fitted_link([])


def test_one_rank_has_usual_links():
    cluster = described(DEVICE_POINTS, CPU, nodes=1, world=1)
    usual = USUAL["cpu"]
    assert (cluster.nodes, cluster.devices_per_node) == (1, 1)
    assert (cluster.intra_gb_per_s, cluster.latency_us) == (usual.intra_gb_per_s, usual.latency_us)
    device = cluster.device
    assert device.tflops == {"float32": 0.06711, "bfloat16": 0.06711}  # the best of each, in four digits
    assert device.backward_tflops == {"float32": 0.03355, "bfloat16": 0.03355}
    assert (device.memory_gb_per_s, device.launch_us) == (20, 2.5)  # of the largest size
    assert device.memory_gb is not None
    assert device.shared_by == 1


def test_a_gpu_is_given_kernels_ahead(monkeypatch):
    """Copies and sums of an H200: their lines begin at 3.3 and 3.8 µs; to start a kernel from Python takes 15."""
    seconds = {"copy": (9e-6, 19.0e-6, 66.1e-6), "add": (8e-6, 26.6e-6, 95.0e-6)}
    points = [point for point in DEVICE_POINTS if point.kind not in ("copy", "add", "launch")]
    points += [
        Point(kind, "memory", size, times * size, s)
        for (kind, found), times in zip(seconds.items(), (2, 3), strict=True)
        for size, s in zip((1 << 20, 1 << 25, 1 << 27), found, strict=True)
    ]
    points.append(Point("launch", "kernel", 1, 1, 15e-6))
    points += [Point("host copy", "both ways", n, n, 10e-6 + n / 5e10) for n in (1 << 24, 1 << 28)]
    monkeypatch.setattr("fxpar.profiling.record.memory_bytes", lambda device, ranks: 1.5e11)
    cuda = _device(points, torch.device("cuda"), 1, 1)
    assert cuda.launch_us == pytest.approx(3.55, abs=0.1)
    assert cuda.overlap_slowdown == GPU.overlap_slowdown  # nothing was measured
    assert cuda.host_gb_per_s == pytest.approx(50, rel=0.01)
    assert _device(points, CPU, 1, 1).launch_us == 15


@pytest.mark.parametrize(("seconds", "slowdown"), [(1.4e-3, 1.5), (1.2e-3, 1.0), (1.1e-3, 1.0)])
def test_kernels_and_transfers_beside_each_other(seconds, slowdown):
    """A product of 1.2 ms beside gathers of 0.4 ms: what both take longer than the product, of the time of these."""
    by_kind = {
        "product": [Point("product", "bfloat16", 8, 8e9, 1.2e-3), Point("product", "float32", 8, 8e9, 9e-3)],
        "all_gather": [Point("all_gather", of, n, n, n * 1e-10) for of, n in (("intra", 10**6), ("inter", 10**7))],
        "product beside gathers": [Point("product beside gathers", "intra", 4 * 10**6, 8e9, seconds)],
    }
    assert _overlap_slowdown(by_kind) == pytest.approx(slowdown)


def test_thin_products_say_how_much_of_their_traffic_takes_time():
    """By dtype, of what their rows take to be read and written, in a cache where it holds them; beside the operations,
    the weights and a launch. Backward a quarter, of two products with as much each.
    """
    shares = {"float32": 0.5, "bfloat16": 1.5}
    points = [one for one in DEVICE_POINTS if one.size != 1 << 20]
    points += [Point("copy", "memory", 1 << 20, 1e6, 25e-6), Point("add", "memory", 1 << 20, 1e6, 25e-6)]  # a cache
    for (dtype, share), width in itertools.product(shares.items(), (64, 256)):
        itemsize, amount = 4 if dtype == "float32" else 2, 2.0 * THIN_ROWS * width**2
        rows_s, weight_s = 2 * THIN_ROWS * width * itemsize / 40e9, width**2 * itemsize / 40e9
        rate, fixed_s = 2 * 256**3 / 5e-4, weight_s + 2.5e-6  # the best of each dtype, and what is paid in full
        points.append(Point("thin product", dtype, width, amount, amount / rate + fixed_s + share * rows_s))
        both_s = 2 * (amount / (rate / 2) + fixed_s + share / 2 * rows_s)
        points.append(Point("backward thin product", dtype, width, 2 * amount, both_s))
    device = described(points, CPU, nodes=1, world=1).sustained
    assert device.cache_gb_per_s == 40
    assert device.exposed_traffic == pytest.approx(shares, rel=1e-3)
    assert device.backward_exposed_traffic == pytest.approx({"float32": 0.25, "bfloat16": 0.75}, rel=1e-3)
    device = described(DEVICE_POINTS, CPU, nodes=1, world=1).sustained
    assert (device.exposed_traffic, device.backward_exposed_traffic) == (0, 0)  # nobody measured it


def test_attention_has_a_rate_and_a_block():
    """Seconds grow with tokens * (tokens + 512), as rows see half a block more than they need."""
    device = described(DEVICE_POINTS, CPU, nodes=1, world=1).sustained
    assert device.attention_tflops == {"float32": 0.007, "bfloat16": 0.014}
    assert device.attention_block == {"float32": pytest.approx(512, rel=1e-3), "bfloat16": pytest.approx(512, rel=1e-3)}
    assert device.backward_attention_tflops == {"float32": 0.0035, "bfloat16": 0.007}
    assert device.backward_attention_block == {"float32": 1024, "bfloat16": 512}
    points = [Point("attention", "float32", n, 7.0 * n**2, n**2.5) for n in (16, 64, 256)]
    assert fitted_attention(points)[1] == 0  # faster than a square where documents are short: no block below none


def test_attention_of_documents_too_short_to_keep_a_device_busy_is_left_out():
    """Seconds of an H200: a step of tokens takes as long as starting its kernels."""
    seconds = {256: 216e-6, 1024: 231e-6, 2048: 228e-6, 4096: 269e-6, 8192: 756e-6, 16384: 2007e-6}
    points = [Point("attention", "bfloat16", n, 7.0 * 256 * n**2, s) for n, s in seconds.items()]
    rate, block = fitted_attention(points)
    assert (rate, block) == fitted_attention(points[3:])
    for point in points[3:]:
        assert 7.0 * 256 * point.size * (point.size + block) / rate == pytest.approx(point.seconds, rel=0.25)


@pytest.mark.parametrize(
    ("gb_per_s", "expected"),
    [
        ((20, 20, 19, 4, 4), {"memory_gb_per_s": 4, "cache_mb": 5.657, "cache_gb_per_s": 19.66}),
        ((20, 18, 18, 17, 16), {"memory_gb_per_s": 16}),  # all alike: no cache
        ((40, 20, 10, 5, 5), {"memory_gb_per_s": 5, "cache_mb": 5.657, "cache_gb_per_s": 17.14}),  # the last fall
        ((8,), {"memory_gb_per_s": 8}),
    ],
)
def test_a_cache_is_what_is_faster_than_memory(gb_per_s, expected):
    sizes = (1e6, 2e6, 4e6, 8e6, 16e6)
    points = [Point("add", "memory", int(n), n, n / (1e9 * rate)) for n, rate in zip(sizes, gb_per_s, strict=False)]
    assert memory_rates(points) == expected


def test_ranks_that_take_turns_on_a_core(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert described(DEVICE_POINTS, CPU, nodes=1, world=4).sustained.shared_by == 2
    assert described(DEVICE_POINTS, CPU, nodes=2, world=4).sustained.shared_by == 1
    assert described(DEVICE_POINTS, CPU, nodes=2, world=4, threads=3).sustained.shared_by == 3


def test_links_are_what_all_ranks_get_at_once_and_all_reduces_have_their_own():
    slow = link_points("intra", 40e-6, 1e9, ("reduce_scatter",)), link_points("intra", 5e-3, 0.5e9, ("all_reduce",))
    cluster = described([*DEVICE_POINTS, *link_points("intra", 1e-6, 9e9, ("send",)), *slow[0], *slow[1]], CPU, 1, 4)
    assert (cluster.latency_us, cluster.intra_gb_per_s) == (40, 1)
    assert (cluster.all_reduce_latency_us, cluster.all_reduce_gb_per_s) == (5000, 0.5)
    assert cluster.collective_s("all_reduce", False) == (Fraction(5, 1000), Fraction(1, 500_000_000))
    assert cluster.collective_s("all_gather", False) == (cluster.latency_s, Fraction(1, 10**9))
    assert cluster.collective_s("all_reduce", True)[0] == cluster.latency_s


def test_levels_of_links():
    points = [*DEVICE_POINTS, *link_points("intra", 20e-6, 3e9), *link_points("inter", 100e-6, 1e9)]
    cluster = described(points, CPU, nodes=2, world=4)
    assert (cluster.nodes, cluster.devices_per_node) == (2, 2)
    assert (cluster.intra_gb_per_s, cluster.inter_gb_per_s) == (3, 1)
    assert cluster.latency_us == 100  # the larger one


@pytest.mark.parametrize(
    ("points", "assumed"),
    [
        (DEVICE_POINTS, ["intra_gb_per_s", "inter_gb_per_s", "latency_us"]),
        ([*DEVICE_POINTS, *link_points("intra", 20e-6, 3e9)], ["inter_gb_per_s"]),
    ],
)
def test_a_file_is_a_cluster_and_says_where_it_comes_from(tmp_path, points, assumed):
    cluster = described(points, CPU, nodes=1, world=2)
    content = file_content(cluster, points, CPU, threads=1)
    (tmp_path / "c.json").write_text(json.dumps(content))
    assert ClusterSpec.from_file(tmp_path / "c.json") == cluster
    about = content["measured"]
    assert (about["version"], about["ranks"], about["threads"]) == (VERSION, 2, 1)
    assert about["assumed"] == assumed
    assert about["torch"] == torch.__version__
    assert about["device"] == device_name(CPU) != ""
    assert [Point(**point) for point in about["points"]] == points
    assert set(about["links"]) == {p.of for p in points} & {"intra", "inter"}
