"""`load(spec)`: from the MODEL of the command line to a module, a loss and batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxpar.errors import ModelFunctionError, ModelOptionError, UnknownModelError
from fxpar.models.builtin import EXAMPLES, load_example
from fxpar.models.loaded import LoadedModel
from fxpar.models.loaders import check_loaded, is_function, loader_of, prefix_of
from fxpar.models.user_function import load_function
from fxpar.precision.precision import parse_dtype


def load(
    spec: str,
    *,
    options: Mapping[str, str] | None = None,
    dtype: torch.dtype | str = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    tokens: Sequence[int] | None = None,
    noise: bool = True,
) -> LoadedModel:
    """Load a model by its name on the command line.

    `spec` is `hf:TYPE` (a tiny random decoder of transformers), `hf:TYPE@SIZE` (a published configuration, see
    `presets`, or `@default`), `hf:./FOLDER` (a local folder as transformers writes it, with its weights),
    `pkg.module:function`, `file.py:function`, a built-in example (`llama`, `gpt`, `vit`, `mlp`), or `PREFIX:NAME` with
    a prefix of another package (entry-point group `fxpar.models`). `options` are texts by name. On device "meta" no
    weight is allocated. `tokens` are the lengths of the micro-batches (row counts for models without tokens); a user's
    function brings its own. `noise` makes errors of a check show (see `perturb`); a model that is to be trained wants
    none.

    Raises UnknownModelError, DtypeError and what the loaders raise.
    """
    dtype = parse_dtype(dtype) if isinstance(dtype, str) else dtype
    given = dict(options or {})
    prefix = prefix_of(spec)
    if prefix is not None:
        settings: dict[str, Any] = {"dtype": dtype, "device": device, "seed": seed, "tokens": tokens, "noise": noise}
        return check_loaded(spec, loader_of(prefix)(spec.removeprefix(f"{prefix}:"), given, **settings))
    if is_function(spec):
        if tokens is not None:
            raise ModelOptionError(
                "tokens",
                "is for hf: and built-in models, whose batches fxpar makes. That of a function of yours is as long as "
                "the function makes it: give it a parameter, such as --set length=64, and for check return 'batches' "
                "from your function. memory and viz take --tokens of any model",
            )
        return load_function(spec, given, dtype=dtype, device=device, seed=seed)
    if spec in EXAMPLES:
        return load_example(spec, given, dtype=dtype, device=device, seed=seed, tokens=tokens, noise=noise)
    if spec.endswith(".py"):
        raise ModelFunctionError(spec, f"it names no function. Write {spec}:FUNCTION")
    raise UnknownModelError.of(spec, tuple(EXAMPLES))
