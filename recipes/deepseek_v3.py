"""DeepSeek V3 with torchtitan, hot-switched and static; see `fxpar.recipes.llama3`. Its MTP layers are not supported.

torchrun --nproc-per-node 2 -m torchtitan.train --module fxpar.recipes.deepseek_v3 --config debug_hot_switch
"""

from __future__ import annotations

from fxpar.recipes.torchtitan_api import shown_import_errors

with shown_import_errors(__name__):
    from fxpar.recipes.convert import to_fxpar
    from fxpar.recipes.debug import debug_recipe
    from fxpar.recipes.trainer import FxparTrainer


def debug_stock() -> FxparTrainer.Config:
    """The debug model under torchtitan alone: what the others are compared with."""
    return to_fxpar(debug_recipe("deepseek_v3"), strategies=None)


def debug_static() -> FxparTrainer.Config:
    """The debug model under one strategy of fxpar: a half of the experts on each rank."""
    return to_fxpar(debug_recipe("deepseek_v3"), strategies={2048: "ep2"})


def debug_hot_switch() -> FxparTrainer.Config:
    """The debug model: short documents on two replicas, middle ones where the experts are, long ones cut in two."""
    return to_fxpar(debug_recipe("deepseek_v3"), strategies={256: "dp2", 1024: "ep2", 2048: "cp2"})
