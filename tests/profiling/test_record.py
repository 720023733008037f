"""From points to a cluster file: lines through points, usual figures where nothing was measured."""

from __future__ import annotations

import json

import pytest
import torch

from fxpar.cost.cluster import USUAL, ClusterSpec
from fxpar.profiling.points import Point
from fxpar.profiling.record import VERSION, described, device_name, file_content, fitted_link

CPU = torch.device("cpu")
DEVICE_POINTS = [
    Point("product", "float32", 256, 2 * 256**3, 1e-3),
    Point("product", "float32", 512, 2 * 512**3, 4e-3),
    Point("product", "bfloat16", 256, 2 * 256**3, 5e-4),
    Point("copy", "memory", 1 << 20, 2e6, 1e-3),
    Point("copy", "memory", 1 << 27, 2e8, 1e-2),
    Point("add", "memory", 1 << 27, 3e8, 1.5e-2),
    Point("launch", "kernel", 1, 1, 2.5e-6),
]


def link_points(level: str, latency_s: float, bytes_per_s: float, kinds=("send", "all_reduce", "all_gather")):
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
    assert (device.memory_gb_per_s, device.launch_us) == (20, 2.5)  # of the largest size
    assert device.memory_gb is not None


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
