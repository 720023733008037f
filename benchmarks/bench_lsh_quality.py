"""What `lsh(0.2)` costs a small encoder and a small decoder with experts, before and after fine-tuning.

    OMP_NUM_THREADS=1 python benchmarks/bench_lsh_quality.py [--steps 100] [--seeds 2] [--only encoder] [--tiny]

Both have three layers of width 64, the middle one with 4 experts of which a token takes 2. They are trained on words of
the standard library, the decoder to say the next word, the encoder those that are hidden; and then, for half as many
steps, to say from which of its packages 32 words are. A step is four micro-batches of 256 tokens, one after the other:
what four ranks of `ep4` compute, each of which makes clusters of its own tokens. Figures are of held-out parts, with
exact experts: the loss per word, and the share of windows whose package is found.

The compressed model is looked at after as many steps as the exact one, and once more when it has taken as long: steps
of `ep4` and of `ep4+lsh(...)` are priced on two nodes, with links between them that make sending 45 % of the exact step
(the mean of arXiv 2411.08446, figure 3).
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_lsh import WORDS, Batch, Experts, frequent_words, stepper, text
from torch import Tensor, nn

from fxpar import losses
from fxpar.cost.calls import node_costs
from fxpar.cost.cluster import usual_cluster
from fxpar.lowering import lower
from fxpar.passes.pack_documents import pack_documents
from fxpar.tracer import capture

SOURCES, ROWS, LENGTH, WINDOW, HIDDEN_WORD = 4, 4, 64, 32, WORDS
PACKAGES = ("asyncio", "email", "unittest", "xml", "encodings", "multiprocessing")
SHARE = 0.45
KINDS = ("encoder", "decoder")


class Body(nn.Module):
    """Three layers, with experts in the middle one. An encoder reads in both directions."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.causal, self.heads = kind == "decoder", 4
        self.words, self.places = nn.Embedding(WORDS + 1, width), nn.Embedding(LENGTH, width)
        nn.init.normal_(self.places.weight, std=0.1)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(3))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        dense = (nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(2))
        first, last = dense
        self.mlp = nn.ModuleList([first, Experts(width), last])
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(7))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places(position_ids)
        for i, (qkv, out, mlp) in enumerate(zip(self.qkv, self.out, self.mlp, strict=True)):
            q, k, v = (
                y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in qkv(self.norms[2 * i](x)).chunk(3, -1)
            )
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            x = x + out(seen.transpose(1, 2).flatten(2))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.norms[6](x)


class Words(nn.Module):
    """The word of each place."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(body.words.embedding_dim, WORDS)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.head(self.body(input_ids, position_ids))


class Package(nn.Module):
    """The package of each window: of an encoder by the mean of its places, of a decoder by the last."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(body.words.embedding_dim, len(PACKAGES))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.body(input_ids, position_ids)
        return self.head(x[:, -1] if self.body.causal else x.mean(1))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return losses.cross_entropy_sum(model(batch["input_ids"], batch["position_ids"]), batch["labels"])


@functools.cache
def packages(most: int) -> list[tuple[Tensor, Tensor]]:
    """Numbers of about `most` words of each package, and of those that are held out, the end of each file."""
    numbers = {word: i + 1 for i, word in enumerate(frequent_words(most))}
    found = []
    for name in PACKAGES:
        parts: tuple[list[int], list[int]] = ([], [])
        for path in sorted((Path(sysconfig.get_paths()["stdlib"]) / name).rglob("*.py")):
            words = [numbers.get(w, 0) for w in re.findall(r"\w+|[^\w\s]", path.read_text(errors="replace"))]
            border = len(words) * 9 // 10
            for into, part in zip(parts, (words[:border], words[border:]), strict=True):
                into.extend(part)
            if len(parts[0]) > most:
                break
        found.append((torch.tensor(parts[0]), torch.tensor(parts[1])))
    return found


def windows(words: Tensor, count: int, length: int, draw: torch.Generator) -> Tensor:
    starts = torch.randint(len(words) - length, (count,), generator=draw)
    return torch.stack([words[start : start + length] for start in starts])


def words_batch(kind: str, words: Tensor, seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    rows = windows(words, ROWS, LENGTH + 1, draw)
    ids, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    if kind == "encoder":
        hidden = torch.rand(ids.shape, generator=draw) < 0.15
        ids, labels = ids.masked_fill(hidden, HIDDEN_WORD), ids.masked_fill(~hidden, losses.IGNORE_INDEX)
    return {"input_ids": ids, "labels": labels, "position_ids": _places(ids)}


def package_batch(kind: str, parts: Sequence[Tensor], seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(parts), (ROWS * LENGTH // WINDOW,), generator=draw)
    ids = torch.cat([windows(parts[label], 1, WINDOW, draw) for label in labels])
    return {"input_ids": ids, "labels": labels, "position_ids": _places(ids)}


def _places(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]).expand(ids.shape).contiguous()


def fit(model: nn.Module, strategy: str, draw: Callable[[int], Batch], looks: Sequence[int], score: Callable) -> list:
    """What `score` says after each of these numbers of steps; batch i is `draw(i)`."""
    step, found = stepper(model, loss, draw(0), strategy), []
    for number in range(looks[-1]):
        batches = [draw(SOURCES * number + i) for i in range(SOURCES)]
        step(batches, sum(int((b["labels"] != losses.IGNORE_INDEX).sum()) for b in batches))
        found += [score(model)] * (number + 1 in looks)
    return found


@torch.no_grad()
def score(model: nn.Module, batches: Sequence[Batch]) -> float:
    """The loss per label; of packages the share that is found."""
    labels = torch.cat([b["labels"].flatten() for b in batches])
    logits = torch.cat([model(b["input_ids"], b["position_ids"]).flatten(0, -2) for b in batches])
    if isinstance(model, Package):
        return float((logits.argmax(-1) == labels).double().mean())
    return float(F.cross_entropy(logits, labels))


def one_run(kind: str, strategy: str, seed: int, steps: int, ratio: float, tiny: bool) -> dict[str, list[float]]:
    """At as many steps as the exact model, and (compressed) at as much time."""
    words, held_out = text(20_000 if tiny else 400_000)
    parts = packages(2_000 if tiny else 40_000)
    torch.manual_seed(seed)
    model = Words(Body(kind, 16 if tiny else 64))
    many = 1 if tiny else 40
    begin = 10_000 * (seed + 1)
    looks = [steps, max(steps + 1, round(steps * ratio))] if "lsh" in strategy else [steps]
    last = [words_batch(kind, held_out, i) for i in range(many)]
    found = fit(model, strategy, lambda i: words_batch(kind, words, begin + i), looks, lambda m: score(m, last))
    short = [-(-look // 2) for look in looks]
    tests = [package_batch(kind, [part for _, part in parts], i) for i in range(many)]
    tuned = fit(
        Package(model.body),
        strategy,
        lambda i: package_batch(kind, [part for part, _ in parts], begin + i),
        sorted(set(short)),
        lambda m: score(m, tests),
    )
    return {"words": found, "package": [tuned[0], tuned[-1]] if len(looks) > 1 else tuned}


def priced(strategies: Sequence[str], width: int) -> tuple[float, float]:
    """How many times as long a step of the first takes as one of the second, and Gbit/s between the nodes."""
    model = Words(Body("decoder", width))
    example = words_batch("decoder", torch.arange(LENGTH * 2) % WORDS, 0)
    row = {name: value[:1] for name, value in example.items()}
    rows = pack_documents(capture(model, loss, row))
    programs = [lower(rows, strategy) for strategy in strategies]
    usual = replace(usual_cluster(SOURCES, SOURCES // 2, "cpu"), latency_us=0.0, node_gb_per_s=None)

    def seconds(program, gb_per_s: float) -> tuple[float, float]:
        costs = node_costs(program, replace(usual, inter_gb_per_s=gb_per_s))
        taken = [(bool(cost.axis), float(cost.seconds.at(SOURCES * ROWS * LENGTH))) for cost in costs]
        return sum(s for sends, s in taken if not sends), sum(s for sends, s in taken if sends)

    work, sending = seconds(programs[0], 1.0)
    speed = sending / (work * SHARE / (1 - SHARE))
    exact, compressed = (sum(seconds(program, speed)) for program in programs)
    return exact / compressed, 8 * speed


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.2)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--tiny", action="store_true", help="a step of a tiny model, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    steps, seeds = (1, 1) if args.tiny else (args.steps, args.seeds)
    flag = f"lsh({args.rate})"
    ratio, speed = priced(["ep4", f"ep4+{flag}"], 16 if args.tiny else 64)
    print(
        f"a step of ep4 takes {ratio:.2f} times as long as one of ep4+{flag}, priced at {speed:.3g} Gbit/s", flush=True
    )
    found: dict[str, dict[str, list]] = {kind: {"exact": [], flag: []} for kind in KINDS}
    for kind in KINDS[1:] if args.tiny else [args.only] if args.only else KINDS:
        for seed in range(seeds):
            for name, runs in found[kind].items():
                strategy = "dp1" if name == "exact" else f"dp1+{name}"
                runs.append(one_run(kind, strategy, seed, steps, ratio, args.tiny))
                shown = "   ".join(f"{what} {' '.join(f'{x:.4f}' for x in xs)}" for what, xs in runs[-1].items())
                print(f"{kind}  seed {seed}  {name:10} {shown}", flush=True)
        for what in ("words", "package"):
            means = [
                [statistics.mean(run[what][i] for run in runs) for i in range(len(runs[0][what]))]
                for runs in found[kind].values()
            ]
            (exact,), (same, longer) = means
            line = f"{kind}  {what}: exact {exact:.4f}, {flag} {same:.4f} at equal steps, {longer:.4f} at equal time"
            print(f"{line}, mean of {seeds} seeds")
    if args.json:
        args.json.write_text(json.dumps({"ratio": ratio, "gbit_per_s": speed, "runs": found}, indent=1))


if __name__ == "__main__":
    main()
