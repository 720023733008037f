"""One training step in four pipeline stages: fxpar against torch.distributed.pipelining, in the same run.

    OMP_NUM_THREADS=1 python benchmarks/bench_pipeline.py [--steps 3] [--rounds 5] [--tokens 512]
        [--one-document | --long-tail] [--tiny] [--json OUT]

4 gloo ranks run forward and backward of 8 micro-batches (packed rows of tokens) through an 8-layer Llama under 1F1B
and under GPipe. The figure is CPU milliseconds per step (process time, all threads) summed over ranks; modes alternate
within a round, the ratio is the median over rounds. Loss and gradients of every mode are compared with one device.
`Products and attention alone` are the kernels that both sides call with the same operands, called again by themselves.

Torch gets what a careful user would give it: stages cut at the same layers, ATen's flash kernel called once for each
document as fxpar's attention does, rotary tables made once, gradients set to None between steps, no outputs merged. It
runs with static shapes, and everything is set up in a warm-up step. No mode has an optimizer.

With --long-tail the micro-batches are one sequence each, of 64 to 1,024 tokens, 512 on average. Torch's stages exchange
tensors of one shape, so its rows are padded to the longest: ignored labels, the padding a document of its own.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from recorded import Recorded
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from fxpar.checking import local_params
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.losses import cross_entropy_sum, next_token_labels
from fxpar.lowering import lower
from fxpar.models import LoadedModel, load
from fxpar.models.batches import document_lengths
from fxpar.models.llama import Attention, LlamaOptions, rotate
from fxpar.runtime.binding import bind_here
from fxpar.runtime.forked import run_forked
from fxpar.runtime.micro import MicroRun
from fxpar.tracer import capture
from fxpar.transport.groups import ProcessGroups

STAGES, MICRO_BATCHES = 4, 8
LONG_TAIL = (64, 128, 256, 384, 512, 768, 960, 1024)  # tokens of the micro-batches
MODEL = LlamaOptions(layers=8, dim=256, heads=8, kv_heads=4, ffn=704, vocab=2000)
TINY = LlamaOptions(layers=STAGES, dim=32, heads=4, kv_heads=2, ffn=64, vocab=64)
# schedule -> fxpar's strategy, torch's schedule, the most that fxpar may cost as a share of torch's CPU time
SCHEDULES = {"1f1b": ("pp4", Schedule1F1B, 0.9), "gpipe": ("pp4+gpipe", ScheduleGPipe, None)}
TOLERANCE = 1e-5  # relative, float32


@dataclass(frozen=True)
class Work:
    """What every mode computes: micro-batches of one row each, the scale of the loss, and one device's results."""

    options: LlamaOptions
    loaded: LoadedModel
    lengths: tuple[int, ...]  # of the documents of a row, alike in all rows; of each row's sequence with `padded`
    scale: float
    loss: float
    grads: dict[str, Tensor]
    padded: bool = False  # torch pads its rows to the longest one

    @property
    def tokens(self) -> int:
        """Of the mini-batch, without padding."""
        return sum(batch["input_ids"].shape[-1] for batch in self.loaded.batches)

    @property
    def row(self) -> int:
        """Tokens of a row of torch's."""
        return max(batch["input_ids"].shape[-1] for batch in self.loaded.batches)


@dataclass(frozen=True)
class Mode:
    """`step` runs a whole mini-batch and returns this rank's part of the loss (all of it on the last stage, else 0).

    `grads` are the whole gradients of this rank's parameters after a step, by FQN of the model.
    """

    step: Callable[[], float]
    grads: Callable[[], dict[str, Tensor]]


def make_work(tokens: int, model: LlamaOptions = MODEL, *, one_document: bool = False, long_tail: bool = False) -> Work:
    """Weights, rows and the reference; no process group."""
    options = {name: str(value) for name, value in vars(model).items()}
    rows_of = LONG_TAIL if long_tail else (tokens,) * MICRO_BATCHES
    loaded = load("llama", noise=False, options=options, tokens=rows_of)
    lengths = rows_of if long_tail else (tokens,) if one_document else document_lengths(tokens)
    if one_document or long_tail:
        rows = tuple(_as_one_document(batch["input_ids"]) for batch in loaded.batches)
        loaded = LoadedModel(loaded.name, loaded.model, loaded.loss_fn, rows[0], rows)
    loss = 0.0
    for batch in loaded.batches:
        part = loaded.loss_fn(loaded.model, batch) * loaded.scale()
        part.backward()
        loss += float(part.detach())
    grads = gradients(loaded.model)
    loaded.model.zero_grad()
    return Work(model, loaded, lengths, loaded.scale(), loss, grads, long_tail)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Those that there are, by FQN."""
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def _as_one_document(ids: Tensor) -> dict[str, Tensor]:
    positions = torch.arange(ids.shape[-1]).expand_as(ids).contiguous()
    return {"input_ids": ids, "labels": next_token_labels(ids), "position_ids": positions}


# --------------------------------------------------------------------------------------------------------- torch
class PackedAttention(Attention):
    """The model's attention with the documents of a row known ahead: one call of ATen's flash kernel for each."""

    def __init__(self, options: LlamaOptions) -> None:
        super().__init__(options)
        self.lengths: list[int] = []

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # `split`, not slices: the backward of a slice fills a whole row with zeros, that of a split is one copy.
        pieces = zip(*(y.split(self.lengths, 2) for y in (q, k, v)), strict=True)
        found = [F.scaled_dot_product_attention(*piece, is_causal=True, enable_gqa=True) for piece in pieces]
        out = found[0] if len(found) == 1 else torch.cat(found, 2)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Stage(nn.Module):
    """Layers of one stage, copied from the model; the first stage embeds, the last returns logits [B, T, V]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, work: Work, stage: int) -> None:
        super().__init__()
        model = copy.deepcopy(work.loaded.model)  # modes must not share gradients
        share = work.options.layers // STAGES
        mine = [str(i) for i in range(stage * share, (stage + 1) * share)]
        self.layers = nn.ModuleDict({i: model.get_submodule(f"layers.{i}") for i in mine})
        self.embedding = model.get_submodule("embedding") if stage == 0 else None
        self.norm = model.get_submodule("norm") if stage == STAGES - 1 else None
        self.head = model.get_submodule("head") if stage == STAGES - 1 else None
        for name, layer in self.layers.items():
            attention = PackedAttention(work.options)
            attention.load_state_dict(model.get_submodule(f"layers.{name}.attention").state_dict())
            layer.attention = attention
        self.lengths = None if work.padded else work.lengths
        positions = max((b["position_ids"] for b in work.loaded.batches), key=torch.numel)
        angles = positions[:, None, :, None] * model.get_buffer("inverse_frequencies")
        self.register_buffer("cos", angles.cos().float())
        self.register_buffer("sin", angles.sin().float())

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """input_ids [B, T] on the first stage, else activations [B, T, D]; of a padded row this many are valid [1]."""
        lengths = self.lengths
        if lengths is None:
            count = x.shape[1] if valid is None else int(valid)
            lengths = (count, x.shape[1] - count) if count < x.shape[1] else (count,)
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            layer.attention.lengths = list(lengths)  # type: ignore[union-attr]
            x = layer(x, self.cos, self.sin)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def torch_mode(schedule: str, work: Work) -> Mode:
    """The schedule of torch.distributed.pipelining over stages that were cut by hand."""
    rank = dist.get_rank()
    module = Stage(work, rank)
    stage = PipelineStage(module, rank, STAGES, torch.device("cpu"))

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy_sum(logits, labels) * work.scale

    runner = SCHEDULES[schedule][1](stage, MICRO_BATCHES, loss_fn=loss_fn, scale_grads=False)
    ids = (_rows(work, "input_ids", 0),) if rank == 0 else ()
    last = rank == STAGES - 1
    labels = _rows(work, "labels", -100) if last else None
    known: dict[str, Any] = {"valid": torch.tensor(work.lengths)} if work.padded else {}

    def step() -> float:
        module.zero_grad()
        losses: list[Tensor] = []
        runner.step(*ids, target=labels, losses=losses if last else None, return_outputs=False, **known)
        return float(torch.stack(losses).sum().detach()) if last else 0.0

    return Mode(step, lambda: gradients(module))


def _rows(work: Work, key: str, filler: int) -> Tensor:
    """All rows [B, T], padded to the longest."""
    rows = [batch[key] for batch in work.loaded.batches]
    return torch.cat([F.pad(row, (0, work.row - row.shape[-1]), value=filler) for row in rows])


# --------------------------------------------------------------------------------------------------------- fxpar
def lower_all(work: Work) -> dict[str, TrainGraph]:
    """The program of each schedule; no process group."""
    logical = capture(work.loaded.model, work.loaded.loss_fn, work.loaded.example_batch)
    return {name: lower(logical, strategy, for_store=True) for name, (strategy, _, _) in SCHEDULES.items()}


def fxpar_mode(program: TrainGraph, work: Work) -> Mode:
    """The program of one schedule on this rank: `work.loaded.batches` are its micro-batches, `work.scale` its scale."""
    bound = bind_here(program, ProcessGroups())
    params, buffers = local_params(program, work.loaded.params(), dist.get_rank()), work.loaded.buffers()
    runs = [MicroRun(lambda batch=batch: batch, work.scale, number) for number, batch in enumerate(work.loaded.batches)]
    found: dict[str, Tensor] = {}
    last = dist.get_rank() == STAGES - 1

    def step() -> float:
        bound.prepare(params, buffers)
        bound.run_all(runs)
        result = bound.finish()
        found.clear()
        found.update(result["grads"])
        return float(result["loss"]) if last else 0.0

    return Mode(step, lambda: found)


# --------------------------------------------------------------------------------------------------------- floor
def floor_mode(work: Work) -> Callable[[], None]:
    """Products and attention of this rank's stage for all micro-batches, and nothing else: what no schedule, no engine
    and no fusion can save.
    """
    rank = dist.get_rank()
    module, row = Stage(work, rank), max(work.loaded.batches, key=lambda batch: batch["input_ids"].numel())
    x = row["input_ids"] if rank == 0 else torch.randn(*row["input_ids"].shape, work.options.dim, requires_grad=True)
    with Recorded() as recorded:
        out = module(x)
        (cross_entropy_sum(out, row["labels"]) if rank == STAGES - 1 else out.square().sum()).backward()

    @torch.no_grad()
    def step() -> None:
        for _ in range(MICRO_BATCHES):
            for func, args, kwargs in recorded.calls:
                func(*args, **kwargs)

    return step


# ----------------------------------------------------------------------------------------------------- measuring
def make_modes(programs: dict[str, TrainGraph], work: Work) -> dict[str, Mode]:
    """All modes, those to be compared next to each other."""
    modes: dict[str, Mode] = {}
    for name in SCHEDULES:
        modes[f"torch {name}"] = torch_mode(name, work)
        modes[f"fxpar {name}"] = fxpar_mode(programs[name], work)
    return modes


def gradient_error(grads: dict[str, Tensor], work: Work) -> float:
    """The worst of max|difference| / max|reference| over this rank's parameters."""
    errors = [(grads[n] - work.grads[n]).abs().max() / work.grads[n].abs().max() for n in grads]
    return float(torch.stack(errors).max())  # unlike Python's max, keeps a NaN


def run(steps: int, rounds: int, programs: dict[str, TrainGraph], work: Work) -> dict:
    """On one rank: CPU ms per step of each mode and round, its part of the loss, the error of its gradients."""
    modes = make_modes(programs, work)
    found: dict = {"loss": {}, "grad_error": {}, "names": {}}
    for name, mode in modes.items():
        mode.step()  # infers shapes, connects ranks
        found["loss"][name] = mode.step()
        grads = mode.grads()
        found["names"][name] = list(grads)
        found["grad_error"][name] = gradient_error(grads, work)
    works: dict[str, Callable[[], object]] = {name: mode.step for name, mode in modes.items()}
    if not work.padded:
        works["floor"] = floor_mode(work)
        works["floor"]()
    found["cpu_ms"] = {name: [] for name in works}
    for _ in range(rounds):
        for name, one in works.items():
            dist.barrier()
            begun = time.process_time()
            for _ in range(steps):
                one()
            found["cpu_ms"][name].append(1e3 * (time.process_time() - begun) / steps)
    return found


def merge(ranks: list[dict], work: Work) -> dict:
    """Sums over ranks, and errors against one device. Raises SystemExit if a mode computes something else."""
    cpu_ms = {
        name: [sum(ms) for ms in zip(*(r["cpu_ms"][name] for r in ranks), strict=True)] for name in ranks[0]["cpu_ms"]
    }
    found: dict = {"load1": os.getloadavg()[0], "modes": {}, "floor_ms": cpu_ms.pop("floor", None)}
    for name in cpu_ms:
        loss = sum(r["loss"][name] for r in ranks)
        one = {
            "cpu_ms": cpu_ms[name],
            "loss": loss,
            "loss_error": abs(loss - work.loss) / abs(work.loss),
            "grad_error": float(torch.tensor([r["grad_error"][name] for r in ranks]).max()),
        }
        seen = sorted(fqn for r in ranks for fqn in r["names"][name])
        if seen != sorted(work.grads):
            raise SystemExit(f"{name}: not every parameter has a gradient on exactly one rank")
        if not (one["loss_error"] <= TOLERANCE and one["grad_error"] <= TOLERANCE):
            raise SystemExit(f"{name} differs from one device: {one}")
        found["modes"][name] = one
    found["ratio"] = ratios(found["modes"])
    return found


def ratios(modes: dict) -> dict[str, float]:
    """fxpar's CPU time as a share of torch's, by schedule: the median over rounds."""
    found = {}
    for name in SCHEDULES:
        mine, theirs = (modes[f"{side} {name}"]["cpu_ms"] for side in ("fxpar", "torch"))
        found[name] = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
    return found


def report(found: dict, work: Work) -> None:
    for name, one in found["modes"].items():
        spread = f"{min(one['cpu_ms']):.0f} to {max(one['cpu_ms']):.0f}"
        print(
            f"{name:12} {statistics.median(one['cpu_ms']):8.1f} CPU ms ({spread})   loss {one['loss']:.6f}, "
            f"relative error {one['loss_error']:.0e}, of gradients {one['grad_error']:.0e}"
        )
    for name, ratio in found["ratio"].items():
        target = None if work.padded else SCHEDULES[name][2]
        print(f"{name}: ratio {ratio:.3f}" + (f" (target <= {target})" if target else ""))
    if found["floor_ms"]:
        floor, theirs = (statistics.median(ms) for ms in (found["floor_ms"], found["modes"]["torch 1f1b"]["cpu_ms"]))
        print(f"products and attention alone: {floor:.1f} CPU ms, {floor / theirs:.2f} of torch's 1f1b")
    sizes = " + ".join(map(str, work.lengths)) if work.padded else f"{MICRO_BATCHES} x {work.row}"
    if work.padded:
        computed = MICRO_BATCHES * work.row
        print(f"{work.tokens} valid tokens; fxpar computes these, torch {computed} with padding")
    model = work.options
    print(
        f"{model.layers} layers, width {model.dim}, vocab {model.vocab}, {sizes} tokens, {STAGES} ranks, "
        f"load {found['load1']:.1f}, torch {torch.__version__}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="steps per round and mode")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512, help="of a micro-batch")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--one-document", action="store_true", help="a row is one document, not four")
    kind.add_argument("--long-tail", action="store_true", help="a row is one sequence, of 64 to 1024 tokens")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, one short step, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = MODEL
    if args.tiny:
        model, args.tokens, args.steps, args.rounds = TINY, 32, 1, 1
    work = make_work(args.tokens, model, one_document=args.one_document, long_tail=args.long_tail)
    programs = lower_all(work)
    ranks = run_forked(STAGES, lambda _: run(args.steps, args.rounds, programs, work), timeout_s=3600)
    found = merge(ranks, work)
    report(found, work)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
