"""What goes into a captured step: parameters, buffers, batch, scale and seed as named fake tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fxpar.errors import BatchError, DeviceError
from fxpar.ir.graph import Input, Size, TensorMeta
from fxpar.torch_api.symbolic import FakeWorld
from fxpar.tracer.dynamic import DynamicDims
from fxpar.tracer.provenance import user_line

Batch = Mapping[str, Tensor] | Sequence[Tensor]


@dataclass(frozen=True)
class Signature:
    """The inputs of a step in order, and the fake tensor of each.

    `names[i]` lists every FQN under which the model holds input i (a tied weight has several).
    """

    inputs: tuple[Input, ...]
    fakes: tuple[Tensor, ...]
    names: tuple[tuple[str, ...], ...]

    def of_kind(self, *kinds: str) -> dict[str, Tensor]:
        """FQN -> fake tensor of the inputs of these kinds, in order."""
        return {i.fqn: fake for i, fake in zip(self.inputs, self.fakes, strict=True) if i.kind in kinds}

    def and_input(self, found: Input, fake: Tensor) -> Signature:
        """The same with one more input."""
        return Signature((*self.inputs, found), (*self.fakes, fake), (*self.names, (found.fqn,)))

    def with_scale(self, dtype: torch.dtype) -> Signature:
        """The same with a scale of this dtype."""
        scale = TensorMeta((), dtype)
        return replace(self, inputs=tuple(replace(i, meta=scale) if i.kind == "scale" else i for i in self.inputs))

    def model_tensors(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        """Every name of every parameter and buffer -> its value among `values` (in the order of `inputs`)."""
        tensors = {}
        for found, names, value in zip(self.inputs, self.names, values, strict=True):
            if found.kind in ("param", "buffer"):
                tensors.update(dict.fromkeys(names, value))
        return tensors


def named_batch(batch: Batch) -> dict[str, Tensor]:
    """The batch as a dict; the tensors of a sequence are called "0", "1" and so on.

    Raises BatchError if there is anything but dense tensors in it.
    """
    if not isinstance(batch, Mapping | Sequence):
        raise BatchError("the example batch", f"it is {type(batch).__name__}")
    named = dict(batch) if isinstance(batch, Mapping) else {str(i): t for i, t in enumerate(batch)}
    for key, value in named.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise BatchError(f"input {key!r}", f"it is {type(value).__name__}, not a tensor under a string key")
        if value.layout is not torch.strided:
            raise BatchError(f"input {key!r}", f"its layout is {value.layout}, not strided")
    if not named:
        raise BatchError("the batch", "there is no tensor in it")
    return named


def make_world() -> FakeWorld:
    """Where a model is traced."""
    return FakeWorld(user_line)


def make_signature(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    world: FakeWorld,
    dims: DynamicDims,
    *,
    scale: bool = True,
    gradients: bool = True,
    batch_gradients: bool = False,
) -> Signature:
    """Fake inputs for one step: shapes and dtypes of the real ones on CPU, dynamic dims symbolic. Allocates nothing.

    `scale`: whether there is one. `gradients`: whether trainable parameters are wanted with a gradient, with
    `batch_gradients` also the tensors of the batch that require one.
    """
    inputs: list[Input] = []
    fakes: list[Tensor] = []
    names: list[tuple[str, ...]] = []

    def add(found: Input, shape: Iterable[int | torch.SymInt], aliases: tuple[str, ...] = ()) -> None:
        inputs.append(found)
        fakes.append(world.empty(tuple(shape), found.meta.dtype, found.requires_grad))
        names.append(aliases or (found.fqn,))

    for kind, named in (
        ("param", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        for aliases, tensor in _untied(named):
            _check_dense(aliases[0], tensor)
            meta = TensorMeta(tuple(tensor.shape), tensor.dtype)
            grad = gradients and kind == "param" and tensor.requires_grad
            add(Input(kind, aliases[0], meta, grad, aliases[1:]), tensor.shape, aliases)
    for key, tensor in batch.items():
        sizes: tuple[Size, ...] = dims.expressions(key, tensor)
        grad = batch_gradients and tensor.requires_grad
        add(Input("batch", key, TensorMeta(sizes, tensor.dtype), grad), dims.symbolic(key, tensor, world))
    if scale:
        # The scale has the dtype of the loss, which the trace will find out.
        add(Input("scale", "scale", TensorMeta((), torch.float32)), ())
    add(Input("seed", "seed", TensorMeta((), torch.int64)), ())
    return Signature(tuple(inputs), tuple(fakes), tuple(names))


def model_device(model: nn.Module) -> torch.device:
    """Where the model will run: where its tensors are. Those on the meta device go to a GPU if there is one.

    Raises DeviceError if they lie on several devices.
    """
    devices: dict[str, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != "meta":
            devices.setdefault(tensor.device.type, name)
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise DeviceError(f"the model is on several devices: {where}. Move it to one device first")
    kind = next(iter(devices), "cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What `torch.autocast` casts to here on such a device; None if it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _untied(named: Iterable[tuple[str, Tensor]]) -> list[tuple[tuple[str, ...], Tensor]]:
    """One entry per tensor, with all names that it has, in the order of the first names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in named:
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return [(tuple(names), tensor) for names, tensor in found.values()]


def _check_dense(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise BatchError(name, "only dense parameters and buffers can be captured")
