"""Experts of transformers that loop over experts by themselves lead to `fxpar::expert_mm` during a capture.

Most types ask the experts interface for a forward (`fxpar.tracer.experts`). dbrx, jetmoe and longcat_flash run each
expert on the tokens that chose it, so what they do depends on the values of a batch. What their classes compute stands
here once more, as products by expert. Parameters, and modules with a state, stay the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.tracer.context import attribute
from fxpar.tracer.experts import expert_mm, weighted_sum

Routes = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@contextmanager
def loops_as_ops(model: nn.Module) -> Iterator[None]:
    """Inside the block, the loops over experts of the model's modules are products by expert."""
    with ExitStack() as stack:
        for kind in {type(module) for module in model.modules()}:
            if kind.__module__.startswith("transformers.models."):
                for name, function in _LOOPS.get(kind.__name__, {}).items():
                    stack.enter_context(attribute(kind, name, function))
        yield


def _each_slot(tokens: Tensor, ids: Tensor) -> Tensor:
    """tokens [N, D], ids [N, K] -> [N, K, D]."""
    return tokens.unsqueeze(1).expand(-1, ids.shape[1], -1)


# ------------------------------------------------------------------------------------------------------------ dbrx
def dbrx_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states [B, T, D]; the weights of all experts are one matrix [E * F, D]."""
    glu, tokens = module.mlp, hidden_states.reshape(-1, module.hidden_size)
    w1, v1, w2 = (w.view(-1, module.ffn_hidden_size, module.hidden_size) for w in (glu.w1, glu.v1, glu.w2))
    rows = _each_slot(tokens, top_k_index)
    gate, up = (expert_mm(rows, w.transpose(1, 2), top_k_index) for w in (w1, v1))
    made = expert_mm(glu.activation_fn(gate) * up, w2, top_k_index)
    return weighted_sum(made, top_k_weights).view(hidden_states.shape)


# ---------------------------------------------------------------------------------------------------- longcat_flash
def longcat_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states [N, D]. Ids from `num_routed_experts` on are experts that return what they get."""
    routed = module.num_routed_experts
    wide = top_k_weights.to(torch.promote_types(hidden_states.dtype, top_k_weights.dtype))
    same = torch.where(top_k_index >= routed, wide, 0.0).sum(-1, keepdim=True)
    out = (hidden_states * same).to(hidden_states.dtype)
    if module.gate_up_proj is None:
        return out
    rows = _each_slot(hidden_states, top_k_index)
    up_weight = module.gate_up_proj[:routed].transpose(1, 2)  # it has rows for the others too, which nothing reads
    gate, up = expert_mm(rows, up_weight, top_k_index).chunk(2, dim=-1)
    made = expert_mm(module.act_fn(gate) * up, module.down_proj.transpose(1, 2), top_k_index)
    return out + weighted_sum(made, top_k_weights).to(hidden_states.dtype)


# ---------------------------------------------------------------------------------------------------------- jetmoe
def jetmoe_routes(module: Any, hidden_states: Tensor) -> Routes:
    """hidden_states [N, D] -> ids, ids, weights [N, K], ids, logits [N, E]: in the places of rows sorted by expert,
    which nobody else reads.
    """
    logits = module.layer(hidden_states).float()
    best, ids = logits.topk(module.top_k, dim=1)
    return ids, ids, torch.softmax(best, dim=1).type_as(hidden_states), ids, logits


def jetmoe_product(module: Any, inputs: Tensor, expert_size: Tensor) -> Tensor:
    """inputs [N, K, D], and ids [N, K] in the place of the experts' sizes -> [N, K, F]."""
    return expert_mm(inputs, module.weight.transpose(1, 2), expert_size)


def jetmoe_experts(module: Any, layer_input: Tensor) -> Tensor:
    """layer_input [B, T, D]."""
    tokens = layer_input.reshape(-1, layer_input.shape[-1])
    ids, _, weights, _, _ = module.router(tokens)
    gate, up = module.input_linear(_each_slot(tokens, ids), ids).chunk(2, dim=-1)
    made = module.output_linear(module.activation(gate) * up, ids)
    return weighted_sum(made, weights).view(layer_input.shape) + module.bias


def jetmoe_queries(module: Any, layer_input: Tensor) -> tuple[Tensor, Tensor, Any]:
    """layer_input [B, T, D] -> queries [B, T, K, F], logits, and what `jetmoe_outputs` is told of routes."""
    tokens = layer_input.reshape(-1, layer_input.shape[-1])
    ids, _, weights, _, logits = module.router(tokens)
    made = module.input_linear(_each_slot(tokens, ids), ids)
    return made.view(*layer_input.shape[:2], *made.shape[1:]), logits, (ids, weights)


def jetmoe_outputs(module: Any, layer_input: Tensor, topo_info: tuple[Tensor, Tensor]) -> Tensor:
    """layer_input [B, T, K, F] -> [B, T, D]."""
    ids, weights = topo_info
    made = module.output_linear(layer_input.reshape(-1, *layer_input.shape[2:]), ids)
    return weighted_sum(made, weights).view(*layer_input.shape[:2], -1) + module.bias


_LOOPS: dict[str, dict[str, Callable[..., Any]]] = {
    "DbrxExperts": {"forward": dbrx_experts},
    "LongcatFlashExperts": {"forward": longcat_experts},
    "JetMoeTopKGating": {"forward": jetmoe_routes},
    "JetMoeParallelExperts": {"forward": jetmoe_product},
    "JetMoeMoE": {"forward": jetmoe_experts},
    "JetMoeMoA": {"map": jetmoe_queries, "reduce": jetmoe_outputs},
}
"""Class of transformers -> its methods as they are here."""
