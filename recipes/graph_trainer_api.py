"""The door to torchtitan's experiments/graph_trainer, which only those pass through who use it.

It needs triton, and it changes weekly: names of it stand here and nowhere else.
"""

from __future__ import annotations

from fxpar.recipes.torchtitan_api import shown_import_errors

with shown_import_errors("torchtitan.experiments.graph_trainer (it needs triton)"):
    from torchtitan.experiments.graph_trainer.llama3 import config_registry as llama3_recipes
    from torchtitan.experiments.graph_trainer.passes import construct_default_graph_passes
    from torchtitan.experiments.graph_trainer.registry import PASS_PIPELINE_REGISTRY, register_pass_pipeline
    from torchtitan.experiments.graph_trainer.trainer import GraphTrainer

NOT_ON_CPU = (
    "selective_activation_remat_pass",  # attention on CPU counts as an op with random numbers, which it refuses
    "joint_transformer_block_bucketing_reordering_pass",  # its cost model asks the GPU for its bandwidth
    "cudagraph_pass",
)
"""Default passes that fail without a GPU."""

COMPILING = (
    "annotate_flex_attention_for_regional_inductor_pass",
    "annotate_rmsnorm_for_regional_inductor_pass",
    "regional_inductor_pass",
    "full_inductor_compilation_pass",
    "insert_kernel_annotations_pass",
    "cudagraph_pass",
)
"""Default passes behind which the graph is no longer what runs: rewrites come before the first of them."""

__all__ = [
    "COMPILING",
    "NOT_ON_CPU",
    "PASS_PIPELINE_REGISTRY",
    "GraphTrainer",
    "construct_default_graph_passes",
    "llama3_recipes",
    "register_pass_pipeline",
]
