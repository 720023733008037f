"""Llama 3 with torchtitan, hot-switched and static.

    torchrun --nproc-per-node 2 -m torchtitan.train --module fxpar.recipes.llama3 --config debug_hot_switch

Debug recipes run on two ranks, with or without GPUs, and bring their own data. The others are torchtitan's recipes
with strategies for 8 and 64 GPUs; every field can be changed on the command line.
"""

from __future__ import annotations

from fxpar.recipes.torchtitan_api import Trainer, shown_import_errors, stock_recipe

with shown_import_errors(__name__):
    from fxpar.recipes.convert import to_fxpar
    from fxpar.recipes.debug import debug_recipe
    from fxpar.recipes.trainer import FxparTrainer


def debug_stock() -> FxparTrainer.Config:
    """The debug model under torchtitan alone: what the others are compared with."""
    return to_fxpar(debug_recipe("llama3"), strategies=None)


def debug_static() -> FxparTrainer.Config:
    """The debug model under one strategy of fxpar."""
    return to_fxpar(debug_recipe("llama3"), strategies={2048: "dp2"})


def debug_hot_switch() -> FxparTrainer.Config:
    """The debug model: short documents on two replicas, middle ones with tensor parallelism, long ones cut in two."""
    return to_fxpar(debug_recipe("llama3"), strategies={256: "dp2", 1024: "tp2+sp", 2048: "cp2"})


def llama3_8b_static() -> FxparTrainer.Config:
    """8B on 8 GPUs under one strategy, for documents of up to 32k tokens."""
    return to_fxpar(_long("llama3_8b", 32768), strategies={32768: "cp8+zero3+remat(selective)"})


def llama3_8b_hot_switch() -> FxparTrainer.Config:
    """8B on 8 GPUs, documents of up to 32k tokens."""
    return to_fxpar(
        _long("llama3_8b", 32768),
        strategies={
            4096: "dp8+zero2+remat(selective)",
            16384: "dp2.tp4+sp+zero1+remat(selective)",
            32768: "tp8+sp+remat(selective)",
        },
    )


def llama3_70b_static() -> FxparTrainer.Config:
    """70B on 64 GPUs under one strategy, for documents of up to 32k tokens."""
    return to_fxpar(_long("llama3_70b", 32768), strategies={32768: "cp2.pp4.tp8+sp+remat"})


def llama3_70b_hot_switch() -> FxparTrainer.Config:
    """70B on 64 GPUs, documents of up to 32k tokens."""
    return to_fxpar(
        _long("llama3_70b", 32768),
        strategies={
            4096: "dp4.pp4.tp4+sp+zero1+remat(selective)",
            16384: "dp2.pp4.tp8+sp+zero1+remat",
            32768: "cp2.pp4.tp8+sp+remat",
        },
    )


def _long(name: str, seq_len: int) -> Trainer.Config:
    """torchtitan's recipe with rows of `seq_len` tokens."""
    recipe = stock_recipe("llama3", name)
    recipe.training.local_batch_size = 1
    recipe.training.seq_len = seq_len
    return recipe
