"""The module tree, and the layers and edges of its drawings."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.viz.modules import SHORT_RUN, Module, ModuleItem, draw, module_tree, run_as_module
from tests.repeat import examples


def outline(module: Module) -> list:
    return [
        (i.kind, i.module.name if i.module else i.nodes, outline(i.module) if i.module else []) for i in module.items
    ]


def test_nodes_stand_in_their_modules_and_long_runs_together():
    fqns = {0: "a.b", 1: "a", 2: "a.b", 3: "", 4: "", 5: "", 6: "", 7: "c", 8: ""}
    tree = module_tree(fqns)
    inner = [("module", "b", [("node", (0,), []), ("node", (2,), [])]), ("node", (1,), [])]
    assert outline(tree) == [
        ("module", "a", inner),
        ("run", (3, 4, 5, 6), []),
        ("module", "c", [("node", (7,), [])]),
        ("node", (8,), []),
    ]
    assert [m.fqn for m in tree.walk()] == ["", "a", "a.b", "c"]


def test_nodes_of_a_module_without_submodules_stand_alone():
    tree = module_tree(dict.fromkeys(range(SHORT_RUN + 2), ""))
    assert [item.kind for item in tree.items] == ["node"] * (SHORT_RUN + 2)


def test_edges_bend_once_in_every_layer_that_they_pass():
    tree = module_tree({0: "a", 1: "b", 2: "c", 3: "d"})
    reads = {0: ["x"], 1: [0], 2: [1], 3: [2, 0, "x"]}
    tree.items.insert(0, ModuleItem("input", (), label="x"))
    drawing = draw(tree, reads.__getitem__)
    edges = {(e.path[0], e.path[-1]): e for e in drawing.edges}
    assert set(edges) == {(0, 1), (1, 2), (2, 3), (3, 4), (1, 4), (0, 4)}
    assert edges[0, 4].values == ("x",)
    assert edges[1, 4].values == (0,)
    assert [len(edges[pair].path) for pair in ((1, 4), (0, 4))] == [4, 5]
    assert [[i for i in layer if i < 5] for layer in drawing.layers] == [[0], [1], [2], [3], [4]]


def test_what_has_no_operands_stands_right_above_its_first_user():
    tree = module_tree({0: "a", 1: "b", 2: "c"})
    tree.items.append(ModuleItem("input", (), label="late"))
    drawing = draw(tree, {0: [], 1: [0], 2: [1, "late"]}.__getitem__)
    assert [set(layer) for layer in drawing.layers] == [{0}, {1, 3}, {2}]


def test_a_module_that_is_called_twice_has_an_edge_back():
    tree = module_tree({0: "a", 1: "b", 2: "a"})
    drawing = draw(tree, {0: [], 1: [0], 2: [1]}.__getitem__)
    assert {(e.path, e.back) for e in drawing.edges} == {((0, 1), False), ((1, 0), True)}


def test_items_without_edges_stand_in_rows():
    tree = module_tree({i: f"m{i}" for i in range(8)})
    assert [len(layer) for layer in draw(tree, lambda _: ()).layers] == [6, 2]


@st.composite
def programs(draw_):
    count = draw_(st.integers(1, 30))
    fqns = {i: draw_(st.sampled_from(["", "a", "a.b", "a.c", "d", "d.0", "d.1"])) for i in range(count)}
    reads = {i: draw_(st.lists(st.integers(0, i - 1), max_size=3)) if i else [] for i in range(count)}
    return fqns, reads


@settings(max_examples=examples(20))
@given(programs())
def test_every_drawing_is_whole(program):
    fqns, reads = program
    tree = module_tree(fqns)
    drawn = list(tree.walk())
    drawn += [run_as_module(item) for module in drawn for item in module.items if item.kind == "run"]
    for module in drawn:
        drawing = draw(module, reads.__getitem__)
        layer = {i: depth for depth, row in enumerate(drawing.layers) for i in row}
        assert set(range(len(module.items))) <= set(layer)
        assert len(layer) == sum(map(len, drawing.layers))
        owner = {n: i for i, item in enumerate(module.items) for n in item.nodes}
        wanted = {(owner[o], owner[n]) for n in module.nodes for o in reads[n] if o in owner and owner[o] != owner[n]}
        assert {(e.path[0], e.path[-1]) for e in drawing.edges} == wanted
        for edge in drawing.edges:
            assert edge.back or all(layer[b] == layer[a] + 1 for a, b in pairwise(edge.path))
    leaves = [n for module in tree.walk() for i in module.items if i.module is None for n in i.nodes]
    assert sorted(leaves) == sorted(fqns)
