"""`WeightStore`: the one storage behind all executable graphs.

    home       every parameter in fp32, cut over all ranks; what the optimizer, checkpoints and users see, as DTensors
    gradients  of the home layout, in its dtype; `.grad` of those DTensors
    compute    the layouts of the strategies, views of flat buffers (`passes/share_weights.py`)

Home pieces are views of one flat buffer per dtype as well, without padding, as DTensor wants them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from fxpar.errors import ChangedParameterError, GradientHookError, ParallelizeError, StaleOptimizerError
from fxpar.ir.exec_graph import Program
from fxpar.passes.share_weights import ALIGN_BYTES, SharedStorage
from fxpar.store.home import specs_of, wire_layout
from fxpar.store.home_tensors import HomeMeshes, broadcast_replicated
from fxpar.switch.layout import ParamLayout, layout_of
from fxpar.torch_api.dtensors import local_of, sibling
from fxpar.torch_api.hooks import has_gradient_hook

_TORCH_ALIGNS = 64  # bytes, on the CPU


def _lazy_zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.zeros(count)`; on the CPU its pages come from the operating system when they are first touched.

    torch writes its zeros, which makes a rank pay for buffers that some strategies only use later, or never.
    """
    if device.type != "cpu":
        return torch.zeros(count, dtype=dtype, device=device)
    nbytes = count * dtype.itemsize
    raw = np.zeros(nbytes + _TORCH_ALIGNS, np.uint8)
    start = -raw.ctypes.data % _TORCH_ALIGNS
    return torch.from_numpy(raw[start : start + nbytes]).view(dtype)


class WeightStore:
    """Storage of one rank. `adopt` turns a module's parameters into DTensors that live here."""

    def __init__(
        self,
        programs: Mapping[str, Program],
        home: ParamLayout,
        storage: SharedStorage,
        *,
        rank: int,
        device: torch.device,
    ) -> None:
        self.home, self.rank, self.device = home, rank, device
        _, self.home_tensors = self._views(list(home.params))
        self._grad_flat: list[Tensor] = []
        self.home_grads: dict[str, Tensor] = {}
        self.lay_out(programs, storage)
        self._meshes = HomeMeshes(device.type)
        self.params: dict[str, nn.Parameter] = {}
        self._adopted: dict[str, tuple[nn.Parameter, torch.dtype, bool]] = {}  # by every name, with what it was then
        self._given: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}  # by id: those that `adopt` replaced
        self._steps = 0
        weakref.finalize(self, register_optimizer_step_post_hook(_counts_steps(weakref.ref(self))).remove)

    def lay_out(self, programs: Mapping[str, Program], storage: SharedStorage) -> None:
        """Make room for the weights of these programs, in the place of those before; what is at home stays."""
        self.storage = storage
        self.specs = specs_of(programs.values())
        self.trained = {out.fqn for program in programs.values() for out in program.outputs if out.kind == "grad"}
        self.wire = wire_layout(self.home, self.specs)
        self.layouts = {name: layout_of(program, name) for name, program in programs.items()}
        self.home_gradients(f for f in self.home.params if f in self.trained)
        flat = {key: _lazy_zeros(count, key[1], self.device) for key, count in storage.numel.items()}
        # Zeros, as a graph counts on padding that is 0. Nothing writes to padding but another layout in the arena.
        self._views_of = {
            name: {fqn: view.of(flat) for fqn, view in views.items()} for name, views in storage.views.items()
        }
        self._arena_padding = {name: list(self._padding_in_arena(name)) for name in programs}

    def _padding_in_arena(self, name: str) -> Iterator[Tensor]:
        """The parts of a strategy's pieces in the arena that hold no values."""
        for fqn, view in self.storage.views[name].items():
            if view.pool != "arena":
                continue
            param, piece = self.layouts[name].params[fqn], self._views_of[name][fqn]
            dist = next(copy for copy in param.copies if self.rank in copy.mesh)
            for d, size in enumerate(param.shape):
                ends = 0
                for start, _, length in [*sorted(dist.intervals(self.rank, d, size)), (piece.shape[d], 0, 0)]:
                    if start > ends:
                        yield piece.narrow(d, ends, start - ends)
                    ends = start + length

    def _views(self, names: list[str]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """A flat buffer per dtype and the home pieces of these parameters in it."""
        sizes: dict[torch.dtype, int] = {}
        place: dict[str, tuple[torch.dtype, int, tuple[int, ...]]] = {}
        for fqn in names:
            param = self.home.params[fqn]
            # DTensor keeps its pieces without padding.
            shape = param.copies[0].real_shape(self.rank, param.shape)
            offset = sizes.get(param.dtype, 0)
            unit = ALIGN_BYTES // param.dtype.itemsize
            sizes[param.dtype] = offset + -(-torch.Size(shape).numel() // unit) * unit
            place[fqn] = (param.dtype, offset, shape)
        flat = {dtype: _lazy_zeros(count, dtype, self.device) for dtype, count in sizes.items()}
        views = {}
        for fqn, (dtype, offset, shape) in place.items():
            piece = flat[dtype][offset : offset + torch.Size(shape).numel()].view(shape)
            # The same memory as a storage of its own: a DTensor shows the offset of its piece as an address, and DCP
            # would copy from there when it saves asynchronously.
            views[fqn] = torch.from_dlpack(piece)
        return list(flat.values()), views

    def compute(self, name: str) -> dict[str, Tensor]:
        """Local parameters of one strategy by FQN; valid after the switch to it, until the optimizer's step."""
        return self._views_of[name]

    def clear_padding(self, name: str) -> None:
        """Make the padding of a strategy's pieces 0 again, before its turn in the arena: others have written there."""
        for padding in self._arena_padding[name]:
            padding.zero_()

    def adopt(self, module: nn.Module, names: Mapping[str, tuple[str, ...]]) -> None:
        """Copy the module's parameters home and put DTensors in their place; `names` lists all FQNs of each (tied).

        Parameters on the meta device come without values: fill them afterwards. The whole weights are let go.
        """
        with torch.no_grad():
            for fqn, aliases in names.items():
                whole = module.get_parameter(fqn)
                if isinstance(whole, DTensor):
                    raise ParallelizeError(f"{fqn} is a DTensor already; pass a model that is not sharded yet")
                if has_gradient_hook(whole):
                    raise GradientHookError(fqn)
                self._take_home(fqn, whole)
                self._given[id(whole)] = weakref.ref(whole), fqn
                local = self.home_tensors[fqn]
                shown = nn.Parameter(self._meshes.as_dtensor(local, self.home.params[fqn]), whole.requires_grad)
                self.params[fqn] = shown
                for alias in aliases:
                    owner, _, attribute = alias.rpartition(".")
                    setattr(module.get_submodule(owner), attribute, shown)
            broadcast_replicated(self.home_tensors[f] for f in names if self._is_replicated(f))
        self._adopted = {fqn: (p, p.dtype, p.requires_grad) for fqn, p in _parameters(module).items()}

    def check_adopted(self, module: nn.Module, *, trained: bool) -> None:
        """Raise ChangedParameterError unless the module's parameters are those that live here, in their dtype, and
        (`trained`) those that had a gradient then have one; GradientHookError for hooks that nobody would call.
        """
        now = _parameters(module)
        for fqn in {**self._adopted, **now}:
            known, dtype, had_gradient = self._adopted.get(fqn, (None, None, False))
            if known is None or now.get(fqn) is not known:
                raise ChangedParameterError(fqn, "is another one than")
            if known.dtype != dtype:
                raise ChangedParameterError(fqn, f"is {known.dtype}, unlike")
            if trained and known.requires_grad != had_gradient:
                raise ChangedParameterError(fqn, f"has requires_grad={known.requires_grad}, unlike")
            if has_gradient_hook(known):
                raise GradientHookError(fqn)

    def fill_slice(self, fqn: str, value: Tensor) -> None:
        """Set this rank's piece of a parameter: `home_box` of it."""
        with torch.no_grad():
            self.home_tensors[fqn].copy_(value)

    def home_box(self, fqn: str) -> tuple[tuple[int, int], ...]:
        """(start, stop) per dim of what this rank has of a parameter at home; empty where it has nothing."""
        param = self.home.params[fqn]
        runs = [param.copies[0].intervals(self.rank, d, size) for d, size in enumerate(param.shape)]
        return tuple((run[0][1], run[0][1] + run[0][2]) if run else (0, 0) for run in runs)

    def _take_home(self, fqn: str, whole: Tensor) -> None:
        if whole.device.type == "meta":
            return
        box = tuple(slice(start, stop) for start, stop in self.home_box(fqn))
        self.home_tensors[fqn].copy_(whole.detach()[box])

    def _is_replicated(self, fqn: str) -> bool:
        return not self.home.params[fqn].copies[0].shard_axes

    def version(self) -> tuple[int, ...]:
        """Changes whenever the home weights are written to: by an optimizer's step, a checkpoint, `load_state_dict`, or
        an op in place. Writes through `.data` and by `torch._foreach_*` are not seen: torch counts neither.
        """
        versions = [piece._version for piece in self.home_tensors.values()]
        for param in self.params.values():
            assert isinstance(param, DTensor)
            versions += param._version, local_of(param)._version  # each counts what went through it alone
        return self._steps, *versions

    def count_step(self, optimizer: torch.optim.Optimizer) -> None:
        """After a step of an optimizer that may have our parameters; fused ones count nothing by themselves.

        Raises StaleOptimizerError if it has one that `adopt` replaced: it would train nothing, without a word.
        """
        held = [param for group in optimizer.param_groups for param in group["params"]]
        for param in held:
            given, fqn = self._given.get(id(param), (None, ""))
            if given is not None and given() is param:
                raise StaleOptimizerError(type(optimizer).__name__, fqn)
        mine = {id(param) for param in self.params.values()}
        self._steps += any(id(param) in mine for param in held)

    @contextmanager
    def shown_without_values(self, module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
        """Within the block the module's parameters have no values, and these dtypes: for a capture."""
        shown = {}
        for fqn, param in self.params.items():
            whole = torch.empty(tuple(param.shape), dtype=dtypes[fqn], device="meta")
            shown[id(param)] = nn.Parameter(whole, requires_grad=param.requires_grad)
        owners = [
            (owner, name, param)
            for owner in module.modules()
            for name, param in list(owner.named_parameters(recurse=False))
            if id(param) in shown
        ]
        try:
            for owner, name, param in owners:
                setattr(owner, name, shown[id(param)])
            yield
        finally:
            for owner, name, param in owners:
                setattr(owner, name, param)

    def home_gradients(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Where the gradients of these parameters lie. Those that the training step does not touch are made on demand,
        for a plain call that does.
        """
        wanted = list(names)
        flat, views = self._views([fqn for fqn in wanted if fqn not in self.home_grads])
        self._grad_flat += flat
        self.home_grads |= views
        return {fqn: self.home_grads[fqn] for fqn in wanted}

    def attach_gradients(self, names: Collection[str]) -> None:
        """Before a mini-batch that touches these parameters: their `.grad` is their home gradient.

        Gradients that the user has dropped (`zero_grad`) start at zero, others are added to, and parameters that are
        not touched keep what they have, None too: as in autograd.
        """
        clean = all(self.params[fqn].grad is None for fqn in self.home_grads)
        if clean:
            for flat in self._grad_flat:
                flat.zero_()
        for fqn, local in self.home_grads.items():
            param = self.params[fqn]
            assert isinstance(param, DTensor)  # it and its gradient lie alike
            if param.grad is None:
                if not clean:
                    local.zero_()
                if fqn in names:
                    param.grad = sibling(param, local)
            elif isinstance(param.grad, DTensor) and param.grad.to_local().data_ptr() != local.data_ptr():
                local.copy_(param.grad.redistribute(param.device_mesh, param.placements).to_local())
                param.grad = sibling(param, local)

    def scale_gradients(self, factor: float) -> None:
        """Multiply all home gradients."""
        for flat in self._grad_flat:
            flat.mul_(factor)

    @property
    def flat_gradients(self) -> tuple[Tensor, ...]:
        """All home gradients of this rank, as few tensors."""
        return tuple(self._grad_flat)

    def drop_gradients(self) -> None:
        """`.grad` is None everywhere, so that an optimizer leaves the weights alone."""
        for param in self.params.values():
            param.grad = None

    def gather(self) -> dict[str, Tensor]:
        """Whole parameters by FQN, on every rank; for tests and exports of small models."""
        return {fqn: param.detach().full_tensor() for fqn, param in self.params.items()}  # type: ignore[attr-defined]


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """By every name, those of tied ones too."""
    return dict(module.named_parameters(remove_duplicate=False))


def _counts_steps(store: weakref.ref[WeightStore]) -> Callable[[torch.optim.Optimizer, Any, Any], None]:
    """A hook that lets the store go when nobody else needs it."""

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        found = store()
        if found is not None:
            found.count_step(optimizer)

    return hook
