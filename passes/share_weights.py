"""Share weights: one storage behind the executable graphs of all strategies.

Before: every graph wants its own copy of the parameters, each in its own layout. After: one flat buffer per dtype and
pool, and for each graph a view of it per parameter. A piece that another graph holds too, or that lies inside a piece
of another graph, is the same memory:

    dp4       wq : bf16[4096, 4096]          resident[0]       stride (4096, 1)
    dp2.tp2   wq : bf16[4096@tp, 4096]       resident[0]       stride (4096, 1)     on the ranks with tp = 0
    dp2.tp2   wo : bf16[4096, 4096@tp]       resident[.. ]     stride (4096, 1)     columns of dp4's piece

*Resident* strategies keep their pieces for the whole mini-batch, so what one switch has brought serves all later ones.
The others take turns in one *arena*, as large as the largest of them. It is all per rank: a quarter of a weight may
lie inside a half on one rank and not on another.

It runs last, on the programs of all strategies together, and changes none of them: a `StoragePass`, no `GraphPass`.

Cost: none at run time; a view into a wider piece is strided. Saves: bytes(all graphs) - bytes(maximal pieces).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from fxpar.errors import PassContractError, StageParamError, StorageError, a_type
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.exec_graph import Program
from fxpar.ir.pass_base import Tier
from fxpar.ir.pass_names import SHARING

Pool = Literal["resident", "arena"]
Runs = tuple[tuple[int, int, int], ...]  # (local start, global start, length)
ALIGN_BYTES = 256


@dataclass(frozen=True)
class BufferView:
    """A parameter of one strategy in a rank's flat buffers: element `offset` in buffer (`pool`, `dtype`)."""

    pool: Pool
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, buffers: Mapping[tuple[Pool, torch.dtype], Tensor]) -> Tensor:
        """The tensor in these buffers."""
        return buffers[self.pool, self.dtype].as_strided(self.shape, self.stride, self.offset)

    @property
    def ends(self) -> tuple[int, int]:
        """The elements of the buffer from its first to behind its last, whatever lies between them."""
        steps = ((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return self.offset, self.offset + (1 + sum(steps) if 0 not in self.shape else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the piece, wherever they lie."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class SharedStorage:
    """One rank's plan: sizes (elements) of the flat buffers, and the views by strategy and FQN."""

    numel: Mapping[tuple[Pool, torch.dtype], int]
    views: Mapping[str, Mapping[str, BufferView]]
    resident: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """What the buffers take together."""
        return sum(count * dtype.itemsize for (_, dtype), count in self.numel.items())

    def pool_bytes(self, pool: Pool) -> int:
        return sum(count * dtype.itemsize for (kind, dtype), count in self.numel.items() if kind == pool)

    def strategy_bytes(self, name: str) -> int:
        """What the pieces of one strategy would take on their own."""
        return sum(view.nbytes for view in self.views[name].values())


@dataclass(frozen=True)
class _Piece:
    """What a rank holds of a parameter: the runs of each dim, and the local shape with padding."""

    runs: tuple[Runs, ...]
    shape: tuple[int, ...]

    def starts_in(self, other: _Piece) -> tuple[int, ...] | None:
        """Where in `other` (local index per dim) this piece begins, if all of it is a box of `other`."""
        start = []
        for mine, size, theirs, width in zip(self.runs, self.shape, other.runs, other.shape, strict=True):
            if mine == theirs and size == width:
                start.append(0)
                continue
            # A padded or strided piece is no box of anything else.
            if len(mine) != 1 or mine[0][2] != size:
                return None
            _, first, length = mine[0]
            home = next((r for r in theirs if r[1] <= first and first + length <= r[1] + r[2]), None)
            if home is None:
                return None
            start.append(home[0] + first - home[1])
        return tuple(start)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@runtime_checkable
class StoragePass(Protocol):
    """What lays out the weights of all strategies of a run; `name` and `tier` as a `GraphPass` has them."""

    name: ClassVar[str]
    tier: ClassVar[Tier]

    def lay_out(
        self, programs: Mapping[str, Program], rank: int, resident: Collection[str] | None = None
    ) -> SharedStorage:
        """Views of the parameters of all programs on `rank`; `resident` (all by default) names those that stay."""
        ...


@dataclass(frozen=True)
class ShareWeights:
    """No options."""

    name: ClassVar[str] = SHARING
    tier: ClassVar[Tier] = "exact"

    def lay_out(
        self, programs: Mapping[str, Program], rank: int, resident: Collection[str] | None = None
    ) -> SharedStorage:
        """Offsets are multiples of 256 bytes. Parameters stand in the order of the first program, so that those of
        equal layers stand at equal distances.
        """
        keep = tuple(name for name in programs if resident is None or name in resident)
        wanted = {name: _pieces(program, rank) for name, program in programs.items()}
        numel: dict[tuple[Pool, torch.dtype], int] = {}
        arena_numel: dict[str, dict[torch.dtype, int]] = {name: {} for name in programs}
        views: dict[str, dict[str, BufferView]] = {name: {} for name in programs}
        for fqn in dict.fromkeys(fqn for pieces in wanted.values() for fqn in pieces):
            held = {name: pieces[fqn] for name, pieces in wanted.items() if fqn in pieces}
            placed: list[tuple[_Piece, BufferView]] = []
            # Largest first: whatever can lie inside another piece finds it there already.
            for name in sorted(held, key=lambda name: (name not in keep, -held[name][0].numel)):
                piece, dtype = held[name]
                view = _inside(piece, dtype, placed)
                if view is None and name in keep:
                    view = _append(piece, dtype, "resident", numel)
                    placed.append((piece, view))
                elif view is None:
                    mine: dict[tuple[Pool, torch.dtype], int] = {("arena", d): n for d, n in arena_numel[name].items()}
                    view = _append(piece, dtype, "arena", mine)
                    arena_numel[name] = {d: n for (_, d), n in mine.items()}
                views[name][fqn] = view
        for sizes in arena_numel.values():
            for dtype, count in sizes.items():
                numel["arena", dtype] = max(numel.get(("arena", dtype), 0), count)
        return SharedStorage(numel, views, keep)


def laid_out(
    sharing: StoragePass, programs: Mapping[str, Program], rank: int, resident: Collection[str] | None = None
) -> SharedStorage:
    """What a pass lays out; of any but fxpar's own, a subclass of it too, it is checked first. Raises StorageError,
    PassContractError for what is no storage.
    """
    storage: object = sharing.lay_out(programs, rank, resident)
    if not isinstance(storage, SharedStorage):
        why = f"lay_out must return a SharedStorage of buffers and views, not {a_type(storage)}"
        raise PassContractError(sharing.name, why)
    if type(sharing) is not ShareWeights:
        check_storage(sharing.name, programs, rank, programs if resident is None else resident, storage)
    return storage


def check_storage(
    name: str, programs: Mapping[str, Program], rank: int, resident: Collection[str], storage: SharedStorage
) -> None:
    """Raise StorageError that names the pass unless each strategy finds all of its parameters in the buffers, and none
    writes over what it has there, or one that stays (`resident`): two views may overlap only where both lie inside of a
    third, or one of them, as their pieces do.
    """
    standing: list[_Held] = []
    for strategy, program in programs.items():
        held = []
        for fqn, (piece, dtype) in _pieces(program, rank).items():
            view = storage.views.get(strategy, {}).get(fqn)
            if view is None:
                raise StorageError(name, fqn, strategy, rank, "it has no view")
            if (view.shape, view.dtype) != (piece.shape, dtype):
                wanted = f"{dtype}{list(piece.shape)}, not {view.dtype}{list(view.shape)}"
                raise StorageError(name, fqn, strategy, rank, f"the rank holds {wanted}")
            if view.offset < 0 or view.ends[1] > storage.numel.get((view.pool, dtype), 0):
                raise StorageError(name, fqn, strategy, rank, "its view ends beyond the buffer")
            if strategy in resident and view.pool != "resident":
                raise StorageError(
                    name, fqn, strategy, rank, "the strategy is resident, but the view is in the pool 'arena'"
                )
            held.append(_Held(fqn, strategy, piece, view))
        standing += [one for one in held if one.view.pool == "resident"]
        _check_apart(name, rank, [one for one in held if one.view.pool == "arena"])
    _check_apart(name, rank, standing)


@dataclass(frozen=True)
class _Held:
    """A parameter of a strategy, and where it lies."""

    fqn: str
    strategy: str
    piece: _Piece
    view: BufferView

    def lies_in(self, other: _Held) -> bool:
        return _inside(self.piece, self.view.dtype, [(other.piece, other.view)]) == self.view


def _check_apart(name: str, rank: int, held: list[_Held]) -> None:
    """Raises StorageError for views that overlap, other than as pieces of one."""
    whole: dict[str, list[_Held]] = defaultdict(list)
    for one in sorted(held, key=lambda one: -one.piece.numel):
        if not any(one.lies_in(other) for other in whole[one.fqn]):
            whole[one.fqn].append(one)
    ends: dict[torch.dtype, tuple[int, _Held | None]] = {}
    for one in sorted(
        (one for some in whole.values() for one in some), key=lambda one: (one.view.ends[0], -one.view.ends[1])
    ):
        end, before = ends.get(one.view.dtype, (0, None))
        if one.view.ends[0] < end and before is not None and one.piece.numel:
            raise StorageError(
                name, one.fqn, one.strategy, rank, f"its view overlaps {before.fqn} of '{before.strategy}'"
            )
        steps = sorted((step, size) for step, size in zip(one.view.stride, one.view.shape, strict=True) if size > 1)
        reach = 1
        for step, size in steps:
            if step < reach:
                raise StorageError(name, one.fqn, one.strategy, rank, "elements of its view overlap")
            reach = step * size
        if one.view.ends[1] > end:
            ends[one.view.dtype] = (one.view.ends[1], one)


def _pieces(program: Program, rank: int) -> dict[str, tuple[_Piece, torch.dtype]]:
    """What the rank computes with; of several pipeline stages, what all of its stages do."""
    found: dict[str, tuple[_Piece, torch.dtype]] = {}
    for part in program.placed:
        if rank not in part.mesh:
            continue
        for info, stored in zip(part.inputs, part.stored_inputs, strict=True):
            if info.kind == "param":
                shape = tuple(int(size) for size in stored.meta.shape)
                piece = (_piece(stored.dist, shape, rank), stored.meta.dtype)
                if found.setdefault(info.fqn, piece) != piece:
                    raise StageParamError(info.fqn, rank)
    return found


def _piece(dist: DistConfig, shape: tuple[int, ...], rank: int) -> _Piece:
    runs = tuple(tuple(dist.intervals(rank, d, size)) for d, size in enumerate(shape))
    return _Piece(runs, tuple(dist.local_shape(shape)))


def lies_in(dist: DistConfig, other: DistConfig, shape: tuple[int, ...], rank: int) -> bool:
    """Whether what a rank holds of a tensor of this global shape is a part of what it holds under another placement."""
    return _piece(dist, shape, rank).starts_in(_piece(other, shape, rank)) is not None


def _inside(piece: _Piece, dtype: torch.dtype, placed: list[tuple[_Piece, BufferView]]) -> BufferView | None:
    for other, view in placed:
        start = piece.starts_in(other) if view.dtype == dtype else None
        if start is not None:
            offset = view.offset + sum(i * step for i, step in zip(start, view.stride, strict=True))
            return BufferView(view.pool, dtype, offset, piece.shape, view.stride)
    return None


def _append(piece: _Piece, dtype: torch.dtype, pool: Pool, numel: dict[tuple[Pool, torch.dtype], int]) -> BufferView:
    """A contiguous view at the end of the buffer."""
    offset = numel.get((pool, dtype), 0)
    unit = ALIGN_BYTES // dtype.itemsize
    numel[pool, dtype] = offset + -(-piece.numel // unit) * unit
    stride, step = [], 1
    for size in reversed(piece.shape):
        stride.append(step)
        step *= max(size, 1)
    return BufferView(pool, dtype, offset, piece.shape, tuple(reversed(stride)))
