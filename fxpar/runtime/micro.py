"""`MicroRun`: one micro-batch of a replica, as a bound program takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from fxpar.batching import MicroBatch
from fxpar.batching.collate import ALIASES, Tokens, collate
from fxpar.ir.axes import REPLICAS
from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import TOKEN_NUMBERS, Input, LogicalGraph
from fxpar.ir.pipeline_graph import TeamsGraph
from fxpar.ops.dropout import token_numbers
from fxpar.runtime.padding import pad


@dataclass(frozen=True)
class MicroRun:
    """`load()` gives the replica's batch, whole and padded; it is called when the micro-batch starts.

    An idle one adds exact zeros and leaves the buffers alone: its replica has nothing left to do but must take part in
    what the others do.
    """

    load: Callable[[], Mapping[str, Tensor]]
    scale: float
    seed: int = 0
    idle: bool = False


def sequence_length(sequence: Tokens) -> int:
    """Tokens of a sequence."""
    if isinstance(sequence, Tensor):
        return len(sequence)
    return next(len(value) for key, value in sequence.items() if ALIASES.get(key, key) == "input_ids")


def batch_keys(program: Program | LogicalGraph) -> list[str]:
    """What a program asks of a batch, but for what fxpar adds itself."""
    return [info.fqn for info in program.inputs if info.kind == "batch" and info.fqn != TOKEN_NUMBERS]


def row_of(program: Program, sequences: Sequence[Tokens], micro: MicroBatch) -> dict[str, Tensor]:
    """The batch of a micro-batch, padded as the program needs it."""
    row = collate(sequences, micro, batch_keys(program))
    lengths = [(i, sequence_length(sequences[i])) for i in micro.sequences]
    left = iter(lengths)
    bins = [sum(length for _, length in islice(left, count)) for count in micro.bins]
    return pad(program, with_token_numbers(program.inputs, row, lengths), bins)


def with_token_numbers(
    inputs: Sequence[Input], batch: Mapping[str, Tensor], sequences: Sequence[tuple[int, int]]
) -> dict[str, Tensor]:
    """A batch with the numbers of its tokens, if the graph with these inputs asks for any and the batch has none.

    `sequences` are (index in the mini-batch, length) of what the row consists of.
    """
    shape = next((info.meta.shape for info in inputs if info.fqn == TOKEN_NUMBERS), None)
    if shape is None or TOKEN_NUMBERS in batch:
        return dict(batch)
    numbers = token_numbers(sequences)
    return {**batch, TOKEN_NUMBERS: numbers if len(shape) == 2 else numbers[0]}


def as_one_sequence(inputs: Sequence[Input], batch: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """A batch whose row counts as sequence `index`, where the graph with these inputs asks for numbers of tokens."""
    shape = next((info.meta.shape for info in inputs if info.fqn == TOKEN_NUMBERS), None)
    like = next((info.fqn for info in inputs if info.meta.shape == shape and info.fqn in batch), None)
    if like is None:
        return dict(batch)
    made = with_token_numbers(inputs, batch, [(index, batch[like].shape[-1])])
    return {**made, TOKEN_NUMBERS: made[TOKEN_NUMBERS].to(batch[like].device)}


def replica_of(program: Program, rank: int) -> int:
    """The data-parallel replica of a rank, as those of all teams are counted."""
    if isinstance(program, TeamsGraph):
        number = program.team_of(rank)
        team, first = program.teams[number], program.mesh_of(number).ranks[0]
        return program.replicas_of(number)[replica_of(team, rank) - replica_of(team, first)]
    return next(placed.mesh.index(rank, REPLICAS) for placed in program.placed if rank in placed.mesh)


def is_first_of_replica(program: Program, rank: int) -> bool:
    """Whether a rank is the first one of its replica."""
    mesh = program.placed[0].mesh
    return rank in mesh and all(mesh.index(rank, axis) == 0 for axis in mesh.names if axis != REPLICAS)


def local_batch(
    program: Program, batch: Mapping[str, Tensor], rank: int, device: torch.device | None = None
) -> dict[str, Tensor]:
    """The pieces of a replica's (padded) batch that `rank` of the program's mesh works on."""
    found = {}
    for info, stored in zip(program.inputs, program.stored_inputs, strict=True):
        if info.kind == "batch":
            piece = stored.dist.take(batch[info.fqn], rank)
            found[info.fqn] = piece.to(device or piece.device, info.meta.dtype, non_blocking=True)
    return found
