"""torchtitan in forked ranks: what its trainer logs in each step, the weights at the end, what its command prints."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor

import fxpar
from fxpar.recipes import llama3, qwen3
from fxpar.recipes.convert import to_fxpar
from fxpar.recipes.debug import debug_recipe, documents, hf_assets
from fxpar.runtime.forked import reserved_port, run_forked
from fxpar.runtime.task import CompiledModel
from fxpar.torch_api.fork import forget_parent_threads
from tests import warm  # noqa: F401

STOCK = {"llama3": llama3.debug_stock, "qwen3": qwen3.debug_stock}
STEPS = {"llama3": 10, "qwen3": 5}
SWITCHING = {64: "dp2", 160: "tp2+sp", 512: "cp2"}
"""What runs have that are not about certain strategies: they share what is compiled for these."""


@dataclass(frozen=True)
class Run:
    """Loss and gradient norm by step, validation losses by step, and (if asked for) whole weights by name.

    Norms are computed, and clipped by, in fp64 for all runs alike: torch adds up half a million squares in fp32, which
    is off by 1e-4 on CPU, more or less according to how the gradients are cut.
    """

    losses: dict[int, float]
    norms: dict[int, float]
    validation: dict[int, float]
    weights: dict[str, torch.Tensor]
    compiled: dict[tuple[str, ...], bytes]
    """What rank 0 captured and lowered, as no run before had."""


COMPILED: dict[tuple[str, ...], CompiledModel] = {}
"""What runs have captured and lowered, by model and options: ranks that are forked later need not."""


def shallow(family: str) -> Any:
    """A debug recipe with two layers, a third of its own: each rank captures the model."""
    made = debug_recipe(family)
    made.model_spec.model.layers = made.model_spec.model.layers[:2]
    return made


def recipe(family: str, strategies: dict[int, str] | None, **settings: Any) -> Any:
    """A shallow debug recipe in fp32, two rows of 512 tokens a step; of 256 for qwen3, five times the size, and fewer
    steps.
    """
    config = to_fxpar(shallow(family), strategies=strategies, **settings)
    config.training.seq_len = 256 if family == "qwen3" else 512
    config.training.local_batch_size = 2
    config.training.global_batch_size = 2
    config.training.mixed_precision_param = "float32"
    config.training.steps = STEPS[family]
    config.lr_scheduler.warmup_steps = 10  # a steeper start sends qwen3 through a spike that multiplies rounding errors
    return config


def train(
    world: int,
    make: Callable[[], Any],
    folder: Path,
    *,
    weights: bool = False,
    inspect: Callable[[Any], None] | None = None,
    timeout_s: float = 300.0,
) -> Run:
    """Train `make()` on forked gloo ranks, after `inspect(trainer)`; what rank 0 saw."""

    def work(rank: int) -> Run:
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({key: str(value) for key, value in environment.items()})
        os.chdir(folder)
        return _train(make(), weights, inspect)

    folder.mkdir(exist_ok=True, parents=True)
    hf_assets(), documents()  # here once, and not in every rank
    found = run_forked(world, work, timeout_s=timeout_s)[0]
    COMPILED.update({key: pickle.loads(data) for key, data in found.compiled.items()})
    return found


def _remembering(found: Run) -> Callable[..., Any]:
    """`fxpar.parallelize` for a forked rank."""
    parallelize = fxpar.parallelize

    def remembered(model: torch.nn.Module, **options: Any) -> Any:
        shapes = {name: tuple(value.shape) for name, value in (*model.named_parameters(), *model.named_buffers())}
        options_read = [options[name] for name in ("strategies", "precision", "token_budget", "cluster")]
        key = (str(model), str(shapes), *map(str, options_read))
        made = parallelize(model, compiled=COMPILED.get(key), **options)
        if key not in COMPILED and dist.get_rank() == 0:
            found.compiled[key] = pickle.dumps(made.fxpar_session.compiled)
        return made

    return remembered


def _train(config: Any, weights: bool, inspect: Callable[[Any], None] | None) -> Run:
    import torchtitan.trainer

    torchtitan.trainer.time.sleep = lambda seconds: None  # rank 0 waits two seconds for the others' logs
    config.debug.enable_structured_logging = False
    found = Run({}, {}, {}, {}, {})
    fxpar.parallelize = _remembering(found)
    trainer = config.build()
    metrics = trainer.metrics_processor
    log, log_validation = metrics.log, metrics.log_validation

    def kept(step: int, loss: float, max_loss: float, norm: float, **more: Any) -> None:
        found.losses[step] = loss
        log(step, loss, max_loss, norm, **more)

    def kept_validation(loss: float, step: int) -> None:
        found.validation[step] = loss
        log_validation(loss=loss, step=step)

    def clip(parameters: list[torch.Tensor], max_norm: float, **_: Any) -> torch.Tensor:
        """Exact, see Run."""
        grads = [p.grad for p in parameters if p.grad is not None]
        squares = [whole(grad).double().square().sum() for grad in grads]
        norm = torch.stack(squares).sum().sqrt()
        found.norms[trainer.step] = float(norm)
        for grad in grads:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            local.mul_(min(1.0, max_norm / (float(norm) + 1e-6)))
        return norm

    metrics.log, metrics.log_validation = kept, kept_validation
    torchtitan.trainer.dist_utils.clip_grad_norm_ = clip
    if inspect is not None:
        inspect(trainer)
    if config.checkpoint.create_seed_checkpoint:
        trainer.checkpointer.save(curr_step=0, last_step=True)
    else:
        trainer.train()
    if weights:
        for name, value in trainer.model_parts[0].state_dict().items():
            found.weights[name] = whole(value).clone()
    saving = getattr(trainer.checkpointer, "save_future", None)
    if saving is not None:  # an interrupted process would lose what it saves in the background
        saving.result()
    trainer.close()
    dist.barrier()
    return found


def whole(value: torch.Tensor) -> torch.Tensor:
    """The global value of a DTensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def command(world: int, folder: Path, *arguments: str, timeout_s: float = 300.0) -> str:
    """What rank 0 prints of `torchrun -m torchtitan.train ARGUMENTS`, whose ranks are forked: they would import
    torchtitan for seconds each. Fails if a rank does.
    """
    import torchtitan.train  # noqa: F401 - here once

    hf_assets(), documents()
    torch.set_num_threads(1)
    context, log = mp.get_context("fork"), folder / "log.txt"
    with reserved_port() as port:
        ranks = [context.Process(target=_command, args=(rank, world, port, log, arguments)) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout_s)
            if process.is_alive():
                process.kill()
    assert [process.exitcode for process in ranks] == [0] * world, log.read_text()[-4000:]
    return log.read_text()


def _command(rank: int, world: int, port: int, log: Path, arguments: tuple[str, ...]) -> None:
    forget_parent_threads()
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NO_COLOR": 1}
    os.environ.update({key: str(value) for key, value in environment.items()})
    os.chdir(log.parent)
    with open(log if rank == 0 else log.with_suffix(f".{rank}"), "w", buffering=1) as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        sys.stdout = sys.stderr = file
        sys.argv = ["torchtitan.train", *arguments]
        try:
            sys.modules["torchtitan.train"].main()
            status = 0
        except BaseException:
            traceback.print_exc()
            status = 1
    os._exit(status)
