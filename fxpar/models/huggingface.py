"""`hf:TYPE` and `hf:TYPE@SIZE`: randomly initialised decoders of transformers; `hf:./FOLDER`: one with its weights.

Nothing is ever downloaded, and nothing of a folder is run: its configuration is JSON, its weights are safetensors.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxpar import losses
from fxpar.errors import (
    MissingPackageError,
    ModelConfigError,
    ModelFolderError,
    ModelOptionError,
    ModelTypeError,
    PresetError,
    nearest,
)
from fxpar.models.batches import TOKENS, token_batches
from fxpar.models.hf_shrink import LAYER_NAMES, tiny
from fxpar.models.loaded import LoadedModel, folder_of, perturb
from fxpar.models.options import typed
from fxpar.models.presets import PRESETS
from fxpar.store.folder import Given

CONFIG = "config.json"
FULL_LENGTH = 4096


def load_hf(
    name: str,
    given: Mapping[str, str],
    *,
    dtype: torch.dtype,
    device: str,
    seed: int,
    tokens: Sequence[int] | None,
    noise: bool = True,
) -> LoadedModel:
    """Build the model that `name` (`llama`, `llama@8b`, `./folder`) stands for, with options as texts.

    Raises MissingPackageError, ModelTypeError, PresetError, ModelOptionError, ModelConfigError, ModelFolderError, and
    for weights of a folder what `fxpar.store.folder.Given.to` raises.
    """
    folder = folder_of(f"hf:{name}")
    if folder is not None:
        return _load_folder(name, folder, given, dtype, device, seed, tokens)
    model_type, at, size = name.partition("@")
    defaults = default_config(model_type)
    config = make_config(model_type, defaults, size if at else None, given)
    model = build(model_type, config, dtype, device, seed, noise=noise)
    # A published configuration is looked at rather than run, at a length that fits its size.
    return _loaded(name, model, seed, tokens or ((FULL_LENGTH,) if at else TOKENS))


def _load_folder(
    name: str,
    folder: Path,
    given: Mapping[str, str],
    dtype: torch.dtype,
    device: str,
    seed: int,
    tokens: Sequence[int] | None,
) -> LoadedModel:
    """With the weights of the folder, but on the meta device: there it says which folder they are in."""
    defaults = _folder_config(folder)
    model_type = defaults.model_type
    config = _with_options(f"the configuration in {folder}", defaults, given)
    model = build(model_type, config, dtype, device, seed, noise=False)
    if device != "meta":
        Given.to(model, folder).fill_module(model)
    found = _loaded(name, model, seed, tokens or ((FULL_LENGTH,) if device == "meta" else TOKENS))
    return replace(found, weights=str(folder), files=(folder / CONFIG,))


def _folder_config(folder: Path) -> Any:
    """Raises ModelFolderError, ModelTypeError, ModelConfigError, MissingPackageError."""
    try:
        with open(folder / CONFIG, encoding="utf-8") as file:
            kind = json.load(file)["model_type"]
        if not isinstance(kind, str):
            raise TypeError(kind)
    except OSError as error:
        if not os.path.isdir(folder):
            why = f"is not there ({folder.absolute()}). Nothing is downloaded: name a local folder"
            raise ModelFolderError(str(folder), why) from error
        why = f"has no {CONFIG} that can be read ({error.strerror}). Nothing is downloaded: name a local folder"
        raise ModelFolderError(str(folder), why) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ModelFolderError(str(folder), f"has a {CONFIG} that names no model_type of transformers") from error
    default_config(kind)  # whether it is a decoder
    from transformers.models.auto.configuration_auto import AutoConfig

    try:
        words = {"local_files_only": True, "trust_remote_code": False}
        config = _quietly(AutoConfig.from_pretrained, str(folder), **words)
    except Exception as error:
        raise ModelConfigError(kind, error) from error
    if getattr(config, "quantization_config", None) is not None:
        raise ModelFolderError(str(folder), "holds compressed weights (quantization_config): save them in bf16 or fp32")
    return config


def _with_options(what: str, config: Any, given: Mapping[str, str]) -> Any:
    """Raises ModelOptionError."""
    known, other_names = config.to_dict(), dict(config.attribute_map)
    for key, text in given.items():
        name = other_names.get(key, key)
        if name not in known:
            raise ModelOptionError.unknown(key, what, [*known, *other_names])
        setattr(config, name, typed(key, text, known[name]))
    return config


def _loaded(name: str, model: Any, seed: int, lengths: Sequence[int]) -> LoadedModel:
    vocab = model.config.get_text_config().vocab_size
    batches = token_batches(tuple(lengths), vocab, seed, positions=False)
    example = {key: batches[0][key] for key in ("input_ids", "labels")}  # the model makes positions of its own
    initializer = getattr(model, "_init_weights", None)
    return LoadedModel(f"hf:{name}", model, losses.causal_lm, example, batches, initializer=initializer)


def default_config(model_type: str) -> Any:
    """The default configuration of a type that is a decoder. Raises MissingPackageError, ModelTypeError."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as HEADS
    except ImportError as error:
        raise MissingPackageError("hf:", "transformers", 'pip install "fxpar[hf]"') from error
    if model_type not in CONFIG_MAPPING:
        folder = f"; the folder of this name is written hf:./{model_type}" if os.path.isdir(model_type) else ""
        raise ModelTypeError(model_type, f"is unknown to transformers{folder or nearest(model_type, HEADS)}")
    if model_type not in HEADS:
        raise ModelTypeError(model_type, "has no causal language model head, so it is not a decoder")
    try:
        config = _quietly(AutoConfig.for_model, model_type)
    except Exception as error:
        raise ModelConfigError(model_type, error) from error
    refuse_parts(model_type, config, HEADS)
    return config


def make_config(model_type: str, defaults: Any, size: str | None, given: Mapping[str, str]) -> Any:
    """A tiny configuration, or the published one of `size`, with the user's options filled in.

    Raises PresetError, ModelOptionError, ModelConfigError.
    """
    from transformers.models.auto.configuration_auto import AutoConfig

    known = {k: v for k, v in defaults.to_dict().items() if k not in ("model_type", "transformers_version")}
    other_names = dict(defaults.attribute_map)
    options = {}
    for key, text in given.items():
        name = other_names.get(key, key)
        if name not in known:
            raise ModelOptionError.unknown(key, f"the configuration of 'hf:{model_type}'", [*known, *other_names])
        options[name] = typed(key, text, known[name])
    if size is None:
        values = tiny(known, options)
    elif size == "default":
        values = options
    else:
        presets = PRESETS.get(model_type, {})
        if size not in presets:
            raise PresetError(model_type, size, presets)
        values = {**presets[size], **options}
    try:
        return _quietly(AutoConfig.for_model, model_type, **values)
    except Exception as error:
        raise ModelConfigError(model_type, error) from error


def refuse_parts(model_type: str, config: Any, heads: Mapping[str, str]) -> None:
    """Raise ModelTypeError for a model with parts beside its decoder, such as one that sees images."""
    try:
        text = config.get_text_config()
    except ValueError:  # several parts read or write text
        text = None
    parts = [getattr(config, key, None) for key in config.sub_configs]
    if text is config and not any(hasattr(part, name) for part in parts for name in LAYER_NAMES):
        return
    decoder = text.model_type if text is not None and text is not config and text.model_type in heads else None
    hint = f"its decoder is 'hf:{decoder}'" if decoder else "bring it as file.py:function"
    raise ModelTypeError(model_type, f"has other parts beside a decoder; {hint}")


def build(model_type: str, config: Any, dtype: torch.dtype, device: str, seed: int, *, noise: bool = True) -> nn.Module:
    """The model in training mode, with random weights (none at all on "meta").

    Raises MissingPackageError, ModelConfigError.
    """
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    try:
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(seed)
            model: nn.Module = _quietly(AutoModelForCausalLM.from_config, config, experts_implementation="eager")
    except ImportError as error:
        raise MissingPackageError(f"hf:{model_type}", "a package that is not installed", str(error).strip()) from error
    except Exception as error:
        raise ModelConfigError(model_type, error) from error
    model = model.to(dtype).train()
    if noise and device != "meta":
        perturb(model, seed)
    return model


def _quietly(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call without the warnings and log lines that transformers has for configurations that nobody trains."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args, **kwargs)
    finally:
        logging.set_verbosity(level)
