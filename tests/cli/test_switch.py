"""`fxpar switch` and `fxpar order`: numbers, JSON, and one clear error for each kind of bad input."""

from __future__ import annotations

import json

import pytest

from tests.cli.helpers import fxpar, shown

KEYS = {
    "planner",
    "intra_node_bytes",
    "inter_node_bytes",
    "max_send_bytes",
    "lower_bound_bytes",
    "transfers",
    "predicted_s",
    "plan_cpu_s",
    "node_matrix",
}
CLUSTER = "nodes = 2\ndevices_per_node = 4\nintra_gb_per_s = 200\ninter_gb_per_s = 25\nlatency_us = 0.1\n"


@pytest.fixture
def cluster(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    return file


def test_switch_text_and_json(cluster, tmp_path):
    out_file = tmp_path / "plan.json"
    words = ("switch", "llama", "--from", "pp2.tp4", "--to", "dp8", "--cluster", cluster, "--json", out_file)
    status, out, err = fxpar(*words)
    assert status == 0, out + err
    links = "2 x 4 devices, 200 GB/s inside a node, 25 between"
    assert out.startswith(f"llama: pp2.tp4 -> dp8; bytes of all ranks; predicted for {cluster} ({links})\n")
    assert "auto (relay)" in out
    data = json.loads(out_file.read_text())
    assert data.keys() >= KEYS
    assert data["planner"] == "auto"
    assert data["chosen"] == "relay"
    assert sum(map(sum, data["node_matrix"])) == data["intra_node_bytes"] + data["inter_node_bytes"]
    assert sum(data["sent_bytes"]) == sum(data["received_bytes"])


TURNED = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(32, 16), nn.Linear(16, 48), nn.Linear(16, 32)

    def forward(self, ids):
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        table = torch.arange(ids.shape[1], dtype=torch.float32)[:, None].cos()
        out = scaled_dot_product_attention(q * table, k * table, v, is_causal=True)
        return self.head(out.transpose(1, 2).flatten(2))

def make():
    ids = torch.arange(12)[None]
    loss = lambda model, batch: cross_entropy(model(batch["ids"]).transpose(1, 2), batch["ids"], reduction="sum")
    return Turned(), loss, {"ids": ids}
"""


@pytest.mark.parametrize("words", [("switch", "--from", "dp2", "--to", "tp2"), ("order", "-s", "dp2,tp2")])
def test_a_model_with_a_table_in_fp32_is_sent_in_bf16(cluster, tmp_path, words):
    """Attention takes one dtype, which a model built in bf16 would not give it."""
    file = tmp_path / "turned.py"
    file.write_text(TURNED)
    command, *rest = words
    status, out, err = fxpar(command, f"{file}:make", *rest)
    assert status == 0, out + err


@pytest.mark.parametrize("planner", ["first_come", "round_robin", "hotspa", "relay"])
def test_planners_and_dtype(cluster, planner):
    words = ("switch", "mlp", "--from", "tp4.dp2", "--to", "dp8", "--cluster", cluster, "--planner", planner)
    half, whole = (json.loads(fxpar(*words, "--json", "-", "--dtype", dtype)[1]) for dtype in ("bf16", "float32"))
    assert half["planner"] == planner
    assert whole["max_send_bytes"] == 2 * half["max_send_bytes"]
    assert half["transfers"] > 0


def test_order(cluster, tmp_path):
    out_file = tmp_path / "order.json"
    words = ("order", "mlp", "--strategies", "pp2.tp4,dp8,tp4.dp2", "--cluster", cluster, "--json", out_file)
    status, out, err = fxpar(*words, "--by", "bytes", "--gradients", "chain")
    assert status == 0, out + err
    assert "best, same first" in out
    data = json.loads(out_file.read_text())
    assert sorted(data["order"]) == ["dp8", "pp2.tp4", "tp4.dp2"]
    assert data["inter_node_bytes"] <= data["same_first"]["inter_node_bytes"] <= data["as_given"]["inter_node_bytes"]
    assert data["same_first"]["order"][0] == "pp2.tp4"
    assert len(data["hops"]) == 4
    status, out, err = fxpar(*words, "--first", "dp8", "--gradients", "home", "--by", "seconds", "--keep-gb", "1")
    assert status == 0, out + err
    assert json.loads(out_file.read_text())["order"][0] == "dp8"


def test_order_counts_from_the_layout_of_the_optimizer(cluster):
    words = ("order", "llama", "-s", "dp8,tp4.dp2", "--cluster", cluster, "--tokens", "1000")
    found = json.loads(fxpar(*words, "--json", "-")[1])
    hops = [(hop["kind"], hop["source"], hop["target"]) for hop in found["hops"]]
    assert hops == [
        *(("weights", "home", name) for name in found["order"]),
        *(("gradients", name, "home") for name in found["order"]),
    ]
    switch = json.loads(fxpar("switch", "llama", "--from", "dp8", "--to", "tp4.dp2", "--json", "-")[1])
    assert (switch["inter_node_bytes"], switch["intra_node_bytes"]) == (0, 0)
    whole = next(hop for hop in found["hops"] if hop["target"] == "dp8")
    assert whole["inter_node_bytes"] > 0  # masters are cut over all ranks
    assert found["per_token_bytes"] == (found["inter_node_bytes"] + found["intra_node_bytes"]) / 1000
    assert found["per_token_s"] == pytest.approx(found["predicted_s"] / 1000)
    out = fxpar(*words)[1]
    assert out.startswith(
        "llama, a mini-batch: weights from the optimizer's layout, gradients back to it, as in training; bytes of all "
        f"ranks; predicted for {cluster} (2 x 4 devices, 200 GB/s inside a node, 25 between)\n"
    )
    assert "per token of 1,000" in out
    assert "per token" not in fxpar(*words[:-2])[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--from", "tp8", "--to", "dp4"), "run on the same ranks, but 'tp8' has 8, 'dp4' has 4. Change degrees"),
        (("--from", "tp16", "--to", "dp16"), "too small for strategies on 16 ranks"),
        (("--from", "tp8", "--to", "dq8"), "unknown axis 'dq'"),
        (("--from", "pp8", "--to", "dp8"), "8 stages need 8 layers, there are 2"),
        (("--from", "tp8", "--to", "dp8", "--planner", "hotpsa"), "did you mean 'hotspa'"),
        (("--from", "tp8", "--to", "dp8", "--dtype", "bf17"), "dtype 'bf17' is not known"),
        (("--from", "tp8", "--to", "dp8", "--json", "missing/plan.json"), "there is no folder 'missing'"),
    ],
)
def test_bad_words(cluster, words, message):
    status, out, err = fxpar("switch", "mlp", "--cluster", cluster, *words)
    assert status == 1
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""


@pytest.mark.parametrize("keep", ["inf", "nan", "-1"])
def test_memory_to_keep_copies_in_is_a_number(cluster, keep):
    status, _, err = fxpar("order", "mlp", "-s", "tp8,dp8", "--cluster", cluster, "--keep-gb", keep)
    assert (status, "--keep-gb" in err) == (2, True)


def test_bad_cluster_and_order(cluster, tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text(CLUSTER.replace("latency_us", "latency_ms"))
    status, _, err = fxpar("switch", "mlp", "--from", "tp8", "--to", "dp8", "--cluster", file)
    assert status == 1
    assert "key 'latency_ms' is unknown; did you mean 'latency_us'?" in err
    err = fxpar("switch", "mlp", "--from", "dp2", "--to", "tp2", "--world", "4")[2]
    assert "'dp2' needs 2 ranks (the product of its degrees), but the world has 4" in err
    status, _, err = fxpar("order", "mlp", "--strategies", "tp8,tp8", "--cluster", cluster)
    assert (status, err.count("\n")) == (1, 1)
    assert "order of graphs: tp8 is named 2 times; name each strategy once" in err
    status, _, err = fxpar("order", "mlp", "--strategies", "tp8,dp8", "--first", "tp4", "--cluster", cluster)
    assert "'tp4' is none of the strategies" in err


@pytest.mark.parametrize("words", [("switch", "--from", "dp2", "--to", "tp2"), ("order", "-s", "dp2,tp2")])
def test_lines_fit_the_terminal_and_words_stay_whole(words):
    command, *others = words
    status, piped, err = fxpar(command, "mlp", *others)
    assert status == 0, err
    for width in (60, 200):
        lines = shown(width, command, "mlp", *others).splitlines()
        assert max(map(len, lines)) <= width
        assert {word for line in lines for word in line.split() if not word[0].isdigit()} <= set(piped.split())
    assert len(lines) == len(piped.splitlines())  # as wide as it may be
