"""The figures of docs/benchmarks.md, in its order: every benchmark with the arguments that stand there. Half an hour.

    make bench [BENCH_ARGS="--only step pipeline --again"]
    python benchmarks/run_cpu.py [--total-s 1800] [--folder runs/bench] [--tiny]

What is done stays in the folder and is not done again on the same commit (see pieces.py). Exit code: 0 if all are
done, 1 if one has failed, 3 if `--total-s` has run out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pieces import Piece, add_options, run_pieces


def _piece(name: str, title: str, words: str, limit_s: int = 1800) -> Piece:
    return Piece(name, title, f"benchmarks/bench_{words}", limit_s)


PIECES = (
    _piece("step", "One training step, 4 gloo ranks", "step.py --steps 6 --rounds 8"),
    _piece("torchtitan", "Training with torchtitan, rows of 2,048", "torchtitan.py --rounds 5"),
    _piece(
        "torchtitan-512", "Training with torchtitan, rows of 512", "torchtitan.py --rounds 3 --seq-len 512 --rows 16"
    ),
    _piece("pipeline", "Pipeline", "pipeline.py --rounds 6 --steps 2"),
    _piece("pipeline-long-tail", "Pipeline, long tail", "pipeline.py --rounds 3 --steps 1 --long-tail"),
    _piece("compile", "Capture and lower", "compile.py"),
    _piece("commands", "Looking at a model", "commands.py"),
    _piece("memory", "Peak memory of a step", "memory.py"),
    _piece("switch-plan", "Planning a switch", "switch_plan.py"),
    _piece("ranks", "One rank of 4,096", "ranks.py --switches"),
    _piece("switch", "Carrying out a switch, 4 gloo ranks", "switch.py"),
    _piece("engine", "What the engine adds", "engine.py"),
    _piece("truth", "Predicted against measured", "truth.py --rounds 5"),
    _piece("truth-modules", "Predicted against measured, per module", "truth.py --rounds 3 --modules"),
    _piece("plan", "A chosen set against sets made by hand", "plan.py"),
    _piece("hotspa", "HotSPa's 32B layouts", "hotspa_32b.py"),
    _piece("galvatron", "Galvatron's case", "galvatron.py"),
    _piece("rounds", "Rounds of teams", "rounds.py"),
    _piece("waves", "Waves over several tasks", "waves.py"),
    _piece("towers", "Two towers side by side, 4 gloo ranks", "towers.py --rounds 6"),
    _piece("precision", "bf16 against fp32", "precision.py"),
    _piece("remat", "Recomputation", "remat.py"),
    _piece("ring", "Keys and values that travel", "ring.py --rounds 6"),
    _piece("chunks", "The loss in chunks", "chunks.py"),
    _piece("lsh", "Compressed experts", "lsh.py"),
    _piece("lsh-quality", "Compressed experts, two models and fine-tuning", "lsh_quality.py"),
    _piece("experts", "Experts on 4 ranks", "experts.py --rounds 12 --ops 16"),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, PIECES, "bench")
    return run_pieces(PIECES, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
