"""Capture: from a module and a loss function to a LogicalGraph."""

from __future__ import annotations

from fxpar.tracer.api import capture
from fxpar.tracer.documents import document_ids_from_cu_seqlens, document_ids_from_positions, packed
from fxpar.tracer.forward import call_key, capture_forward

__all__ = [
    "call_key",
    "capture",
    "capture_forward",
    "document_ids_from_cu_seqlens",
    "document_ids_from_positions",
    "packed",
]
