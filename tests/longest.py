"""The files whose tests take longest, a worker's quarter of a minute or more: they begin first.

One that began last would keep a worker busy while the others have nothing left to do.
"""

from __future__ import annotations

LONGEST = (
    "cli/test_train.py",
    "checking/test_module_rules.py",
    "annotate/test_driver.py",
    "test_dynamo.py",
    "flow/test_pack_documents.py",
    "monitor/test_lost_ranks.py",
    "passes/test_chunk_loss.py",
    "cli/test_figures.py",
    "runtime/test_pipeline.py",
    "checking/test_driver.py",
    "runtime/test_few_heads_hot.py",
    "runtime/test_engine.py",
    "runtime/test_dropout.py",
    "rules/test_table.py",
    "cli/test_memory.py",
    "tracer/test_hosts.py",
    "runtime/test_overlap.py",
    "cli/test_graph_files.py",
    "runtime/test_gpu.py",
    "annotate/test_narrow.py",
    "passes/test_rematerialize.py",
    "cli/test_explain.py",
    "search/test_price.py",
)
