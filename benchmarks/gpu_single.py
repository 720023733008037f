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
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from turns import accept, apart, in_turns

import fxpar
from fxpar.ir.exec_graph import ExecGraph
from fxpar.losses import IGNORE_INDEX, next_token_labels
from fxpar.lowering import lower
from fxpar.models import LoadedModel, load
from fxpar.runtime.bound import bind
from fxpar.runtime.runner import Backend
from fxpar.tracer import capture

SIZES = {"layers": "16", "dim": "2048", "heads": "32", "kv_heads": "8", "ffn": "8192", "vocab": "32000"}
TINY = {"layers": "2", "dim": "64", "heads": "4", "kv_heads": "2", "ffn": "176", "vocab": "500"}
TOLERANCE = 0.05  # of bf16 gradients, relative in the 2-norm
Row = dict[str, Any]
Batch = Mapping[str, Tensor]
Step = Callable[[], tuple[float, dict[str, Tensor]]]  # a micro-batch's loss and gradients


@dataclass(frozen=True)
class Settings:
    """`steps` per round and way."""

    device: torch.device
    tiny: bool
    steps: int
    rounds: int

    @property
    def model(self) -> dict[str, str]:
        return TINY if self.tiny else SIZES

    def to(self, batch: Batch) -> dict[str, Tensor]:
        return {key: value.to(self.device) for key, value in batch.items()}


def off(step: Step, expected: tuple[float, dict[str, Tensor]]) -> float:
    """The worst relative difference of a gradient, or of the loss."""
    loss, grads = step()
    wanted, references = expected
    return max([abs(loss / wanted - 1), *(apart(grads[name], one) for name, one in references.items())])


def wide_step(loaded: LoadedModel, batch: Batch, scale: float) -> Step:
    """Eager torch in fp32, from the same weights: what rounding to bf16 is measured by."""
    return torch_step(replace(loaded, model=copy.deepcopy(loaded.model).float()), batch, scale=scale)


def compare(ways: Mapping[str, Step], wide: Step) -> dict[str, float]:
    """How far each way is off fp32. None may be further off than the first one, eager torch or fxpar, by half."""
    loss, grads = wide()
    expected = loss, {name: grad.clone() for name, grad in grads.items()}
    found: dict[str, float] = {}
    for name, step in ways.items():
        limit = max(TOLERANCE, 1.5 * next(iter(found.values()))) if found else float("inf")
        found[name] = accept(name, off(step, expected), limit)
    return found


# ---------------------------------------------------------------------------------------------------------- step
def fxpar_step(loaded: LoadedModel, batch: Batch, scale: float, compile: Backend, strategy: str = "dp1") -> Step:
    """The lowered graph of one rank."""
    program = lower(capture(loaded.model, loaded.loss_fn, batch), strategy)
    assert isinstance(program, ExecGraph)
    bound = bind(program, 0, {}, compile=compile)
    params, buffers = loaded.params(), loaded.buffers()

    def step() -> tuple[float, dict[str, Tensor]]:
        bound.prepare(params, buffers)
        bound.run(batch, scale)
        found = bound.finish()
        return float(found["loss"]), found["grads"]

    return step


def torch_step(loaded: LoadedModel, *batches: Batch, scale: float, compiled: bool = False) -> Step:
    """What a careful user writes: one micro-batch after the other."""
    model: nn.Module = loaded.model

    def forward(given: Batch) -> Tensor:
        return loaded.loss_fn(model, given) * scale

    run: Any = torch.compile(forward) if compiled else forward

    def step() -> tuple[float, dict[str, Tensor]]:
        model.zero_grad()
        losses = []
        for batch in batches:
            loss = run(batch)
            loss.backward()
            losses.append(loss.detach())
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()  # else they lie beside what other ways allocate
        return float(sum(losses)), grads

    return step


def load_llama(settings: Settings, dtype: torch.dtype, tokens: int) -> LoadedModel:
    device = str(settings.device)
    return load("llama", noise=False, options=settings.model, dtype=dtype, device=device, tokens=(tokens,))


def compare_steps(settings: Settings) -> list[Row]:
    """Targets: fxpar with inductor takes at most 1.0 of the time of torch.compile and 1.02 of its memory."""
    loaded = load_llama(settings, torch.bfloat16, 64 if settings.tiny else 8192)
    batch, scale = settings.to(loaded.example_batch), loaded.scale()
    ways = {"torch": torch_step(loaded, batch, scale=scale), "fxpar": fxpar_step(loaded, batch, scale, "eager")}
    if not settings.tiny:
        ways["torch.compile"] = torch_step(loaded, batch, scale=scale, compiled=True)
        ways["fxpar, inductor"] = fxpar_step(loaded, batch, scale, "inductor")
    return _beside_torch(ways, wide_step(loaded, batch, scale), settings)


def _beside_torch(ways: Mapping[str, Step], wide: Step, settings: Settings) -> list[Row]:
    """The first way, and "torch.compile" where there is one, are what the others are compared with."""
    errors = compare(ways, wide)
    found = in_turns(ways, settings.steps, settings.rounds, settings.device)
    first = next(iter(found.values()))
    return [
        {
            "way": name,
            "ms": ms,
            "of the first": ms / first[0],
            "of torch.compile": ms / found["torch.compile"][0] if "torch.compile" in found else None,
            "peak MB": peak,
            "off fp32": errors[name],
        }
        for name, (ms, peak) in found.items()
    ]


# ------------------------------------------------------------------------------------------------------- experts
MIXTURE = {
    "num_hidden_layers": "4",
    "hidden_size": "1024",
    "intermediate_size": "2048",
    "num_local_experts": "16",
    "num_attention_heads": "16",
    "num_key_value_heads": "8",
    "head_dim": "64",
    "vocab_size": "32000",
    "max_position_embeddings": "8192",
}


def compare_experts(settings: Settings) -> list[Row]:
    """A row of 8,192 tokens, two of 16 experts each."""
    options: dict[str, str] = {} if settings.tiny else MIXTURE
    tokens, device = 64 if settings.tiny else 8192, str(settings.device)
    loaded = load("hf:mixtral", noise=False, options=options, dtype=torch.bfloat16, device=device, tokens=(tokens,))
    batch, scale = settings.to(loaded.example_batch), loaded.scale()
    ways: dict[str, Step] = {}
    for name, compiled in (("eager", False), ("grouped_mm", False), ("grouped_mm", True)):
        if settings.tiny and name != "eager":
            continue
        model: Any = copy.deepcopy(loaded.model)
        model.set_experts_implementation(name)
        of = replace(loaded, model=model)
        ways["torch.compile" if compiled else f"torch, {name}"] = torch_step(of, batch, scale=scale, compiled=compiled)
    ways["fxpar"] = fxpar_step(loaded, batch, scale, "eager")
    if not settings.tiny:
        ways["fxpar, inductor"] = fxpar_step(loaded, batch, scale, "inductor")
    return _beside_torch(ways, wide_step(loaded, batch, scale), settings)


# ------------------------------------------------------------------------------------------------------- offload
def compare_offload(settings: Settings) -> list[Row]:
    """The Llama of `step` under fxpar, eager."""
    loaded = load_llama(settings, torch.bfloat16, 64 if settings.tiny else 8192)
    batch, scale = settings.to(loaded.example_batch), loaded.scale()
    strategies = ("dp1", "dp1+offload(0.25)", "dp1+offload(0.5)", "dp1+offload", "dp1+remat")
    ways = {strategy: fxpar_step(loaded, batch, scale, "eager", strategy) for strategy in strategies}
    return _beside_torch(ways, wide_step(loaded, batch, scale), settings)


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
