"""Documents packed in bins: which attention keeps to its bin, and which models may run so."""

from __future__ import annotations

from torch import fx

from fxpar.errors import BinsError, RingOfBinsError
from fxpar.flow import in_words, token_flow, token_symbol
from fxpar.ir.graph import DOCUMENTS, ForwardGraph, LogicalGraph
from fxpar.ir.strategy import Strategy
from fxpar.rules.view import documents_read


def reads_bins(node: fx.Node) -> bool:
    """Whether a call of attention is told of documents by the batch itself: no two bins have the same of these, so no
    query sees a key of another bin. Marks that the model computes may be anything.
    """
    source = documents_read(node)
    return source is not None and source.meta.get("class", ())[:2] == ("batch", DOCUMENTS)


def check_bins(logical: LogicalGraph, strategy: Strategy) -> None:
    """Raise BinsError for a strategy that packs documents in bins, of a model whose rows hold one sequence, or that
    would see the padding between them, RingOfBinsError for one that cuts documents as well. A forward whose loss is
    outside takes its rows as they are.
    """
    if strategy.bins > 1 and strategy.ring > 1:
        raise RingOfBinsError(str(strategy))
    if strategy.bins == 1 or isinstance(logical, ForwardGraph):
        return
    token = token_symbol(logical)
    if token is None:
        raise BinsError(str(strategy), logical.name, "its batch has no dim of tokens")
    if logical.packing is None:
        flow = token_flow(logical, token, "documents")
        why = (
            in_words(flow.hazard)
            if flow.hazard
            else "it was captured for one sequence per row; pack_documents packs it"
        )
        raise BinsError(str(strategy), logical.name, f"its documents see each other: {why}" if flow.hazard else why)
    if logical.packing.padding_hazard:
        raise BinsError(str(strategy), logical.name, f"bins are padded, and {logical.packing.padding_hazard}")
