"""Whether sequences may be packed into one row: does attention of a program know where documents end?"""

from __future__ import annotations

from fxpar.batching.work import ATTENTION
from fxpar.exec_graph import Program


def keeps_documents_apart(program: Program) -> bool:
    """Whether every attention of the program is told document ids, so that packed sequences do not see each other.

    False as well for a program without `fxpar::attention`: what mixes tokens in it, if anything, is not known. Pass the
    result to `plan_batch` as `packed`: a model that ignores boundaries must run one sequence at a time.
    """
    calls = [
        node
        for part in program.parts.values()
        for node in part.graph.nodes
        if node.op == "call_function" and node.target in ATTENTION
    ]
    ids = [node.args[3] if ATTENTION[node.target] == 0 else node.args[6] for node in calls]
    return bool(ids) and all(given is not None for given in ids)
