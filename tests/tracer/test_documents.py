"""What the surroundings of a forward say of its rows."""

from __future__ import annotations

import torch

from fxpar.tracer.documents import packed, padded, surrounding_documents, surrounding_tokens, without_surroundings


def test_a_forward_on_its_own_has_no_surroundings() -> None:
    """They are tensors of one batch, and the captured forward is for all."""
    ids = torch.ones(1, 3, dtype=torch.int64)
    with packed(ids), padded(ids):
        with without_surroundings():
            assert surrounding_documents() is None
            assert surrounding_tokens() is None
        assert surrounding_documents() is ids
        assert surrounding_tokens() is ids
    assert surrounding_tokens() is None
