"""Two graphs of one model side by side: two strategies, or the same graph after two passes.

    difference = compare(digest(tp2), digest(tp2_sp))

`fxpar.graph_diff.digest` says what a graph has, `compare` what differs, `lines` how the nodes themselves do.
"""

from fxpar.graph_diff.compare import GraphDiff, compare
from fxpar.graph_diff.digest import Digest, digest, joined

__all__ = ["Digest", "GraphDiff", "compare", "digest", "joined"]
