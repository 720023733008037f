"""Make tests/example_package importable, with its entry points, as `pip install` would."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

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
