"""Training with torchtitan on CPU: fxpar's recipes against stock torchtitan, in the same run, from the same model.

    OMP_NUM_THREADS=1 python benchmarks/bench_torchtitan.py [--rounds 5] [--seq-len 2048] [--rows 4] [--tiny]
        [--json OUT]

Two gloo ranks train torchtitan's llama3 debug model (fp32) on packed rows of the standard library's definitions. All
modes stand side by side in the same two processes and take turns, a step each; the figure is valid tokens per CPU
second (process time of all threads, summed over ranks; forward, backward, clipping, optimizer), the median over rounds.
Documents are the same in all modes that draw alike: as two data-parallel ranks (fsdp2 and its likes), or as one (tp2).

    fsdp2       stock torchtitan, FSDP2 over both ranks
    fsdp2+fxpar::attention   the same, with fxpar's attention instead of a dense mask: what the packing alone is worth
    tp2         stock torchtitan, tensor parallel with sequence parallel
    fxpar ...   one strategy, and the hot-switched set; micro-batches of as many tokens as torchtitan's batches

Stock attention on CPU is dense (FlexAttention has no backward there): `fxpar.recipes.attention.dense_attention`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fxpar.recipes import torchtitan_api as titan
from fxpar.recipes.attention import FxparAttention
from fxpar.recipes.convert import to_fxpar
from fxpar.recipes.debug import debug_recipe
from fxpar.runtime.forked import run_forked
from fxpar.tracer.documents import document_ids_from_positions

WORLD = 2
WARM_UP = 2
SEED = "outputs/checkpoint/step-0"


@dataclass(frozen=True)
class Mode:
    """`strategies` None: stock, with `tp` ranks of tensor parallelism. `draws`: as so many data-parallel ranks."""

    name: str
    strategies: dict[int, str] | None
    tp: int = 1
    draws: int = 1
    own_attention: bool = False


def modes(seq_len: int) -> list[Mode]:
    return [
        Mode("fsdp2", None, draws=2),
        Mode("fsdp2 + fxpar::attention", None, draws=2, own_attention=True),
        Mode("tp2", None, tp=2),
        Mode("fxpar dp2", {seq_len: "dp2"}, draws=2),
        Mode("fxpar dp2+zero3", {seq_len: "dp2+zero3"}, draws=2),
        Mode("fxpar tp2+sp", {seq_len: "tp2+sp"}),
        Mode("fxpar hot", {seq_len // 8: "dp2", seq_len // 2: "tp2+sp", seq_len: "cp2"}, draws=2),
        Mode("fxpar hot, every group", {seq_len // 8: "dp2", seq_len // 2: "tp2+sp", seq_len: "cp2"}, draws=2),
    ]


@dataclass(frozen=True)
class Result:
    """Of one mode: CPU ms of each step summed over ranks, valid tokens of each step, and the losses."""

    mode: str
    cpu_ms: list[float]
    tokens: list[int]
    losses: list[float]

    @property
    def rate(self) -> float:
        """Valid tokens per CPU second."""
        return statistics.median(n / ms * 1e3 for n, ms in zip(self.tokens, self.cpu_ms, strict=True))


class _OwnAttention(FxparAttention):
    """fxpar::attention in a stock model: eager, over the documents of the batch at hand."""

    documents: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        kwargs["attention_masks"] = type(self).documents
        return super().forward(q, k, v, **kwargs)


def config_of(mode: Mode, arguments: argparse.Namespace) -> Any:
    # A micro-batch of a replica has as many tokens as a batch of a rank of torchtitan's.
    budget = arguments.rows * arguments.seq_len // mode.draws
    settings = {"merge": "every" not in mode.name, "log_groups": False, "token_budget": budget}
    if mode.strategies is None:
        settings = {}
    recipe = debug_recipe("llama3")
    recipe.model_spec.model.layers = recipe.model_spec.model.layers[: arguments.layers]
    config = to_fxpar(recipe, strategies=mode.strategies, **settings)
    training = config.training
    training.seq_len, training.global_batch_size = arguments.seq_len, arguments.rows
    training.local_batch_size = arguments.rows // mode.draws
    training.mixed_precision_param = "float32"
    training.steps = 1000
    config.lr_scheduler.warmup_steps = 100
    config.debug.enable_structured_logging = False
    config.checkpoint.enable = config.checkpoint.load_only = True
    config.checkpoint.initial_load_path = os.path.abspath(SEED)
    config.metrics.log_freq = 1
    if mode.strategies is None:
        config.parallelism.tensor_parallel_degree = mode.tp
        config.activation_checkpoint = None  # fxpar's strategies here recompute nothing either
    else:
        config.fxpar.data_ranks = mode.draws
    return config


def build(mode: Mode, arguments: argparse.Namespace) -> Any:
    """A trainer of this rank, ready to step."""
    config = config_of(mode, arguments)
    if mode.own_attention:
        for _, _, parent, attribute in config.model_spec.model.traverse(titan.FlexAttention.Config):
            setattr(parent, attribute, FxparAttention.Config())
    trainer = config.build()
    if mode.own_attention:
        for module in trainer.model_parts[0].modules():
            if isinstance(module, FxparAttention):
                module.__class__ = _OwnAttention
        prepare = trainer.post_dataloading_process

        def noting(inputs: Any, labels: Tensor) -> Any:
            _OwnAttention.documents = document_ids_from_positions(inputs["positions"])
            return prepare(inputs, labels)

        trainer.post_dataloading_process = noting
    return trainer


def save_seed(arguments: argparse.Namespace, folder: str) -> Any:
    """The weights that all modes begin with; torchtitan draws others for each parallelism."""

    def run(rank: int) -> None:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        os.chdir(folder)
        titan.logger.setLevel("ERROR")
        config = config_of(Mode("seed", None), arguments)
        config.checkpoint.load_only, config.checkpoint.create_seed_checkpoint = False, True
        config.checkpoint.initial_load_path = None
        config.build().checkpointer.save(curr_step=0, last_step=True)

    return run


def work(arguments: argparse.Namespace, folder: str) -> Any:
    def run(rank: int) -> list[Result]:
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
        os.environ.update({key: str(value) for key, value in environment.items()})
        os.chdir(folder)
        titan.logger.setLevel("ERROR")
        chosen = [mode for mode in modes(arguments.seq_len) if not arguments.only or mode.name in arguments.only]
        trainers = [build(mode, arguments) for mode in chosen]
        for trainer in trainers:
            trainer.checkpointer.load()
        found = [Result(mode.name, [], [], []) for mode in chosen]
        losses: list[float] = []
        for trainer in trainers:
            trainer.metrics_processor.log = lambda step, loss, *rest, **more: losses.append(loss)
        iterators = [trainer.batch_generator(trainer.dataloader) for trainer in trainers]
        for turn in range(WARM_UP + arguments.rounds):
            for trainer, iterator, result in zip(trainers, iterators, found, strict=True):
                trainer.step += 1
                torch.distributed.barrier()
                begun = time.process_time()
                trainer.train_step(iterator)
                spent = torch.tensor((time.process_time() - begun) * 1e3)
                torch.distributed.all_reduce(spent)
                if turn >= WARM_UP:
                    result.cpu_ms.append(float(spent))
                    result.tokens.append(arguments.rows * arguments.seq_len)
                    result.losses.append(losses[-1])
        return found

    return run


def check(results: list[Result]) -> None:
    """Modes that draw the same documents have the same losses."""
    by_name = {result.mode: result for result in results}
    drawn = {mode.name: mode.draws for mode in modes(2048)}
    for result in results:
        reference = by_name.get("fsdp2" if drawn[result.mode] == 2 else "tp2")
        if reference is not None:
            worst = max(abs(a - b) for a, b in zip(result.losses, reference.losses, strict=True))
            assert worst < 1e-4, f"{result.mode}: losses differ from {reference.mode} by {worst:.1e}"


def show(results: list[Result], console: Console) -> None:
    by_name = {result.mode: result for result in results}
    stock = [by_name[name] for name in ("fsdp2", "tp2") if name in by_name]
    best = max((result.rate for result in stock), default=0.0)
    table = Table(title="valid tokens per CPU second, all ranks")
    for column in ("mode", "tokens / CPU s", "/ fsdp2", "/ tp2", "/ best stock"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for result in results:
        ratios = [f"{result.rate / by_name[name].rate:.2f}" if name in by_name else "" for name in ("fsdp2", "tp2")]
        table.add_row(result.mode, f"{result.rate:,.0f}", *ratios, f"{result.rate / best:.2f}" if best else "")
    console.print(table)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=4, help="rows of a mini-batch, over both ranks")
    parser.add_argument("--only", nargs="*", default=[], help="modes by name")
    parser.add_argument("--tiny", action="store_true", help="two layers, short rows, one round, to see that it runs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    arguments.layers = 2 if arguments.tiny else None  # all
    if arguments.tiny:
        arguments.rounds, arguments.seq_len, arguments.rows = 1, 128, 2
        arguments.only = ["fsdp2", "fsdp2 + fxpar::attention", "fxpar hot"]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run_forked(1, save_seed(arguments, folder))
        results = run_forked(WORLD, work(arguments, folder), timeout_s=3600)[0]
    check(results)
    show(results, Console(width=110))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) | {"rate": result.rate} for result in results], indent=1))


if __name__ == "__main__":
    main()
