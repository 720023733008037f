"""Task graphs as JSON files, and mistakes in them."""

from __future__ import annotations

import json

import pytest

from fxpar.errors import TaskGraphError
from fxpar.waves.file import case_of, read_tasks

METAOP = {"name": "a", "layers": 2, "layer_ms": {"1": 2, "2": 1.5}}


def write(tmp_path, data) -> str:
    path = tmp_path / "tasks.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


def test_a_file(tmp_path):
    other = METAOP | {"name": "b", "weights": "w", "state_bytes": 5, "saved_bytes": 6, "output_bytes": 7}
    data = {"metaops": [METAOP, other], "edges": [["a", "b"]], "inter_gb_per_s": 3, "memory_gib": 2}
    found = read_tasks(write(tmp_path, data))
    assert found.graph.edges == (("a", "b"),)
    a, b = found.graph.metaops
    assert (a.layer_ms, a.state_bytes, a.parameters) == ({1: 2, 2: 1.5}, 0, "a")
    assert (b.state_bytes, b.saved_bytes, b.output_bytes, b.parameters) == (5, 6, 7, "w")
    assert (found.node.intra_gb_per_s, found.node.inter_gb_per_s, found.memory_bytes) == (200, 3, 2 * 2**30)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "it is not JSON"),
        ("[]", "it holds a list"),
        ('{"metaops": [{"name": "a", "layers": 1, "layer_ms": {"1": NaN}}]}', "layer_ms.1 = nan cannot be used"),
        ({}, "it lacks metaops"),
        ({"metaops": {}}, "metaops: it is a dict"),
        ({"metaops": [1]}, r"metaops\[0\]: it holds a int"),
        ({"metaops": [METAOP], "edge": []}, "key 'edge' is unknown; did you mean 'edges'"),
        ({"metaops": [METAOP | {"layer": 1}]}, r"metaops\[0\]: key 'layer' is unknown; did you mean 'layers'"),
        ({"metaops": [{"name": "a", "layers": 1}]}, "it lacks layer_ms"),
        ({"metaops": [METAOP | {"name": 1}]}, "name: 1 is not a name"),
        ({"metaops": [METAOP | {"layer_ms": [1]}]}, r"layer_ms: \[1\] is not a table"),
        ({"metaops": [METAOP | {"layer_ms": {"two": 1}}]}, "'two' is not a number of devices"),
        ({"metaops": [METAOP | {"layer_ms": {"0": 1}}]}, "'0' is not a number of devices"),
        ({"metaops": [METAOP | {"layer_ms": {"1": "x"}}]}, r"layer_ms.1: 'x' is not a time"),
        ({"metaops": [METAOP | {"layers": "4"}]}, "layers: '4' is not a number"),
        ({"metaops": [METAOP, METAOP]}, "MetaOp 'a': two have this name"),
        ({"metaops": [METAOP], "edges": [["a"]]}, "are no pairs"),
        ({"metaops": [METAOP], "edges": [["a", "x"]]}, "there is no MetaOp 'x'"),
        ({"metaops": [METAOP], "memory_gib": 0}, "memory_gib: 0 cannot be"),
        ({"metaops": [METAOP], "intra_gb_per_s": "1"}, "intra_gb_per_s: '1' cannot be"),
    ],
)
def test_files_that_cannot_be(tmp_path, data, message):
    path = write(tmp_path, data)
    with pytest.raises(TaskGraphError, match=message):
        read_tasks(path)


def test_no_file_and_no_case(tmp_path):
    with pytest.raises(TaskGraphError, match="it cannot be read"):
        read_tasks(str(tmp_path / "none.json"))
    with pytest.raises(
        TaskGraphError, match=r"case 'clip-5': there is no such case; did you mean 'clip-\d'\? Or name a JSON file$"
    ):
        case_of("clip-5")
