"""What is wrong with the words of a command, found before torch is imported: that alone takes seconds."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from fxpar.cli.names import EXAMPLE_NAMES, SUFFIX
from fxpar.cli.options import GraphSource
from fxpar.cli.request import check_output, parse_strategies, parse_tokens
from fxpar.errors import ModelFunctionError, UnknownModelError


def check_early(request: Any) -> None:
    """Look at the words that a command is about to read anyway: its strategies, lengths, MODEL, files.

    Raises StrategySyntaxError, WorldSizeError, OverrideError, OneFormationError, TokensError, UnknownModelError,
    ModelFunctionError, OutputError, ClusterError, LengthsError, PlanFileError.
    """
    source = getattr(request, "source", None)
    if not isinstance(source, GraphSource):
        return
    rounds = getattr(request, "takes_rounds", False)
    parse_strategies(request.strategy_texts, source.overrides, source.world, rounds)
    parse_tokens(source.tokens)
    for path in (getattr(request, name, None) for name in ("json", "output", "trace")):
        check_output(path)
    if getattr(request, "cluster", None) is not None:
        from fxpar.cost.cluster import ClusterSpec

        ClusterSpec.from_file(request.cluster)
    if getattr(request, "lengths", None) is not None:
        from fxpar.search.lengths import check_lengths  # with numpy

        check_lengths(request.lengths, request.tokenizer)
    if not source.model or getattr(request, "table", None):  # a command that can do without one
        return
    if source.is_plan and getattr(request, "takes_plans", False):
        from fxpar.search.plan_file import read_plan

        read_plan(source.model)
        return
    file = source.model.removesuffix(":")
    if file.endswith(".py"):
        raise ModelFunctionError(source.model, f"it names no function. Write {file}:{_function_in(file)}")
    if ":" not in source.model and not source.model.endswith(SUFFIX) and source.model not in EXAMPLE_NAMES:
        raise UnknownModelError.of(source.model, EXAMPLE_NAMES)


def _function_in(path: str) -> str:
    """A function of the file that may be meant: the first that can be called without arguments."""
    try:
        body = ast.parse(Path(path).read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError):
        return "FUNCTION"
    found = [each for each in body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")]
    free = (each.name for each in found if len(each.args.args) == len(each.args.defaults))
    return next(free, "FUNCTION")
