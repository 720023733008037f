"""What is said of a corpus and its sequences."""

from __future__ import annotations

import pytest

from fxpar.train.text import describe, make_loader, open_tokens, prepare
from tests.train.test_config import SMALL, parse


@pytest.fixture
def config(tmp_path):
    """Of a corpus of few words."""
    (tmp_path / "corpus").mkdir()
    for number in range(9):
        (tmp_path / "corpus" / f"{number}.txt").write_text("weights go home again " * (number + 1))
    return lambda *words: parse(SMALL, f"data.source={tmp_path / 'corpus'}", f"data.cache={tmp_path / 'cache'}", *words)


def test_a_vocabulary_that_the_corpus_cannot_fill(config):
    made = prepare(config("data.vocab=4000").data, lambda text: None)
    assert 257 < made.vocab_size < 4000
    said = f"tokenizer of {made.vocab_size} tokens"
    assert made.lines[-1].startswith(f"{said}, as many as this corpus gives (data.vocab = 4,000): ")
    filled = prepare(config(f"data.vocab={made.vocab_size - 1}").data, lambda text: None)
    assert filled.lines[-1].startswith(f"tokenizer of {made.vocab_size - 1} tokens: ")
    given = prepare(config(f"data.tokenizer={made.tokenizer}", "data.vocab=4000").data, lambda text: None)
    assert given.lines[-1].startswith(f"{said}: ")


def test_sequences_are_counted_once(config):
    made = config("data.vocab=260")
    prepared = prepare(made.data, lambda text: None)
    lines = list(describe(make_loader(open_tokens(prepared, 0)[0], made, prepared.vocab_size)))
    assert lines[0].startswith("9 documents give 9 sequences, ")
    assert lines[1].startswith("tokens per sequence: mean ")
