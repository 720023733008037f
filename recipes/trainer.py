"""torchtitan's Trainer with fxpar's engine under its forward and backward.

To torchtitan the world is one device (`OneDevice`): the same data comes to every rank; a step is one batch, the whole
mini-batch; parameters are DTensors, as FSDP2's are. Optimizer, schedules, clipping, metrics, profiler and
checkpointer stay torchtitan's own. With `fxpar.strategies` unset, nothing is changed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

import fxpar
from fxpar.api import ParallelModule
from fxpar.cost.cluster import ClusterSpec
from fxpar.losses import cross_entropy_sum
from fxpar.monitor import Monitor
from fxpar.recipes import attention, experts
from fxpar.recipes import torchtitan_api as titan
from fxpar.recipes.checkpoint import FxparCheckpointManager
from fxpar.recipes.checks import check_recipe, check_trainer, mixtures, rows_of_step, validation_turns
from fxpar.recipes.documents import Documents
from fxpar.recipes.loader import LengthGroupedDataLoader
from fxpar.recipes.plans import with_plan
from fxpar.recipes.report import group_lines, step_line
from fxpar.recipes.settings import unheard
from fxpar.recipes.stock import prepare_host, stock, with_overrides
from fxpar.recipes.torchtitan_api import Trainer, logger
from fxpar.recipes.validator import FxparValidator
from fxpar.runtime.report import StepReport
from fxpar.tracer.documents import document_ids_from_positions, packed


@dataclass(kw_only=True, slots=True)
class FxparConfig:
    """How a recipe trains with fxpar."""

    strategies: dict[int, str] | None = None
    """Strategy of each length group by its longest sequence, as in `512 dp4 4096 dp2.tp2+sp`; unset: stock torchtitan.
    The longest must take training.seq_len tokens."""

    plan: str | None = None
    """A file of `fxpar plan`: strategies, token budgets and the memory budget are as it says."""

    token_budget: int | None = None
    """Most tokens of one micro-batch of one replica; by default that of the group's longest sequence."""

    token_budgets: dict[int, int] | None = None
    """The same by limit, as a plan says it."""

    memory_budget_gib: float | None = None
    """Memory per rank for weights, gradients and staging of all strategies together; unset: all stay."""

    merge: bool = True
    """Let a small group join the next longer one where that is cheaper."""

    nan: Literal["error", "skip"] = "error"
    """What a mini-batch does whose loss is no number: end the run, or be left out."""

    cluster: str | None = None
    """A cluster file: the devices and links that times are predicted for; by default usual figures of their kind."""

    data_ranks: int = 1
    """Draw data as so many data-parallel ranks of torchtitan would: to go on from their checkpoint."""

    override_attention: bool = True
    """Put fxpar::attention in the place of the recipe's. Off: the model's own is captured, such as an attention
    of yours that derives from torchtitan's; FlexAttention cannot be captured."""

    log_groups: bool = True
    """A line per length group of each logged step."""


class FxparMixin(Trainer):
    """Makes a torchtitan trainer of yours switch strategy inside of the mini-batch: `class Mine(FxparMixin, Yours)`.

    The class gets a `Config` with the settings of Yours and `fxpar`; `to_fxpar(recipe, trainer=Mine, ...)` makes one.
    With strategies `forward_backward_step` is given the documents of the whole mini-batch; without, nothing is changed.
    """

    Config: ClassVar[Any]

    fxpar_report: StepReport | None = None
    """What the last step did; None before the first one, and without strategies."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "Config" not in vars(cls) or not _has_settings(cls.Config):
            cls.Config = _with_settings(cls)
        super().__init_subclass__(**kwargs)

    def __init__(self, config: Any) -> None:
        prepare_host()
        config = with_plan(config)
        self.fxpar_settings, self.fxpar_given = config.fxpar, config
        # A seed checkpoint is the model's initial state on one device; nothing of a strategy shows in it.
        self.is_hot = self.fxpar_settings.strategies is not None and not config.checkpoint.create_seed_checkpoint
        self._fxpar_reports: list[StepReport] = []
        if self.is_hot:
            world = int(os.environ["WORLD_SIZE"])
            check_trainer(type(self), FxparMixin)
            check_recipe(config, config.fxpar, world)
            for line in unheard(config):
                logger.warning(f"[fxpar] {line}")
            config = one_device(config, world, self._fxpar_parallelize)
        else:
            config = stock(config)
        super().__init__(config)
        self._fxpar_logged_at = time.perf_counter()

    def init_distributed(self) -> Any:
        if not self.is_hot:
            return super().init_distributed()
        world = titan.dist_utils.init_distributed(self.config.comm, base_folder=self.config.dump_folder)
        if self.config.debug.seed is None:  # all ranks draw the same initial weights
            seed = torch.randint(2**62, (1,), device=self.device)
            dist.broadcast(seed, src=0)
            self.config.debug.seed = int(seed)
        # torchtitan would log and save what `one_device` made of it, which nobody has written and no stock run takes.
        replace(self.fxpar_given, debug=replace(self.fxpar_given.debug, seed=self.config.debug.seed)).maybe_log()
        return titan.OneDevice(world)

    def _fxpar_parallelize(self, model: nn.Module, *, training: Any, compile_config: Any, **_: Any) -> nn.Module:
        """torchtitan's `parallelize_fn`: takes the model on the meta device, returns it with storage and values."""
        assert self.fxpar_settings.strategies is not None
        budget, seed = self.fxpar_settings.memory_budget_gib, self.config.debug.seed
        assert seed is not None  # `init_distributed` has seen to it
        compiled = compile_config.enable and "model" in compile_config.components
        model.__class__ = _hosted(type(model))
        made = fxpar.parallelize(
            model,
            strategies=self.fxpar_settings.strategies,
            loss=next_token_loss,
            token_budget=self.fxpar_settings.token_budgets or self.fxpar_settings.token_budget,
            merge=self.fxpar_settings.merge,
            memory_budget_bytes=None if budget is None else int(budget * 2**30),
            cluster=None if self.fxpar_settings.cluster is None else ClusterSpec.from_file(self.fxpar_settings.cluster),
            precision=_precision(training),
            nan=self.fxpar_settings.nan,
            compile="inductor" if compiled else "eager",
            # With `warn_only` the setting that torchtitan has made stays in force.
            deterministic=self.config.debug.deterministic and not self.config.debug.deterministic_warn_only,
            initializer=_fill_own,
            meta_init="whole",  # the weights of stock torchtitan on one rank
            seed=seed,
            timeout_s=float(self.config.comm.init_timeout_seconds),
        )
        logger.info(f"[fxpar] {', '.join(f'<={n} {s}' for n, s in sorted(self.fxpar_settings.strategies.items()))}")
        return made

    def forward_backward_step(self, *, input_dict: Any, labels: Any, global_valid_tokens: Tensor) -> Tensor:
        """Every document of the mini-batch (`input_dict["documents"]`), each length group under its strategy; `.grad`
        is filled. Returns the loss, a mean over valid tokens of all ranks.
        """
        if not self.is_hot:
            return super().forward_backward_step(
                input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
            )
        model = cast(ParallelModule, self.model_parts[0])
        model.load_engine_state({"steps": self.step - 1})  # a resumed run goes on with the step it is at
        documents: Documents = input_dict["documents"]  # on the CPU: a rank copies the tokens that it works on
        report = model.train_step(documents.sequences())
        experts.count_tokens(model, report)
        self.ntokens_seen += documents.places
        self.fxpar_report = report
        self._fxpar_reports.append(report)
        return torch.tensor(report.loss, dtype=torch.float64, device=self.device)

    @record
    def train(self) -> None:
        """torchtitan's loop. What a lost rank breaks in it, saving and clipping too, names that rank."""
        monitor = self.model_parts[0].fxpar_monitor if self.is_hot else None  # type: ignore[attr-defined]
        with nullcontext() if monitor is None else cast(Monitor, monitor).explained("torchtitan's loop"):
            super().train()

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        if self.is_hot and self.metrics_processor.should_log(self.step):
            self._fxpar_log_groups()

    def _fxpar_log_groups(self) -> None:
        """Valid tokens per second (torchtitan's `tps` counts padding), and a line per group."""
        now = time.perf_counter()
        seconds, self._fxpar_logged_at = now - self._fxpar_logged_at, now
        reports, self._fxpar_reports = self._fxpar_reports, []
        ranks = dist.get_world_size()
        logger.info(step_line(self.step, reports, seconds, ranks))
        if self.fxpar_settings.log_groups:
            for line in group_lines(reports[-1]):
                logger.info(line)
        valid = sum(r.valid_tokens for r in reports)
        metrics = {
            "fxpar/valid_tps": valid / seconds / ranks,
            "fxpar/switch_s": sum(g.switch_s for r in reports for g in r.groups),
            "fxpar/switch_bytes": sum(g.switch_bytes for r in reports for g in r.groups),
        }
        self.metrics_processor.logger.log(metrics, self.step)


def _has_settings(config: type) -> bool:
    return any(one.name == "fxpar" for one in fields(config))


def _with_settings(trainer: type[Trainer]) -> type:
    """A Config of the trainer's own: what it has, or inherits, and `fxpar`."""
    base = trainer.Config
    added = [] if _has_settings(base) else [("fxpar", FxparConfig, field(default_factory=FxparConfig))]
    name = f"{trainer.__qualname__}.Config"
    shown = {"__doc__": base.__doc__, "__module__": trainer.__module__, "__qualname__": name}
    return make_dataclass("Config", added, bases=(base,), namespace=shown, kw_only=True, slots=True)


class FxparTrainer(FxparMixin):
    """torchtitan's own trainer with fxpar."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        fxpar: FxparConfig = field(default_factory=FxparConfig)
        """Hot switching between strategies by sequence length."""


def one_device(config: FxparTrainer.Config, world: int, parallelize: Callable[..., nn.Module]) -> FxparTrainer.Config:
    """The recipe as torchtitan sees it on `world` ranks that fxpar runs: one device, the whole mini-batch as one batch.

    A copy; the recipe's own degrees say how many rows a step takes, if it does not say so itself.
    """
    assert config.model_spec is not None
    training, parallelism = config.training, config.parallelism
    rows = rows_of_step(config, world)
    alone = replace(
        parallelism,
        data_parallel_replicate_degree=1,
        data_parallel_shard_degree=1,
        context_parallel_degree=1,
        tensor_parallel_degree=1,
        pipeline_parallel_degree=1,
        spmd_backend="partial_dtensor",
    )
    return replace(
        config,
        model_spec=replace(config.model_spec, parallelize_fn=parallelize, pipelining_fn=None),
        parallelism=alone,
        loss=config.loss.loss_fn if isinstance(config.loss, titan.ChunkedLossWrapper.Config) else config.loss,
        activation_checkpoint=None,
        debug=replace(config.debug, print_config=False, save_config_file=None),  # the user's was logged by then
        override=with_overrides(config.override, *_overrides(config)),
        training=replace(training, local_batch_size=rows, global_batch_size=rows, disable_cuda_graphs=True),
        dataloader=LengthGroupedDataLoader.Config(
            inner=config.dataloader, rows=training.local_batch_size, data_ranks=config.fxpar.data_ranks
        ),
        checkpoint=FxparCheckpointManager.of(config.checkpoint),
        validator=FxparValidator.of(
            config.validator, training.local_batch_size, validation_turns(config, world), config.fxpar.data_ranks
        ),
    )


def _overrides(config: FxparTrainer.Config) -> Iterator[str]:
    """What fxpar captures in the place of parts of the model, by torchtitan's paths."""
    if config.fxpar.override_attention:
        assert config.model_spec is not None
        model = config.model_spec.model
        yield from attention.FOR_GPT_OSS if isinstance(model, titan.GptOssModel.Config) else attention.FOR_FXPAR
    if any(mixtures(config)):
        yield from experts.FOR_FXPAR


def next_token_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Sum of the token losses of a torchtitan decoder; batch tensors are [B, T], logits [B, T, V]."""
    positions = batch["position_ids"]
    with packed(document_ids_from_positions(positions)), experts.without_padding(model, batch):
        logits = model(batch["input_ids"], positions=positions)
    return cross_entropy_sum(logits, batch["labels"])


def _precision(training: Any) -> str | None:
    """torchtitan's mixed precision in fxpar's words: parameters are cast, gradients are added and sent in fp32."""
    return None if training.mixed_precision_param == "float32" else "bf16+reduce=fp32"


def _fill_own(module: nn.Module) -> None:
    """A torchtitan module's own parameters and buffers, as its `init_states` fills them."""
    if isinstance(module, titan.Module):
        module._init_self_parameters()
        module._init_self_buffers()
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]


def _hosted(cls: type[nn.Module]) -> type[nn.Module]:
    """The model's class, whose weights `parallelize` has filled when the trainer asks for it. Called by a validator of
    the user's own, it keeps the documents of a row apart, as torchtitan's attention does.
    """

    def init_weights(self: nn.Module, **_: Any) -> None:
        """Done."""

    def forward(self: nn.Module, tokens: Tensor, positions: Tensor | None = None, *masks: Any, **more: Any) -> Tensor:
        with nullcontext() if positions is None else packed(document_ids_from_positions(positions)):
            return cls.forward(self, tokens, positions, *masks, **more)

    return type(cls.__name__, (cls,), {"init_weights": init_weights, "forward": forward, "__module__": cls.__module__})


__all__ = ["FxparConfig", "FxparMixin", "FxparTrainer", "next_token_loss", "one_device"]
