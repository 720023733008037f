"""The five layouts of HotSPa's 32B model (dp, tp, pp on 4 x 8 GPUs): captured once, cut into stages and lowered.

    OMP_NUM_THREADS=1 python benchmarks/bench_hotspa_32b.py [--tiny] [--json OUT]

CPU seconds of this process; no process group, no device, no weights. Target: below 60 CPU s for everything. Also the
bytes that the busiest rank sends in each of the 20 switches between the lowered layouts (planner: hotspa, bf16).
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fxpar.cost.cluster import ClusterSpec
from fxpar.lowering import lower
from fxpar.models import load
from fxpar.search.published import LAYERS_32B, MODEL_32B
from fxpar.switch import layout_of, plan_switch
from fxpar.tracer import capture

TARGET_S = 60.0
SIZES = {**MODEL_32B, "layers": str(LAYERS_32B)}
STRATEGIES = ("dp1.pp2.tp16", "dp2.pp2.tp8", "dp4.pp2.tp4", "dp4.pp4.tp2", "dp8.pp1.tp4")
CLUSTER = ClusterSpec(nodes=4, devices_per_node=8, intra_gb_per_s=200.0, inter_gb_per_s=25.0, latency_us=10.0)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="four layers, two of the layouts, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    sizes, strategies = ({**SIZES, "layers": "4"}, STRATEGIES[2:4]) if args.tiny else (SIZES, STRATEGIES)
    begun = time.process_time()
    loaded = load("llama", options=sizes, dtype=torch.bfloat16, device="meta")
    logical = capture(loaded.model, loaded.loss_fn, loaded.example_batch, name="32B")
    found: dict[str, Any] = {"capture_cpu_s": time.process_time() - begun, "lower_cpu_s": {}, "max_send_bytes": {}}
    print(f"capture {found['capture_cpu_s']:.1f} CPU s, {len(logical.gm.graph.nodes)} nodes")
    layouts = {}
    for strategy in strategies:
        start = time.process_time()
        program = lower(logical, strategy, for_store=True)
        layouts[strategy] = layout_of(program)
        found["lower_cpu_s"][strategy] = time.process_time() - start
        print(f"{strategy:14} {found['lower_cpu_s'][strategy]:5.1f} CPU s, {program.node_count} nodes")
    found["total_cpu_s"] = found["capture_cpu_s"] + sum(found["lower_cpu_s"].values())
    print(f"together {found['total_cpu_s']:.1f} CPU s (target <= {TARGET_S:.0f})")
    for before, after in itertools.permutations(strategies, 2):
        plan = plan_switch(layouts[before], layouts[after], CLUSTER, "hotspa")
        plan.verify()
        found["max_send_bytes"][f"{before} -> {after}"] = plan.max_send_bytes
        moved = plan.intra_node_bytes + plan.inter_node_bytes
        print(
            f"{before:14} -> {after:14} {moved / 1e9:7.2f} GB moved, busiest rank {plan.max_send_bytes / 1e9:5.2f} GB"
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
