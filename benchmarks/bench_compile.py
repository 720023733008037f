"""Compile time: capture and lower a 32-layer Llama of 8B widths on meta weights, with a dynamic token count.

    OMP_NUM_THREADS=1 python benchmarks/bench_compile.py [--layers 32] [--strategies dp4.tp8 dp4.tp8+sp] [--tiny]
        [--json OUT]

CPU seconds of this process and its peak resident memory. No process group, no device, no weights.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Sequence
from pathlib import Path

import torch

CAPTURE_TARGET_S, LOWER_TARGET_S, MEMORY_TARGET_GB, RULES_TARGET = 20.0, 8.0, 2.0, 1.5
UNIFORM = "dp4.tp8+sp"
RULES = (
    "model.layers.{0-7}.self_attn: cp2.tp4",
    "model.layers.{8-15}.self_attn: cp4.tp2",
    "model.layers.{16-23}.self_attn: cp8",
    "model.layers.{0-7}.mlp: +remat",
    "model.layers.{8-15}.mlp: cp2.tp4+sp",
    "model.layers.{16-23}: +zero3",
    "model.embed_tokens: tp8",
    "lm_head: cp2.tp4",
)
RULED = f"{UNIFORM}[{'; '.join(RULES)}]"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument(
        "--strategies", nargs="*", default=["dp4.tp8", UNIFORM, "dp4.tp8+sp+zero3", "cp4.tp8+sp", RULED]
    )
    parser.add_argument("--tiny", action="store_true", help="one layer, two strategies, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.tiny:
        args.layers, args.strategies = 1, [UNIFORM, f"{UNIFORM}[*.self_attn: cp2.tp4]"]
    from transformers import LlamaConfig, LlamaForCausalLM

    import fxpar
    from fxpar import losses

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=args.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.zeros(1, 2048, dtype=torch.long)
    batch = {"input_ids": tokens, "position_ids": torch.arange(2048)[None], "labels": tokens}
    begun = time.process_time()
    logical = fxpar.capture(model, losses.causal_lm, batch)
    rows = [("capture", time.process_time() - begun, CAPTURE_TARGET_S, len(logical.gm.graph.nodes), "")]
    for strategy in args.strategies:
        begun = time.process_time()
        program = fxpar.lower(logical, strategy)
        counts = " ".join(f"{kind} {count}" for kind, count in program.collectives().items())
        rows.append((f"lower {strategy}", time.process_time() - begun, LOWER_TARGET_S, program.node_count, counts))
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    for name, seconds, target, nodes, counts in rows:
        rules = name.count(":")
        short = f"{name.partition('[')[0]}[{rules} rule{'s' * (rules > 1)}]" if rules else name
        print(f"{short:24} {seconds:6.2f} CPU s (target <= {target:4.0f})  {nodes:6} nodes  {counts}")
    capture_s, *lower_s = (seconds for _, seconds, *_ in rows)
    took = dict(zip(args.strategies, lower_s, strict=True))
    for strategy in args.strategies if UNIFORM in took else ():
        if "[" in strategy:
            with_capture = (capture_s + took[strategy]) / (capture_s + took[UNIFORM])
            alone = took[strategy] / took[UNIFORM]
            print(
                f"rules over {UNIFORM}: {with_capture:.2f} (target <= {RULES_TARGET}); without the capture {alone:.2f}"
            )
    print(f"peak resident memory {peak_gb:.2f} GB (target <= {MEMORY_TARGET_GB})")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "peak_gb": peak_gb}, indent=1))


if __name__ == "__main__":
    main()
