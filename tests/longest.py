"""The files whose tests take longest: they begin first.

One that began last would keep a worker busy while the others have nothing left to do.
"""

from __future__ import annotations

LONGEST = (
    "runtime/test_engine.py",
    "cli/test_train.py",
    "search/test_ruled.py",
    "runtime/test_tasks.py",
    "monitor/test_lost_ranks.py",
    "checking/test_module_rules.py",
    "runtime/test_teams.py",
    "runtime/test_overlap.py",
    "cli/test_figures.py",
    "memory/test_predict.py",
    "runtime/test_dropout.py",
    "runtime/test_packing.py",
    "search/test_stages.py",
    "runtime/test_pipeline_hot.py",
    "monitor/test_monitor.py",
    "runtime/test_rounds.py",
    "distributed/test_gloo.py",
    "runtime/test_experts_hot.py",
    "test_api.py",
    "cli/test_graph_files.py",
    "cli/test_explain.py",
    "runtime/test_calls.py",
    "runtime/test_evaluate.py",
    "test_dynamo.py",
    "rules/test_table.py",
    "runtime/test_padding.py",
    "runtime/test_precision.py",
    "annotate/test_driver.py",
    "flow/test_pack_documents.py",
    "passes/test_chunk_loss.py",
    "runtime/test_pipeline.py",
    "checking/test_driver.py",
    "cli/test_memory.py",
    "tracer/test_hosts.py",
    "annotate/test_narrow.py",
)
