"""What a model's options come to, defaults included, without making the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fxpar.models.builtin import EXAMPLES
from fxpar.models.loaded import folder_of
from fxpar.models.loaders import is_function
from fxpar.models.options import typed, with_options
from fxpar.models.user_function import arguments_of


def resolved_options(spec: str, given: Mapping[str, str]) -> dict[str, Any]:
    """The options of MODEL with the texts `given`: those of a built-in model, a type of transformers and a function
    with their defaults; of any other, whose defaults its own code has, those that are given, as JSON where they are.

    Raises as `fxpar.models.load` does for options.
    """
    if spec in EXAMPLES:
        return asdict(with_options(EXAMPLES[spec].options, given, f"the built-in {spec!r}"))
    if is_function(spec):
        return arguments_of(spec, given)
    if not spec.startswith("hf:") or folder_of(spec) is not None:
        return {key: typed(key, text, None) for key, text in given.items()}
    from fxpar.models.huggingface import default_config, make_config

    model_type, at, size = spec.removeprefix("hf:").partition("@")
    return make_config(model_type, default_config(model_type), size if at else None, given).to_dict()
