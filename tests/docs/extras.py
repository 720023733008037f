"""Make tests/example_package importable, with its entry points, as `pip install` would."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import fxpar
from fxpar.ir.exec_graph import ExecGraph
from fxpar.models import LoadedModel

PACKAGE = Path(__file__).resolve().parents[1] / "example_package"


def install(folder: Path) -> None:
    """Declare the package in `folder`, which is on sys.path. Its code stays where it is, and stays importable: an op is
    registered once in a process.
    """
    if str(PACKAGE) not in sys.path:
        sys.path.append(str(PACKAGE))
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    info = folder / f"fxpar_extras-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


ROLE = "tp2+role(tp=small_whole)"


def module(name: str) -> ModuleType:
    """One of the package, once it is installed."""
    return importlib.import_module(f"fxpar_extras.{name}")


def squares(program: ExecGraph) -> int:
    """How many calls of the program square by a power."""
    calls = [n for part in program.parts.values() for n in part.graph.nodes if "pow" in str(n.target)]
    return sum(n.args[1] == 2 for n in calls)


def agree(logical: fxpar.LogicalGraph, small: LoadedModel, *strategies: str) -> None:
    """To 1e-10 with one device."""
    for found in fxpar.check(logical, strategies, small.params(), small.buffers(), small.batches, scale=small.scale()):
        assert found.ok, (found.strategy, found.error)
        assert max(found.loss_rel_err, found.grad_max_rel_err) < 1e-10
        assert not any("no sharding rule" in note for note in found.notes)
