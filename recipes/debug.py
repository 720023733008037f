"""torchtitan's debug recipes, small enough for two CPU ranks, on text that is on every machine: the standard library of
the running Python, cut into definitions.

Lengths of its classes and functions are long-tailed, as those of web text are. `hf_assets()` makes a tokenizer in the
form that torchtitan loads, once, in the user's cache.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from fxpar.data import Corpus, default_cache_dir, open_corpus, train_tokenizer
from fxpar.data.cache import cache_key, publish
from fxpar.data.tokenizer import END_TOKEN
from fxpar.recipes import torchtitan_api as titan
from fxpar.recipes.torchtitan_api import Trainer, stock_recipe

DATASET = "python_stdlib"
_FORMAT = 2
CHAT = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@functools.cache
def _corpus() -> Corpus:
    """Opening it reads all of it."""
    return open_corpus("python-stdlib", unit="definition")


def hf_assets(vocab: int = 2048) -> str:
    """A folder with a byte-pair tokenizer of the standard library as Hugging Face lays it out (`hf_assets_path`)."""
    corpus = _corpus()
    settings = {"format": _FORMAT, "corpus": corpus.fingerprint, "vocab": vocab}
    folder = default_cache_dir() / "hf_assets" / cache_key(settings)
    if not folder.is_dir():
        trained = Path(train_tokenizer(corpus, vocab).name).read_text(encoding="utf-8")
        config = {"bos_token": END_TOKEN, "eos_token": END_TOKEN, "chat_template": CHAT}
        with publish(folder) as building:
            (building / "tokenizer.json").write_text(trained, encoding="utf-8")
            (building / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def documents(path: str = "") -> Any:
    """The definitions as a `datasets.Dataset` with a column `text`, in an order that mixes modules."""
    return _documents()


@functools.cache
def _documents() -> Any:
    from datasets import Dataset

    corpus = _corpus()
    return Dataset.from_dict({"text": [corpus.text(i) for i in range(len(corpus))]}).shuffle(seed=7)


def add_dataset() -> str:
    """Make the documents known to torchtitan's loaders; their name there."""
    titan.add_dataset(DATASET, documents, lambda sample: sample["text"])
    return DATASET


# What is not called FAMILY_debugmodel. Attention of gpt_oss is varlen there, which has no kernel on a CPU.
_NAMES = {"qwen3_moe": ("qwen3", "qwen3_moe_debug"), "gpt_oss": ("gpt_oss", "gpt_oss_debugmodel_flex")}


def debug_recipe(kind: str) -> Trainer.Config:
    """torchtitan's debug model of a kind ("llama3", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss"): 2 rows of 2048
    tokens a rank, standard library.
    """
    recipe = stock_recipe(*_NAMES.get(kind, (kind, f"{kind}_debugmodel")))
    recipe.hf_assets_path = hf_assets()
    recipe.dataloader.dataset = add_dataset()
    recipe.training.local_batch_size = 2
    recipe.training.seq_len = 2048
    recipe.parallelism.pipeline_parallel_schedule = "1F1B"
    recipe.debug.seed = 42
    return recipe


__all__ = ["CHAT", "DATASET", "add_dataset", "debug_recipe", "documents", "hf_assets"]
