"""A forward whose loss is outside, run behind autograd: `model(x)`, then `loss.backward()`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor

from fxpar.batching.documents import mark_documents
from fxpar.errors import CallMismatchError, PadError, PositionsError, SecondDerivativeError, StaleWeightsError, a_type
from fxpar.errors.capture import in_words
from fxpar.ir.exec_graph import PlainGraph
from fxpar.ir.graph import CallStructure, Dim, Input, Size, SizeRef, TensorMeta, ValueRef
from fxpar.runtime.micro import local_batch
from fxpar.runtime.padding import pad
from fxpar.runtime.runner import Backend, Runner, Values
from fxpar.torch_api.tree import flatten_call, unflatten

Tensors = Mapping[str, Tensor]
OnTensors = Callable[[dict[str, Tensor]], None]


@dataclass(frozen=True)
class Lengths:
    """Sizes of the dynamic dims in one call, as given and as padded."""

    real: Mapping[sympy.Symbol, int]
    padded: Mapping[sympy.Symbol, int]

    def grown(self, size: Size) -> bool:
        """Whether a size is another one after padding."""
        return not isinstance(size, int) and any(
            self.real[s] != self.padded[s]  # type: ignore[bad-index]
            for s in size.free_symbols
        )

    def cut(self, value: Tensor, shape: Sequence[Size]) -> Tensor:
        """A padded value without its padding; `shape` is its shape in the graph."""
        for d, size in enumerate(shape):
            if self.grown(size):
                value = value.narrow(d, 0, self.real[size])  # type: ignore[index]
        return value

    def fill(self, value: Tensor, shape: Sequence[Size]) -> Tensor:
        """Inverse of `cut`, with zeros."""
        for d, size in enumerate(shape):
            if self.grown(size):
                missing = self.padded[size] - self.real[size]  # type: ignore[index]
                value = torch.cat([value, value.new_zeros(*value.shape[:d], missing, *value.shape[d + 1 :])], d)
        return value


@dataclass
class _Call:
    """One forward on its way through autograd."""

    inputs: Sequence[Any]  # local tensors in the order of the program's inputs; tangents are None
    lengths: Lengths
    on_gradients: OnTensors
    weights: Callable[[], Hashable]
    buffers: dict[str, Tensor]  # new values, filled in by the forward
    values: list[tuple[torch.Size, torch.dtype]]  # what was returned, filled in by the forward


class PlainRunner(Runner[PlainGraph]):
    """One rank's `PlainGraph`. Any number of forwards may run before their backwards, which may come in any order.

    All ranks must call it, and `backward`, in the same order. Backwards run within `watched()`: they begin outside of
    fxpar's calls.
    """

    def __init__(
        self,
        program: PlainGraph,
        rank: int,
        groups: Mapping[str, str],
        *,
        compile: Backend = "eager",
        watched: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        super().__init__(program, rank, groups, compile)
        self.watched = watched
        for name in program.parts:
            self.compiled(name)
        found = list(zip(program.outputs, program.stored_outputs, strict=True))
        self._returned = [(o, s) for o, s in found if o.kind in ("value", "buffer")]
        self._gradients = [(o, s) for o, s in found if o.kind not in ("value", "buffer")]
        self._values = [(o.fqn, s.meta) for o, s in self._returned if o.kind == "value"]
        self._tangents = {i.fqn for i in program.inputs if i.kind == "tangent"}
        self._reached = [program.tangents[o.kind, o.fqn] for o, _ in self._gradients]
        self._written = {o.fqn for o in program.outputs if o.kind == "buffer"}

    def __call__(
        self,
        params: Tensors,
        buffers: Tensors,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        seed: int,
        on_gradients: OnTensors,
        on_buffers: OnTensors | None = None,
        weights: Callable[[], Hashable] = lambda: None,
        roots: Tensors | None = None,
    ) -> Any:
        """Run the forward on this replica's whole arguments; the same on all ranks of the replica.

        `params` are local tensors as `program.stored_inputs` says, `buffers` whole ones. Returns what the model
        returns. When a backward reaches it, `on_gradients` gets the local gradients by FQN, which lie as
        `program.stored_outputs` says, of all parameters that the loss depends on; `on_buffers` gets new values of
        buffers right away, if there are any. `weights()` identifies the values of the weights (a count of updates); a
        backward checks that it is as in its forward. `roots` are tensors by parameter FQN whose gradients autograd gets
        as well, for programs lowered with `whole`.

        Raises CallMismatchError, PadError, PositionsError; in the backward StaleWeightsError, SecondDerivativeError.
        """
        given = call_tensors(self.program.structure, args, kwargs or {})
        _check_restarts(self.program.structure.restarting, given)
        batch = mark_documents(self.program.inputs, given, whole=True)  # padding will be another document
        lengths = self._lengths(batch)
        self.move_to((*params.values(), *batch.values()))
        padded = local_batch(self.program, pad(self.program, _detached(batch)), self.rank)
        given = {"param": _detached(params), "buffer": _detached(buffers), "constant": self.constants}
        call = _Call(self.fill({**given, "batch": padded, "seed": seed}), lengths, on_gradients, weights, {}, [])
        wanted = {("batch", i.fqn): batch[i.fqn] for i in self.program.inputs if i.kind == "batch" and i.requires_grad}
        wanted |= {("param", fqn): tensor for fqn, tensor in (roots or {}).items()}
        if self._tangents and torch.is_grad_enabled():
            anchor = torch.zeros((), requires_grad=True)  # the parameters are not arguments, yet a backward is due
            found = _Plain.apply(self, call, tuple(wanted), anchor, *wanted.values())
        else:
            found, _ = self.run_forward(call)
        updated, call.buffers = call.buffers, {}
        if updated and on_buffers is not None:
            on_buffers(updated)
        return self._structured(dict(zip((fqn for fqn, _ in self._values), found, strict=True)), lengths)

    # ------------------------------------------------------------------------------------------------- both ways
    def run_forward(self, call: _Call) -> tuple[list[Tensor], list[Any]]:
        """The values without padding, and what the backward needs of the forward."""
        results = self._run("forward", {"input": call.inputs})
        values = []
        for (out, stored), value in zip(self._returned, results, strict=False):
            if out.kind == "value":
                values.append(call.lengths.cut(value, stored.meta.shape))
            else:
                call.buffers[out.fqn] = value
        call.values = [(value.shape, value.dtype) for value in values]
        return values, results

    def run_backward(
        self, call: _Call, inputs: Mapping[int, Any], results: Mapping[int, Any], tangents: Sequence[Tensor | None]
    ) -> dict[tuple[str, str], Tensor]:
        """Hand out the gradients of parameters; returns them and those of the batch by kind and name of the input.

        `inputs` and `results` (of the forward) are those that the backward needs, by position; `tangents` are those of
        all values, None where no loss reads one. What depends on such values alone has no gradient, as in autograd.
        """
        local, used = dict(inputs), set()
        for (fqn, _), tangent, (shape, dtype) in zip(self._values, tangents, call.values, strict=True):
            if fqn not in self._tangents:
                continue
            if tangent is None:
                tangent = torch.zeros(shape, dtype=dtype, device=self.device)
            else:
                used.add(fqn)
            i = self.place["tangent", fqn]
            stored = self.program.stored_inputs[i]
            local[i] = stored.dist.take(call.lengths.fill(tangent, stored.meta.shape), self.rank)
        found = self._run("backward", {"input": local, "forward": results})
        grads: dict[str, Tensor] = {}
        back: dict[tuple[str, str], Tensor] = {}
        for (out, stored), reached, grad in zip(self._gradients, self._reached, found, strict=True):
            if not reached & used:
                continue
            if out.kind == "grad":
                grads[out.fqn] = grad
            else:
                back[("batch", out.fqn)] = call.lengths.cut(grad, stored.meta.shape)
        call.on_gradients(grads)
        return back | {("param", fqn): grad for fqn, grad in grads.items()}

    def kept(self, call: _Call) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Inputs that the backward needs, by position: (tensors of the call, weights).

        Tensors of the call, buffers among them, are watched by autograd for writes between forward and backward; what
        the forward itself has written is copied. Weights are not, as whoever stores them may well write the same again.
        """
        own, shared = {}, {}
        for i, value in self.read("backward", "input", call.inputs).items():
            info = self.program.inputs[i]
            if info.kind in ("batch", "buffer"):
                own[i] = value.clone() if info.kind == "buffer" and info.fqn in self._written else value
            elif info.kind != "tangent":
                shared[i] = value
        return own, shared

    def _run(self, name: str, tables: Mapping[str, Values]) -> list[Any]:
        """Call a part without autocast, whose casts it has already."""
        with torch.autocast(self.device.type, enabled=False):
            return self.call(name, self.gather(name, tables))

    @property
    def differentiable(self) -> list[bool]:
        """Whether each value has a gradient."""
        return [fqn in self._tangents for fqn, _ in self._values]

    # -------------------------------------------------------------------------------------------------- arguments
    def _lengths(self, batch: Tensors) -> Lengths:
        real: dict[sympy.Symbol, int] = {}
        for info in self.program.inputs:
            if info.kind == "batch":
                _check(info, batch[info.fqn], real)
        padded = dict(real)
        for dim in self.program.dims:
            size = real[dim.symbol]
            if size < dim.minimum or (dim.maximum is not None and size > dim.maximum):
                raise CallMismatchError(_beyond(dim, size))
            padded[dim.symbol] += -size % self.program.divisors.get(dim.name, 1)
        lengths = Lengths(real, padded)
        for fqn, meta in self._values:
            for size in meta.shape:
                if lengths.grown(size) and size not in real:
                    symbol = next(iter(size.free_symbols))  # type: ignore[union-attr]
                    raise PadError(str(symbol), f"output {fqn} is {size} long, so what is padding in it cannot be told")
        return lengths

    def _structured(self, values: Tensors, lengths: Lengths) -> Any:
        leaves = []
        for leaf in self.program.structure.leaves:
            if isinstance(leaf, ValueRef):
                leaves.append(values[leaf.fqn])
            elif isinstance(leaf, SizeRef):
                leaves.append(int(leaf.size.subs(dict(lengths.real))))  # type: ignore[arg-type]
            else:
                leaves.append(leaf)
        return unflatten(leaves, self.program.structure.returned)


class _Plain(torch.autograd.Function):
    """The node of autograd's graph that stands for one call of a PlainRunner."""

    @staticmethod
    def forward(
        ctx: Any, runner: PlainRunner, call: _Call, names: tuple[tuple[str, str], ...], anchor: Tensor, *wanted: Tensor
    ) -> tuple[Tensor, ...]:
        values, results = runner.run_forward(call)
        own, ctx.shared = runner.kept(call)
        needed = runner.read("backward", "forward", results)
        tensors = {i: value for i, value in needed.items() if isinstance(value, Tensor)}
        ctx.numbers = {i: value for i, value in needed.items() if i not in tensors}
        values = _distinct(values, [t for t in call.inputs if t is not None])
        ctx.save_for_backward(*own.values(), *tensors.values())  # freed by autograd after the backward
        ctx.places = list(own), list(tensors)
        ctx.names = names
        ctx.runner, ctx.call, ctx.weights = runner, call, call.weights()
        call.inputs = ()
        fixed = [v for v, yes in zip(values, runner.differentiable, strict=True) if not yes]
        ctx.mark_non_differentiable(*fixed)
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # type: ignore[bad-override]
        saved = iter(ctx.saved_tensors)  # raises torch's own error the second time
        runner: PlainRunner = ctx.runner
        if torch.is_grad_enabled():  # create_graph=True
            raise SecondDerivativeError
        if ctx.call.weights() != ctx.weights:
            raise StaleWeightsError
        own, tensors = ctx.places
        inputs = {**ctx.shared, **dict(zip(own, saved, strict=False))}
        results = {**ctx.numbers, **dict(zip(tensors, saved, strict=True))}
        with runner.watched():
            back = runner.run_backward(ctx.call, inputs, results, grad_outputs)
        return None, None, None, None, *(back.get(name) for name in ctx.names)


def _detached(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _distinct(values: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The values, each a tensor object of its own that is no input: autograd marks what a function returns."""
    taken = {id(t) for t in inputs}
    found = []
    for value in values:
        found.append(value.detach() if id(value) in taken else value)
        taken.add(id(value))
    return found


def _beyond(dim: Dim, size: int) -> str:
    """What a size means that the captured forward does not hold for, and where its bounds come from."""
    most = "or more" if dim.maximum is None else f"to {dim.maximum}"
    if size == 0:
        return (
            f"{in_words(dim.name)} is 0, and the captured forward holds for {dim.minimum} {most}: leave such calls out"
        )
    return (
        f"{in_words(dim.name)} is {size}, and the captured forward holds for {dim.minimum} {most}, because "
        f"the model, or torch within one of its calls, went one way at {dim.name}={dim.example}: a table of that many "
        "rows, or an `if` about the size"
    )


def call_tensors(structure: CallStructure, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a call by batch key. Raises CallMismatchError if anything else than tensors differs."""
    leaves, found = flatten_call(args, kwargs)
    if found != structure.call:
        raise CallMismatchError(f"they are nested as {found} instead of {structure.call}")
    constants = iter(structure.constants)
    tensors = {}
    for key, leaf in zip(structure.arguments, leaves, strict=True):
        if key is not None:
            if not isinstance(leaf, Tensor):
                raise CallMismatchError(f"{key} is {a_type(leaf)} instead of a tensor")
            tensors[key] = leaf
            continue
        expected = next(constants)
        if isinstance(leaf, Tensor) or leaf != expected:
            what = "a tensor" if isinstance(leaf, Tensor) else repr(leaf)
            raise CallMismatchError(f"there is {what} instead of {expected!r}")
    return tensors


def _check_restarts(keys: Sequence[str], given: Tensors) -> None:
    """Raise PositionsError for positions [..., S] that jump, and not to 0: documents were captured as begun by a 0."""
    for key in keys:
        now, before = given[key][..., 1:], given[key][..., :-1]
        jumps = ((now != before + 1) & (now != 0)).reshape(-1, now.shape[-1]).nonzero()
        if len(jumps):
            row, token = map(int, jumps[0])
            values = (rows.reshape(-1, now.shape[-1])[row, token] for rows in (before, now))
            raise PositionsError(key, row, token + 1, tuple(map(int, values)))  # type: ignore[arg-type]


def _check(info: Input, tensor: Tensor, sizes: dict[sympy.Symbol, int]) -> None:
    """Raise CallMismatchError unless a tensor is as captured; notes the sizes of its dynamic dims."""
    meta: TensorMeta = info.meta
    fits = tensor.dtype == meta.dtype and tensor.dim() == len(meta.shape)
    for have, size in zip(tensor.shape, meta.shape, strict=False):
        fits = fits and have == (size if isinstance(size, int) else sizes.setdefault(size, have))  # type: ignore
    if not fits or (tensor.requires_grad and not info.requires_grad and torch.is_grad_enabled()):
        grad = " without a gradient" * (tensor.requires_grad and not info.requires_grad)
        raise CallMismatchError(f"{info.fqn} is {tensor.dtype} {list(tensor.shape)}, captured was {meta}{grad}")
