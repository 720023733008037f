"""Everything that waits for a GPU, in order, each piece in a process of its own of at most nine minutes.

    make gpu [GPU_ARGS="--only step switch --again"]
    python benchmarks/run_gpu.py [--total-s 560] [--folder runs/gpu]
    python benchmarks/run_gpu.py --device cpu --tiny          # the same pieces, to see that they run

What is done stays in the folder and is not done again (see pieces.py). Exit code: 0 if all pieces are done, 1 if one
has failed, 2 if there is nothing to measure on, 3 if `--total-s` has run out: the same command goes on from there.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence

from pieces import Piece, add_options, run_pieces

NEEDED = ("torch", "numpy", "rich", "scipy", "sympy", "typer")
SINGLE = "benchmarks/gpu_single.py"
TESTS = "-m pytest -q -m gpu -rs -p no:cacheprovider tests/ops tests/runtime/test_gpu.py"
PIECES = (
    Piece("tests", "Tests marked `gpu`", TESTS, measures=False),
    Piece("step", "One step of a Llama of 1B in bf16, a row of 8,192 tokens", f"{SINGLE} step"),
    Piece("experts", "One step of a mixture of 16 experts in bf16, a row of 8,192 tokens", f"{SINGLE} experts"),
    Piece("offload", "Activations on the host: the Llama of 1B again", f"{SINGLE} offload"),
    Piece("attention", "Attention, forward and backward, 16,384 tokens, 16 heads of 128", f"{SINGLE} attention"),
    Piece("packed", "Packed documents of 1,024 to 8,192 tokens", f"{SINGLE} packed"),
    Piece("switch", "Two strategies of one rank in every step, in three precisions", f"{SINGLE} switch"),
)


def why_not(device: str) -> str | None:
    """Why nothing can be measured here."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"{sys.executable} has no {', '.join(missing)} (a folder that has them may stand on PYTHONPATH)"
    if device == "cpu":
        return None
    import torch

    return None if torch.cuda.is_available() else f"torch {torch.__version__} of {sys.executable} sees no CUDA GPU"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, PIECES, "gpu")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    reason = why_not(args.device)
    if reason:
        print(f"{reason}: nothing was measured")
        return 2
    return run_pieces(PIECES, args, ["--device", args.device])


if __name__ == "__main__":
    sys.exit(main())
