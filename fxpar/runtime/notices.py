"""What `parallelize` says once, on rank 0, of a model that will not do what somebody may expect of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from fxpar.batching import LengthGroup
from fxpar.batching.lengths import LengthLimits
from fxpar.errors import muted_warnings, warn
from fxpar.ir.graph import LogicalGraph


@contextmanager
def only_rank_0_warns() -> Iterator[None]:
    """All ranks find the same, and one says it."""
    if dist.is_available() and dist.is_initialized() and dist.get_rank() > 0:
        with muted_warnings():
            yield
    else:
        yield


def warn_of_limits(groups: Sequence[LengthGroup], lengths: LengthLimits) -> None:
    """A limit says "up to", so one beyond what the model takes is no error: shorter sequences run. Nor is a branch of
    the model about short ones, of which there may be none; a branch for a single token is not worth a word.
    """
    if (lengths.least_at or lengths.least_in) and lengths.least > 2:
        warn(f"sequences of fewer than {lengths.least} tokens are an error in train_step: the model takes {lengths}")
    beyond = [f"{group.limit} ({group.strategy})" for group in groups if lengths.most and group.limit > lengths.most]
    if beyond:
        warn(
            f"strategies: {', '.join(beyond)} promises more than can run, as the model takes {lengths}. A longer "
            f"sequence is an error in train_step; write {lengths.most} as the last limit"
        )


def warn_of_carried(logical: LogicalGraph) -> None:
    """A forward that reads what earlier ones wrote depends on how many there were, and on which."""
    carried = logical.carried_buffers()
    if carried:
        warn(
            f"{logical.name}: the forward reads buffers that it writes ({', '.join(carried)}), so a loss depends on "
            "what ran before. One forward is a micro-batch, which may be several sequences; replicas begin with the "
            "same values, and the mean of what they write is kept. Losses and gradients are not those of single "
            "sequences on one device"
        )
    counted = logical.counted_buffers()
    if counted:
        warn(
            f"{logical.name}: the forward makes new values of buffers from the old ones ({', '.join(counted)}). One "
            "forward is a micro-batch, which may be several sequences, and the mean of what the replicas write is "
            "kept: these buffers do not count as on one device. Losses and gradients do not depend on them"
        )


def tell_of_tasks(graphs: Mapping[str, LogicalGraph]) -> None:
    """What of a model no task trains, and tasks that have no parameter in common with any other one."""
    if len(graphs) < 2:
        return
    trained = {name: {out.fqn for out in graph.outputs if out.kind == "grad"} for name, graph in graphs.items()}
    every = {info.fqn: info.requires_grad for graph in graphs.values() for info in graph.params()}
    nobody = [fqn for fqn, wanted in every.items() if wanted and not any(fqn in mine for mine in trained.values())]
    if nobody:
        warn(f"the loss of no task depends on {', '.join(nobody)}: no gradient, as in autograd")
    for name, mine in trained.items():
        if not any(mine & others for other, others in trained.items() if other != name):
            warn(
                f"task {name!r} trains no parameter that another task trains. It runs, but nothing is shared: is its "
                "loss of the right part of the model?"
            )
