"""What `lsh(0.2)` costs in loss and in time: a small language model with and without it.

    OMP_NUM_THREADS=1 python benchmarks/bench_lsh.py [--steps 300] [--seeds 3] [--rate 0.2] [--tiny] [--json OUT]

A Llama of 3 layers, width 64, the middle one with 4 experts of which a token takes 2; the words are the 1,000
most frequent ones of the standard library, 1,024 tokens a step, AdamW. It is captured once, and trained under `dp1` and
under `dp1+lsh(0.2)` from the same weights, on the same tokens, for each seed. Losses are of a held-out part, of both
with exact experts, and of the compressed one with compression too. Targets: the rate (means that have rows, over rows)
between 0.195 and 0.2 of each step that is looked at; the loss, mean of the seeds, within 0.035.

The second part is CPU milliseconds of hash and clusters against the experts' forward, 8,192 tokens of width 768, each
for one of 4 experts with an inner width of 3,072, the best of 3. Target: at most 8 %.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
import statistics
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar import expert_mm, losses
from fxpar.ir.exec_graph import ExecGraph
from fxpar.lowering import lower
from fxpar.models.llama import Llama, LlamaOptions
from fxpar.passes.compress_dispatch import CompressDispatch
from fxpar.runtime import bind
from fxpar.tracer import capture

own = torch.ops.fxpar
EXPERTS, SLOTS, WORDS, ROWS = 4, 2, 1000, 8
LOOKS = 25  # steps from one look at the rate to the next
TARGETS = {"least rate": 0.195, "loss": 0.035, "time": 0.08}
Batch = dict[str, Tensor]


class Experts(nn.Module):
    """Gated experts. With a `rate` they compute with means themselves, and keep the shares of rows in `seen`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, width, 4 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 4 * width, width) * (4 * width) ** -0.5 / 4)
        self.rate: float | None = None
        self.seen: list[float] = []

    def experts(self, x: Tensor, ids: Tensor) -> Tensor:
        return expert_mm(F.gelu(expert_mm(x, self.up, ids)), self.down, ids)

    def compressed(self, x: Tensor, ids: Tensor, rate: float) -> Tensor:
        options = CompressDispatch()
        codes = own.hash_rows.default(x, options.hashes, options.columns, 0)
        budget = (EXPERTS, 2 * options.columns, options.hashes, rate, EXPERTS + 1)
        cluster, sizes, ids_of = own.cluster_rows.default(codes, ids, *budget)
        self.seen.append(int((sizes > 0).sum()) / ids.numel())
        means = own.cluster_mean.default(x, cluster, sizes)
        return own.cluster_restore.default(self.experts(means, ids_of), x, means, cluster, sizes)

    def forward(self, rows: Tensor) -> Tensor:
        tokens = rows.flatten(0, 1)
        weights, ids = self.router(tokens).softmax(-1).topk(SLOTS)
        x = tokens[:, None].expand(-1, SLOTS, -1)
        made = self.experts(x, ids) if self.rate is None else self.compressed(x, ids, self.rate)
        return (made * weights[..., None]).sum(1).view(rows.shape)


def model_of(width: int, seed: int) -> tuple[nn.Module, Experts]:
    """A Llama with experts in its middle layer."""
    torch.manual_seed(seed)
    model, experts = Llama(LlamaOptions(3, width, 4, 4, 4 * width, WORDS)), Experts(width)
    model.layers[1].ffn = experts
    return model, experts


@functools.cache
def _files(most: int) -> list[list[str]]:
    """About `most` words of the standard library, by file."""
    files: list[list[str]] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        files.append(re.findall(r"\w+|[^\w\s]", path.read_text(errors="replace")))
        if sum(map(len, files)) >= most:
            break
    return files


def frequent_words(most: int) -> list[str]:
    """WORDS - 1 of them, by how often they are among so many."""
    return [word for word, _ in Counter(itertools.chain(*_files(most))).most_common(WORDS - 1)]


@functools.cache
def text(most: int) -> tuple[Tensor, Tensor]:
    """Numbers of about `most` words of the standard library, and of those that are held out, the end of each file. The
    rarer words are number 0.
    """
    numbers = {word: i + 1 for i, word in enumerate(frequent_words(most))}
    found: tuple[list[int], list[int]] = ([], [])
    for words in _files(most):
        border = len(words) * 19 // 20
        for into, part in zip(found, (words[:border], words[border:]), strict=True):
            into.extend(numbers.get(word, 0) for word in part)
    return torch.tensor(found[0]), torch.tensor(found[1])


def draw(words: Tensor, length: int, seed: int) -> Batch:
    """ROWS windows of the words."""
    starts = torch.randint(len(words) - length, (ROWS,), generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([words[start : start + length + 1] for start in starts])
    ids, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(length).expand(ROWS, -1).contiguous()}


def train(strategy: str, rate: float, seed: int, steps: int, width: int, length: int) -> dict[str, object]:
    """Under a strategy of one rank; the held-out loss per token, exact and compressed, and rates on the way."""
    words, held_out = text(400_000 if steps > 10 else 20_000)
    model, experts = model_of(width, seed)
    step, rates = stepper(model, losses.causal_lm, draw(words, length, 0), strategy), []
    for number in range(steps):
        batch = draw(words, length, 1000 * seed + number)
        if number % LOOKS == 0 or number == steps - 1:
            rates.append(look(model, experts, batch, rate)[1])
        step([batch], batch["labels"].numel())
    last = [draw(held_out, length, i) for i in range(16 if steps > 10 else 1)]
    exact, lossy = (statistics.mean(look(model, experts, b, r)[0] for b in last) for r in (None, rate))
    return {"exact": exact, "compressed": lossy, "rates": rates}


def stepper(
    model: nn.Module, loss: Callable[[nn.Module, Batch], Tensor], batch: Batch, strategy: str
) -> Callable[[Sequence[Batch], int], None]:
    """A step of AdamW on micro-batches like `batch`, one after the other on one rank: of the sum of their losses, over
    so many.
    """
    program = lower(capture(model, loss, batch, dynamic=None), strategy)
    assert isinstance(program, ExecGraph)
    weights = dict(model.named_parameters())
    optimizer, bound = torch.optim.AdamW(weights.values(), lr=2e-3, foreach=False), bind(program, 0, {})

    def step(batches: Sequence[Batch], count: int) -> None:
        bound.prepare({fqn: value.detach() for fqn, value in weights.items()}, dict(model.named_buffers()))
        for one in batches:
            bound.run(one, 1.0 / count)
        for fqn, grad in bound.finish()["grads"].items():
            weights[fqn].grad = grad
        optimizer.step()

    return step


@torch.no_grad()
def look(model: nn.Module, experts: Experts, batch: Batch, rate: float | None) -> tuple[float, float]:
    """The loss per token, and the share of rows that experts see."""
    experts.rate, experts.seen = rate, []
    found = float(losses.causal_lm(model, batch)) / batch["labels"].numel()
    seen = experts.seen[-1] if experts.seen else 1.0
    experts.rate = None
    return found, seen


def timed(run: Callable[[], object], rounds: int) -> float:
    """CPU ms, the best of some rounds."""
    found = []
    for _ in range(rounds):
        begun = time.process_time()
        run()
        found.append(1e3 * (time.process_time() - begun))
    return min(found)


def times(tokens: int, width: int, rate: float, rounds: int) -> dict[str, float]:
    """CPU ms of each part, for one expert per token."""
    torch.manual_seed(0)
    x, ids = torch.randn(tokens, 1, width), torch.randint(EXPERTS, (tokens, 1))
    up, down = torch.randn(EXPERTS, width, 4 * width), torch.randn(EXPERTS, 4 * width, width)
    options = CompressDispatch()
    budget = (EXPERTS, 2 * options.columns, options.hashes, rate, EXPERTS + 1)
    codes = own.hash_rows.default(x, options.hashes, options.columns, 0)
    cluster, sizes, _ = own.cluster_rows.default(codes, ids, *budget)
    means = own.cluster_mean.default(x, cluster, sizes)
    return {
        "experts": timed(lambda: expert_mm(F.gelu(expert_mm(x, up, ids)), down, ids), rounds),
        "hash": timed(lambda: own.hash_rows.default(x, options.hashes, options.columns, 0), rounds),
        "cluster": timed(lambda: own.cluster_rows.default(codes, ids, *budget), rounds),
        "mean": timed(lambda: own.cluster_mean.default(x, cluster, sizes), rounds),
        "restore": timed(lambda: own.cluster_restore.default(means, x, means, cluster, sizes), rounds),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.2)
    parser.add_argument("--tiny", action="store_true", help="two steps of a tiny model, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    steps, seeds, width, length = (2, 1, 16, 32) if args.tiny else (args.steps, args.seeds, 64, 128)
    runs: dict[str, list[dict]] = {"dp1": [], f"dp1+lsh({args.rate})": []}
    for seed in range(seeds):
        for strategy, found in runs.items():
            found.append(train(strategy, args.rate, seed, steps, width, length))
            rates = found[-1]["rates"]
            shown = f"   rate {min(rates):.4f} to {max(rates):.4f}" if "lsh" in strategy else ""
            both = "  ".join(f"{name} {found[-1][name]:.4f}" for name in ("exact", "compressed"))
            print(f"seed {seed}  {strategy:14} {both}{shown}", flush=True)
    base, mine = (statistics.mean(run["exact"] for run in found) for found in runs.values())
    print(f"loss, mean of {seeds} seeds: {base:.4f} exact, {mine:.4f} compressed while training, {mine - base:+.4f}")
    spent = times(*((256, 32) if args.tiny else (8192, 768)), args.rate, 1 if args.tiny else 3)
    share = (spent["hash"] + spent["cluster"]) / spent["experts"]
    print("  ".join(f"{name} {ms:.0f} ms" for name, ms in spent.items()), f"  hash + cluster {share:.1%} of experts")
    print(f"targets: rate from {TARGETS['least rate']}, loss +{TARGETS['loss']}, time {TARGETS['time']:.0%}")
    if args.json:
        args.json.write_text(json.dumps({"runs": runs, "loss": mine - base, "ms": spent, "share": share}, indent=1))


if __name__ == "__main__":
    main()
