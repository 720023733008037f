"""A small model with tied weights, a buffer, a frozen and an unused parameter; sharded over all ranks as DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

# DTensors load dynamo when first used: better once here than in each of the forked ranks.
torch.compiler.list_backends()


class Small(nn.Module):
    """Parameters of 11, 3, 2 and 1 rows: with four ranks some hold none."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.norm = nn.BatchNorm1d(width)
        self.body = nn.Linear(width, 3)
        self.gain = nn.Parameter(torch.randn(1))
        self.frozen = nn.Parameter(torch.randn(2, 2), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(2))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight


def shard(model: nn.Module, world: int) -> None:
    """Every parameter becomes a DTensor, Shard(0) over all ranks; tied ones stay tied."""
    mesh = init_device_mesh("cpu", (world,))
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                local = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
                made[parameter] = nn.Parameter(local, requires_grad=parameter.requires_grad)
            setattr(module, name, made[parameter])


def make(world: int, seed: int = 0, width: int = 6, **options: Any) -> tuple[Small, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Small(width)
    if world > 1:
        shard(model, world)
    decay = [p for n, p in model.named_parameters() if "body" in n]
    rest = [p for n, p in model.named_parameters() if "body" not in n]
    groups = [{"params": decay, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.1, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One optimizer step with gradients that depend on the seed alone, not on the ranks."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if name == "unused" or not parameter.requires_grad:
            continue
        sharded = isinstance(parameter, DTensor)
        parameter.grad = (
            distribute_tensor(gradient, parameter.device_mesh, parameter.placements) if sharded else gradient
        )
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for buffer in model.buffers():
            buffer += seed


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All tensors of a model and its optimizer, gathered."""
    gather: Callable[[torch.Tensor], torch.Tensor] = lambda t: t.full_tensor() if isinstance(t, DTensor) else t  # noqa: E731
    found = {
        name: gather(tensor).detach().clone() for name, tensor in model.state_dict().items() if torch.is_tensor(tensor)
    }
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items() if parameter in optimizer.state else ():
            found[f"{name}/{key}"] = gather(value).clone()
    return found


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different
