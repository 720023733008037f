"""The loss over the vocabulary in chunks of tokens: which part of a graph that is, and its chunks one after another."""

from fxpar.chunks.pieces import cut_in_chunks
from fxpar.chunks.region import LossRegion, begin_with_constants, find_head, find_region, loss_span

__all__ = ["LossRegion", "begin_with_constants", "cut_in_chunks", "find_head", "find_region", "loss_span"]
