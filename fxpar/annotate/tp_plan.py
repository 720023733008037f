"""Hugging Face's tensor-parallel plans as overrides.

transformers ships, for many models, a table from module patterns to styles (`config.base_model_tp_plan`, and
`_tp_plan` on models). A style says which dim of a linear's weight is cut; fxpar derives everything else.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn

# Style -> is the output (True) or the input (False) of the linear cut; styles that cut no weight are left out.
_STYLES = {
    "colwise": True,
    "colwise_rep": True,
    "colwise_gather_output": True,
    "local_colwise": True,
    "packed_colwise": True,
    "rowwise": False,
    "rowwise_rep": False,
    "local_rowwise": False,
    "packed_rowwise": False,
    "rowwise_split_input": False,
    "embedding_rowwise": True,  # the rows of a table are its outputs' vocabulary
}


def overrides_from_tp_plan(model: nn.Module, plan: Mapping[str, Any] | None = None) -> dict[str, str]:
    """`Strategy` overrides for a transformers model: parameter FQN -> `S(dim)@tp`.

    `plan` defaults to the model's own. Weights are [out, in] in nn.Linear and [in, out] in GPT-2's Conv1D; both are
    understood. Modules that the plan does not name are left to the search. An empty dict if there is no plan.
    """
    if plan is None:
        plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
        config = getattr(model, "config", None)
        base = getattr(config, "base_model_tp_plan", None) or {}
        prefix = getattr(model, "base_model_prefix", "")
        plan = {**{f"{prefix}.{k}" if prefix else k: v for k, v in base.items()}, **(plan or {})}
    overrides: dict[str, str] = {}
    for name, module in model.named_modules():
        style = next((s for pattern, s in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if style not in _STYLES or not hasattr(module, "weight"):
            continue
        cuts_output = _STYLES[style]
        transposed = type(module).__name__ == "Conv1D"
        overrides[f"{name}.weight"] = f"S({int(cuts_output == transposed)})@tp"
        if getattr(module, "bias", None) is not None:
            overrides[f"{name}.bias"] = "S(0)@tp" if cuts_output else "R@tp"
    return overrides
