"""Who may import whom: import direction, host frameworks, private torch names, the package list.

The checks read the source with `ast`, so nothing is imported. An import counts wherever it stands,
inside a function or under `TYPE_CHECKING` too. To add a module, give it a row in LAYERS; to add a
folder with code, add it to the `packages` list of pyproject.toml as well.
"""

from __future__ import annotations

import ast
import functools
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.longest import LONGEST

ROOT = Path(__file__).resolve().parent.parent

# A module imports from its own layer and lower ones. "__init__" is what `import fxpar` offers.
LAYER_TABLE: dict[int, str] = {
    0: "errors version",
    1: "ir",
    2: "graph_diff",
    3: "torch_api rules ops losses data",
    4: "tracer annotate cost flow batching monitor schedule stages remat chunks precision graph_files rounds waves",
    5: "passes",
    6: "lowering compile",
    7: "store switch transport memory",
    8: "runtime checkpoint viz explain profiling search tasks",
    9: "api checking dynamo __init__",
    10: "recipes cli models train __main__",
}
LAYERS = {unit: layer for layer, units in LAYER_TABLE.items() for unit in units.split()}

# Of layer 4 a pass sees the costs only: what captures and annotates runs around it.
HIDDEN_FROM_PASSES = {"tracer", "annotate"}
HOSTS = {"torchtitan", "transformers"}
HOST_UNITS = {"recipes", "cli", "models"}
PRIVATE_OPS_ALLOWED = {"_c10d_functional"}


@dataclass(frozen=True)
class Import:
    """One imported dotted name; `module` is set for `from module import ...`."""

    line: int
    dotted: str
    lazy: bool  # inside a function, or seen by type checkers only
    module: str = ""
    relative: bool = False


@dataclass
class Scan(ast.NodeVisitor):
    """Collects the imports of one module, and the dotted names in it that start at torch.

    Names are bound per module, not per scope: a name that stands for torch in one function does so
    in all. A private name reached through a value (`graph._x`) is not seen.
    """

    package: str
    imports: list[Import] = field(default_factory=list)
    torch_names: list[tuple[int, str]] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    depth: int = 0  # of functions and TYPE_CHECKING blocks

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node, alias.name)
            bound = alias.asname or alias.name.split(".")[0]
            self._bind(bound, alias.name if alias.asname else bound)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parents = self.package.split(".")[: len(self.package.split(".")) - node.level + 1]
            base = ".".join([*parents, *([base] if base else [])])
        for alias in node.names:
            dotted = f"{base}.{alias.name}"
            self._add(node, dotted, module=base, relative=node.level > 0)
            self._bind(alias.asname or alias.name, dotted)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._deeper(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        if _last_name(node.test) == "TYPE_CHECKING":
            self._deeper(node)
        else:
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        dotted = self._dotted(node.value)
        if dotted and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            self._bind(node.targets[0].id, dotted)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = self._dotted(node)
        if dotted:
            self.torch_names.append((node.lineno, dotted))
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name, first = _last_name(node.func), node.args[0] if node.args else None
        if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
            self._add(node, str(first.value))
        if name == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            base = self._dotted(node.args[0])
            if base:
                self.torch_names.append((node.lineno, f"{base}.{node.args[1].value}"))
        self.generic_visit(node)

    def _add(self, node: ast.AST, dotted: str, module: str = "", relative: bool = False) -> None:
        line = getattr(node, "lineno", 0)
        self.imports.append(Import(line, dotted, self.depth > 0, module, relative))
        if dotted.split(".")[0] == "torch":
            self.torch_names.append((line, dotted))

    def _bind(self, name: str, dotted: str) -> None:
        if dotted.split(".")[0] == "torch":
            self.aliases[name] = dotted

    def _deeper(self, node: ast.AST) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    def _dotted(self, node: ast.AST) -> str:
        """The dotted name of an attribute chain that starts at torch, else an empty string."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in self.aliases:
            return ".".join([self.aliases[node.id], *reversed(parts)])
        return ""


def _last_name(node: ast.AST) -> str:
    """`c` of `a.b.c`, of whatever `a` is; "" for what has no name. `ast.unparse` would take half of the time."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def unit_of(path: str) -> str:
    """The row of LAYERS that the file at `path` (relative, posix) belongs to."""
    parts = path.removesuffix(".py").split("/")
    return parts[1] if parts[0] == "fxpar" else parts[0]


def package_of(folder: str) -> str:
    """The dotted package name of a folder: `passes` is `fxpar.passes`."""
    return ("" if folder.startswith("fxpar") else "fxpar.") + folder.replace("/", ".")


def imported_unit(found: Import) -> str | None:
    """The row of LAYERS that an import refers to; None if it is not of fxpar."""
    parts = found.dotted.split(".")
    if parts[0] != "fxpar":
        return None
    if len(parts) == 1 or (found.module == "fxpar" and parts[1] not in LAYERS):
        return "__init__"  # `import fxpar`, `from fxpar import Strategy`
    return parts[1]


def private_part(dotted: str) -> str:
    """The first private component of a name under torch; names of operators are not private."""
    parts = dotted.split(".")
    if parts[1:2] == ["ops"]:
        parts = [part for part in parts[2:3] if part not in PRIVATE_OPS_ALLOWED]
    private = (part for part in parts if part.startswith("_") and not part.endswith("__"))
    return next(private, "")


def direction_problem(unit: str, found: Import) -> str:
    target = imported_unit(found)
    if target is None:
        return ""
    if target not in LAYERS:
        return f"imports fxpar.{target}, which has no row in LAYER_TABLE"
    if unit == "passes" and target == "passes":
        return f"imports {found.dotted}: a pass never imports another pass; let lower order them"
    if unit == "passes" and target in HIDDEN_FROM_PASSES:
        return f"imports fxpar.{target}: of layer 4 a pass may import cost only"
    if LAYERS[target] > LAYERS[unit]:
        name = "fxpar" if target == "__init__" else f"fxpar.{target}"
        return f"{unit} (layer {LAYERS[unit]}) imports {name} (layer {LAYERS[target]})"
    return ""


def host_problem(path: str, unit: str, found: Import) -> str:
    host = found.dotted.split(".")[0]
    if host not in HOSTS or unit in HOST_UNITS:
        return ""
    if path.startswith("fxpar/tracer/hosts"):
        return "" if found.lazy else f"imports {host} at module level; do it inside the function"
    return f"imports {host}, which belongs in {', '.join(sorted(HOST_UNITS))} or tracer/hosts*.py"


@functools.cache  # two tests look at all files
def scanned(path: str, source: str) -> Scan:
    scan = Scan(package_of(os.path.dirname(path)))
    scan.visit(ast.parse(source))
    return scan


def problems(path: str, source: str) -> Iterator[str]:
    """All violations in one file, as `path:line: what is wrong`."""
    unit = unit_of(path)
    if unit not in LAYERS:
        yield f"{path}:1: {unit!r} has no row in LAYER_TABLE of tests/test_layers.py"
        return
    scan = scanned(path, source)
    for found in scan.imports:
        for problem in (direction_problem(unit, found), host_problem(path, unit, found)):
            if problem:
                yield f"{path}:{found.line}: {problem}"
        if found.relative and unit in {"passes", "recipes"}:
            yield f"{path}:{found.line}: relative import; write `from {found.module} import ...`"
    if unit != "torch_api":
        for line, dotted in dict.fromkeys(scan.torch_names):
            if private_part(dotted):
                yield f"{path}:{line}: private torch name {dotted}; go through fxpar.torch_api"


def source_files(*folders: str) -> Iterator[Path]:
    """Python files below the folders of the repository; links are not followed."""
    for folder in folders:
        for directory, _, files in os.walk(ROOT / folder):
            yield from (Path(directory, name) for name in sorted(files) if name.endswith(".py"))


def test_imports_of_the_library():
    found = [
        problem
        for path in source_files("fxpar", "passes", "recipes")
        for problem in problems(path.relative_to(ROOT).as_posix(), path.read_text())
    ]
    assert not found, "\n" + "\n".join(found)


def test_no_circles_between_files():
    """Imports inside of functions and for type checkers count as well."""
    paths = {}
    for path in source_files("fxpar", "passes", "recipes"):
        where = path.relative_to(ROOT)
        paths[f"{package_of(where.parent.as_posix())}.{where.stem}".removesuffix(".__init__")] = path
    below: dict[str, set[str]] = {}
    for name, path in paths.items():
        scan = scanned(path.relative_to(ROOT).as_posix(), path.read_text())
        found = {i.dotted if i.dotted in paths else i.module or i.dotted for i in scan.imports}
        below[name] = found & paths.keys() - {name}
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        pytest.fail(f"imports go round in a circle: {' -> '.join(error.args[1])}")


def test_few_modules_stand_alone():
    loose = [path.name for path in (ROOT / "fxpar").glob("*.py")]
    assert len(loose) <= 8, f"each belongs in a room: {sorted(loose)}"


def test_package_list_matches_the_tree():
    with open(ROOT / "pyproject.toml", "rb") as file:
        declared = tomllib.load(file)["tool"]["setuptools"]
    paths = source_files("fxpar", "passes", "recipes")
    folders = {path.parent.relative_to(ROOT).as_posix() for path in paths}
    nested = [f for f in folders if f.startswith(("passes/", "recipes/"))]
    assert not nested, f"keep passes/ and recipes/ flat: {nested}"
    tree = {package_of(folder) for folder in folders}
    missing, stale = tree - set(declared["packages"]), set(declared["packages"]) - tree
    assert not missing, f"add to [tool.setuptools] packages in pyproject.toml: {sorted(missing)}"
    assert not stale, f"in [tool.setuptools] packages but without code: {sorted(stale)}"
    for folder in folders:
        assert (ROOT / folder / "__init__.py").exists(), f"{folder}/__init__.py is missing"


def test_the_files_that_begin_first_are_there():
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []
    assert len(set(LONGEST)) == len(LONGEST)


# ---------------------------------------------------------- the checker can fail, and can pass
VIOLATIONS = [
    ("fxpar/ir/graph.py", "import fxpar.store", "ir (layer 1) imports fxpar.store (layer 7)"),
    ("fxpar/ir/graph.py", "from fxpar.store import Store", "ir (layer 1) imports fxpar.store"),
    ("fxpar/ir/graph.py", "from fxpar import store", "ir (layer 1) imports fxpar.store"),
    ("fxpar/ir/graph.py", "from .. import store", "ir (layer 1) imports fxpar.store"),
    ("fxpar/ops/attention.py", "from ..lowering import x", "ops (layer 3) imports fxpar.lowering"),
    ("fxpar/ir/graph.py", "def f():\n    import fxpar.store", "ir/graph.py:2: ir (layer 1) imports"),
    ("fxpar/ir/graph.py", "from fxpar import Strategy", "imports fxpar (layer 9)"),
    ("fxpar/ir/graph.py", "import_module('fxpar.runtime')", "imports fxpar.runtime (layer 8)"),
    ("fxpar/ir/graph.py", "import fxpar.novelty", "no row in LAYER_TABLE"),
    ("fxpar/novelty.py", "", "no row in LAYER_TABLE"),
    ("passes/a.py", "from fxpar.passes.b import B", "never imports another pass"),
    ("passes/a.py", "from fxpar.passes import b", "never imports another pass"),
    ("passes/a.py", "from .b import B", "write `from fxpar.passes.b import ...`"),
    ("passes/a.py", "from fxpar.tracer import capture", "a pass may import cost only"),
    ("passes/a.py", "from fxpar.runtime.engine import E", "passes (layer 5) imports fxpar.runtime"),
    ("fxpar/api.py", "import torchtitan.trainer", "imports torchtitan, which belongs in"),
    ("fxpar/tracer/trace.py", "def f():\n    import transformers", "imports transformers"),
    ("fxpar/tracer/hosts_hf.py", "import transformers", "inside the function"),
    ("fxpar/ir/graph.py", "import torch._dynamo", "private torch name torch._dynamo"),
    ("fxpar/ir/graph.py", "from torch import _C", "private torch name torch._C"),
    ("fxpar/ir/graph.py", "from torch.utils import _pytree as p", "torch.utils._pytree"),
    ("fxpar/ir/graph.py", "import torch\ntorch._check(True)", "ir/graph.py:2: private torch name"),
    ("fxpar/ir/graph.py", "import torch.distributed as d\nd._x.y()", "torch.distributed._x.y"),
    ("fxpar/ir/graph.py", "from torch import fx\nfx.Graph()._x\nfx.Node._y", "torch.fx.Node._y"),
    ("fxpar/ir/graph.py", "import torch\nt = torch.fx\nt._x", "torch.fx._x"),
    ("fxpar/ir/graph.py", "import torch\ngetattr(torch, '_C')", "torch._C"),
    ("fxpar/ir/graph.py", "import_module('torch._inductor')", "torch._inductor"),
    ("fxpar/ir/graph.py", "import torch\ntorch.ops._dtensor.f", "torch.ops._dtensor"),
    ("passes/a.py", "import torch\ntorch._foreach_add(a, b)", "torch._foreach_add"),
]


@pytest.mark.parametrize(("path", "source", "message"), VIOLATIONS)
def test_checker_reports(path, source, message):
    found = list(problems(path, source))
    assert any(message in problem for problem in found), found
    assert all(problem.startswith(f"{path}:") for problem in found)


LEGAL = [
    ("fxpar/store.py", "from fxpar.ir.graph import LogicalGraph\nimport fxpar.switch.boxes"),
    ("fxpar/cli/main.py", "import fxpar\nfrom fxpar import Strategy\nimport transformers"),
    ("fxpar/__init__.py", "from fxpar.api import parallelize\nfrom fxpar.runtime import Engine"),
    ("fxpar/ops/attention.py", "from .document_mask import m\nfrom fxpar.ops import dropout"),
    ("passes/a.py", "from fxpar.ir.graph import G\nfrom fxpar.cost import ops\nfrom fxpar.rules import r"),
    ("recipes/llama.py", "from torchtitan.config import C\nfrom fxpar.api import a"),
    ("fxpar/tracer/hosts_hf.py", "def f():\n    import transformers"),
    ("fxpar/tracer/hosts_hf.py", "if TYPE_CHECKING:\n    from transformers import P"),
    ("fxpar/torch_api/tracing.py", "import torch._dynamo\nfrom torch._C import x"),
    ("fxpar/ir/graph.py", "import torch\ntorch.__version__\nself._torch._x\ntorch.empty(1)._base"),
    ("fxpar/ir/graph.py", "import torch\ntorch.ops._c10d_functional.wait_tensor.default"),
    ("fxpar/ir/graph.py", "import torch\naten = torch.ops.aten\naten._softmax.default\naten._x"),
]


@pytest.mark.parametrize(("path", "source"), LEGAL)
def test_checker_accepts(path, source):
    assert list(problems(path, source)) == []
