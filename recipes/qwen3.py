"""Qwen 3 with torchtitan, hot-switched and static; see `fxpar.recipes.llama3`.

torchrun --nproc-per-node 2 -m torchtitan.train --module fxpar.recipes.qwen3 --config debug_hot_switch
"""

from __future__ import annotations

from fxpar.recipes.torchtitan_api import Trainer, shown_import_errors, stock_recipe

with shown_import_errors(__name__):
    from fxpar.recipes.convert import to_fxpar
    from fxpar.recipes.debug import debug_recipe
    from fxpar.recipes.trainer import FxparTrainer


def debug_stock() -> FxparTrainer.Config:
    """The debug model under torchtitan alone: what the others are compared with."""
    return to_fxpar(debug_recipe("qwen3"), strategies=None)


def debug_static() -> FxparTrainer.Config:
    """The debug model under one strategy of fxpar."""
    return to_fxpar(debug_recipe("qwen3"), strategies={2048: "dp2"})


def debug_hot_switch() -> FxparTrainer.Config:
    """The debug model: short documents on two replicas, middle ones with tensor parallelism, long ones cut in two."""
    return to_fxpar(debug_recipe("qwen3"), strategies={256: "dp2", 1024: "tp2+sp", 2048: "cp2"})


def debug_moe_stock() -> FxparTrainer.Config:
    """The debug model with experts under torchtitan alone."""
    return to_fxpar(debug_recipe("qwen3_moe"), strategies=None)


def debug_moe_static() -> FxparTrainer.Config:
    """The debug model with experts under one strategy of fxpar: a half of the experts on each rank."""
    return to_fxpar(debug_recipe("qwen3_moe"), strategies={2048: "ep2"})


def debug_moe_hot_switch() -> FxparTrainer.Config:
    """The same: short documents on two replicas, middle ones where the experts are, long ones cut in two."""
    return to_fxpar(debug_recipe("qwen3_moe"), strategies={256: "dp2", 1024: "ep2", 2048: "cp2"})


def qwen3_14b_static() -> FxparTrainer.Config:
    """14B on 8 GPUs under one strategy, for documents of up to 32k tokens."""
    return to_fxpar(_long(32768), strategies={32768: "tp8+sp+remat"})


def qwen3_14b_hot_switch() -> FxparTrainer.Config:
    """14B on 8 GPUs, documents of up to 32k tokens."""
    return to_fxpar(
        _long(32768),
        strategies={
            4096: "dp4.tp2+sp+zero1+remat(selective)",
            16384: "dp2.tp4+sp+zero1+remat(selective)",
            32768: "tp8+sp+remat",
        },
    )


def _long(seq_len: int) -> Trainer.Config:
    """torchtitan's recipe of the 14B model with rows of `seq_len` tokens."""
    recipe = stock_recipe("qwen3", "qwen3_14b")
    recipe.training.local_batch_size = 1
    recipe.training.seq_len = seq_len
    return recipe
