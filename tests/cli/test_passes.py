"""`fxpar passes`: the ladder in order, descriptions, unknown names; one pass on a dumped graph."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

from fxpar.cli.passes import description_of, first_line
from fxpar.cli.run_pass import check_needs
from fxpar.errors import PassNeedsError
from fxpar.ir import pass_registry
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.pass_base import Tier
from fxpar.ir.pass_names import BUILTIN
from fxpar.lowering import default_passes, lower
from tests.cli.helpers import fxpar
from tests.graph_diff.graphs import logical


def test_list_is_in_the_order_of_the_ladder():
    status, out, _ = fxpar("passes")
    assert status == 0
    words = [line.split() for line in out.splitlines()[1:]]
    steps = [row[1] for row in words if row[0].isdigit()]
    assert steps == [step.name for step in default_passes()]
    assert {row[1] if row[0].isdigit() else row[0] for row in words} == set(pass_registry.available())
    assert all(len(row) > 4 for row in words)  # each has a description
    assert [first_line(name) for name in BUILTIN] == [description_of(name).splitlines()[0] for name in BUILTIN]


def test_description():
    status, out, _ = fxpar("passes", "casts")
    assert status == 0
    assert out.startswith("casts\n\n")
    assert "Before: " in out
    assert "Cost: " in out


def test_unknown_name():
    status, out, err = fxpar("passes", "cats")
    assert (status, out) == (1, "")
    assert "there is no pass 'cats'; did you mean 'casts'" in err


def test_a_plugin_that_cannot_be_loaded_does_not_hide_the_others(monkeypatch):
    monkeypatch.setitem(pass_registry.BUILTIN, "broken", "no_such_module:Pass")
    status, out, _ = fxpar("passes")
    assert status == 0
    assert "No module named 'no_such_module'" in out
    assert "casts" in out


def test_json():
    entries = {entry["name"]: entry for entry in json.loads(fxpar("passes", "--json", "-")[1])["passes"]}
    assert set(entries) == set(pass_registry.available())
    assert [n for n, e in entries.items() if e["step"] is not None] == [step.name for step in default_passes()]
    bucket = entries["bucket_collectives"]
    assert (bucket["tier"], [o["name"] for o in bucket["options"]]) == ("exact", ["bucket_mb", "body"])
    assert bucket["options"][0] == {"name": "bucket_mb", "type": "float", "default": 256.0, "required": False}
    assert entries["narrow_gradients"]["options"][0]["required"] is True
    assert [e["name"] for e in json.loads(fxpar("passes", "casts", "--json", "-")[1])["passes"]] == ["casts"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The graph of the mlp after several passes, by their name."""
    folder = tmp_path_factory.mktemp("graphs")
    for name in ("annotate", "insert_reshards", "cleanup", "rematerialize", "write_in_place"):
        words = ("dump", "mlp", "-s", "dp2.tp2", "--after", name, "-o", folder / f"{name}.fxpar")
        status, _, err = fxpar(*words)
        assert status == 0, err
    fxpar("dump", "mlp", "-o", folder / "logical.fxpar")
    return folder


def test_run_a_pass(files, tmp_path):
    """What it writes is the graph that the lowering has after the pass; the report has the numbers."""
    out_file, numbers = tmp_path / "out.fxpar", tmp_path / "numbers.json"
    status, out, err = fxpar(
        "passes", "global_to_local", "--on", files / "cleanup.fxpar", "-o", out_file, "--json", numbers
    )
    assert status == 0, err
    assert re.match(r"GlobalToLocal\(\): \d+\.\d CPU ms, verified\nmodel mlp\n--- dp2.tp2 in .*cleanup.fxpar\n", out)
    words = ("diff", out_file, tmp_path / "same.fxpar", "--text", "--exit-code")
    fxpar("dump", "mlp", "-s", "dp2.tp2", "--after", "global_to_local", "-o", tmp_path / "same.fxpar")
    assert fxpar(*words)[0] == 0
    data = json.loads(numbers.read_text())
    assert (data["pass"], data["differs"]) == ("global_to_local", True)
    assert data["cpu_s"] >= 0


def test_options_of_a_pass(files):
    words = ("passes", "bucket_collectives", "--on", files / "rematerialize.fxpar")
    whole = fxpar(*words)[1]
    pieces = fxpar(*words, "--set", "bucket_mb=0.001")[1]
    assert pieces.startswith("BucketCollectives(bucket_mb=0.001, body=False): ")
    assert re.search(r"epilogue +all_reduce +dp +\d+ -> +1 ", whole)
    assert not re.search(r"epilogue +all_reduce +dp +\d+ -> +1 ", pieces)
    words = ("passes", "casts", "--on", files / "insert_reshards.fxpar", "--set", "storage=bfloat16")
    assert "Casts(storage=torch.bfloat16, gradients=None)" in fxpar(*words)[1]
    words = ("passes", "rematerialize", "--on", files / "rematerialize.fxpar", "--set", 'sizes=[["T", 64]]')
    assert "Rematerialize(sizes=(('T', 64),))" in fxpar(*words)[1]


def test_every_pass_of_the_lowering_runs_on_the_graph_before_it():
    """The needs of a pass are what the lowering gives it, and the next pass of a file is never refused."""
    failed = []

    def look(name: str, graph: AnnotatedGraph) -> None:
        following = ladder[ladder.index(name) + 1 :][:1]
        for step in following:
            try:
                check_needs(step, graph)
            except PassNeedsError as error:
                failed.append(str(error))

    ladder = [step.name for step in default_passes()]
    for strategy in ("dp2.tp2+sp+zero3", "dp2+zero1", "tp2", "dp1"):
        lower(logical(), strategy, on_pass=look)
    assert failed == []


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("insert_reshards", "write_in_place", "needs global shapes; in this graph these are local"),
        ("zero_shard", "annotate", "Run insert_reshards first, or dump the model with --after insert_reshards"),
        ("reduce_gradients", "cleanup", "reduce_gradients has run. Dump the model with --after casts"),
        ("global_to_local", "write_in_place", "global_to_local has run. Dump the model with --after cleanup"),
        ("global_to_local", "insert_reshards", "needs a graph without reshards; in this graph there are some"),
        ("lower_collectives", "cleanup", "needs local shapes; in this graph these are global. Run global_to_local"),
        ("sink_waits", "annotate", "needs operands that are placed as their users need them"),
        ("accumulate_gradients", "write_in_place", "needs the body of a step alone"),
        ("annotate", "cleanup", "needs a graph without placements; in this graph it has them. Give the model"),
        ("casts", "logical", "it holds the logical graph, and passes change an annotated one"),
        ("casts", "nothing", "there is no such file"),
        ("cats", "cleanup", "did you mean 'casts'"),
        ("narrow_gradients", "cleanup", "option 'dtype' of pass 'narrow_gradients': it has no default"),
    ],
)
def test_a_pass_that_does_not_fit(files, name, file, message):
    status, out, err = fxpar("passes", name, "--on", files / f"{file}.fxpar")
    assert (status, out) == (1, "")
    assert message in err


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("--set", "bucket_mb"), 1, "write field=value"),
        (("--set", "bucket=3"), 1, "did you mean 'bucket_mb'? its options are bucket_mb, body"),
        (("--set", "bucket_mb=x"), 1, "'x' is not a float"),
        (("--set", "body=maybe"), 1, "'maybe' is not a bool"),
        (("-o", "no/folder/x"), 1, "there is no folder"),
    ],
)
def test_bad_options(files, words, status, message):
    found, out, err = fxpar("passes", "bucket_collectives", "--on", files / "rematerialize.fxpar", *words)
    assert (found, out) == (status, "")
    assert message in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("casts", "-o", "x"), "name a graph file with --on"),
        (("casts", "--set", "storage=bfloat16"), "name a graph file with --on"),
        (("--on", "x.fxpar"), "name the pass to run"),
    ],
)
def test_bad_words(words, message):
    status, _, err = fxpar("passes", *words)
    assert status == 2
    assert message in err


def test_a_pass_of_another_package_that_fails(files, monkeypatch):
    monkeypatch.setitem(pass_registry.BUILTIN, "fails", f"{__name__}:Fails")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Fails.__module__])
    status, out, err = fxpar("passes", "fails", "--on", files / "cleanup.fxpar")
    assert (status, out) == (1, "")
    assert "pass 'fails' cannot run on this graph (KeyError: 'spot')" in err


@dataclass(frozen=True)
class Fails:
    """Reads what is not there."""

    name: ClassVar[str] = "fails"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        raise KeyError("spot")


def test_storage_behind_several_strategies():
    words = ("dump", "mlp", "-s", "dp2,tp2", "--after", "share_weights", "--rank", "1")
    found = json.loads(fxpar(*words, "--json", "-")[1])
    whole, cut = found["views"]["dp2"], found["views"]["tp2"]
    assert whole.keys() == cut.keys()
    halves = [fqn for fqn in cut if cut[fqn]["shape"] != whole[fqn]["shape"]]
    assert halves
    for fqn in halves:  # inside of the whole weight, which rank 1 has the second half of
        assert cut[fqn]["stride"] == whole[fqn]["stride"]
        assert cut[fqn]["offset"] > whole[fqn]["offset"]
    assert found["nbytes"] == 4 * sum(one["numel"] for one in found["buffers"])
    status, out, _ = fxpar(*words, "--fqn", halves[0])
    assert (status, out.count(halves[0])) == (0, 2)
    assert "if each strategy had weights of its own" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-s", "dp2,tp2", "--rank", "2"), "no rank 2: 'dp2' has ranks 0 to 1"),
        (("-s", "dp2,tp4"), "'dp2' has 2, 'tp4' has 4"),
        (("-s", "dp2", "--fqn", "nowhere"), "nowhere"),
        (("-s", "dp2", "--format", "dot"), "share_weights is no graph. Write text"),
        (("-s", "dp2", "--stage", "1"), "share_weights has no stages. Leave out --stage"),
    ],
)
def test_storage_that_nobody_has(words, message):
    status, out, err = fxpar("dump", "mlp", "--after", "share_weights", *words)
    assert (status, out) == (1, "")
    assert message in err
