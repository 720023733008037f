"""Graph files that were changed: a GraphFileError says so, or they are graphs. No file is made, no code runs."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import zipfile
from typing import Any

import pytest
import torch

from fxpar.cli.check_file import check_file
from fxpar.cli.source import GraphSource
from fxpar.errors import FxparError
from fxpar.graph_files.file import _MEMBERS, Origin, load_graph, load_origin, save_graph
from fxpar.ir.printer import format_graph
from fxpar.lowering import lower
from tests.captured import odd
from tests.watched import watched

CODE = "__import__('os').system('touch made')"
# Words that would do harm if anything evaluated, imported or called them.
EVIL: list[Any] = [
    CODE,
    f"x): return {CODE}\ndef g(self",
    f"x = {CODE}",
    "os:system",
    "builtins:eval",
    "operator:attrgetter",
    "operator:itemgetter",
    "operator:call",
    "operator:methodcaller",
    "fxpar.ops.layout:torch",
    "fxpar.ops.layout:torch.load",
    "torch:load",
    "evil_module:run",
    "aten.from_file.default",
    "aten.save.default",
    "aten.set_.source_Storage",
    "aten.uniform_.default",
    "aten.rand.default",
    "aten.mm.__class__",
    "load_library",
    "classes.load_library.x",
    "_c10d_functional.broadcast_.default",
    "../../made",
    "0",
    "@world",
    "#tp",
    "\x1b]0;title\x07",
    "\ud800",
    "",
    "self",
    "torch",
    "call_method",
    "call_module",
    "get_attr",
    "placeholder",
    "output",
    -1,
    0,
    1,
    2**31,
    2**63 - 1,
    10**400,
    1e308,
    0.5,
    True,
    None,
    [],
    {},
    {"a": 1},
    ["t"],
    ["l", 1],
    ["d", [["t"], 1]],
    ["n", 0],
    ["n", -1],
    ["p", 0],
    ["p", -1],
    ["x", 0],
    ["s", "T"],
    ["s", CODE],
    ["e", "Pow", 9, ["q", 1000000000, 1]],
    ["e", "Mul", ["s", "T"], 4294967296],
    ["q", 1, 0],
    ["f", "nan"],
    ["torch", "load"],
    ["torch", "onnx"],
    ["torch", "float16"],
    ["device", "cuda:0"],
    ["device", "xla"],
    ["c", "Path", ["a", "b"]],
    ["g"],
    "[" * 40,
]


class Base:
    """The members of a file that `save_graph` wrote."""

    def __init__(self, path: Any) -> None:
        with zipfile.ZipFile(path) as archive:
            self.members = {name: archive.read(name) for name in archive.namelist()}
        self.header = json.loads(self.members["header.json"])
        self.data = {name: json.loads(self.members[f"{name}.json"]) for name in ("graph", "origin")}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> list[Base]:
    folder = tmp_path_factory.mktemp("bases")
    found = []
    for name, strategy in (("sizes", None), ("norms", "tp2"), ("shared", "dp2+zero3")):
        model = odd(name)
        graph = model.graph if strategy is None else lower(model.graph, strategy)
        path = folder / f"{strategy}.fxpar"
        save_graph(path, graph, Origin(None if strategy is None else model.graph, model.batches[:2]))
        assert all(result.ok for result in checked(path, strategy is None))  # and all that is imported on the way
        found.append(Base(path))
    return found


def checked(path: Any, logical: bool) -> Any:
    from fxpar.ir.strategy import Strategy

    strategies = [Strategy.parse("tp2")] if logical else []
    return check_file(GraphSource(str(path)), strategies, tolerance=None, compile="eager", seed=0)[1]


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found.append((value, key))
        places(inner, found)
    return found


def mutate(data: Any, rng: random.Random) -> Any:
    """A copy with one to three things put elsewhere, left out, doubled, or replaced by something evil."""
    data = copy.deepcopy(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        sites = places(data, [])
        container, key = rng.choice(sites)
        other = rng.choice(sites)
        match rng.randrange(6):
            case 0 if isinstance(container, list):
                del container[key]
            case 1 if isinstance(container, list):
                container.insert(key, copy.deepcopy(container[key]))
            case 2:
                container[key] = copy.deepcopy(other[0][other[1]])
            case 3 if isinstance(container[key], int):
                container[key] += rng.choice((-1, 1, 2**31, 2**62))
            case _:
                container[key] = copy.deepcopy(rng.choice(EVIL))
    return data


def write(path: Any, base: Base, rng: random.Random) -> None:
    """A changed file whose checksum is right, as anybody can compute it, or one with changed bytes."""
    members = dict(base.members)
    kind = rng.choice(("graph", "graph", "graph", "origin", "header", "bytes", "tensors"))
    if kind in base.data:
        members[f"{kind}.json"] = json.dumps(mutate(base.data[kind], rng)).encode()
    if kind == "tensors":
        body = bytearray(members["origin.bin"])
        body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
        members["origin.bin"] = bytes(body[: rng.choice((len(body), len(body) - 1))])
    digest = hashlib.sha256(b"".join(members[name] for name in _MEMBERS)).hexdigest()
    header = {**base.header, "sha256": digest}
    members["header.json"] = json.dumps(mutate(header, rng) if kind == "header" else header).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    if kind == "bytes":
        content = bytearray(path.read_bytes())
        for _ in range(rng.choice((1, 3, 50))):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(bytes(content[: rng.choice((len(content), rng.randrange(len(content))))]))


def fuzz(bases: list[Base], folder: Any, cases: range, run: bool) -> tuple[int, int]:
    """(files that were read, files that were refused); with `run`, those that can be read are checked too."""
    path, before = folder / "changed.fxpar", torch.random.get_rng_state()
    read = refused = 0
    for case in cases:
        rng = random.Random(case)
        index = case % len(bases)
        write(path, bases[index], rng)
        with watched() as seen:
            try:
                graph = load_graph(path)
                load_origin(path)
                read += 1
                format_graph(graph)
                if run:
                    checked(path, logical=index == 0)
            except FxparError as error:
                if str(path) not in str(error) or not str(error).isprintable():
                    raise AssertionError(f"case {case}: {error!r}") from error
                refused += 1
            except Exception as error:
                raise AssertionError(f"case {case}: {type(error).__name__}: {error}") from error
        assert not seen, (case, seen)
        assert list(folder.iterdir()) == [path], case
        assert torch.equal(torch.random.get_rng_state(), before), case
    return read, refused


def test_changed_files_are_refused(bases, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, refused = fuzz(bases, tmp_path, range(150), run=False)
    assert refused > 75


def test_changed_files_are_run(bases, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read, _ = fuzz(bases, tmp_path, range(10_000, 10_030), run=True)
    assert read > 2


@pytest.mark.nightly
@pytest.mark.slow
def test_thousands_of_changed_files(bases, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fuzz(bases, tmp_path, range(20_000, 40_000), run=False)
    fuzz(bases, tmp_path, range(50_000, 52_000), run=True)
