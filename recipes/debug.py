"""torchtitan's debug recipes, small enough for two CPU ranks, on data that is there."""

from __future__ import annotations

from fxpar.recipes import debug_data
from fxpar.recipes.torchtitan_api import Trainer, stock_recipe


def debug_recipe(family: str) -> Trainer.Config:
    """torchtitan's debug model of a family ("llama3", "qwen3"): 2 rows of 2048 tokens a rank, standard library."""
    recipe = stock_recipe(family, f"{family}_debugmodel")
    recipe.hf_assets_path = debug_data.hf_assets()
    recipe.dataloader.dataset = debug_data.add_dataset()
    recipe.training.local_batch_size = 2
    recipe.training.seq_len = 2048
    recipe.parallelism.pipeline_parallel_schedule = "1F1B"
    recipe.debug.seed = 42
    return recipe


__all__ = ["debug_recipe"]
