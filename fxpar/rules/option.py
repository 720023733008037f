"""What a sharding rule speaks of: `OpView` (one call, sizes as integers), `Factor` and `Option`.

A *factor* is one loop of an op, in the sense of Shardy's sharding rules: it names the dim that the loop walks in each
tensor. Cutting a loop over a mesh axis cuts those dims; a result that does not contain the loop becomes a partial
reduction, or the factor is no legal cut. So `mm` has factors M (parallel), N (parallel) and K (a sum).

An *option* is one legal way to run the op on one mesh axis: the placement of each tensor operand and of each result.
Running the op on the local operands, with sizes in its arguments made local, gives the local results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fxpar.ir.dist_config import OuterShard, Partial, Placement, R, Shard, chunk

Shape = tuple[int, ...]
ABSENT = "absent"  # a result that a call's output mask leaves out


@dataclass(frozen=True)
class TensorRef:
    """Stands for tensor operand number `index` inside `OpView.args`."""

    index: int


@dataclass(frozen=True)
class OpView:
    """One call of an op with integer sizes; tensor operands are numbered in the order they appear.

    Some integers stand for sizes that change from batch to batch: `dynamic` has the dims of the operands and results
    that do, `moving` says that an argument does.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    dynamic: tuple[tuple[int, ...], ...] = ()
    moving: bool = False

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """Positional or keyword argument of the schema."""
        if position < len(self.args):
            return self.args[position]
        return dict(self.kwargs).get(name, default)

    def local(self, option: Option, degree: int) -> OpView:
        """This call on a rank's own operands and results; its arguments are left alone."""
        inputs = tuple(localize(s, p, degree) for s, p in zip(self.inputs, option.inputs, strict=True))
        outputs = tuple(localize(s, p, degree) for s, p in zip(self.outputs, option.outputs, strict=True))
        return replace(self, inputs=inputs, outputs=outputs)

    def dim(self, value: int, rank: int | None = None) -> int:
        """A dim argument made non-negative (against the rank of operand 0 by default)."""
        rank = len(self.inputs[0]) if rank is None else rank
        return value % rank if rank else 0


@dataclass(frozen=True)
class Option:
    """Placements of all operands and results of one op on one mesh axis."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]

    def at(self, seed: Seed) -> Placement:
        """Placement of one tensor."""
        made, index = seed
        return (self.outputs if made else self.inputs)[index]


@dataclass(frozen=True)
class Factor:
    """One loop: the dim it walks in each operand (None: not there) and each result.

    A result's entry may be the name of the reduction ("sum", "max", "avg", "logsumexp") that combines the chunks'
    results, or ABSENT. `pad` says that padding the dim with zeros is harmless.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int | str | None, ...]
    pad: bool = True
    sections: bool = True

    def option(self, op: OpView, degree: int, sections: tuple[int, ...]) -> Option | None:
        """The option that cuts this loop, or None where it is not legal for these sizes."""
        if sections and not self.sections:
            return None
        for shape, d in [*zip(op.inputs, self.inputs, strict=True), *zip(op.outputs, self.outputs, strict=True)]:
            if isinstance(d, int) and not divides(shape[d], degree, sections, self.pad):
                return None
        if any(d is None for d in self.outputs):
            return None
        inputs = tuple(R if d is None else Shard(d, sections) for d in self.inputs)
        made = (
            R if d == ABSENT else Shard(d, sections) if isinstance(d, int) else Partial(str(d)) for d in self.outputs
        )
        return Option(inputs, tuple(made))


def divides(size: int, degree: int, sections: tuple[int, ...], pad: bool) -> bool:
    """Whether a dim may be cut: evenly, or padded where that is harmless and leaves no more than half of it empty."""
    if sections or not pad:
        return chunk(size, degree, sections) is not None and (bool(sections) or size % degree == 0)
    return size % degree == 0 or size >= 2 * degree


Cut = Shard | OuterShard
Seed = tuple[bool, int]  # (is a result, index): which tensor of the op a placement is about
Rule = Callable[[OpView, int, Seed, Shard], list[Option]]


def replicated(op: OpView) -> Option:
    """The option that is always legal: everything replicated."""
    return Option((R,) * len(op.inputs), (R,) * len(op.outputs))


def from_factors(factors: list[Factor], op: OpView, degree: int, seed: Seed, shard: Shard) -> list[Option]:
    """Options that cut the loop which walks dim `shard.dim` of the seed tensor."""
    is_result, index = seed
    options = []
    for factor in factors:
        entry = (factor.outputs if is_result else factor.inputs)[index]
        if isinstance(entry, int) and not isinstance(entry, bool) and entry == shard.dim:
            option = factor.option(op, degree, shard.sections)
            if option is not None:
                options.append(option)
    return options


def localize(shape: Shape, placement: Placement, degree: int) -> Shape:
    """Local shape of a tensor on one axis."""
    match placement:
        case Shard(dim, sections):
            local = chunk(shape[dim], degree, sections)
        case OuterShard(dim, outer):
            local = chunk(shape[dim], outer)
        case _:
            return shape
    assert local is not None
    return (*shape[:dim], local, *shape[dim + 1 :])


def linear(op: OpView, *positions: int) -> Option:
    """Partial sums on the operands at `positions` pass through to every result."""
    inputs = tuple(Partial() if i in positions else R for i in range(len(op.inputs)))
    return Option(inputs, (Partial(),) * len(op.outputs))
