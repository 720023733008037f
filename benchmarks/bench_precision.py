"""Does bf16 learn what fp32 learns? Two runs of `fxpar train` on Python's standard library, from the same weights.

    OMP_NUM_THREADS=1 python benchmarks/bench_precision.py [--steps 200] [--tiny] [--json OUT]

4 gloo ranks, three strategies in every step, one of them with pipeline stages; the runs differ in `precision.compute`
only. Prints the loss of held-out text after the last step and the mean training loss of the last 20 steps, and how far
bf16 is from fp32 (target: 1 %).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

CONFIG = """
[model]
name = "llama"
options = { layers = 3, dim = 96, heads = 4, kv_heads = 2, ffn = 256 }

[data]
source = "python-stdlib"
unit = "definition"
vocab = 2048
max_length = 1024
overlong = "truncate"
batch_tokens = 3072
validation = 60

[strategies]
128 = "dp4"
512 = "dp2.pp2"
1024 = "cp4"

[engine]
merge = false

[optimizer]
lr = 3e-3

[schedule]
warmup = 10

[checkpoint]
enabled = false
"""
# Five short documents and one rank, to see that it runs.
TINY = (
    *("data.glob=json/*.py", "data.unit=file", "data.vocab=270", "data.batch_tokens=1024", "data.validation=1"),
    *("model.options.layers=1", "strategies.static=dp1"),
)
RUNS = {"fp32": (), "bf16": ("precision.compute=bf16",)}
TARGET = 0.01
LAST = 20


def run(name: str, steps: int, folder: Path, *words: str) -> dict[str, float]:
    """One run; its losses at the end."""
    config = folder / "config.toml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "fxpar", "train", str(config), "--steps", str(steps)]
    for word in (f"run.folder={folder / name}", *words):
        command += ["--set", word]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    held_out = [r["validation_loss"] for r in records if r["validation_loss"] is not None]
    return {
        "held_out": held_out[-1],
        "training": statistics.mean(r["loss"] for r in records[-LAST:]),
        "cpu_s": sum(r["cpu_s"] for r in records),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tiny", action="store_true", help="two steps in bf16 on little text, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    steps, words = (2, TINY) if args.tiny else (args.steps, ())
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: run(name, steps, Path(folder), *words, *more)
            for name, more in RUNS.items()
            if name == "bf16" or not args.tiny
        }
    for name, one in found.items():
        print(f"{name}  held-out loss {one['held_out']:.4f}, training {one['training']:.4f}, {one['cpu_s']:.0f} CPU s")
    for what in () if args.tiny else ("held_out", "training"):
        apart = abs(found["bf16"][what] / found["fp32"][what] - 1)
        print(f"{what}: {apart:.2%} apart (target <= {TARGET:.0%})")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
