"""The files whose tests take longest, a worker's half minute or more: they begin first.

One that began last would keep a worker busy while the others have nothing left to do.
"""

from __future__ import annotations

LONGEST = (
    "cli/test_train.py",
    "checking/test_module_rules.py",
    "runtime/test_engine.py",
    "cli/test_figures.py",
    "search/test_price.py",
    "cli/test_plan_verify.py",
    "search/test_driver.py",
    "cli/test_graph_files.py",
    "cli/test_explain.py",
    "annotate/test_narrow.py",
    "runtime/test_pipeline.py",
    "checking/test_driver.py",
    "test_dynamo.py",
    "annotate/test_driver.py",
    "flow/test_pack_documents.py",
    "runtime/test_packing.py",
    "cli/test_memory.py",
    "monitor/test_kills.py",
    "monitor/test_lost_ranks.py",
)
