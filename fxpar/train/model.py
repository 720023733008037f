"""From the [model] section to a module whose vocabulary and positions suit the data."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxpar.errors import (
    ExampleNeededError,
    ModelOptionError,
    TextModelError,
    TrainedParametersError,
    VocabularyError,
)
from fxpar.models import LoadedModel, load
from fxpar.models.loaded import folder_of
from fxpar.store.folder import Weights
from fxpar.train.config import TrainConfig

# Vocabularies are rounded up: tensor parallelism splits them, and matrix kernels like such sizes.
VOCAB_MULTIPLE = 64
# By kind of model: the options for the number of tokens and of positions.
_OPTIONS = {"hf": ("vocab_size", "max_position_embeddings"), "llama": ("vocab", ""), "gpt": ("vocab", "positions")}
_DO = "give it a [task.NAME] in place of [data], or train it in a loop of your own"


def build_model(config: TrainConfig, vocab_size: int, tokenizer: str, device: str = "cpu") -> LoadedModel:
    """The model with random weights from `run.seed`: the same on every rank. What has its weights in a folder is on the
    meta device instead if ranks of this `device` can fill it there; see `weights_of`.

    The vocabulary of `hf:` and built-in models is set to `vocab_size`, rounded up, unless the user sets it; so is the
    number of positions, to the longest sequence. Models from a folder stay as they are.

    Raises what `fxpar.models.load` raises, TextModelError, VocabularyError, TrainedParametersError.
    """
    place = "meta" if folder_of(config.model.name) is not None and _fills_meta(device) else "cpu"
    loaded = _loaded(config, vocab_size, place)
    _check_text(loaded, vocab_size, tokenizer)
    freeze(loaded.model, config.model.train)
    return loaded


def shapes_of(config: TrainConfig, vocab_size: int) -> LoadedModel:
    """The model on the meta device, to find out early what is wrong with its name, its options, or the parameters to
    train. Raises as `build_model` does, but for VocabularyError.
    """
    loaded = _loaded(config, vocab_size, "meta")
    _check_text(loaded, 0, "")
    freeze(loaded.model, config.model.train)
    return loaded


def shapes_for(config: TrainConfig, vocab_size: int, options: Mapping[str, Any]) -> LoadedModel:
    """The model of a run with further `options`, on the meta device. Raises as `build_model` does."""
    model = replace(config.model, options={**config.model.options, **options})
    loaded = _loaded(replace(config, model=model), vocab_size, "meta")
    freeze(loaded.model, model.train)
    return loaded


def decided_by_data(name: str) -> tuple[str, ...]:
    """The options for the number of tokens and of positions ("" where there is none) that a run gives this MODEL where
    it names none. Nothing of models from a folder or of a function.
    """
    kind = "hf" if name.startswith("hf:") else name
    return () if folder_of(name) is not None else _OPTIONS.get(kind, ())


def _loaded(config: TrainConfig, vocab_size: int, device: str) -> LoadedModel:
    """With the options that the data decides, unless the user does."""
    name = config.model.name
    options = texts_of(config)
    if name in ("vit", "mlp"):
        raise TextModelError(name, "takes no tokens; train llama, gpt, hf:TYPE or a function of your own")
    rounded = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    wanted = zip(decided_by_data(name), (rounded, config.max_length), strict=False)
    automatic = {key: str(value) for key, value in wanted if key and key not in options}
    return _load(config, options, automatic, device)


def weights_of(config: TrainConfig, loaded: LoadedModel) -> Weights | None:
    """Where the model starts from; None for random weights, and where a checkpoint brings its own."""
    return weights_in(config, loaded.weights)


def weights_in(config: TrainConfig, folder: str | None) -> Weights | None:
    """The same of `model.weights`, by default of a `folder`."""
    folder = config.model.weights or folder
    if folder is None or config.checkpoint.resume:
        return None
    return Weights(Path(folder).expanduser(), config.model.missing or (), config.model.unused or ())


def freeze(model: nn.Module, trained: Sequence[str] | None) -> None:
    """Let only the parameters that a glob names be trained. Raises TrainedParametersError."""
    if trained is None:
        return
    names = dict(model.named_parameters(remove_duplicate=False))
    for glob in trained:
        if not fnmatch.filter(names, glob):
            raise TrainedParametersError(glob, names)
    kept = {id(parameter) for glob in trained for parameter in map(names.get, fnmatch.filter(names, glob))}
    for parameter in names.values():
        parameter.requires_grad_(id(parameter) in kept)


def _fills_meta(device: str) -> bool:
    """`fxpar.parallelize` puts what is on the meta device on a GPU if there is one."""
    return device != "cpu" or not torch.cuda.is_available()


def texts_of(config: TrainConfig) -> dict[str, str]:
    """The options of the model as `--set` of the other commands writes them."""
    return {key: option_text(value) for key, value in config.model.options.items()}


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


def _load(config: TrainConfig, options: dict[str, str], automatic: dict[str, str], device: str = "cpu") -> LoadedModel:
    settings: dict[str, Any] = {"dtype": config.precision.parameters, "seed": config.run.seed, "noise": False}
    settings["device"] = device
    try:
        return load(config.model.name, options={**automatic, **options}, **settings)
    except ModelOptionError:
        # Types without a fixed number of positions have no such option.
        fewer = {key: value for key, value in automatic.items() if key != "max_position_embeddings"}
        if fewer == automatic:
            raise
        return load(config.model.name, options={**fewer, **options}, **settings)


@contextmanager
def text_alone(name: str) -> Iterator[None]:
    """While the step of a run of text is captured: a key that it lacks is an error that says so (TextModelError)."""
    try:
        yield
    except ExampleNeededError as error:
        raise TextModelError(name, f"reads {error.key!r} beside token ids, and [data] has text alone: {_DO}") from error


def _check_text(loaded: LoadedModel, vocab_size: int, tokenizer: str) -> None:
    if "input_ids" not in loaded.example_batch:
        keys = ", ".join(loaded.example_batch)
        raise TextModelError(
            loaded.name,
            f"takes no input_ids (its batches have {keys}), and [data] is for causal language models: {_DO}, by plain "
            "calls after fxpar.parallelize",
        )
    known = model_vocab(loaded.model)
    if known is not None and known < vocab_size:
        raise VocabularyError(tokenizer, vocab_size, known)
