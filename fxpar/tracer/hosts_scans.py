"""Scans and short convolutions of transformers lead to `fxpar::recurrence` and `fxpar::causal_conv` during a capture.

transformers has one function for each kind of scan, by whose name it looks for a kernel; without one it runs a loop in
Python over tokens or chunks, which no graph holds for all lengths. The names and arguments are those of the packages
that have the kernels (causal-conv1d, mamba-ssm, flash-linear-attention). A call with a state from before, or that wants
the one behind, is left to transformers. How the work is cut (`chunk_size`, `use_mambapy`) changes no numbers.

Computed in fp32 at least, as there; numbers of fp64 stay in fp64, where transformers rounds them to fp32.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar.ops.attention_cpu import compute_dtype
from fxpar.tracer.context import attribute, current

own = torch.ops.fxpar


@contextmanager
def scans_as_ops(model: nn.Module) -> Iterator[None]:
    """Inside the block, the scans of the model's modules are fxpar's ops."""
    modules = {type(module).__module__ for module in model.modules()}
    with ExitStack() as stack:
        for module in (sys.modules[name] for name in modules if name.startswith("transformers.models.")):
            for name, function in _SCANS.items():
                theirs: Any = getattr(module, name, None)
                if hasattr(theirs, "__wrapped__"):
                    stack.enter_context(attribute(module, name, _in_place_of(theirs, function)))
        yield


def _in_place_of(theirs: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for calls that give it nothing it does not know; others stay theirs, which drops what it ignores."""
    known, ours = inspect.signature(theirs).parameters, inspect.signature(function).parameters
    places = sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in ours.values())

    def call(*args: Any, **kwargs: Any) -> Any:
        context = current()
        for key in _BOUNDS:
            if context is not None and kwargs.get(key) is not None:
                raise context.unsupported(
                    f"a scan that is told bounds of documents ({key})",
                    "Leave them out of the batch: fxpar packs documents itself.",
                )
        given = {k: v for k, v in kwargs.items() if k in known and v is not None and v is not False}
        if len(args) > places or not set(given) <= set(ours):
            return theirs(*args, **kwargs)
        return function(*args, **given)

    return call


_BOUNDS = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")


def _wide(*values: Tensor) -> list[Tensor]:
    return [x.to(compute_dtype(x.dtype)) for x in values]


def causal_conv(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """hidden_states [B, C, T], weight [C, W]."""
    out = own.causal_conv(hidden_states.to(weight.dtype), weight, bias, None)
    if activation is not None:
        from transformers.activations import ACT2FN

        out = ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    *,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, None]:
    """query, key [B, T, Hk, K], value [B, T, H, V], beta [B, T, H], g [B, T, H], of Kimi's [B, T, H, K]."""
    q, k, v, decay, beta = _wide(query, key, value, g, beta)
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    decay = decay if decay.dim() == 4 else decay[..., None]
    return own.recurrence(q * q.shape[-1] ** -0.5, k, v, decay, beta, None, True).to(query.dtype), None


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    *,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
) -> Tensor:
    """hidden_states, dt, z [B, D, T], A [D, N], B, C [B, N, T], D [D]."""
    dt = _step(dt, None if delta_bias is None else delta_bias[:, None], delta_softplus)
    x, step, rates, keys, queries = _wide(hidden_states, dt, A, B, C)
    step = step.transpose(1, 2)
    keys, queries = (each.transpose(1, 2)[:, :, None] for each in (keys, queries))
    values = x.transpose(1, 2)[..., None]
    out = own.recurrence(queries, keys, values, step[..., None] * rates, step, None, False)[..., 0].transpose(1, 2)
    out = out if D is None else out + x * D[:, None]
    out = out if z is None else out * F.silu(z)
    return out.to(hidden_states.dtype)


def chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """hidden_states [B, T, H, P], dt [B, T, H], A, D [H], B, C [B, T, G, N]."""
    dt = _step(dt, dt_bias, dt_softplus).clamp(dt_limit[0], dt_limit[1])
    x, step, rates, keys, queries = _wide(hidden_states, dt, A, B, C)
    out = own.recurrence(queries, keys, x, (rates * step)[..., None], step, None, False)
    return out if D is None else out + D[:, None] * x


def _step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


_SCANS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba_selective_scan": selective_scan,
    "mamba2_chunk_scan": chunk_scan,
}
"""Function of a model's module -> what it is here."""
