"""The autograd graph of a trace as numbers, and values for results that a trace has not made itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.fx.experimental import proxy_tensor


@dataclass(frozen=True)
class Links:
    """What the gradient of a tensor passes through. Calls have numbers that grow from the first to the last one."""

    names: Mapping[int, str]
    """Of each call, what autograd calls its backward."""
    calls: tuple[tuple[int, int, int, int], ...]
    """Of each operand of a call: the number of the call, the place of the operand, the number of the call that made the
    operand, and which of its results it is.
    """
    leaves: tuple[tuple[int, int, Tensor], ...]
    """Of each operand that no call has made: the number of the call, the place of the operand, and the operand."""


def links_behind(value: Tensor) -> Links:
    """All that `value`, which has a gradient, is made of. As autograd's engine does, it looks at gradients alone."""
    first = value.grad_fn
    assert first is not None
    todo, seen = [first], {first}
    names, calls, leaves = {}, [], []
    while todo:
        call = todo.pop()
        number = call._sequence_nr()
        names[number] = call.name()
        for place, (before, result) in enumerate(call.next_functions):
            if before is None:
                continue
            leaf = getattr(before, "variable", None)  # of autograd's AccumulateGrad
            if isinstance(leaf, Tensor):
                leaves.append((number, place, leaf))
                continue
            calls.append((number, place, before._sequence_nr(), result))
            if before not in seen:
                seen.add(before)
                todo.append(before)
    return Links(names, tuple(calls), tuple(leaves))


def made_by(value: Tensor) -> tuple[int, int] | None:
    """The number of the call that made `value`, and which of its results it is; None without a gradient."""
    return None if value.grad_fn is None else (value.grad_fn._sequence_nr(), value.output_nr)


def as_result(node: fx.Node, like: Tensor) -> Tensor:
    """Inside a trace: a tensor as `like`, which from now on is the result of `node`."""
    mode = proxy_tensor.get_proxy_mode()
    assert mode is not None, "as_result works inside a trace only"
    with proxy_tensor.disable_proxy_modes_tracing():
        value = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        proxy_tensor.track_tensor_tree(value, fx.Proxy(node, mode.tracer), constant=None, tracer=mode.tracer)
    return value


def tensors_in(found: object) -> Sequence[Tensor]:
    """The tensors that a module returns: one, or several in a tuple or list."""
    if isinstance(found, Tensor):
        return [found]
    return [value for value in found if isinstance(value, Tensor)] if isinstance(found, tuple | list) else []
