"""`strategies = "auto"`: the plan of a run, from the mini-batches that it reads first."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import torch

from fxpar.ir.graph import LogicalGraph
from fxpar.models.depth import layer_option
from fxpar.runtime.auto import Search, read_rows
from fxpar.search.chosen import whole_depth
from fxpar.search.lengths import SAMPLES
from fxpar.search.plan_file import Plan
from fxpar.search.price import Depth
from fxpar.train.config import TrainConfig, described_cluster
from fxpar.train.model import shapes_for, texts_of
from fxpar.train.strategies import STATIC
from fxpar.train.text import Prepared, make_loader, open_tokens


def search_plan(config: TrainConfig, prepared: Prepared, device: torch.device) -> Plan:
    """The best plan for a model with the vocabulary of this tokenizer. Raises as `Search.plan` and the loaders do."""
    tokens, _ = open_tokens(prepared, config.data.validation)
    loader = make_loader(tokens, config, prepared.vocab_size)
    batches = [[len(ids) for ids in batch] for batch in itertools.islice(loader, SAMPLES)]
    option = layer_option(config.model.name, texts_of(config))

    @functools.cache
    def captured(layers: int) -> LogicalGraph:
        shallow = {} if option is None or layers == option.layers else {option.name: layers}
        loaded = shapes_for(config, prepared.vocab_size, shallow)
        return read_rows(loaded.model, loaded.loss_fn, precision=config.precision.compute)

    return Search(
        model=config.model.name,
        rows=captured if option is not None else lambda _: captured(1),
        depth=whole_depth(captured(1)) if option is None else Depth(option.layers, option.period),
        batches=batches,
        longest=config.max_length,
        tokens_per_step=config.data.batch_tokens or round(sum(map(sum, batches)) / len(batches)),
        world=config.world,
        device=device,
        options=tuple(f"{key}={value}" for key, value in texts_of(config).items()),
        cluster=described_cluster(config.engine),
        memory_budget_bytes=config.engine.memory_budget_bytes,
    ).plan()


def with_plan(config: TrainConfig, plan: Plan) -> TrainConfig:
    """The run under the strategies and budgets of a plan; its own memory budget goes first."""
    budgets = {str(limit): tokens for limit, tokens in plan.token_budgets.items()}
    memory = config.engine.memory_budget_bytes or plan.memory_budget_bytes or None
    engine = replace(config.engine, token_budgets=budgets, memory_budget_bytes=memory)
    return replace(config.planned(), strategies=tuple(plan.strategies.items()), engine=engine)


def compared_with(compare: str | None, plan: Plan) -> str | None:
    """The strategy of the second run: static is that of the longest sequences."""
    return plan.groups[-1].strategy if compare == STATIC else compare


def plan_line(plan: Plan) -> str:
    """What was chosen, and what it should take."""
    sets = ", ".join(f"<={group.limit} {group.strategy}" for group in plan.groups)
    times = f"{plan.predicted_s:.3g} s per step predicted, no set below {plan.lower_bound_s:.3g} s"
    return f"chosen strategies {sets}: {times}"
