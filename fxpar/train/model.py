"""From the [model] section to a module whose vocabulary and positions suit the data."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from fxpar.errors import ModelOptionError, TextModelError, VocabularyError
from fxpar.models import LoadedModel, load
from fxpar.train.config import TrainConfig

# Vocabularies are rounded up: tensor parallelism splits them, and matrix kernels like such sizes.
VOCAB_MULTIPLE = 64
# By kind of model: the options for the number of tokens and of positions.
_OPTIONS = {"hf": ("vocab_size", "max_position_embeddings"), "llama": ("vocab", ""), "gpt": ("vocab", "positions")}


def build_model(config: TrainConfig, vocab_size: int, tokenizer: str) -> LoadedModel:
    """The model with random weights from `run.seed`: the same on every rank.

    The vocabulary of `hf:` and built-in models is set to `vocab_size`, rounded up, unless the user sets it; so is the
    number of positions, to the longest sequence.

    Raises what `fxpar.models.load` raises, TextModelError, VocabularyError.
    """
    name = config.model.name
    options = {key: option_text(value) for key, value in config.model.options.items()}
    kind = "hf" if name.startswith("hf:") else name
    automatic: dict[str, str] = {}
    if ":" not in name or kind == "hf":
        if kind not in _OPTIONS and kind in ("vit", "mlp"):
            raise TextModelError(name, "takes no tokens; train llama, gpt, hf:TYPE or a function of your own")
        vocab_key, positions_key = _OPTIONS.get(kind, ("", ""))
        rounded = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        wanted = {vocab_key: str(rounded), positions_key: str(config.max_length)}
        automatic = {key: value for key, value in wanted.items() if key and key not in options}
    loaded = _load(config, options, automatic)
    _check_text(loaded, vocab_size, tokenizer)
    return loaded


def option_text(value: Any) -> str:
    """A value of a configuration as `--set` of the other commands writes it."""
    if isinstance(value, str):
        return value
    return json.dumps(value)


def model_vocab(model: nn.Module) -> int | None:
    """Number of tokens that a model knows; None if it has no embedding."""
    inputs = getattr(model, "get_input_embeddings", None)
    if callable(inputs):
        return getattr(inputs(), "num_embeddings", None)
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return max(sizes, default=None)


def _load(config: TrainConfig, options: dict[str, str], automatic: dict[str, str]) -> LoadedModel:
    settings: dict[str, Any] = {"dtype": config.precision.parameters, "seed": config.run.seed, "noise": False}
    try:
        return load(config.model.name, options={**automatic, **options}, **settings)
    except ModelOptionError:
        # Types without a fixed number of positions have no such option.
        fewer = {key: value for key, value in automatic.items() if key != "max_position_embeddings"}
        if fewer == automatic:
            raise
        return load(config.model.name, options={**fewer, **options}, **settings)


def _check_text(loaded: LoadedModel, vocab_size: int, tokenizer: str) -> None:
    if "input_ids" not in loaded.example_batch:
        keys = ", ".join(loaded.example_batch)
        raise TextModelError(
            loaded.name,
            f"takes no input_ids (its batches have {keys}), and fxpar train is for causal language models: "
            "train it in a loop of your own, by plain calls after fxpar.parallelize",
        )
    known = model_vocab(loaded.model)
    if known is not None and known < vocab_size:
        raise VocabularyError(tokenizer, vocab_size, known)
