"""`fxpar memory`: a table, JSON, and clear mistakes."""

from __future__ import annotations

import io
import json
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from fxpar.cli.memory import _sizes_text, show
from fxpar.ir.columns import human_bytes
from fxpar.lowering import lower
from fxpar.memory import predict_memory
from tests.captured import llama
from tests.cli.helpers import fxpar


def test_table():
    status, out, err = fxpar("memory", "llama", "-s", "dp2.tp2+sp+remat", "--tokens", "512", "--world", "4")
    assert status == 0, err
    lines = out.splitlines()
    assert lines[0] == "llama under dp2.tp2+sp+remat, 4 ranks, T = 512"
    assert [line.split("  ")[0] for line in lines[2:]] == [
        "master weights",
        "optimizer",
        "weights",
        "gradients",
        "accumulators",
        "activations",
        "for backward",
        "per token",
        "backward",
        "workspace",
        "staging",
        "peak",
        "reserved",
    ]


@pytest.mark.parametrize(
    ("strategies", "tokens", "said"),
    [
        ("tp2", 77, "llama under tp2, 2 ranks, T = 77"),
        ("tp2+sp", 77, "llama under tp2+sp, 2 ranks, T = 77, rounded up to 78"),
        ("tp2+sp", 78, "llama under tp2+sp, 2 ranks, T = 78"),
        ("tp2+sp,cp2", 77, "llama, T = 77, rounded up to 78; the"),
        (
            "tp4+sp,dp4,dp2.tp2+sp,cp4",
            77,
            "llama, T = 77, rounded up to 80 by tp4+sp, cp4 and to 78 by dp2.tp2+sp; the",
        ),
        ("cp4,dp4", None, "llama, T = 61, rounded up to 64 by cp4; the"),  # those of the captured example
    ],
)
def test_who_pads_the_tokens(strategies, tokens, said):
    status, out, err = fxpar("memory", "llama", "-s", strategies, *([] if tokens is None else ["--tokens", tokens]))
    assert status == 0, err
    assert out.splitlines()[0].removesuffix(" fullest rank of each strategy:") == said


def test_only_tokens_are_asked_for():
    found = SimpleNamespace(sizes={"B": 2, "T": 78}, strategy="tp2+sp", tokens=156)
    assert _sizes_text([found], 154) == ", B = 2, T = 77, rounded up to 78"
    widest, narrow = (
        SimpleNamespace(sizes={"T": n}, strategy=name, tokens=n) for n, name in ((78, "cp2"), (39, "dp2"))
    )
    assert _sizes_text([widest, narrow], 77) == ", T = 77, rounded up to 78 by cp2, in narrower teams 39 by dp2"
    assert _sizes_text([SimpleNamespace(sizes={}, strategy="dp1", tokens=0)], 77) == ""


def test_a_line_per_stage():
    words = ("memory", "llama", "--tokens", "512")
    status, out, err = fxpar(*words, "-s", "dp2.pp2+zb_h1")
    assert status == 0, err
    lines = out.splitlines()
    assert lines[0] == "llama under dp2.pp2+zb_h1, 4 ranks, T = 512"
    assert lines[1].startswith("zb_h1 (2 ranks, 4 micro-batches); ")
    assert " ".join(lines[2].split()) == "stage ranks from weights accumulators for backward messages peak rank"
    assert re.match(r"0 +0-1 +the start .* 2 x \d", lines[3])
    assert re.match(r"1 +2-3 +layers\.1 .* 2 x \d", lines[4])
    assert lines[6] == "the fullest rank:"
    assert "messages" in [line.split("  ")[0] for line in lines[8:]]
    status, out, _ = fxpar(*words, "-s", "pp2+gpipe", "--micro-batches", "5", "--json", "-")
    data = json.loads(out)
    assert (data["micro_batches"], [s["in_flight"] for s in data["stages"]]) == (5, [5, 5])
    assert data["peak_bytes"] == max(s["rank_peak_bytes"] for s in data["stages"])
    assert sum(s["weight_bytes"] for s in data["stages"]) >= data["weight_bytes"]


def test_json(tmp_path):
    plain, full = tmp_path / "plain.json", tmp_path / "full.json"
    for path, strategy in ((plain, "tp2"), (full, "tp2+remat")):
        status, _, err = fxpar("memory", "llama", "-s", strategy, "--tokens", "512", "--json", path)
        assert status == 0, err
    none, remat = json.loads(plain.read_text()), json.loads(full.read_text())
    assert (none["model"], none["world"], none["sizes"]) == ("llama", 2, {"T": 512})
    assert remat["body"]["saved_bytes"] < 0.3 * none["body"]["saved_bytes"]
    assert remat["peak_bytes"] < none["peak_bytes"]
    status, out, _ = fxpar("memory", "mlp", "-s", "dp1", "--json", "-")
    assert status == 0
    assert json.loads(out)["strategy"] == "dp1"


ROWS = """
import torch
from torch import nn
from fxpar.losses import causal_lm


class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, input_ids):
        assert input_ids.shape[1] <= 32
        x = self.embed(input_ids)
        return self.head(x - x.mean(1, keepdim=True))  # sees all of a row: neither packed nor padded


def make():
    ids = torch.arange(48).reshape(3, 16) % 32
    return Centered(), causal_lm, {"input_ids": ids, "labels": ids}
"""


def test_tokens_are_those_of_a_micro_batch_of_several_rows(tmp_path):
    (tmp_path / "rows.py").write_text(ROWS)
    model, page = f"{tmp_path / 'rows.py'}:make", tmp_path / "page.json"
    document = json.loads(fxpar("memory", model, "-s", "tp2", "--tokens", "96", "--json", "-")[1])
    assert (document["tokens"], document["sizes"]) == (96, {"T": 32})
    assert fxpar("memory", model, "-s", "tp2", "--tokens", "75")[1].splitlines()[0].endswith(" 2 ranks, T = 25")
    assert fxpar("viz", model, "-s", "tp2", "--format", "json", "-o", page, "--tokens", "75")[0] == 0
    assert json.loads(page.read_text())["sent"]["tp2"]["tokens"] == 75
    for tokens, command in ((97, "memory"), (99, "memory"), (99, "viz")):
        more = ("-o", tmp_path / "page.html") if command == "viz" else ()
        status, _, err = fxpar(command, model, "-s", "tp2", "--tokens", tokens, *more)
        said = " ".join(err.split())
        assert status != 0
        assert f"--tokens {tokens}: a micro-batch of this model has tokens in 3 rows of T each" in said
        assert "Write a multiple of 3, at most 96" in said


def test_nothing_is_padded_that_must_not_be(tmp_path):
    (tmp_path / "rows.py").write_text(ROWS)
    model = f"{tmp_path / 'rows.py'}:make"
    assert "dim T: 16 in the example; it takes multiples of 3; figures are for 18, at most 32" in dump_of(model, "cp3")
    line = fxpar("memory", model, "-s", "cp3", "--tokens", "48")[1].splitlines()[0]
    assert line.endswith("under cp3, 3 ranks, T = 16, rounded up to 18")
    assert "(example: T=16, figures are for 18): " in fxpar("explain", model, "-s", "cp3")[1]
    out = fxpar("diff", model, "-s", "dp3", "-s", "cp3", "--brief")[1]
    assert re.search(r"^  T a multiple of +1 +3$", out, re.MULTILINE)
    assert "padded" not in out


def dump_of(model, strategy):
    return fxpar("dump", model, "-s", strategy, "--brief")[1]


def test_for_backward_is_one_figure():
    """The most that is kept, in the table of one strategy and of several, also where the peak is at another moment."""
    status, out, err = fxpar("memory", "llama", "-s", "pp2.cp2", "--tokens", "4096", "--json", "-")
    assert status == 0, err
    body = json.loads(out)["body"]
    assert body["kept_bytes"] <= body["forward_bytes"] < body["saved_bytes"]
    out = fxpar("memory", "llama", "-s", "pp2.cp2", "--tokens", "4096")[1]
    words = "activations kept until their backward, at most, when less is held in all"
    kept = re.search(rf"^for backward +(\S+ MB)  {words}", out, re.MULTILINE)[1]
    assert kept == human_bytes(body["saved_bytes"])
    table = fxpar("memory", "llama", "-s", "pp2.cp2,tp4", "--tokens", "4096")[1]
    assert re.search(rf"^pp2.cp2 .* {kept} ", table, re.MULTILINE)


def test_strategies_and_what_a_device_holds():
    words = ("memory", "llama", "-s", "dp4,tp4+sp", "--tokens", "4096", "--capacity")
    status, out, err = fxpar(*words, "0.02GB")
    assert status == 0, err
    lines = out.splitlines()
    assert lines[0].endswith("a device has 20.0 MB:")
    assert [(line.split()[0], " ".join(line.split()[10:])) for line in lines[2:4]] == [
        ("dp4", "does not fit"),
        ("tp4+sp", "fits"),
    ]
    meant = [line[:12].strip() for line in lines[5:]]
    assert meant == ["stays", "for backward", "per token", "peak"]  # what the columns are
    found = json.loads(fxpar(*words, "0.02gib", "--json", "-")[1])["strategies"]
    assert [(one["fits"], one["device_bytes"]) for one in found] == [(False, 21474836), (True, 21474836)]
    assert "it fits: a device has 80.0 GB" in fxpar("memory", "llama", "-s", "dp4", "--capacity", "80GB")[1]
    status, _, err = fxpar(*words, "80")
    assert status == 2
    assert "80GB" in err


def test_what_is_saved_per_token():
    """Of one micro-batch, whatever the schedule keeps at once; the same in the table of several strategies."""
    words = ("memory", "llama", "--tokens", "512")
    whole, staged = (json.loads(fxpar(*words, "-s", s, "--json", "-")[1]) for s in ("tp2", "pp2"))
    assert whole["tokens"] == staged["tokens"] == 512
    assert whole["per_token_bytes"] == whole["body"]["saved_bytes"] / 512
    assert staged["per_token_bytes"] == max(stage["saved_bytes"] for stage in staged["stages"]) / 512
    out = fxpar(*words, "-s", "tp2,pp2")[1]
    assert [line.split()[6:8] for line in out.splitlines()[2:4]] == [
        human_bytes(found["per_token_bytes"]).split() for found in (whole, staged)
    ]
    assert "per token" in out
    assert "kept for the backward, at 512 tokens" in fxpar(*words, "-s", "tp2")[1]  # a figure of this length
    for shown in ("tp2", "tp2,dp2"):
        assert "per token" not in fxpar("memory", "mlp", "-s", shown)[1]  # it has no token ids


def test_budget_is_meant_at_the_tokens():
    status, out, err = fxpar("memory", "llama", "-s", "dp1+remat(1MB)", "--tokens", "512")
    assert status == 0, err
    assert "note: remat(1MB): " in out
    assert "MB per rank are saved for the backward at T = 512" in out
    status, _, err = fxpar("memory", "llama", "-s", "dp1+remat(1MB)", "--tokens", "8192")
    assert status == 1
    assert "the backward needs at least" in err
    assert "T = 8192" in err


def test_mistakes():
    for words, message in [
        (("llama", "-s", "tp2+remt"), "unknown flag 'remt'; did you mean 'remat'?"),
        (("llama", "-s", "tp2+remat(*.fnn)"), "did you mean '*.ffn'?"),
        (("llama", "-s", "tp2", "--world", "4"), "needs 2 ranks"),
        (("llama", "-s", "tp2", "--json", "/nowhere/x.json"), "/nowhere"),
        (("llama", "-s", "pp3"), "3 stages need 3 layers, there are 2"),
        (
            ("mlp", "-s", "pp2+interleaved_1f1b", "--set", "layers=4", "--micro-batches", "3"),
            "a multiple of 2 micro-batches",
        ),
    ]:
        status, _, err = fxpar("memory", *words)
        assert status == 1, words
        assert message in err


def test_sixty_columns():
    """On a terminal no line is broken by it, and no number is lost."""
    graph = lower(llama(layers=2).graph, "pp2.dp2+zb_h1", for_store=True)
    found = predict_memory(graph, micro_batches=2)
    texts = []
    for terminal in (False, True):
        console = Console(
            file=io.StringIO(), width=60, force_terminal=terminal, color_system=None, soft_wrap=not terminal
        )
        show(console, "llama", 4, found, [])
        texts.append(console.file.getvalue())
    wide, narrow = texts
    assert all(len(line) <= 60 for line in narrow.splitlines())
    assert "stage 1 on ranks 2-3, from layers.1" in narrow
    assert "\n" + 26 * " " + "micro-batch and a switch" in narrow
    size = re.compile(r"\d[\d.]* [kMG]?B")
    assert sorted(size.findall(wide)) == sorted(size.findall(" ".join(narrow.split())))


@pytest.mark.parametrize("tokens", ["64,32", "many", "0"])
def test_tokens_are_one_number(tokens):
    status, _, err = fxpar("memory", "llama", "-s", "tp2", "--tokens", tokens)
    assert status == 2
    assert err.startswith(f"error: --tokens: '{tokens}' must be ")


def test_no_document_is_longer_than_its_row():
    status, _, err = fxpar("memory", "llama", "-s", "tp2", "--tokens", "32", "--longest", "33")
    assert status == 2
    assert "a document of 33 tokens is longer than its row of 32" in err


def test_tokens_of_a_function_and_of_a_graph_file(tmp_path):
    """Neither is captured anew for them."""
    (tmp_path / "own.py").write_text(OWN)
    path = f"{tmp_path}/own.fxpar"
    assert fxpar("dump", f"{tmp_path}/own.py:make", "-o", path)[0] == 0
    peaks = []
    for source, tokens in ((f"{tmp_path}/own.py:make", 64), (f"{tmp_path}/own.py:make", 640), (path, 640)):
        status, out, err = fxpar("memory", source, "-s", "tp2", "--tokens", str(tokens), "--json", "-")
        assert status == 0, err
        found = json.loads(out)
        assert found["sizes"] == {"T": tokens}
        peaks.append(found["peak_bytes"])
    assert peaks[2] == peaks[1] > 3 * peaks[0]


OWN = """
import torch
from fxpar import losses

def make():
    model = torch.nn.Sequential(torch.nn.Embedding(61, 24), torch.nn.Linear(24, 61))
    ids = torch.randint(0, 61, (1, 13))
    batch = {"input_ids": ids, "labels": losses.next_token_labels(ids)}
    return model, lambda m, b: losses.cross_entropy_sum(m(b["input_ids"]), b["labels"]), batch
"""


def test_a_cluster_adds_sums_of_nodes_and_says_what_fits(tmp_path):
    links = "nodes = 2\ndevices_per_node = 2\nintra_gb_per_s = 200\ninter_gb_per_s = 1\nlatency_us = 10\n"
    device = "[device]\ntflops = 300\nmemory_gb_per_s = 2000\nlaunch_us = 4\nmemory_gb = {}\n"
    words = ("memory", "llama", "-s", "dp4", "--tokens", "512")
    plain = json.loads(fxpar(*words, "--json", "-")[1])
    assert plain["sums_bytes"] == 0
    for memory_gb, verdict in ((80, "it fits: a device has 80.0 GB"), (0.001, "it does not fit: a device has 1.0 MB")):
        path = tmp_path / f"{memory_gb}.toml"
        path.write_text(links + device.format(memory_gb))
        status, out, err = fxpar(*words, "--cluster", path, "--json", tmp_path / "found.json")
        assert (status, err) == (0, "")
        assert out.splitlines()[-1] == verdict
        assert re.search(r"^sums +\d", out, re.MULTILINE)
        found = json.loads((tmp_path / "found.json").read_text())
        assert found["switch_bytes"] == plain["switch_bytes"] + found["sums_bytes"] > plain["switch_bytes"]
    (tmp_path / "links.toml").write_text(links)
    assert "a device has" not in fxpar(*words, "--cluster", tmp_path / "links.toml")[1]
    (tmp_path / "one.toml").write_text(links.replace("nodes = 2", "nodes = 1"))
    status, out, err = fxpar(*words, "--cluster", tmp_path / "one.toml")
    assert (status, out) == (1, "")
    assert "is too small for strategies on 4 ranks" in err


def test_notes_of_several_strategies():
    status, out, err = fxpar("memory", "mlp", "-s", "dp2+sp,dp2,dp2")
    assert status == 0, err
    assert len(re.findall(r"^dp2 ", out, re.MULTILINE)) == 1
    assert out.splitlines()[-2:] == [
        "note: dp2 is named 2 times",
        "note: dp2+sp: sp has no effect: it shards tokens over the ranks of tp, and there is no tp",
    ]
