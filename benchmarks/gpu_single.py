"""What one GPU can say about fxpar, piece by piece; `make gpu` runs all of them.

    python benchmarks/gpu_single.py step|experts|offload|attention|packed|switch [--steps 10] [--rounds 3] [--json OUT]
    python benchmarks/gpu_single.py step --device cpu --tiny      # the same program, to see that it runs

step        forward and backward of one packed row through a Llama of 1B: eager torch, `torch.compile`, fxpar's graph
            eager and with inductor, all with `fxpar::attention`
experts     the same of a mixture of experts (transformers' mixtral), against its loop and its grouped products
offload     what copies of activations to the host cost the step, beside recomputation
attention   `fxpar::attention` against torch's, dense (flash) and in packed documents (varlen)
packed      long-tailed documents in one row against a padded row each, as many tokens at a time
switch      training that changes between two strategies of one rank in every step, in fp32, bf16 and fp16, against
            eager torch on each sequence alone

Times are CUDA events (wall time on a CPU), the median over rounds in which ways take turns; memory is the peak of what
was allocated. Every piece checks its results before it prints them, and raises SystemExit if they are wrong.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_steps import (
    TOLERANCE,
    Batch,
    Row,
    Settings,
    compare_experts,
    compare_offload,
    compare_steps,
    fxpar_step,
    load_llama,
    off,
    torch_step,
)
from torch import Tensor
from turns import accept, apart, in_turns

import fxpar
from fxpar.losses import IGNORE_INDEX, next_token_labels


# ----------------------------------------------------------------------------------------------------- attention
def compare_attention(settings: Settings) -> list[Row]:
    """Forward and backward, causal, as many key/value heads as heads. Errors are against fp32 document by document."""
    tokens, counts = (64, (1, 4)) if settings.tiny else (16_384, (1, 4, 64))
    return [row for count in counts for row in _attention_rows([tokens // count] * count, settings)]


def _attention_rows(lengths: Sequence[int], settings: Settings) -> list[Row]:
    heads, width = (2, 16) if settings.tiny else (16, 128)
    shape, device = (1, sum(lengths), heads, width), settings.device
    made = torch.Generator(device).manual_seed(0)
    given = [torch.randn(shape, device=device, generator=made).bfloat16().transpose(1, 2) for _ in range(4)]
    expected = _attend(lambda *x: _by_document(*x, lengths), *(x.float() for x in given))
    ways = {name: partial(_attend, way, *given) for name, way in _attention_ways(lengths, device).items()}
    errors = {
        name: accept(name, max(apart(a, b) for a, b in zip(run(), expected, strict=True)), TOLERANCE)
        for name, run in ways.items()
    }
    flops = 3.5 * 4 * heads * width * sum(n * n / 2 for n in lengths)
    return [
        {
            "documents": f"{len(lengths)} of {lengths[0]}",
            "way": name,
            "ms": ms,
            "TFLOP/s": flops / ms / 1e9,
            "peak MB": peak,
            "apart": errors[name],
        }
        for name, (ms, peak) in in_turns(ways, settings.steps, settings.rounds, settings.device).items()
    ]


def _attend(way: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = way(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def _by_document(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    pieces = zip(*(x.split(list(lengths), 2) for x in (q, k, v)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*piece, is_causal=True) for piece in pieces], 2)


def _attention_ways(lengths: Sequence[int], device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """On q, k, v [1, H, T, E]."""
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to(device)
    ids = documents if len(lengths) > 1 else None

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.fxpar.attention.default(q, k, v, ids, None, True, 0, q.shape[-1] ** -0.5, 0.0)[0]

    ways = {"fxpar::attention": ours, "torch, a call per document": lambda q, k, v: _by_document(q, k, v, lengths)}
    if device.type == "cuda" and len(lengths) > 1:
        from torch.nn.attention.varlen import varlen_attn

        ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()

        def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
            out: Any = varlen_attn(*rows, ends, ends, max(lengths), max(lengths), window_size=(-1, 0))
            return out[None].transpose(1, 2)

        ways["torch, varlen"] = varlen
    return ways


# -------------------------------------------------------------------------------------------------------- packed
def compare_packing(settings: Settings) -> list[Row]:
    """Documents whose lengths halve, doubling in number: valid tokens per second."""
    longest = 64 if settings.tiny else 8192
    lengths = [longest // 2**k for k in range(4) for _ in range(2**k)]
    loaded = load_llama(settings, torch.bfloat16, longest)
    made = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, int(settings.model["vocab"]), (n,), generator=made) for n in lengths]
    scale = 1.0 / (sum(lengths) - len(lengths))
    row = settings.to(_packed(documents))
    count = sum(lengths) // longest  # rows of a padded micro-batch: as many tokens as the packed one has
    padded = [settings.to(_padded(documents[i : i + count], longest)) for i in range(0, len(documents), count)]
    ways = {
        "torch, padded": torch_step(loaded, *padded, scale=scale),
        "torch, packed": torch_step(loaded, row, scale=scale),
        "fxpar, packed": fxpar_step(loaded, row, scale, "eager"),
    }
    loss, grads = ways["torch, packed"]()
    expected = loss, {name: grad.clone() for name, grad in grads.items()}
    errors = {name: accept(name, off(step, expected), TOLERANCE) for name, step in ways.items()}
    computed = {name: longest * len(documents) if "padded" in name else sum(lengths) for name in ways}
    return [
        {
            "way": name,
            "tokens computed": computed[name],
            "ms": ms,
            "valid tokens / s": round(sum(lengths) / ms * 1e3),
            "peak MB": peak,
            "gradients apart": errors[name],
        }
        for name, (ms, peak) in in_turns(ways, settings.steps, settings.rounds, settings.device).items()
    ]


def _packed(documents: Sequence[Tensor]) -> Batch:
    ids, positions = torch.cat(list(documents))[None], torch.cat([torch.arange(len(d)) for d in documents])[None]
    labels = next_token_labels(ids, position_ids=positions)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def _padded(documents: Sequence[Tensor], longest: int) -> Batch:
    ids = torch.stack([F.pad(d, (0, longest - len(d))) for d in documents])
    labels = torch.stack(
        [F.pad(next_token_labels(d[None])[0], (0, longest - len(d)), value=IGNORE_INDEX) for d in documents]
    )
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(longest).expand_as(ids).contiguous()}


# -------------------------------------------------------------------------------------------------------- switch
PRECISIONS = {"captured": 1e-4, "bf16": 0.02, "fp16": 0.02}  # and how far losses may be off, relative


def compare_precisions(settings: Settings) -> list[Row]:
    """Losses of some steps of AdamW with two strategies in every step, against eager torch in fp32."""
    steps, longest = (2, 64) if settings.tiny else (8, 4096)
    steps_of = [_mini_batch(settings, longest, seed) for seed in range(steps)]
    expected = _train_eagerly(settings, steps_of)
    backend = "nccl" if settings.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    rows: list[Row] = []
    try:
        for precision, tolerance in PRECISIONS.items():
            begun = time.perf_counter()
            losses, reports, peak = _train(settings, steps_of, longest, precision)
            worst = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
            last = reports[-1]
            rows.append(
                {
                    "precision": precision,
                    "strategies": ", ".join(group.strategy for group in last.groups),
                    "ms of a step": 1e3 * statistics.median(r.wall_s for r in reports[1:]),
                    "ms of its switches": 1e3 * sum(group.switch_s for group in last.groups),
                    "steps left out": sum(r.skipped for r in reports),
                    "peak MB": peak,
                    "losses apart": accept(f"the loss in {precision}", worst, tolerance),
                    "s in all": round(time.perf_counter() - begun),
                }
            )
    finally:
        dist.destroy_process_group()
    return rows


def _mini_batch(settings: Settings, longest: int, seed: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    lengths = [longest, longest // 2, *[longest // 8] * 4]
    return [torch.randint(0, int(settings.model["vocab"]), (n,), generator=made) for n in lengths]


def _train_eagerly(settings: Settings, mini_batches: Sequence[Sequence[Tensor]]) -> list[float]:
    """Each sequence alone."""
    loaded = load_llama(settings, torch.float32, 64)
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=1e-4)
    losses = []
    for sequences in mini_batches:
        scale = 1.0 / sum(len(s) - 1 for s in sequences)
        total = 0.0
        for sequence in sequences:
            part = loaded.loss_fn(loaded.model, settings.to(_packed([sequence]))) * scale
            part.backward()
            total += float(part.detach())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _train(
    settings: Settings, mini_batches: Sequence[Sequence[Tensor]], longest: int, precision: str
) -> tuple[list[float], list[Any], float]:
    """Losses, reports and peak MB of the same steps under fxpar."""
    loaded = load_llama(settings, torch.float32, 64)
    model = fxpar.parallelize(
        loaded.model, strategies={longest // 4: "dp1", longest: "dp1+remat"}, merge=False, precision=precision
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if settings.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(settings.device)
    reports = []
    for sequences in mini_batches:
        reports.append(model.train_step(sequences))
        optimizer.step()
        optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated(settings.device) / 1e6 if settings.device.type == "cuda" else 0.0
    return [report.loss for report in reports], reports, peak


# --------------------------------------------------------------------------------------------------------- main
PIECES: dict[str, Callable[[Settings], list[Row]]] = {
    "step": compare_steps,
    "experts": compare_experts,
    "offload": compare_offload,
    "attention": compare_attention,
    "packed": compare_packing,
    "switch": compare_precisions,
}


def place(device: torch.device) -> dict[str, str]:
    """What it ran on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", choices=PIECES)
    parser.add_argument("--steps", type=int, default=10, help="per round and way")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, one step")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no CUDA GPU; --device cpu --tiny shows that the program runs")
    settings = Settings(device, args.tiny, *((1, 1) if args.tiny else (args.steps, args.rounds)))
    rows = PIECES[args.piece](settings)
    for row in rows:
        print("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
    if args.json:
        args.json.write_text(json.dumps({"place": place(device), "table": rows}, indent=1))


if __name__ == "__main__":
    main()
