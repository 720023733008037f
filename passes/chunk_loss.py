"""Chunk loss: the loss over the vocabulary runs for some tokens after the other, so that its logits never stand whole.

Before: the head makes logits of all tokens, and its gradient waits for the loss. After: the head, the loss and their
gradients run once per chunk of tokens. What is read elsewhere is joined (a value per token) or added up (a gradient of
a weight).

    %l = mm(%h, %w)                             %h0 = slice(%h, 0, 0, %n)
    %t = cross_entropy(%l, %y)                  %l0 = mm(%h0, %w); %t0 = cross_entropy(%l0, %y0)
    %g = cross_entropy_backward(%d, %l, %y)     %g0 = cross_entropy_backward(%d0, %l0, %y0)
    %dh = mm(%g, %w_t)                          %dh0 = mm(%g0, %w_t); %dw0 = mm(%g0_t, %h0)
    %dw = mm(%g_t, %h)                          %h1 = ...; %dw = addmm(%dw0, %g1_t, %h1)
                                                %dh = cat(%dh0, %dh1)

Memory: logits and their gradient are one chunk's. Cost: smaller products, collectives of the loss once per chunk, one
pass over the gradient of the head per chunk. Terms of a sum that have less than 32 bits are added up in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxpar.chunks import LossRegion, begin_with_constants, cut_in_chunks, find_head, find_region
from fxpar.errors import ChunkedRuleError, ChunkedTokensError, NoVocabularyLossError
from fxpar.flow import token_symbol
from fxpar.ir.dist_config import Shard
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.node_meta import fqn_of, local_tensor
from fxpar.ir.pass_base import Tier


@dataclass(frozen=True)
class ChunkLoss:
    """Reads from the strategy in how many chunks. Raises NoVocabularyLossError, ChunkedLossError, ChunkedTokensError,
    ChunkedRuleError.
    """

    name: ClassVar[str] = "chunk_loss"
    tier: ClassVar[Tier] = "numeric"

    def __call__(self, graph: AnnotatedGraph) -> None:
        if graph.strategy.most("chunks") == 1:
            return
        kinds = {out.kind for out in graph.outputs}
        if "loss" not in kinds:
            if "sent" not in kinds:  # no stage of a pipeline, whose last one has the loss
                graph.notes.append(
                    "chunks(...) has no effect here: the loss is outside of the graph, which gives logits whole"
                )
            return
        head = find_head(graph)
        if head is None:
            raise NoVocabularyLossError(str(graph.strategy), graph.name)
        chunks = graph.strategy.chunks_of(fqn_of(head))
        if chunks > 1:
            begin_with_constants(graph.graph)
            region = find_region(graph, head, chunks)
            _divide_tokens(graph, region, chunks)
            cut_in_chunks(graph, region, chunks)
        elif graph.strategy.chunks == 1:
            rules = [str(rule) for rule in graph.strategy.rules if (rule.chunks or 1) > 1]
            raise ChunkedRuleError(rules, graph.name, fqn_of(head))


def _divide_tokens(graph: AnnotatedGraph, region: LossRegion, chunks: int) -> None:
    """Let the runtime pad tokens so that all chunks have equally many."""
    (lies,) = region.cuts.makes[region.head]
    assert isinstance(lies, Shard)
    size, token = local_tensor(region.head).shape[lies.dim], token_symbol(graph)
    if isinstance(size, int):
        each = size // max(1, len(lies.sections))
        if each % chunks:
            raise ChunkedTokensError(str(graph.strategy), graph.name, each, chunks)
    elif token in size.free_symbols:
        graph.divisors[str(token)] = graph.divisors.get(str(token), 1) * chunks
