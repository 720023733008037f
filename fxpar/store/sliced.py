"""Parameters that are filled by slice: an initializer sees the whole shape, memory is taken for this rank's part alone.

    with torch.no_grad(), sliced_init():
        weight = Sliced(Slice("layers.0.wq", (8192, 8192), ((0, 2), (0, 8192)), torch.float32, device, seed=0))
        nn.init.trunc_normal_(weight, std=0.02)
    weight.slice.value        # [2, 8192], the rows that a whole tensor would have, whoever draws them

Random numbers go by element number (`philox`), other in-place ops are done on the slice. What has been done is noted:
if an op comes that is not known to work element by element, the whole is made from the notes and the op is done there.
So the values do not depend on the slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from fxpar.store.philox import Box, Draw, fill, normal, truncated_normal, uniform
from fxpar.torch_api.tree import flatten, unflatten
from fxpar.torch_api.wrapper import stand_in, truncated_normals_by

_aten = torch.ops.aten
# Work element by element if all other operands are single numbers. Larger ones are whole already, and may change later.
_POINTWISE = {
    _aten.zero_.default,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.copy_.default,
    _aten.mul_.Tensor,
    _aten.mul_.Scalar,
    _aten.add_.Tensor,
    _aten.add_.Scalar,
    _aten.sub_.Tensor,
    _aten.sub_.Scalar,
    _aten.div_.Tensor,
    _aten.div_.Scalar,
    _aten.neg_.default,
    _aten.abs_.default,
    _aten.clamp_.default,
    _aten.clamp_min_.default,
    _aten.clamp_max_.default,
}
_RANDOM: dict[Any, Callable[..., Draw]] = {
    _aten.normal_.default: lambda mean=0.0, std=1.0: normal(mean, std),
    _aten.uniform_.default: lambda low=0.0, high=1.0: uniform(low, high),
}
_SHOW = {_aten.detach.default, _aten.alias.default}


@dataclass(eq=False)
class Slice:
    """The part `box` of a tensor; `name` and `seed` say which random numbers it gets.

    `whole` is made by the first op that needs it, and is what counts from then on.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: torch.dtype
    device: torch.device
    seed: int
    whole: Tensor | None = None
    draws: int = 0
    _done: list[Callable[[Tensor, Box], object]] = field(default_factory=list)
    _part: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """The slice as it is now, zeros at first."""
        if self.whole is not None:
            return cut(self.whole, self.box)
        if self._part is None:
            self._part = self._zeros(self.box)
        return self._part

    def draw(self, draw: Draw) -> None:
        """Fill it with random numbers, other ones each time."""
        name = f"{self.seed}\0{self.name}\0{self.draws}"
        self.draws += 1
        self.do(lambda target, box: fill(target, box, self.shape, name, draw))

    def do(self, action: Callable[[Tensor, Box], object]) -> None:
        """Change the value by an action on a contiguous tensor, which is a box of the whole."""
        if self.whole is not None:
            action(self.whole, tuple((0, size) for size in self.shape))
            return
        action(self.value, self.box)
        self._done.append(action)

    def make_whole(self) -> Tensor:
        """The whole tensor; what has been done to the slice is done to it."""
        if self.whole is None:
            everything = tuple((0, size) for size in self.shape)
            whole = self._zeros(everything)
            for action in self._done:
                action(whole, everything)
            self.whole = whole
            self._done, self._part = [], None
        return self.whole

    def _zeros(self, box: Box) -> Tensor:
        return torch.zeros([stop - start for start, stop in box], dtype=self.dtype, device=self.device)


def cut(whole: Tensor, box: Box) -> Tensor:
    """The part of a tensor in a box."""
    return whole[tuple(slice(start, stop) for start, stop in box)]


class Sliced(Tensor):
    """A tensor that shows all of its shape and has one slice; see the top of the file."""

    slice: Slice

    def __new__(cls, part: Slice) -> Self:
        made = stand_in(cls, part.shape, part.dtype, part.device)
        made.slice = part
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Sliced({self.slice.name}, {list(self.shape)}, {self.slice.box})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        first, others = args[0] if args else None, args[1:]
        if isinstance(first, Sliced):
            if func in _SHOW:
                return Sliced(first.slice)
            if func in _RANDOM and kwargs.get("generator") is None:
                kwargs.pop("generator", None)
                first.slice.draw(_RANDOM[func](*others, **kwargs))
                return first
            if func in _POINTWISE and all(map(_is_number, (*others, *kwargs.values()))):
                others = tuple(other.clone() if isinstance(other, Tensor) else other for other in others)
                first.slice.do(lambda target, box: func(target, *others, **kwargs))
                return first
        return _on_whole(func, args, kwargs)


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor) or (value.dim() == 0 and not isinstance(value, Sliced))


def _on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Do an op that is not known on whole tensors; what it returns of its operands is these again."""
    leaves, structure = flatten((args, kwargs))
    shown = {id(leaf.slice.make_whole()): leaf for leaf in leaves if isinstance(leaf, Sliced)}
    whole = [leaf.slice.make_whole() if isinstance(leaf, Sliced) else leaf for leaf in leaves]
    args, kwargs = unflatten(whole, structure)
    found, structure = flatten(func(*args, **kwargs))
    return unflatten([shown.get(id(leaf), leaf) for leaf in found], structure)


@contextmanager
def sliced_init() -> Iterator[None]:
    """In the block `torch.nn.init` fills `Sliced` tensors by slice."""
    with truncated_normals_by(Sliced, _trunc_normal):
        yield


def _trunc_normal(
    tensor: Sliced, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
) -> Tensor:
    if generator is not None:
        # Its numbers come one after the other, so all of them are drawn.
        torch.nn.init.trunc_normal_(tensor.slice.make_whole(), mean, std, a, b, generator)
    else:
        tensor.slice.draw(truncated_normal(mean, std, a, b))
    return tensor
