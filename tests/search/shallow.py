"""Small models of any depth, as `fxpar plan` prices them."""

from __future__ import annotations

import functools

from fxpar.cli.options import GraphSource
from fxpar.cli.shallow import Shallow
from fxpar.models.depth import layer_option


@functools.cache
def shallow(model: str, layers: int) -> Shallow:
    option = layer_option(model, {})
    assert option is not None
    return Shallow(GraphSource(model, world=8, options=(f"{option.name}={layers}",)))
