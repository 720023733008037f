"""Tensors that only stand for one: what torch does with them, Python code decides.

What this wraps (torch 2.13): `torch.Tensor._make_wrapper_subclass`, which gives a tensor subclass shape and dtype but
no memory, and `torch.nn.init._no_grad_trunc_normal_`, which draws until all elements of a tensor are within its bounds,
so that no subclass can do it by slice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_LOCK = threading.Lock()
_inside = 0


def stand_in(kind: type, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of class `kind` without memory; its `__torch_dispatch__` gets every op."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


@contextmanager
def truncated_normals_by(kind: type, draw: Callable[..., Tensor]) -> Iterator[None]:
    """In the block `torch.nn.init.trunc_normal_` of a tensor of class `kind` is `draw(tensor, mean, std, a, b)`.

    Threads may be in it at once, with the same arguments.
    """
    global _inside
    with _LOCK:
        _inside += 1
        if _inside == 1:
            _take_over(kind, draw)
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if not _inside:
                torch.nn.init._no_grad_trunc_normal_ = _usual.pop()


_usual: list[Any] = []


def _take_over(kind: type, draw: Callable[..., Tensor]) -> None:
    usual = torch.nn.init._no_grad_trunc_normal_

    def trunc_normal(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return (draw if isinstance(tensor, kind) else usual)(tensor, *args, **kwargs)

    _usual.append(usual)
    torch.nn.init._no_grad_trunc_normal_ = trunc_normal
