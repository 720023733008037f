"""Which dims of the batch are dynamic, and what they are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fxpar.errors import DynamicDimError
from fxpar.ir.graph import TOKENS, Dim, Size, dim_symbol
from fxpar.torch_api.symbolic import FakeWorld

Dynamic = str | Mapping[str, Mapping[int, str]] | None
BATCH, DOCUMENT_BOUNDS = "B", "C"


@dataclass(frozen=True)
class DynamicDims:
    """names[key][dim] is the name of a dynamic dim; dims of the same name have one size."""

    names: Mapping[str, Mapping[int, str]]
    dims: tuple[Dim, ...]

    def expressions(self, key: str, tensor: Tensor) -> tuple[Size, ...]:
        """Shape of a batch tensor in sympy."""
        named = self.names.get(key, {})
        return tuple(dim_symbol(named[d]) if d in named else size for d, size in enumerate(tensor.shape))

    def symbolic(self, key: str, tensor: Tensor, world: FakeWorld) -> tuple[int | torch.SymInt, ...]:
        """Shape of a batch tensor with one shared symbolic size per name."""
        named = self.names.get(key, {})
        # torch takes sizes 0 and 1 for constants, so a dim whose example is that small is traced at 2.
        return tuple(
            world.symbol(named[d], max(2, size)) if d in named else size for d, size in enumerate(tensor.shape)
        )

    def with_like(self, key: str, other: str) -> DynamicDims:
        """The same with a further tensor, whose dims are those of `other`."""
        return replace(self, names={**self.names, key: self.names[other]})


def resolve_dynamic(
    dynamic: Dynamic, batch: Mapping[str, Tensor], captured: Mapping[str, tuple[Size, ...]] | None = None
) -> DynamicDims:
    """Turn the `dynamic` argument of `capture` into names per batch tensor; "auto" reads them off sizes, and where
    several are alike off the shape of a tensor of that name that was `captured` before. Raises DynamicDimError.
    """
    if dynamic is None:
        names: Mapping[str, Mapping[int, str]] = {}
    elif isinstance(dynamic, str):
        if dynamic != "auto":
            raise DynamicDimError(f"dynamic={dynamic!r} is not known; pass 'auto', None or {{key: {{dim: name}}}}")
        found, known = _automatic(batch), captured or {}
        names = {key: _told_apart(named, batch[key], known.get(key, ())) for key, named in found.items()}
    else:
        names = _checked(dynamic, batch)
    sizes: dict[str, tuple[int, str]] = {}
    for key, named in names.items():
        for d, name in named.items():
            size = batch[key].shape[d]
            first, where = sizes.setdefault(name, (size, f"{key}[{d}]"))
            if first != size:
                raise DynamicDimError(
                    f"dim {name!r} is {first} in {where} and {size} in {key}[{d}]. One name stands for one "
                    "size: give the second dim another name"
                )
    return DynamicDims(names, tuple(Dim(name, size) for name, (size, _) in sizes.items()))


def token_row(batch: Mapping[str, Tensor], dims: DynamicDims) -> str | None:
    """The key of a tensor of ids [1, T] or [T] whose token dim is dynamic: of a batch that is one row of tokens."""
    return next(
        (
            key
            for key, tensor in batch.items()
            if dims.names.get(key) == {tensor.dim() - 1: TOKENS} and tensor.numel() == tensor.shape[-1]
            if tensor.dim() <= 2 and _is_integer(tensor)
        ),
        None,
    )


def _checked(dynamic: Mapping[str, Mapping[int, str]], batch: Mapping[str, Tensor]) -> dict[str, dict[int, str]]:
    names: dict[str, dict[int, str]] = {}
    for key, named in dynamic.items():
        if key not in batch:
            raise DynamicDimError(f"dynamic names {key!r}, but the batch has {', '.join(batch)}")
        names[key] = {}
        for d, name in named.items():
            rank = batch[key].dim()
            if not -rank <= d < rank or not name.isidentifier():
                raise DynamicDimError(
                    f"dynamic[{key!r}] = {{{d}: {name!r}}} does not name a dim of a {rank}-dim tensor"
                )
            names[key][d % rank] = name
    return names


def _is_integer(tensor: Tensor) -> bool:
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.dtype != torch.bool


def _is_bounds(key: str, tensor: Tensor) -> bool:
    return "cu_seq" in key and tensor.dim() == 1 and _is_integer(tensor)


def _automatic(batch: Mapping[str, Tensor]) -> dict[str, dict[int, str]]:
    bounds = {key for key, tensor in batch.items() if _is_bounds(key, tensor)}
    rest = {key: tensor for key, tensor in batch.items() if key not in bounds}
    tokens = next((t for t in rest.values() if t.dim() == 2 and _is_integer(t)), None)
    if tokens is None and rest and all(t.dim() == 1 and _is_integer(t) for t in rest.values()):
        tokens = next(iter(rest.values()))  # packed tokens without a batch dim
    if tokens is None:
        names = {key: {0: BATCH} for key, tensor in rest.items() if tensor.dim()}
    else:
        names = {key: _token_dims(key, tensor, tokens) for key, tensor in rest.items()}
    names.update({key: {0: DOCUMENT_BOUNDS} for key in bounds})
    return {key: named for key, named in names.items() if named}


def _told_apart(named: Mapping[int, str], tensor: Tensor, captured: tuple[Size, ...]) -> dict[int, str]:
    """Without dims that are as long as the tokens by chance: they have that size in the shape that was captured."""
    same = [d for d in named if len(captured) == tensor.dim() and captured[d] == tensor.shape[d]]
    return {d: name for d, name in named.items() if d not in same} if len(same) < len(named) else dict(named)


def _token_dims(key: str, tensor: Tensor, tokens: Tensor) -> dict[int, str]:
    """The dims of `tensor` that are as long as the token dim of `tokens` [T] or [B, T]."""
    length = tokens.shape[-1]
    named = {d: TOKENS for d, size in enumerate(tensor.shape) if size == length}
    if tokens.dim() == 2 and tokens.shape[0] == length and named:
        if tensor.dim() < 2:
            raise DynamicDimError(
                f"cannot tell whether dim 0 of {key!r} is the batch or the tokens: both are {length} long. "
                "Use an example batch where they differ, or pass dynamic={key: {dim: name}}"
            )
        del named[0]
    return named
