"""Models that `fxpar train` cannot take are refused by name."""

from __future__ import annotations

import pytest

from fxpar.errors import TextModelError
from fxpar.models import load
from fxpar.train.model import _check_text


def test_a_model_without_token_ids_is_told_how_it_is_trained():
    with pytest.raises(TextModelError, match=r"'mlp' takes no input_ids \(its batches have x, .*by plain calls after"):
        _check_text(load("mlp"), 300, "tokenizer.json")
