"""Experts as products by expert, `fxpar::expert_mm`: for models written with it, and for those of transformers.

transformers asks its experts interface for a forward by name, `config._experts_implementation`. That of "fxpar" runs
the products of all slots of all tokens; the gate, the activation and a norm behind are the module's own. What a router
does is plain code, and is captured as it is written.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar.errors import OpInputError, a_type
from fxpar.tracer.attention import autocast


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The "fxpar" experts: tokens [N, D], experts of each [N, K] and their weights [N, K] -> [N, D]."""
    rows = hidden_states.unsqueeze(1).expand(-1, top_k_index.shape[1], -1)
    if module.has_gate:
        made = module._apply_gate(_product(module, "gate_up_proj", rows, top_k_index))
    else:
        made = module.act_fn(_product(module, "up_proj", rows, top_k_index))
    made = _product(module, "down_proj", made, top_k_index)
    if module.has_post_expert_norm:
        made = module.post_expert_norm(made)
    return weighted_sum(made, top_k_weights).to(hidden_states.dtype)


def _product(module: Any, name: str, rows: Tensor, ids: Tensor) -> Tensor:
    """rows [N, K, D] times the weights `name` of the experts, [E, F, D] or, transposed, [E, D, F], plus their bias."""
    weight = getattr(module, name)
    made = expert_mm(rows, weight if module.is_transposed else weight.transpose(1, 2), ids)
    return made + F.embedding(ids, getattr(module, f"{name}_bias")) if module.has_bias else made


def expert_mm(rows: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """rows [N, K, D] times weight [E, D, F] of each row's expert, ids [N, K] -> [N, K, F].

    Row k of a token is that of the k-th expert its router chose; `x[:, None].expand(-1, K, -1)` gives each of them the
    token. A row whose id is no expert, below 0 or from E on, becomes zeros. As other products this one follows autocast
    and runs in the dtype of the weights. Raises OpInputError for operands that do not fit.
    """
    _check_tensors("expert_mm", rows=rows, weight=weight, ids=ids)
    rows, weight = autocast(rows, weight)
    return torch.ops.fxpar.expert_mm(rows.to(weight.dtype), weight, ids)


def weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """rows [N, K, D] times their weights [N, K], summed over the experts of a token -> [N, D], in the dtype of `rows`.

    It is `(rows * weights[..., None]).sum(1)`, summed in float32 at least. Under tp ranks then add up [N, D] and not
    [N, K, D]. Raises OpInputError for operands that do not fit.
    """
    _check_tensors("weighted_sum", rows=rows, weights=weights)
    return torch.ops.fxpar.weighted_sum(rows, weights)


def _check_tensors(op: str, **given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise OpInputError(op, f"{name} is {a_type(value)}; give a tensor")


def experts_modules(model: nn.Module) -> list[Any]:
    """The modules of `model` whose forward transformers' experts interface chooses."""
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]
