"""Multi-task models planned in waves, Spindle's problem: plans against the bound, waves, sequential, and CPU seconds.

    OMP_NUM_THREADS=1 python benchmarks/bench_waves.py [--tiny] [--json FILE]

Models are those of `fxpar tasks plan --case`, on nodes of 8 devices; twice: without transfers and reductions, as the
figures that are known of Spindle's open planner are, and with them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fxpar.waves import CASES, TaskGraph, plan_waves
from fxpar.waves.published import NODE

# By case and devices: ms of the open planner's waves (with extension) or of a heuristic without levels, whichever is
# less; and the speed-up over one task after the other that the paper measured (DeepSpeed; None: not shown).
KNOWN: dict[str, dict[int, tuple[float, float | None]]] = {
    "clip-4": {8: (97.6, 1.21), 16: (59.9, 1.22), 32: (37.8, 1.52), 64: (29.3, None)},
    "clip-7": {8: (253.2, 1.31), 16: (137.1, 1.26), 32: (77.5, 1.54), 64: (47.4, None)},
    "clip-10": {8: (334.5, 1.37), 16: (180.1, 1.33), 32: (100.8, 1.71), 64: (60.5, None)},
    "ofasys-7": {8: (255, 1.33), 16: (138, 1.51), 32: (80.6, 1.71), 64: (52.6, None)},
    "qwen-val": {8: (4639, None), 16: (2347, None), 32: (1194, 1.16), 64: (613, 1.63)},
}


@dataclass(frozen=True)
class Row:
    """ms of a plan, its bound and what is known of others; the same with transfers, and the part of the step that
    devices spend on them; speed-ups over one after the other; CPU seconds of planning.
    """

    case: str
    devices: int
    bound_ms: float
    free_ms: float  # without transfers
    free_waves_ms: float
    known_ms: float
    ms: float
    waves_ms: float
    transfer_share: float
    speed_up: float
    waves_speed_up: float
    paper_speed_up: float | None
    cpu_s: float


def measured(case: str, devices: int) -> Row:
    """Plan it twice."""
    graph, cluster = CASES[case], NODE.with_nodes(devices // 8, 8)
    silent = TaskGraph(tuple(replace(one, output_bytes=0, gradient_bytes=0) for one in graph.metaops), graph.edges)
    free = plan_waves(silent, cluster)
    begun = time.process_time()
    plan = plan_waves(graph, cluster)
    spent = time.process_time() - begun
    known, paper = KNOWN[case][devices]
    return Row(
        case,
        devices,
        plan.bound_ms,
        free.ms,
        free.spindle_ms,
        known,
        plan.ms,
        plan.spindle_ms,
        plan.transfer_share,
        plan.sequential_ms / plan.ms,
        plan.sequential_ms / plan.spindle_ms,
        paper,
        spent,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="one small case, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args(argv)
    cases = [("clip-4", 8)] if args.tiny else [(case, devices) for case, rows in KNOWN.items() for devices in rows]
    print(
        f"{'case':9} {'N':>3} {'bound':>7} {'free':>7} {'gap':>6} {'waves':>7} {'known':>7} | {'plan':>7} {'waves':>7} "
        f"{'sent':>5} {'times':>5} {'waves':>5} {'paper':>5} {'CPU s':>6}"
    )
    rows = []
    for case, devices in cases:
        row = measured(case, devices)
        rows.append(row)
        paper = "" if row.paper_speed_up is None else f"{row.paper_speed_up:.2f}"
        free = f"{row.free_ms:7.1f} {row.free_ms / row.bound_ms - 1:6.1%} {row.free_waves_ms:7.1f} {row.known_ms:7.1f}"
        with_transfers = f"{row.ms:7.1f} {row.waves_ms:7.1f} {row.transfer_share:5.1%}"
        times = f"{row.speed_up:5.2f} {row.waves_speed_up:5.2f} {paper:>5} {row.cpu_s:6.2f}"
        print(f"{case:9} {devices:3} {row.bound_ms:7.1f} {free} | {with_transfers} {times}", flush=True)
    gaps = [row.free_ms / row.bound_ms - 1 for row in rows if row.case.startswith("clip")]
    print(f"gap of the CLIP models without transfers: {sum(gaps) / len(gaps):.1%} on average, {max(gaps):.1%} at most")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
