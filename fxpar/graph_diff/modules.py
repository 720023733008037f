"""Where nodes belong: a repeated block or another module, and the part of the step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import fx

from fxpar.ir.fqn import block_of
from fxpar.ir.node_meta import fqn_of, is_backward, phase_of

PARTS = ("prologue", "forward", "backward", "epilogue")
ROOT = "(root)"
_NUMBERED = re.compile(r"(.*?\.)?(\d+)")


class ModulePlace(NamedTuple):
    """A block (`layers.3`; outside of repeated blocks the module itself) and one of PARTS."""

    block: str
    part: str


def part_of(fqn: str) -> str:
    """`layers.3` for `layers.3.mlp.up`, `model.norm` for itself, ROOT for the model."""
    return block_of(fqn) or fqn or ROOT


def place_of(node: fx.Node, graph: str) -> ModulePlace:
    """Of a node in the graph of that name (`body`, `step`, `epilogue`, ...); `step` is one that is not yet cut."""
    part = phase_of(node) if graph == "step" else graph
    if part not in ("prologue", "epilogue"):
        part = "backward" if is_backward(node) else "forward"
    return ModulePlace(part_of(fqn_of(node)), part)


def ranges(blocks: Iterable[str]) -> str:
    """`layers.0 .. 3, layers.7, norm` for these blocks: neighbours by number are joined, whatever their order."""
    names: dict[str, list[int]] = {}
    for block in blocks:
        match = _NUMBERED.fullmatch(block)
        names.setdefault(match[1] or "" if match else block, []).extend([int(match[2])] if match else [])
    return ", ".join(word for name, numbers in names.items() for word in _runs(name, sorted(numbers)))


def _runs(name: str, numbers: Sequence[int]) -> list[str]:
    if not numbers:
        return [name]
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"{name}{run[0]}{f' .. {run[-1]}' if len(run) > 1 else ''}" for run in runs]
