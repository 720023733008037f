"""The commands on graph files: dumped, read again, checked; and what does not fit."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch import fx

from fxpar.graph_files import Origin, load_origin, save_graph
from fxpar.ir.graph import TensorMeta
from tests.captured import odd
from tests.cli.helpers import fxpar


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Graph files of the tiny llama: logical, annotated, lowered, of a pipeline."""
    folder = tmp_path_factory.mktemp("graphs")
    words = {
        "logical": (),
        "annotated": ("-s", "tp2", "--stage", "annotated"),
        "exec": ("-s", "dp2.tp2+sp"),
        "pipeline": ("-s", "pp2.dp2"),
    }
    for name, more in words.items():
        path = folder / f"{name}.fxpar"
        status, out, err = fxpar("dump", "llama", *more, "-o", path)
        assert (status, out) == (0, ""), err
        assert err.startswith(f"wrote the {name} graph of llama to ")
    return lambda name: folder / f"{name}.fxpar"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("logical", ()),
        ("logical", ("-s", "dp2.tp2+sp")),
        ("logical", ("-s", "dp2.tp2+sp", "--after", "casts")),
        ("annotated", ()),
        ("annotated", ("-s", "tp2", "--stage", "annotated")),
        ("exec", ()),
        ("exec", ("-s", "dp2.tp2+sp", "--brief")),
        ("exec", ("--rank", "3", "--fqn", "layers.1.*")),
        ("pipeline", ("--rank", "3")),
        ("pipeline", ("--stage", "1")),
        ("pipeline", ("--schedule",)),
    ],
)
def test_a_file_dumps_like_its_model(files, name, words):
    own = {"annotated": ("-s", "tp2", "--stage", "annotated"), "exec": ("-s", "dp2.tp2+sp")}
    own |= {"pipeline": ("-s", "pp2.dp2")}
    more = tuple(word for word in own.get(name, ()) if word not in words) if "-s" not in words else ()
    if name == "pipeline" and "--stage" in words:
        more = ("-s", "pp2.dp2")
    from_file, from_model = fxpar("dump", files(name), *words), fxpar("dump", "llama", *more, *words)
    assert from_file == from_model
    assert from_file[0] == 0, from_file[2]


@pytest.mark.parametrize(
    ("name", "words"), [("logical", ("-s", "dp2,tp2+sp")), ("annotated", ()), ("exec", ()), ("pipeline", ())]
)
def test_check(files, name, words):
    status, out, err = fxpar("check", files(name), *words, "--json", "-")
    assert status == 0, err
    results = json.loads(out)["results"]
    assert len(results) == 1 + (name == "logical")
    assert all(result["ok"] for result in results)
    assert f"{len(results)} of {len(results)} strategies agree" in err


def test_check_finds_a_broken_graph(files, tmp_path):
    """A lost all-reduce in the file of a lowered graph."""
    from fxpar.graph_files import load_graph, load_origin, save_graph
    from fxpar.ir.exec_graph import collective_kind

    graph = load_graph(files("exec"))
    node = next(n for n in graph.epilogue.graph.nodes if collective_kind(n) == "all_reduce")
    for wait in list(node.users):
        wait.replace_all_uses_with(node.args[0])
        graph.epilogue.graph.erase_node(wait)
    graph.epilogue.graph.erase_node(node)
    save_graph(tmp_path / "broken.fxpar", graph, load_origin(files("exec")))
    status, out, _ = fxpar("check", tmp_path / "broken.fxpar")
    assert status == 1
    assert "0 of 1 strategies agree" in out


def test_check_of_stages_that_cut_tokens(tmp_path):
    """The backward of a stage gets sizes from its forward: those of a rank's own tokens."""
    assert fxpar("dump", "llama", "-s", "pp2.rows2", "-o", tmp_path / "stages.fxpar")[0] == 0
    status, _, err = fxpar("check", tmp_path / "stages.fxpar")
    assert status == 0, err


def test_from_pass_to_pass(files, tmp_path):
    """Dumped after a pass, one pass by hand, the others by `check` or `dump`: what `lower` makes."""
    middle, after = tmp_path / "middle.fxpar", tmp_path / "after.fxpar"
    assert fxpar("dump", files("logical"), "-s", "dp2.tp2+sp", "--after", "mask_padding", "-o", middle)[0] == 0
    status, _, err = fxpar("passes", "cleanup", "--on", middle, "-o", after)
    assert status == 0, err
    assert fxpar("dump", after, "--stage", "exec") == fxpar("dump", files("exec"))
    status, out, err = fxpar("check", files("logical"), "-s", "dp2.tp2+sp")
    assert status == 0, err
    # The batches that `check` needs are those of the dump, which `--after` has too.
    assert fxpar("check", after)[1].splitlines()[-1] == out.splitlines()[-1]


def test_memory_and_switch(files, tmp_path):
    cluster = tmp_path / "cluster.json"
    cluster.write_text('{"nodes":2,"devices_per_node":2,"intra_gb_per_s":100,"inter_gb_per_s":10,"latency_us":5}')
    of_file, of_model = (
        fxpar("memory", model, "-s", "dp2.tp2", "--json", "-") for model in (files("logical"), "llama")
    )
    drop = ("cpu_s", "model")
    one, other = ({k: v for k, v in json.loads(out[1]).items() if k not in drop} for out in (of_file, of_model))
    assert one == other
    words = ("--from", "pp2.dp2", "--to", "dp2.tp2", "--cluster", cluster, "--json", "-")
    plans = [json.loads(fxpar("switch", model, *words)[1]) for model in (files("logical"), "llama")]
    assert plans[0]["node_matrix"] == plans[1]["node_matrix"]
    order = ("-s", "pp2.dp2,dp2.tp2", "--cluster", cluster)
    assert fxpar("order", files("logical"), *order)[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("dump", "none.fxpar"), "there is no such file"),
        (("dump", "exec", "-s", "tp2"), "it holds a graph under dp2.tp2+sp, not tp2. Leave --strategy out"),
        (("dump", "exec", "--stage", "logical"), "it holds the exec graph, and this needs a logical graph"),
        (("dump", "exec", "--after", "casts", "-s", "dp2.tp2+sp"), "this needs a logical graph"),
        (("dump", "logical", "--stage", "annotated"), "the annotated graph needs a strategy. Add --strategy"),
        (("dump", "exec", "--stage", "1"), "there is no pipeline stage 1: 'dp2.tp2+sp' has none"),
        (("check", "logical"), "it holds a logical graph. Say for which strategies"),
        (("check", "exec", "-s", "tp2"), "it holds a graph under dp2.tp2+sp. Leave --strategies out"),
        (("check", "exec", "--override", "*=R@tp"), "--override comes too late: its graph is already placed"),
        (("check", "exec", "--precision", "bf16"), "--precision comes too late"),
        (
            ("check", "logical", "-s", "tp2", "--tokens", "8,8"),
            "--tokens comes too late: its graph is already captured",
        ),
        (("check", "logical", "-s", "tp2", "--dtype", "float64"), "--dtype comes too late"),
        (("dump", "exec", "--world", "7"), "--world comes too late"),
        (("dump", "exec", "--storage", "float64"), "--storage comes too late"),
        (("diff", "logical", "-s", "tp2", "-s", "dp2", "--set", "layers=4"), "--set comes too late"),
        (("explain", "logical", "-s", "tp2", "embedding.weight", "--tokens", "9"), "--tokens comes too late"),
        (("memory", "exec", "-s", "dp2"), "this needs a logical graph"),
        (("dump", "llama", "-s", "tp2", "-o", "no/folder/g.fxpar"), "there is no folder 'no/folder'"),
        (("dump", "logical", "--format", "graph", "-o", "g.bin"), "its name does not end in .fxpar"),
        (("dump", "pipeline", "--stage", "1", "-o", "g.fxpar"), "saves all stages of a pipeline"),
        (("dump", "pipeline", "--rank", "3", "--stage", "0"), "--rank 3 is of stage 1"),
        (("dump", "pipeline", "--schedule", "--format", "dot"), "--schedule prints no nodes"),
        (("dump", "logical", "-s", "pp2", "--after", "casts", "--stage", "7"), "'pp2' has stages 0 to 1"),
    ],
)
def test_what_does_not_fit(files, words, message):
    command, name, *more = words
    model = files(name) if name in ("logical", "annotated", "exec", "pipeline") else name
    status, out, err = fxpar(command, model, *more)
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err


def test_a_logical_file_in_a_precision(files):
    status, out, err = fxpar("check", files("logical"), "-s", "tp2", "--precision", "bf16", "--json", "-")
    assert status == 0, err
    assert json.loads(out)["results"][0]["grad_max_rel_err"] > 1e-4  # that of bf16


def test_one_stage_has_nothing_to_check_with(files, tmp_path):
    path = tmp_path / "stage.fxpar"
    assert fxpar("dump", files("logical"), "-s", "pp2", "--after", "casts", "--stage", "1", "-o", path)[0] == 0
    status, _, err = fxpar("check", path)
    assert (status, "no batches to check with" in err) == (1, True)
    assert "layers.1.ffn.down_proj.weight : f32[64, 88]" in fxpar("explain", path, "layers.1.ffn.down_proj.weight")[1]


def test_explain_speaks_of_the_graph_in_the_file(files, tmp_path):
    path = tmp_path / "stored.fxpar"
    words = ("-s", "tp2", "--storage", "float64", "--after", "casts")
    assert fxpar("dump", files("logical"), *words, "-o", path)[0] == 0
    assert "f64[131@tp, 64]" in fxpar("dump", files("logical"), *words, "--brief")[1]
    assert "f64[131@tp, 64]" in fxpar("explain", path)[1]


def test_what_a_model_prints_is_not_output(tmp_path):
    """Nor does its file run twice, which may register ops."""
    (tmp_path / "talks.py").write_text(TALKS)
    status, out, err = fxpar("dump", f"{tmp_path}/talks.py:make", "-s", "dp2", "--json", "-", "--no-cache")
    assert status == 0, err
    assert json.loads(out)["model"] == "talks.py:make"
    note = "note: the loss does not depend on idle.weight, idle.bias: no gradient, as in autograd"
    assert err.splitlines() == ["the file", "the function", note]


TALKS = """
import torch

print("the file")
torch.library.Library("talks", "DEF").define("nothing(Tensor x) -> Tensor")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.idle = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.lin(x)


def make():
    print("the function")
    return Model(), lambda model, batch: model(batch["x"]).square().mean(), {"x": torch.randn(8, 4)}
"""


def test_a_graph_that_needs_more_memory_than_there_is(tmp_path):
    """A size of 2**40 in one node: found before anything is allocated."""
    graph = odd("shared").graph
    gm = fx.GraphModule(graph.gm, copy.deepcopy(graph.gm.graph))
    first = next(node for node in gm.graph.nodes if node.op == "call_function")
    with gm.graph.inserting_before(first):
        node = gm.graph.call_function(torch.ops.aten.full.default, ([2**40], 1.0))
        node.meta = {**first.meta, "tensor": TensorMeta((4,), torch.float32)}
    path = tmp_path / "g.fxpar"
    save_graph(path, replace(graph, gm=gm), Origin(None, odd("shared").batches))
    status, _, err = fxpar("check", path, "-s", "dp2")
    assert status == 1
    assert f"%{node.name} of its graph needs 4.4 TB at once on a rank. This machine has not got that" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch: {}, "its batches do not fit 'x' of its graph"),
        (lambda batch: {**batch, "x": batch["x"].int()}, "its batches do not fit 'x' of its graph"),
        (lambda batch: {**batch, "x": batch["x"][0]}, "its batches do not fit 'x' of its graph"),
        (lambda batch: {**batch, "x": batch["x"][:, 1:]}, "its batches do not fit 'x' of its graph"),
        (lambda batch: {**batch, "x": batch["x"][1:]}, "its batches do not fit 'y' of its graph"),
    ],
)
def test_batches_of_another_graph(change, message, tmp_path):
    model = odd("shared")
    path = tmp_path / "g.fxpar"
    save_graph(path, model.graph, Origin(None, (change(model.batches[0]),)))
    status, _, err = fxpar("check", path, "-s", "dp2")
    assert status == 1
    assert message in err


def test_a_graph_that_torch_cannot_run(tmp_path):
    """Its metadata says one thing and its ops another."""
    graph = odd("shared").graph
    gm = fx.GraphModule(graph.gm, copy.deepcopy(graph.gm.graph))
    node = next(node for node in gm.graph.nodes if node.target is torch.ops.aten.mm.default)
    node.args = (node.args[0], node.args[0])
    path = tmp_path / "g.fxpar"
    save_graph(path, replace(graph, gm=gm), Origin(None, odd("shared").batches))
    status, _, err = fxpar("check", path, "-s", "dp2")
    assert status == 1
    assert "its graph cannot be run (RuntimeError: " in err


OWN = """
import torch
from torch import nn

def loss(model, batch):
    return (model(batch["x"]).square().sum(-1) * batch["weight"]).sum()

def make():
    return nn.Sequential(nn.Linear(4, 4), nn.Mish()), loss, {"x": torch.randn(8, 4), "weight": 2 + torch.rand(8)}

def fixed():
    with torch.device("cpu"):
        batch = {"x": torch.full((8, 4), 3.0), "weight": torch.full((8,), 0.5)}
    return nn.Linear(4, 4), loss, batch

def nothing():
    return nn.Linear(4, 4), loss, {"x": torch.randn(8, 4), "weight": torch.zeros(8)}
"""


@pytest.mark.parametrize("cache", [(), ("--no-cache",)], ids=["cached", "anew"])
def test_batches_of_an_own_function_have_their_values(tmp_path, cache):
    """The function runs on the meta device for the capture, where its batches have none."""
    (tmp_path / "own.py").write_text(OWN)
    path = tmp_path / "own.fxpar"
    for _ in range(1 if cache else 2):
        assert fxpar("dump", f"{tmp_path}/own.py:make", "-o", str(path), *cache)[0] == 0
        (batch,) = load_origin(path).batches
        assert bool((batch["weight"] >= 2).all())
        assert batch["x"].std() > 0.5
    if cache:
        status, out, err = fxpar("check", str(path), "-s", "dp2")
        assert status == 0, out + err


def test_a_function_that_needs_more_memory_than_there_is_runs_on_the_meta_device_only(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.setattr("fxpar.cli.source.os.sysconf", lambda name: 1)
    status, _, err = fxpar("dump", f"{tmp_path}/own.py:make", "-o", str(tmp_path / "a.fxpar"), "--no-cache")
    assert status == 1
    assert "its 80 B of weights are made too. Make the batches with device='cpu'" in err
    assert fxpar("dump", f"{tmp_path}/own.py:fixed", "-o", str(tmp_path / "b.fxpar"), "--no-cache")[0] == 0
    assert float(load_origin(tmp_path / "b.fxpar").batches[0]["weight"].sum()) == 4.0


def test_a_check_in_which_nothing_can_differ_is_not_ok(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    path = tmp_path / "own.fxpar"
    assert fxpar("dump", f"{tmp_path}/own.py:nothing", "-s", "dp2", "-o", str(path), "--no-cache")[0] == 0
    for words in (("check", str(path)), ("check", f"{tmp_path}/own.py:nothing", "-s", "dp2")):
        status, out, err = fxpar(*words)
        assert status == 1
        assert "the loss and all gradients are 0" in out + err
