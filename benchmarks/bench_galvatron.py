"""Galvatron's own case, from the profile that it ships and by its formulas: the best plan, and the time to find it.

    OMP_NUM_THREADS=1 python benchmarks/bench_galvatron.py [--tiny] [--json FILE]

LLaMA-2-7B, 64 sequences of 2,048 tokens, 38 GB per device. `theirs` is what Galvatron 3.0 found or, where its search
optimizes something else than it predicts, what it finds once that is repaired; its CPU seconds are those of its search
as released, on two cores of the same kind. Borders between layers are left out of a plan's time, as it leaves them out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fxpar.search.galvatron import GalvatronCost
from fxpar.search.galvatron_files import read_profiles
from fxpar.search.layered import search

PROFILES = Path(__file__).parents[1] / "tests" / "search" / "data" / "galvatron_llama2-7b"
BATCH, LENGTH, MEMORY_BYTES = 64, 2048, 38 * 2**30


@dataclass(frozen=True)
class Case:
    """`target_cpu_s` is what finding a plan may take."""

    devices: int
    micro_batches: int | None  # None: as many as are best
    theirs_s: float
    their_cpu_s: float
    target_cpu_s: float

    @property
    def name(self) -> str:
        return f"{self.devices} devices, {self.micro_batches or 'any number of'} micro-batches"


CASES = (
    Case(8, None, 4.18076, 154.2, 1.0),
    Case(8, 8, 4.42213, 37.8, 1.0),
    Case(16, 8, 2.15721, 54.6, 2.0),
)


@dataclass(frozen=True)
class Row:
    """What was found."""

    case: str
    found_s: float
    theirs_s: float
    gap: float
    cpu_s: float
    their_cpu_s: float
    target_cpu_s: float


def measured(case: Case) -> Row:
    """Search once; reading the profile counts too."""
    begun = time.process_time()
    cost = GalvatronCost(read_profiles(PROFILES), case.devices, BATCH, LENGTH)
    found = search(cost, MEMORY_BYTES, micro_batches=case.micro_batches)
    spent = time.process_time() - begun
    return Row(case.name, found.predicted_s, case.theirs_s, found.gap, spent, case.their_cpu_s, case.target_cpu_s)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the first case alone, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args(argv)
    rows = [measured(case) for case in (CASES[:1] if args.tiny else CASES)]
    print(f"{'case':36} {'found':>10} {'theirs':>10} {'gap':>6} {'CPU s':>6} {'theirs':>7}  target")
    for row in rows:
        numbers = f"{row.found_s:8.5f} s {row.theirs_s:8.5f} s {row.gap:6.1%} {row.cpu_s:6.2f} {row.their_cpu_s:7.1f}"
        print(f"{row.case:36} {numbers}  {row.target_cpu_s:.0f}")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
