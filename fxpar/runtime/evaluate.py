"""The loss of held-out sequences: forwards alone, each length group under its own strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpar.batching import GroupPlan, MicroBatch
from fxpar.batching.collate import collate, valid_tokens
from fxpar.exec_graph import ExecGraph
from fxpar.runtime.calls import PlainCalls
from fxpar.runtime.engine import Engine, sequence_length

LossFunction = Callable[[nn.Module, Any], Tensor]


def evaluate(
    module: nn.Module,
    loss: LossFunction,
    sequences: Sequence[Tensor | Mapping[str, Tensor]],
    engine: Engine,
    calls: PlainCalls,
) -> float:
    """Mean loss over the valid tokens of `sequences`, in evaluation mode and without gradients; same on all ranks.

    All ranks pass the same sequences. Raises as `train_step` does.
    """
    # A loss that keeps packed documents apart does so in the captured step; a forward alone would not see that.
    plan = engine.plan(sequences, packed=False)
    count = valid_tokens(sequences)
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    training = module.training
    module.eval()
    try:
        for group in plan.groups:
            name = engine.names[group.group]
            with calls.using(name), torch.no_grad():
                total += _share(module, loss, sequences, group, engine.bound[name].program, engine.bound[name].rank)
    finally:
        module.train(training)
    if dist.get_world_size() > 1:
        dist.all_reduce(total, group=engine.world_group)
    return float(total) / count


def _share(
    module: nn.Module,
    loss: LossFunction,
    sequences: Sequence[Any],
    group: GroupPlan,
    program: ExecGraph,
    rank: int,
) -> float:
    """This rank's part of the sum; the ranks of a replica find the same sum and share it out."""
    mesh = program.strategy.mesh
    replica = mesh.coordinate(rank).get("dp", 0)
    keys = [info.fqn for info in program.inputs if info.kind == "batch"]
    mine = group.replicas[replica]
    found = 0.0
    for turn in range(group.slots):
        # Replicas make equally many calls, as the first one moves weights between all ranks.
        micro = mine[turn] if turn < len(mine) else _shortest(sequences, group)
        value = float(loss(module, collate(sequences, micro, keys)))
        found += value if turn < len(mine) else 0.0
    return found * mesh.degree("dp") / mesh.size


def _shortest(sequences: Sequence[Any], group: GroupPlan) -> MicroBatch:
    lengths = {i: sequence_length(sequences[i]) for i in group.sequences}
    index = min(lengths, key=lambda i: (lengths[i], i))
    return MicroBatch((index,), lengths[index])
