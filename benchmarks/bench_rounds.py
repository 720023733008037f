"""Batches planned as rounds of teams, FlexSP's problem with its constants: their seconds, and CPU seconds to plan.

    OMP_NUM_THREADS=1 python benchmarks/bench_rounds.py [--lengths FILE.npz] [--tiny] [--json FILE]

Lengths are drawn like those of Wikipedia articles, or read from a file; the targets are for the file that FlexSP's open
code ships. A batch has 8 sequences per device, is padded to a multiple of 2 * devices, and a device has 30 GiB. Degrees
beyond 64 have the bandwidth of 64.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fxpar.rounds import PUBLISHED, homogeneous_ms, plan_rounds
from fxpar.rounds.batches import batches_of
from fxpar.search.lengths import read_lengths

PER_DEVICE = 8  # sequences of a batch
K = 1024


@dataclass(frozen=True)
class Case:
    """`target_s` for all batches together, where there is one; what planning a batch may take, and the largest gap."""

    devices: int
    longest: int
    least: int  # degree
    batches: range
    target_cpu_s: float
    target_gap: float
    target_s: float | None = None

    @property
    def name(self) -> str:
        which = f"{self.batches.start}:{self.batches.stop}"
        return f"{self.devices} devices, {self.longest // K}K, from {self.least}, {which}"


CASES = (
    Case(64, 192 * K, 2, range(10), 0.5, 0.035, 40.4),
    Case(64, 192 * K, 1, range(10), 0.7, 0.035, 39.7),
    Case(64, 384 * K, 2, range(10, 20), 0.5, 0.035, 34.4),
    Case(64, 384 * K, 1, range(10, 20), 0.7, 0.035),
    Case(128, 192 * K, 2, range(3), 1, 0.05),
    Case(256, 192 * K, 2, range(3), 2, 0.05),
    Case(1024, 192 * K, 2, range(3), 8, 0.05),
    Case(1024, 192 * K, 1, range(3), 8, 0.05),
)
TINY = Case(8, 4 * K, 2, range(1), 0.5, 0.05)


@dataclass(frozen=True)
class Row:
    """Seconds of all batches, their bounds, and what plans of one degree take (None: not asked); the largest gap of a
    batch, and the mean CPU seconds of planning one.
    """

    case: str
    found_s: float
    target_s: float | None
    bound_s: float
    any_cut_bound_s: float
    gap: float
    static_s: float | None
    one_degree_s: float | None
    cpu_s: float
    target_cpu_s: float


def measured(case: Case, lengths: str) -> Row:
    """Plan its batches."""
    degrees = [2**power for power in range(case.devices.bit_length()) if 2**power >= case.least]
    cost = PUBLISHED["flexsp-7b"] if case is not TINY else PUBLISHED["flexsp-7b"].with_memory(80)
    costs = cost.teams(degrees, case.devices, case.longest)
    size = PER_DEVICE * case.devices
    batches = batches_of(read_lengths(lengths), case.batches, size, case.longest, case.devices)
    begun = time.process_time()
    plans = [plan_rounds(one.lengths, case.devices, costs) for one in batches]
    spent = (time.process_time() - begun) / len(plans)
    alike = [homogeneous_ms(one.lengths, case.devices, costs) for one in batches] if case.devices <= 64 else []
    return Row(
        case.name,
        sum(plan.predicted_ms for plan in plans) / 1000,
        case.target_s,
        sum(plan.bound_ms for plan in plans) / 1000,
        sum(plan.any_cut_bound_ms for plan in plans) / 1000,
        max(plan.gap for plan in plans),
        sum(one[case.devices] for one in alike) / 1000 if alike else None,
        sum(min(one.values()) for one in alike) / 1000 if alike else None,
        spent,
        case.target_cpu_s,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default=f"wikipedia:{1024 * K}", help="a file of lengths, as for fxpar rounds")
    parser.add_argument("--tiny", action="store_true", help="one small batch, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args(argv)
    rows = []
    print(
        f"{'case':34} {'found':>8} {'target':>7} {'bound':>8} {'any cut':>8} {'gap':>6} {'static':>8} {'one deg.':>8} "
        f"{'CPU s':>6}  target"
    )
    for case in (TINY,) if args.tiny else CASES:
        row = measured(case, args.lengths)
        rows.append(row)
        target, static, alike = (
            "" if value is None else f"{value:.2f}" for value in (row.target_s, row.static_s, row.one_degree_s)
        )
        figures = f"{row.found_s:8.2f} {target:>7} {row.bound_s:8.2f} {row.any_cut_bound_s:8.2f} {row.gap:6.1%}"
        print(f"{row.case:34} {figures} {static:>8} {alike:>8} {row.cpu_s:6.2f}  {row.target_cpu_s:g}", flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
