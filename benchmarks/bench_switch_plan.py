"""CPU seconds of planning: 32B on 32 ranks and 70B on 1,024 ranks, shapes only.

    python benchmarks/bench_switch_plan.py [--tiny] [--json OUT]

Prints one line per switch and planner. Models are captured and layouts made once (90 CPU s), and not counted; the plan
(slices and senders) is.
Targets: 0.3 s for 32B on 32 ranks, 3 s for 70B on 1,024 ranks.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from fxpar.cost.cluster import ClusterSpec
from fxpar.lowering import outline
from fxpar.models import load
from fxpar.switch import layout_of, plan_switch
from fxpar.switch.planners import NAMES
from fxpar.tracer import capture

SIZES_32B = {
    "num_hidden_layers": "60",
    "hidden_size": "6656",
    "intermediate_size": "17920",
    "num_attention_heads": "64",
    "num_key_value_heads": "64",
    "vocab_size": "30592",
}
CASES = [
    ("32B", SIZES_32B, 4, ["pp2.tp16 > dp8.tp4", "dp8.tp4 > pp2.tp16", "dp4.pp4.tp2 > dp8.tp4"]),
    (
        "70B",
        {},
        128,
        [
            "dp8.pp16.tp8 > dp128.tp8",
            "dp128.tp8 > dp8.pp16.tp8",
            "dp16.pp8.tp8 > dp64.tp16",
            "dp64.tp16 > dp8.pp16.tp8",
        ],
    ),
]
TINY_CASES = [("tiny", {**SIZES_32B, "num_hidden_layers": "4"}, 4, ["dp4.pp4.tp2 > dp8.tp4"])]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="four layers, one switch, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    found = []
    for label, options, nodes, switches in TINY_CASES if args.tiny else CASES:
        loaded = load("hf:llama@70b", options=options, dtype=torch.bfloat16, device="meta", tokens=(128,))
        logical = capture(loaded.model, loaded.loss_fn, loaded.example_batch, name=label)
        texts = {text for switch in switches for text in switch.split(" > ")}
        layouts = {text: layout_of(outline(logical, text)) for text in texts}
        cluster = ClusterSpec(nodes, 8, intra_gb_per_s=200, inter_gb_per_s=25, latency_us=10)
        for switch in switches:
            source, target = (layouts[text] for text in switch.split(" > "))
            for planner in NAMES:
                plan = plan_switch(source, target, cluster, planner)
                begun = time.process_time()
                plan.verify()
                verify_s = time.process_time() - begun
                found.append(
                    [label, switch, planner, plan.plan_cpu_s, verify_s, plan.inter_node_bytes, plan.predicted_s]
                )
                print(
                    f"{label} {switch:34} {planner:12} plan {plan.plan_cpu_s:6.3f} s  verify {verify_s:6.3f} s  "
                    f"{len(plan.transfers):8} transfers  inter {plan.inter_node_bytes / 1e9:8.1f} GB  "
                    f"max send {plan.max_send_bytes / 1e9:6.2f} GB (bound {plan.lower_bound_bytes / 1e9:6.2f})  "
                    f"predicted {plan.predicted_s:.3f} s",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
