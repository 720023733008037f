"""How tokens flow through a captured graph: which values keep the documents of a row apart, and which see padding."""

from fxpar.flow.analysis import PADDING, TokenFlow, in_words, padding_of, token_flow
from fxpar.flow.hazard import padding_hazard, token_symbol, with_packing
from fxpar.flow.value import Flow

__all__ = [
    "PADDING",
    "Flow",
    "TokenFlow",
    "in_words",
    "padding_hazard",
    "padding_of",
    "token_flow",
    "token_symbol",
    "with_packing",
]
