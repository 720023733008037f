"""Passes by name, in the entry-point group `fxpar.passes`; and as torchtitan's graph_trainer calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import fx

from fxpar.errors import PassContractError, a_type
from fxpar.ir.graph_module import from_graph_module
from fxpar.ir.pass_base import GraphPass
from fxpar.ir.pass_names import BUILTIN, PASSES

GraphModulePass = Callable[[fx.GraphModule, Sequence[Any]], fx.GraphModule]
"""A pass as torchtitan's graph_trainer calls it: `(gm, example_inputs) -> gm`."""


class SupportsRun(Protocol):
    """An object that rewrites a graph module: in place (returns whether it did) or into another."""

    def run(self, gm: fx.GraphModule, /) -> fx.GraphModule | bool: ...


def available() -> tuple[str, ...]:
    """Names of all known passes, sorted; see `Registry.available`."""
    return PASSES.available()


def get(name: str) -> Any:
    """The pass called `name`: the attribute that its entry names, a class or a function; see `Registry.get`.

    Raises UnknownPassError (with the nearest names), DuplicateNameError, EntryLoadError.
    """
    return PASSES.get(name)


def as_graph_module_pass(
    pass_: GraphPass | SupportsRun | Callable[[fx.GraphModule], fx.GraphModule | bool],
) -> GraphModulePass:
    """Adapt a pass to the signature `(gm, example_inputs) -> gm` of torchtitan's graph_trainer.

    `pass_` is one of fxpar's passes, an object with `run(gm)`, or a callable `(gm)`. The latter two return the graph
    module, or say whether they changed the one they were given; a changed one is checked and recompiled here. The
    result carries the name of the pass, by which graph_trainer reports and disables passes. The
    example inputs are not used: fxpar passes read shapes from the nodes.

    Raises `PassContractError` when `pass_` is a class or cannot be called, and, at the call, when
    it returns anything else.
    """
    name = _pass_name(pass_)
    if isinstance(pass_, type):
        raise PassContractError(name, "it is a class; make an instance with the options you want")
    run = _on_module(pass_) if isinstance(pass_, GraphPass) else getattr(pass_, "run", pass_)
    if not callable(run):
        raise PassContractError(name, f"a {type(pass_).__name__} cannot be called")

    def adapted(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
        result = run(gm)
        if result is False:
            return gm
        changed = gm if result is True else result
        if not isinstance(changed, fx.GraphModule):
            raise PassContractError(name, f"it returned {a_type(changed)}")
        changed.graph.lint()
        changed.recompile()
        return changed

    adapted.__name__ = adapted.__qualname__ = name
    adapted.__doc__ = pass_.__doc__
    return adapted


def _on_module(pass_: GraphPass) -> Callable[[fx.GraphModule], bool]:
    """One of our passes as a function of a graph module."""

    def run(gm: fx.GraphModule) -> bool:
        pass_(from_graph_module(gm))
        return True

    return run


def _pass_name(pass_: object) -> str:
    """The `name` of a pass, or of what it wraps, or of its class."""
    target = getattr(pass_, "func", pass_)  # a functools.partial carries the name of its function
    for attribute in ("name", "__name__"):
        name = getattr(target, attribute, None)
        if isinstance(name, str):
            return name
    return type(target).__name__


__all__ = [
    "BUILTIN",
    "PASSES",
    "GraphModulePass",
    "SupportsRun",
    "as_graph_module_pass",
    "available",
    "get",
]
