"""Text and a tokenizer for debug recipes, from what is on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from fxpar.data import default_cache_dir, open_corpus
from fxpar.recipes import debug
from fxpar.recipes import torchtitan_api as titan
from fxpar.recipes.checks import mixtures
from fxpar.recipes.debug import debug_recipe


@pytest.fixture
def small_corpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A part of the standard library, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))

    def opened(source: str, **options: Any) -> Any:
        return open_corpus(source, **options, glob=["json/*.py", "email/*.py"])

    monkeypatch.setattr(debug, "open_corpus", opened)
    forget()
    yield
    forget()


def forget() -> None:
    """What this process has read."""
    debug._corpus.cache_clear()
    debug._documents.cache_clear()


@pytest.mark.usefixtures("small_corpus")
def test_assets_are_what_torchtitan_loads():
    folder = debug.hf_assets(vocab=300)
    assert Path(folder).is_relative_to(default_cache_dir())
    tokenizer = HuggingFaceTokenizer(tokenizer_path=folder)
    assert tokenizer.get_vocab_size() <= 300
    text = "def f(x):\n    return {'ü': x}\n"
    tokens = tokenizer.encode(text, add_bos=True, add_eos=True)
    assert tokens[0] == tokens[-1] == tokenizer.eos_id
    assert tokenizer.decode(tokens[1:-1]) == text
    assert tokenizer.eos_id not in tokens[1:-1]
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert tokenizer.apply_chat_template(chat) == "user: one\nassistant: two\n"
    assert tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True) == "user: one\nassistant: "


@pytest.mark.usefixtures("small_corpus")
def test_assets_are_made_once(monkeypatch):
    folder = debug.hf_assets(vocab=300)
    stamp = Path(folder).stat().st_mtime_ns
    monkeypatch.setattr(debug, "train_tokenizer", None)  # a call would fail
    assert debug.hf_assets(vocab=300) == folder
    assert Path(folder).stat().st_mtime_ns == stamp
    with pytest.raises(TypeError):
        debug.hf_assets(vocab=301)


@pytest.mark.usefixtures("small_corpus")
def test_documents_are_those_of_the_corpus_in_a_fixed_order():
    first = debug.documents()
    assert debug.documents() is first  # read once in a process
    forget()
    again = debug.documents()
    corpus = debug.open_corpus("python-stdlib", unit="definition")
    in_order = [corpus.text(i) for i in range(len(corpus))]
    assert list(first["text"]) == list(again["text"])
    assert list(first["text"]) != in_order
    assert sorted(first["text"]) == sorted(in_order)


def test_the_dataset_is_known_to_torchtitan(monkeypatch):
    monkeypatch.setattr(titan.text_datasets, "DATASETS", {})
    name = debug.add_dataset()
    config = titan.text_datasets.DATASETS[name]
    assert config.loader is debug.documents
    assert config.sample_processor({"text": "x"}) == "x"


@pytest.mark.parametrize("kind", ["llama3", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_debug_recipes(kind):
    recipe = debug_recipe(kind)
    assert recipe.model_spec.flavor.startswith("debugmodel")
    assert any(mixtures(recipe)) == (kind not in ("llama3", "qwen3"))
    assert recipe.dataloader.dataset in titan.text_datasets.DATASETS
    assert HuggingFaceTokenizer(tokenizer_path=recipe.hf_assets_path).get_vocab_size() <= (
        recipe.model_spec.model.vocab_size
    )
    assert recipe.debug.seed == 42
