"""Every key of `node.meta` in the code stands in `NodeMeta`, or is one of torch's."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_type_hints

import pytest
import sympy
import torch
from torch import fx

from fxpar.ir import node_meta
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.graph import TensorMeta
from fxpar.ir.node_meta import NodeMeta
from fxpar.ir.strategy import Strategy

ROOT = Path(__file__).resolve().parents[2]
TORCH = {"val", "example_value", "custom", "autograd_backward", "nn_module_stack", "grapharg", "seq_nr"}
FILES = [path for folder in ("fxpar", "passes", "recipes") for path in sorted((ROOT / folder).rglob("*.py"))]


def keys(tree: ast.AST) -> set[str]:
    """Constants in `x.meta["key"]`, `x.meta.get("key")` and the like, `"key" in x.meta`, `x.meta.update(key=...)`."""
    found: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and is_meta(node.value):
            found.append(node.slice)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_meta(node.func.value):
            found += node.args[:1] if node.func.attr in ("get", "pop", "setdefault") else []
            found += [ast.Constant(word.arg) for word in node.keywords if word.arg is not None]
        elif isinstance(node, ast.Compare) and is_meta(node.comparators[0]):
            found.append(node.left)
    return {one.value for one in found if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def is_meta(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "meta"


def test_the_search_finds_each_form():
    code = 'a.meta["one"]; b.c.meta.get("two", 3); "three" not in d.meta; e[0].meta.update(four=1); f.meta.pop("five")'
    assert keys(ast.parse(code)) == {"one", "two", "three", "four", "five"}


def test_every_key_is_listed():
    found = {(path.name, key) for path in FILES for key in keys(ast.parse(path.read_text()))}
    assert len(found) > 100
    assert not {(name, key) for name, key in found if key not in get_type_hints(NodeMeta) and key not in TORCH}


def test_every_listed_key_is_written_somewhere():
    text = "\n".join(path.read_text() for path in FILES if path.name != "node_meta.py")
    assert [key for key in get_type_hints(NodeMeta) if f'"{key}"' not in text and f"{key}=" not in text] == []


META, DIST = TensorMeta((4, 8), torch.float32), DistConfig.replicated(Strategy.parse("dp2").mesh, 2, torch.float32)


@pytest.fixture
def node():
    return fx.Graph().placeholder("x")


def test_what_is_not_said(node):
    assert (node_meta.fqn_of(node), node_meta.source_of(node), node_meta.input_kind(node)) == ("", None, None)
    assert (node_meta.is_backward(node), node_meta.is_size(node), node_meta.phase_of(node)) == (False, False, "body")
    assert (node_meta.whole_meta(node), node_meta.tensor_metas(node), node_meta.local_meta(node)) == (None, (), None)
    assert (node_meta.dists_of(node), node_meta.wanted_dists(node), node_meta.fused_count(node)) == ((), (), 1)


def test_one_result_and_several(node):
    node.meta.update(tensor=META, dist=DIST)
    assert (node_meta.tensor_of(node), node_meta.dist_of(node)) == (META, DIST)
    assert (node_meta.tensor_metas(node), node_meta.dists_of(node)) == ((META,), (DIST,))
    node.meta.update(tensor=(META, None), dist=(DIST, None))
    assert (node_meta.tensor_metas(node), node_meta.dists_of(node)) == ((META, None), (DIST, None))
    assert node_meta.whole_meta(node) == node_meta.local_meta(node) == (META, None)
    node.meta["local"] = META
    assert node_meta.local_meta(node) == node_meta.local_tensor(node) == META


def test_a_size(node):
    node.meta["sym"] = sympy.Symbol("T") + 1
    assert node_meta.is_size(node)
    assert node_meta.size_of(node) == sympy.Symbol("T") + 1
