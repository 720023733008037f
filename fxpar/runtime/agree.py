"""Do all ranks hold the same? One small collective per mini-batch, against silent divergence."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import (
    AutoStrategiesError,
    BatchMismatchError,
    DeviceMismatchError,
    FxparError,
    OptionMismatchError,
    ProgramMismatchError,
    ReplicaBatchError,
    ValueMismatchError,
)
from fxpar.ir.content import content
from fxpar.ir.exec_graph import Program
from fxpar.torch_api.since_2_13 import all_gather_single

Sequence_ = Tensor | Mapping[str, Tensor]
T = TypeVar("T")


def digest(sequences: Sequence[Sequence_]) -> int:
    """63 bits that depend on every token and on the order of the sequences.

    What is no mini-batch is told apart by its kind only: it is an error, which all ranks report if it is the same.
    """
    found = hashlib.blake2b(digest_size=8)
    for sequence in sequences if isinstance(sequences, list | tuple) else [{"": sequences}]:
        items = sequence.items() if isinstance(sequence, Mapping) else (("input_ids", sequence),)
        for key, value in items:
            if not isinstance(value, Tensor):
                found.update(f"{key} {type(value).__name__}".encode())
                continue
            found.update(f"{key} {tuple(value.shape)} {value.dtype} {value.layout} {value.is_meta}".encode())
            if value.layout == torch.strided and not value.is_meta:
                # A copy: a single element may have any stride and still be called contiguous.
                values = value.detach().cpu().clone(memory_format=torch.contiguous_format).flatten()
                found.update(values.view(torch.uint8).numpy().tobytes())
    return int.from_bytes(found.digest(), "big") >> 1


def check_same_batch(
    sequences: Sequence[Sequence_], plan: str, device: torch.device, group: Any = None, denominator: object = None
) -> None:
    """Raise BatchMismatchError on every rank if one was given another mini-batch or denominator, or made another plan.

    `plan` is the fingerprint of what this rank is going to run, `denominator` what losses are divided by.
    """
    mine = [digest(sequences), _short(repr(denominator)), _short(plan)]
    world, count = dist.get_world_size(), len(mine)
    everyone = torch.empty(world * count, dtype=torch.int64, device=device)
    all_gather_single(everyone, torch.tensor(mine, dtype=torch.int64, device=device), group=group)
    values = everyone.view(world, count).tolist()
    for column, what in enumerate(("mini-batch", "denominator", "plan of the mini-batch")):
        different = [str(rank) for rank, row in enumerate(values) if row[column] != values[0][column]]
        if different:
            raise BatchMismatchError(", ".join(different), what)


def check_same_in_replicas(values: Iterable[object], replica: int, strategy: str, group: Any = None) -> None:
    """Raise ReplicaBatchError on every rank if a rank was given other tensors than the first one of its replica."""
    tensors = {str(number): value for number, value in enumerate(values) if isinstance(value, Tensor)}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (replica, digest([tensors])), group=group)
    first: dict[int, int] = {}
    for rank, (number, found) in enumerate(everyone):
        if everyone[first.setdefault(number, rank)][1] != found:
            raise ReplicaBatchError(strategy, rank, first[number])


def _short(text: str) -> int:
    """63 bits of it."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def check_same_values(module: nn.Module, group: Any = None) -> None:
    """Raise ValueMismatchError on every rank if parameters or buffers of the module differ from rank 0's: each rank
    keeps its own piece of its own weights, and computes with its own buffers.

    Parameters without values yet (on the meta device) and those that are sharded already have nothing to compare.
    """
    mine = {"parameter": _contents(module.named_parameters()), "buffer": _contents(module.named_buffers())}
    brief = {kind: hashlib.blake2b(repr(found).encode(), digest_size=8).digest() for kind, found in mine.items()}
    for kind, different in _different(brief, group).items():
        theirs: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(theirs, mine[kind], group=group)
        names = {**theirs[0], **theirs[different[0]]}
        fqn = next(name for name in names if theirs[0].get(name) != theirs[different[0]].get(name))
        raise ValueMismatchError(kind, fqn, ", ".join(map(str, different)))


def _contents(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[Any, ...]]:
    """By FQN: shape, dtype and content; one transfer from the device for all of them."""
    plain = {
        fqn: value
        for fqn, value in tensors
        if not value.is_meta and not isinstance(value, DTensor) and value.layout == torch.strided
    }
    if not plain:
        return {}
    found = torch.stack([content(value) for value in plain.values()]).tolist()
    return {
        fqn: (tuple(value.shape), str(value.dtype), one) for (fqn, value), one in zip(plain.items(), found, strict=True)
    }


def _different(mine: Mapping[str, Any], group: Any) -> dict[str, list[int]]:
    """By key, the ranks whose value is another than rank 0's; keys that all agree on are left out."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=group)
    found = {key: [r for r, theirs in enumerate(everyone) if theirs.get(key) != everyone[0].get(key)] for key in mine}
    return {key: ranks for key, ranks in found.items() if ranks}


def check_same_options(
    mine: Mapping[str, object], group: Any = None, *, compared: Mapping[str, object] | None = None
) -> None:
    """Raise OptionMismatchError on every rank if one was given another value of an option (`value_text`). What options
    named in `compared` lead to is compared in their place.
    """
    texts = {name: value_text(value) for name, value in {**mine, **(compared or {})}.items()}
    for name, different in _different(texts, group).items():
        theirs: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(theirs, (texts[name], repr(mine[name])), group=group)
        alike = [str(rank) for rank in different if theirs[rank][0] == theirs[different[0]][0]]
        raise OptionMismatchError(name, ", ".join(alike), theirs[different[0]][1], theirs[0][1])


def value_text(value: object) -> str:
    """The same for values that mean the same, whatever they are written as: lists and tuples, 8e9 and 8000000000, the
    items of a dict in any order.
    """
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{value_text(key)}: {value_text(one)}' for key, one in value.items()))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(value_text, value)))}}}"
    if isinstance(value, float) and value.is_integer():
        return repr(int(value))
    return repr(value)


def check_same_programs(programs: Mapping[str, Program], group: Any = None) -> None:
    """Raise ProgramMismatchError on every rank if one has compiled another program: they would wait for each other."""
    mine = {name: program.fingerprint() for name, program in programs.items()}
    for name, different in _different(mine, group).items():
        raise ProgramMismatchError(name, ", ".join(map(str, different)))


def agreed_cluster(mine: ClusterSpec, kind: str, group: Any = None) -> ClusterSpec:
    """Rank 0's cluster, on all ranks. Each rank describes the machine that it sees (what its launcher calls a node, the
    file that lies there), and ranks with other figures would make other plans. `kind` is a `torch.device.type`.

    Raises DeviceMismatchError on every rank if the kinds differ: no figures would hold for all.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (kind, mine), group=group)
    kinds = [theirs for theirs, _ in everyone]
    if len(set(kinds)) > 1:
        raise DeviceMismatchError(kinds)
    return everyone[0][1]


def on_rank_0(make: Callable[[], T], elsewhere: Callable[[str], FxparError] = AutoStrategiesError) -> T:
    """What `make` returns on rank 0, on all ranks: a search that looks at clocks or figures of this machine must not
    decide differently, and what takes long need not be done by all. What it raises is raised there, and what
    `elsewhere` makes of its text on the others.
    """
    found: list[T | None] = [None]
    problem, own = [""], None
    if dist.get_rank() == 0:
        try:
            found = [make()]
        except Exception as error:
            own, problem = error, [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(problem, src=0)
    if own is not None:
        raise own
    if problem[0]:
        raise elsewhere(problem[0])
    dist.broadcast_object_list(found, src=0)
    return found[0]  # type: ignore[return-value]
