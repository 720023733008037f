"""How tokens flow through a captured graph: which values keep the documents of a row apart, and which see padding."""

from fxpar.flow.analysis import PADDED_KEYS, PADDING, TokenFlow, in_words, token_flow
from fxpar.flow.hazard import padding_hazard, token_symbol, unknown_padding, with_packing
from fxpar.flow.value import Flow

__all__ = [
    "PADDED_KEYS",
    "PADDING",
    "Flow",
    "TokenFlow",
    "in_words",
    "padding_hazard",
    "token_flow",
    "token_symbol",
    "unknown_padding",
    "with_packing",
]
