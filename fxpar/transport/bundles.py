"""Small tensors that lie alike travel as one: a switch costs per tensor, not only per byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fxpar.switch import ParamLayout, PlacedParam

SMALL_BYTES = 1 << 20  # of a whole tensor that is worth two more copies of it
BUNDLE_BYTES = 16 << 20  # of a whole bundle: these copies are extra memory


@dataclass(frozen=True)
class Bundle:
    """Tensors that are placed alike before and after; several of them are stacked on a new first dim."""

    members: tuple[str, ...]

    @property
    def name(self) -> str:
        """Names all members, so that ranks with other bundles notice."""
        return ", ".join(self.members)

    def placed(self, layout: ParamLayout) -> PlacedParam:
        """How the stack lies."""
        param = layout.params[self.members[0]]
        if len(self.members) == 1:
            return param
        copies = tuple(replace(copy, dims=((), *copy.dims)) for copy in param.copies)
        return replace(param, shape=(len(self.members), *param.shape), copies=copies)

    def stacked(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The values of the members, or the tensor itself if it is alone."""
        first = tensors[self.members[0]]
        return first if len(self.members) == 1 else torch.stack([tensors[name] for name in self.members])

    def room(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Memory for the stack of the members, or the tensor itself if it is alone."""
        first = tensors[self.members[0]]
        return first if len(self.members) == 1 else first.new_empty(len(self.members), *first.shape)

    def unstack(self, stack: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Write the members."""
        if len(self.members) > 1:
            for name, value in zip(self.members, stack.unbind(), strict=True):
                tensors[name].copy_(value)


def bundles_of(source: ParamLayout, target: ParamLayout, dtypes: Mapping[str, torch.dtype]) -> list[Bundle]:
    """All tensors of the layouts, those that lie alike together; `dtypes` are those of the source's tensors.

    Tensors lie alike if they share their PlacedParam in both layouts.
    """
    together: dict[tuple, list[str]] = {}
    bundles: list[Bundle] = []
    for name, param in target.params.items():
        nbytes = torch.Size(param.shape).numel() * param.dtype.itemsize
        if nbytes > SMALL_BYTES:
            bundles.append(Bundle((name,)))
            continue
        key = (id(source.params[name]), id(param), dtypes[name])
        members = together.setdefault(key, [])
        members.append(name)
        if (len(members) + 1) * nbytes > BUNDLE_BYTES:
            bundles.append(Bundle(tuple(together.pop(key))))
    return [*bundles, *(Bundle(tuple(members)) for members in together.values())]


def layout_of_bundles(layout: ParamLayout, bundles: Sequence[Bundle]) -> ParamLayout:
    """The layout of the stacks."""
    return replace(layout, params={bundle.name: bundle.placed(layout) for bundle in bundles})
