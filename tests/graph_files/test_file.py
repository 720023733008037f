"""Graph files: what is read equals what was written, and a file that cannot be read says why."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from dataclasses import replace

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from fxpar.annotate import annotate
from fxpar.errors import GraphFileError, GraphFormatError, OutputError
from fxpar.graph_files.codec import Decoder, Encoder
from fxpar.graph_files.file import (
    Origin,
    kind_of,
    load_graph,
    load_origin,
    load_value,
    read_header,
    save_graph,
    save_value,
)
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.graph import Averaged, TensorMeta, dim_symbol
from fxpar.ir.mesh import Mesh
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.ir.printer import format_graph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from tests.captured import gpt, llama, odd


def again(graph, folder):
    save_graph(folder / "g.fxpar", graph)
    return load_graph(folder / "g.fxpar")


@pytest.mark.parametrize("model", [llama, gpt, lambda: odd("counter")])
def test_a_logical_graph_comes_back(model, tmp_path):
    graph = replace(model().graph, averaged=Averaged("a mean", 1))
    read = again(graph, tmp_path)
    assert format_graph(read, fold=False) == format_graph(graph, fold=False)
    for field in ("inputs", "outputs", "dims", "name", "timings", "averaged"):
        assert getattr(read, field) == getattr(graph, field)
    assert [n.meta for n in read.gm.graph.nodes if n.op != "output"] == [
        n.meta for n in graph.gm.graph.nodes if n.op != "output"
    ]
    assert all(torch.equal(read.constants[name], value) for name, value in graph.constants.items())


@pytest.mark.parametrize(
    "text", ["tp2+sp+remat", "tp4", "cp2", "dp2.cp2.tp2+sp+zero3", "pp2.dp2+zb_h1", "tp4[*.attention: cp2.tp2+zero1]"]
)
def test_a_lowered_graph_comes_back(text, tmp_path):
    program = lower(llama(layers=2 if "pp2" in text else 1).graph, text)
    read = again(program, tmp_path)
    assert format_graph(read, fold=False) == format_graph(program, fold=False)
    assert read.fingerprint() == program.fingerprint()
    assert read.passes == program.passes
    assert read.params() == program.params()


def test_an_annotated_graph_comes_back_and_goes_on(tmp_path):
    """With all that later passes read of a node."""
    graph = annotate(llama().graph, Strategy.parse("dp2.tp2+sp"))
    read = again(graph, tmp_path)
    assert kind_of(read) == "annotated"
    assert format_graph(read, fold=False) == format_graph(graph, fold=False)
    for ours, theirs in zip(read.graph.nodes, graph.graph.nodes, strict=True):
        assert ours.meta.keys() == theirs.meta.keys()


def test_what_a_graph_is_checked_against(tmp_path):
    graph, batch = llama().graph, {"input_ids": torch.arange(6).view(1, 6)}
    save_graph(tmp_path / "g.fxpar", lower(graph, "tp2"), Origin(graph, (batch,)))
    origin = load_origin(tmp_path / "g.fxpar")
    assert format_graph(origin.logical) == format_graph(graph)
    assert torch.equal(origin.batches[0]["input_ids"], batch["input_ids"])
    save_graph(tmp_path / "g.fxpar", graph)
    assert load_origin(tmp_path / "g.fxpar") is None


SIZES = st.recursive(
    st.integers(1, 9) | st.sampled_from([dim_symbol("T"), dim_symbol("B")]),
    lambda inner: (
        st.tuples(inner, inner).map(lambda p: p[0] * p[1] + 1)
        | st.tuples(inner, inner).map(lambda p: sympy.Max(p[0], p[1]))
        | inner.map(lambda e: sympy.floor(sympy.sympify(e) / 2) + 1)
    ),
    max_leaves=5,
)
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=5)
PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | TEXT
VALUES = st.recursive(
    PLAIN | SIZES | st.sampled_from([torch.float32, torch.bfloat16, torch.strided, torch.preserve_format]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(TEXT | st.integers(-9, 99), inner, max_size=3)
        | st.lists(SIZES, max_size=3).map(lambda sizes: TensorMeta(tuple(sizes), torch.float32))
    ),
    max_leaves=12,
)


@given(VALUES)
def test_any_value_comes_back(value):
    encoder = Encoder()
    root = json.loads(json.dumps(encoder.encode(value), allow_nan=False))
    read = Decoder(json.loads(json.dumps(encoder.pool, allow_nan=False)), encoder.tensors).decode(root)
    assert read == value
    assert type(read) is type(value) or isinstance(value, sympy.Integer)


def test_equal_values_are_stored_once():
    encoder = Encoder()
    meta = DistConfig.replicated(Mesh((("tp", 2),)), 2)
    encoder.encode([meta] * 50)
    size = len(encoder.pool)
    encoder.encode(DistConfig.replicated(Mesh((("tp", 2),)), 2))
    assert len(encoder.pool) == size


def test_what_has_no_form_is_refused():
    with pytest.raises(GraphFormatError, match="no form for"):
        Encoder().encode(object())


@pytest.mark.parametrize(
    ("root", "message"),
    [
        (["?"], "tag '\\?'"),
        (["torch", "load"], "torch.load is not a dtype"),
        (["c", "Path"], "'Path' is not known"),
        (["c", "Dim", ["size", 1]], "fields of Dim are others"),
        (["e", "exec", "1"], "'exec' is not known"),
        (["g", ["call_function", "x", "os:system", ["t", "ls"], ["d"], []]], "'os:system' is none"),
        (["g", ["call_function", "x", "torch:load", ["t", "x"], ["d"], []]], "'torch:load' is none"),
        (["g", ["call_function", "x", "load_library", ["t", "x"], ["d"], []]], "'load_library' is not an op"),
        (["g", ["call_function", "x", "not_there_at_all:f", ["t"], ["d"], []]], "is none that graphs"),
        (["g", ["call_function", "x", "aten.no_such_op.default", ["t"], ["d"], []]], "not available here"),
    ],
)
def test_a_file_of_a_stranger_executes_nothing(root, message):
    with pytest.raises(GraphFormatError, match=message):
        Decoder([], []).decode(root)


def changed(path, header=None, body=None):
    """The file with another header or graph."""
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    if header:
        contents["header.json"] = json.dumps({**json.loads(contents["header.json"]), **header}).encode()
    if body is not None:
        contents["graph.json"] = body
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)


def test_bad_files(tmp_path):
    path = tmp_path / "g.fxpar"

    def says(text):
        with pytest.raises(GraphFileError, match=re.escape(text)) as info:
            load_graph(path)
        assert str(path) in str(info.value)

    says("there is no such file")
    path.write_text("not a graph")
    says("it is not a graph file")
    save_graph(path, llama().graph)
    assert read_header(path)["kind"] == "logical"
    changed(path, header={"version": 9, "fxpar": "9.1"})
    says("fxpar 9.1 wrote it in version 9 of the format, this fxpar reads version 4. Dump it again")
    changed(path, header={"version": 2, "format": "other"})
    says("it is not a graph of fxpar")
    save_graph(path, llama().graph)
    changed(path, body=b'{"pool": [], "root": 3}')
    says("its content is not what was written")
    path.write_bytes(path.read_bytes()[:-200])
    says("it is not a graph file, or it is incomplete")
    path.unlink()
    path.mkdir()
    says("it cannot be read")
    with pytest.raises(OutputError, match="no/folder"):
        save_graph("no/folder/g.fxpar", llama().graph)


def test_a_failed_write_leaves_nothing(tmp_path):
    graph = llama().graph
    node = next(iter(graph.gm.graph.nodes))
    node.meta["odd"] = fx.Graph.python_code
    try:
        with pytest.raises(GraphFormatError):
            save_graph(tmp_path / "g.fxpar", graph)
    finally:
        del node.meta["odd"]
    assert list(tmp_path.iterdir()) == []


def written(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)


def members(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_files_that_would_fill_the_memory(tmp_path):
    path = tmp_path / "g.fxpar"
    save_graph(path, odd("shared").graph)
    parts = members(path)
    written(path, {**parts, "graph.json": b" " * (2**27 + 1)}.items())
    assert path.stat().st_size < 2**18
    with pytest.raises(GraphFileError, match=r"its graph.json unpacks to 134,217,729 bytes, more than 134,217,728"):
        load_graph(path)
    # One that lies about its size: the archive is damaged.
    content = path.read_bytes()
    path.write_bytes(content.replace((2**27 + 1).to_bytes(4, "little"), (100).to_bytes(4, "little")))
    with pytest.raises(GraphFileError, match="it is not a graph file, or it is incomplete"):
        load_graph(path)


def resigned(path, body=None, **header):
    """The file with another graph, and the checksum of that one."""
    parts = members(path)
    parts["graph.json"] = parts["graph.json"] if body is None else body
    digest = hashlib.sha256(b"".join(parts[n] for n in ("graph.json", "graph.bin", "origin.json", "origin.bin")))
    header = {**json.loads(parts["header.json"]), "sha256": digest.hexdigest(), **header}
    written(path, {**parts, "header.json": json.dumps(header).encode()}.items())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"pool":[],"pool":[],"root":1,"tensors":[]}', "a key is there twice"),
        (b'{"pool":[],"root":NaN,"tensors":[]}', "NaN is not a number"),
        (b'{"pool":[],"root":1e999,"tensors":[]}', "inf is not a value of a graph file"),
        (b'{"pool":[],"root":' + b"9" * 5000 + b',"tensors":[]}', "it cannot be understood"),
        (b'{"pool":[],"root":' + b"9" * 50 + b',"tensors":[]}', "a number of 167 bits is too large"),
        (b'{"pool":[],"root":' + b"[" * 99999 + b"]" * 99999 + b',"tensors":[]}', "RecursionError"),
        (b'{"pool":[],"root":' + b'["t",' * 800 + b"1" + b"]" * 800 + b',"tensors":[]}', "it holds no graph|Recursion"),
        (b'{"pool":[["t",1]],"root":1,"tensors":[]}', "does not belong into the pool"),
        (b'{"pool":[],"root":{"a":1},"tensors":[]}', "is not a value of a graph file"),
        (b'{"pool":[],"root":1,"tensors":[["float32",[4]]]}', "bytes of its tensors are missing"),
        (b'{"pool":[],"root":1,"tensors":[["float32",[4611686018427387904,4]]]}', "bytes of its tensors are missing"),
        (b'{"pool":[],"root":1,"tensors":[["float32",[-1]]]}', "is not a tensor"),
        (b'{"pool":[],"root":1,"tensors":[["load",[1]]]}', "is not a tensor"),
        (b'{"pool":[],"root":"\\u001b]0;x\\u0007","tensors":[]}', "holds control characters"),
        (b'{"pool":[["e","Pow",["s","T"],99]],"root":1,"tensors":[]}', "is not a power of a size"),
        (b'{"pool":[["s","T+1"]],"root":1,"tensors":[]}', "is not a name of a value"),
        (b'{"pool":[["q",1,0]],"root":1,"tensors":[]}', "the tag 'q' is not known, or not with what follows it"),
        (b"[]", "it cannot be understood"),
        (b"", "it cannot be understood"),
    ],
)
def test_values_that_no_graph_has(body, message, tmp_path):
    path = tmp_path / "g.fxpar"
    save_graph(path, odd("shared").graph)
    parts = members(path)
    written(path, {**parts, "graph.bin": b""}.items())
    resigned(path, body)
    with pytest.raises(GraphFileError, match=message) as info:
        load_graph(path)
    assert str(info.value).isprintable()


@pytest.mark.parametrize(
    ("seed", "grow", "message"),
    [
        (["s", "T"], lambda i: ["e", "Mul", ["p", i], ["e", "Add", ["p", i], 1]], "200 parts"),
        (["q", 1, 3], lambda i: ["e", "Pow", ["p", i], 16], "200 parts"),  # the digits of 3 ** (16 ** 12)
        (["s", "T"], lambda i: ["e", "torch.PowByNatural", ["p", i], 16], "200 parts"),
        (["s", "T"], lambda i: ["e", "Mod", ["e", "Add", ["p", i], 1], ["e", "Add", ["s", "T"], i]], "200 parts"),
        (["s", "T"], lambda i: ["e", "torch.Max", ["p", i], ["s", f"a{i}"]], "16 to choose from"),
    ],
)
def test_expressions_do_not_grow(seed, grow, message):
    """Each is made of the one before: it would have a million million parts, or take sympy for ever."""
    with pytest.raises(GraphFormatError, match=f"more than {message}"):
        Decoder([seed, *map(grow, range(60))], [])


def test_what_a_header_says_is_shown_as_text(tmp_path):
    path = tmp_path / "g.fxpar"
    save_graph(path, odd("shared").graph)
    resigned(path, fxpar="\x1b]0;x\x07", version=7)
    with pytest.raises(GraphFileError, match=r"fxpar \\x1b\]0;x\\x07 wrote it in version 7"):
        load_graph(path)


def test_members_that_do_not_belong_there(tmp_path):
    path = tmp_path / "g.fxpar"
    save_graph(path, odd("shared").graph)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../../made", b"")
    with pytest.raises(GraphFileError, match="it is not a graph file"):
        load_graph(path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_come_back(dtype, tmp_path):
    for shape in ((), (0,), (3,), (2, 0, 2), (2, 3)):
        value = (torch.randn(shape) * 3).to(dtype)
        save_value(tmp_path / "v.fxpar", {"a": value, "b": value.expand(2, *shape)}, {"kind": "test"})
        found = load_value(tmp_path / "v.fxpar")
        assert torch.equal(found["a"], value)
        assert found["a"].dtype == dtype
        assert torch.equal(found["b"], value.expand(2, *shape))


@pytest.mark.parametrize(
    "node",
    [
        ["placeholder", "x", "x): return __import__('os').system('touch made')\ndef g(y", ["t"], ["d"], []],
        ["placeholder", "x", "x=__import__('os').system('touch made')", ["t"], ["d"], []],
        ["placeholder", "x", "torch", ["t"], ["d"], []],
        ["placeholder", "x", "x", ["t", "a default"], ["d"], []],
        ["placeholder", "x y", "x", ["t"], ["d"], []],
        ["get_attr", "x", "x.__class__", ["t"], ["d"], []],
        ["call_method", "x", "__reduce__", ["t"], ["d"], []],
        ["call_module", "x", "x", ["t"], ["d"], []],
        ["output", "output", "output", ["t", ["t", 1]], ["d"], []],
        ["output", "output", "output", ["t", ["t"], ["t"]], ["d"], []],
        ["call_function", "x", "aten.ones.default", ["t", ["l", 2]], ["d", ["pin_memory=x, **y", True]], []],
        ["call_function", "x", "aten.ones.default", ["d", ["a", 1]], ["d"], []],
    ],
)
def test_nodes_that_would_be_code(node):
    with pytest.raises(GraphFormatError):
        Decoder([], []).decode(["g", node, ["output", "output", "output", ["t", ["t"]], ["d"], []]])


@pytest.mark.parametrize("offset", [0, 1, 4])
def test_a_stage_elsewhere(tmp_path, offset):
    """The ranks of a stage are those that its pipeline says, and its placements are on them."""
    program = lower(llama(layers=2).graph, "pp2.dp2")
    assert isinstance(program, PipelineGraph)
    first, second = program.stages
    moved = replace(second, strategy=replace(second.strategy, offset=offset))
    path = tmp_path / "g.fxpar"
    save_graph(path, replace(program, stages=(first, moved)))
    with pytest.raises(GraphFileError, match=r"its (pipeline|program) on"):
        load_graph(path)
    ranks = replace(second.mesh, offset=offset)
    lies = tuple(replace(stored, dist=replace(stored.dist, mesh=ranks)) for stored in second.stored_inputs)
    save_graph(path, replace(program, stages=(first, replace(second, stored_inputs=lies))))
    with pytest.raises(GraphFileError, match=rf"is on the ranks \({offset}, {offset + 1}\), its program on \(2, 3\)"):
        load_graph(path)
