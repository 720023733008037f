"""What `check` and `dump` share: from words on the command line to a captured model."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpar.cli.names import SUFFIX
from fxpar.errors import (
    FxparWarning,
    GraphFileError,
    OneFormationError,
    OutputError,
    OverrideError,
    StrategySyntaxError,
    TokensError,
    UnequalWorldsError,
)
from fxpar.ir.strategy import Strategy
from fxpar.ir.teams import formations, is_rounds
from fxpar.ir.written import LONGEST

if TYPE_CHECKING:  # a command that finds its graph in the cache waits for none of these
    from torch import Tensor

    from fxpar.ir.graph import LogicalGraph
    from fxpar.models import LoadedModel
    from fxpar.precision import Precision

_LINE, _DEPTH = 100, 3  # JSON: longer values are broken into lines, down to this depth


def parse_tokens(text: str | None) -> tuple[int, ...] | None:
    """(64, 37) for "64,37". Raises TokensError."""
    if text is None:
        return None
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise TokensError(text) from None
    if not 2 <= min(lengths) <= max(lengths) <= LONGEST:
        raise TokensError(text)
    return lengths


def parse_overrides(items: Sequence[str]) -> dict[str, str]:
    """{"*.q.weight": "S(0)@tp"} for ["*.q.weight=S(0)@tp"]. Raises OverrideError."""
    found = {}
    for item in items:
        pattern, equals, placement = item.rpartition("=")
        if not equals or not pattern:
            example = f"{item or '*.o_proj.weight'}=R@tp"
            raise OverrideError(item, "is not an assignment.", f" Write GLOB=PLACE, such as {example!r}.")
        found[pattern] = placement
    return found


def parse_strategies(
    texts: Sequence[str], overrides: Sequence[str], world: int | None, rounds: bool = False
) -> list[Strategy]:
    """All strategies, before anything is captured; with `rounds` also all formations of such as `rounds(cp4)`.

    Raises StrategySyntaxError, WorldSizeError, OverrideError, OneFormationError.
    """
    placements = parse_overrides(overrides)
    names = [text.strip() for text in texts]
    if names and not any(names):
        raise StrategySyntaxError(" ".join(texts).strip(), "", "it is empty")
    if not all(names):
        raise StrategySyntaxError(",".join(texts), ",", "a strategy in the list is empty")
    found = []
    for name in names:
        written = list(map(str, formations(name))) if is_rounds(name) else [name]
        if is_rounds(name) and not rounds:
            raise OneFormationError(name, written)
        found += [Strategy.parse(one, world=world, overrides=placements) for one in written]
    return found


def named_once(strategies: Sequence[Strategy]) -> tuple[list[Strategy], list[str]]:
    """Each strategy once, and notes of those that are named again."""
    names = list(map(str, strategies))
    again = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    once = {name: strategy for name, strategy in zip(names, strategies, strict=True)}
    return list(once.values()), [f"{name} is named {names.count(name)} times" for name in again]


def same_ranks(strategies: Sequence[Strategy]) -> int:
    """Of how many ranks all of them are. Raises UnequalWorldsError."""
    ranks = {str(strategy): strategy.world for strategy in strategies}
    if len({*ranks.values()}) > 1:
        raise UnequalWorldsError(ranks)
    return strategies[0].world


def cluster_name(path: str | None) -> str:
    """What the value of `--cluster` stands for, as a head line names it."""
    from fxpar.cost.cluster import shipped

    return "usual GPUs" if path is None else f"{path} nodes, from data sheets" if path in shipped() else path


def load_model(
    spec: str, options: Sequence[str], dtype: str, tokens: str | None, *, device: str, seed: int = 0
) -> LoadedModel:
    """Raises what `fxpar.models.load` raises, TokensError, ModelOptionError."""
    from fxpar.models import load
    from fxpar.models.options import parse_assignments

    given = parse_assignments(options)
    with redirect_stdout(sys.stderr):  # what a user's file prints must not stand in the JSON
        return load(spec, options=given, dtype=dtype, device=device, seed=seed, tokens=parse_tokens(tokens))


def capture_model(model: LoadedModel) -> LogicalGraph:
    """Raises the errors of `fxpar.capture`."""
    from fxpar.tracer import capture

    return capture(model.model, model.loss_fn, model.example_batch, name=model.name)


@contextmanager
def collected_warnings(notes: list[str]) -> Iterator[None]:
    """Put the texts of fxpar's warnings into `notes` instead of on stderr; other warnings are not for the user."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        text = str(warning.message)
        if issubclass(warning.category, FxparWarning) and text not in notes:
            notes.append(text)


def check_output(path: str | None) -> None:
    """Find out early that `path`, if there is one, cannot be written. Raises OutputError."""
    if path in (None, "-"):
        return
    if os.path.isdir(path):
        raise OutputError(path, IsADirectoryError(0, "it is a folder"))
    folder = Path(path).parent
    if not os.path.isdir(folder):
        raise OutputError(path, FileNotFoundError(0, f"there is no folder {str(folder)!r}"))
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise OutputError(path, PermissionError(0, "permission denied"))


def check_replaced(path: str) -> None:
    """The same for a file that is written beside and put in its place when it is whole. Raises OutputError."""
    check_output(path)
    if path != "-" and not os.access(Path(path).parent, os.W_OK):
        raise OutputError(path, PermissionError(0, f"nothing can be written in {str(Path(path).parent)!r}"))


def check_graph_output(path: str) -> None:
    """The same for a graph file, which has to be named as one. Raises OutputError, GraphFileError."""
    check_replaced(path)
    if not path.endswith(SUFFIX):
        why = f"its name does not end in {SUFFIX}, so no command would take it for a graph"
        raise GraphFileError(path, why, f"Write -o {path}{SUFFIX}")


def write_output(path: str, text: str) -> None:
    """Write `text` to a file, or to stdout for "-". Raises OutputError."""
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(path, error) from error


def write_json(path: str | None, document: Any) -> bool:
    """Write what `--json` asks for, if it does; whether stdout is free for people. Raises OutputError."""
    if path is not None:
        write_output(path, to_json(document))
    return path != "-"


def replace_output(path: str, text: str) -> None:
    """The same, but a file that is there stays as it is until the new one is whole. Raises OutputError."""
    if path == "-":
        write_output(path, text)
        return
    part = f"{path}.part"
    write_output(part, text)
    try:
        os.replace(part, path)
    except OSError as error:
        raise OutputError(path, error) from error


def to_json(data: Any) -> str:
    """Valid JSON, what fits on a line on one line: infinities and NaN become null."""
    return _pretty(_finite(data), 0) + "\n"


def _pretty(value: Any, depth: int) -> str:
    line = json.dumps(value, allow_nan=False)
    if not isinstance(value, dict | list) or depth >= _DEPTH or len(line) <= _LINE:
        return line
    pad = " " * (depth + 1)
    if isinstance(value, dict):
        items = [f"{pad}{json.dumps(k)}: {_pretty(v, depth + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(items) + "\n" + " " * depth + "}"
    return "[\n" + ",\n".join(pad + _pretty(v, depth + 1) for v in value) + "\n" + " " * depth + "]"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def parse_precision(text: str | None) -> Precision | None:
    """The value of `--precision`, before anything is captured for it. Raises PrecisionSyntaxError."""
    if text is None:
        return None
    from fxpar.precision import Precision

    return Precision.parse(text)


def in_precision(logical: LogicalGraph, precision: Precision | None) -> LogicalGraph:
    """The graph as `--precision` wants it. Raises PrecisionDtypeError, PrecisionGlobError."""
    if precision is None:
        return logical
    from fxpar.precision import with_precision

    return with_precision(logical, precision)


def as_computed(logical: LogicalGraph, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters in the dtypes that the graph takes."""
    dtypes = {info.fqn: info.meta.dtype for info in logical.params()}
    return {fqn: value.to(dtypes.get(fqn, value.dtype)) for fqn, value in params.items()}
