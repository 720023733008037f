"""The same figure in every command that shows it, and what docs/choose.md claims of the commands that it prints."""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.cli.helpers import fxpar
from tests.repeat import crossed

CHOOSE = (Path(__file__).parents[2] / "docs" / "choose.md").read_text()
STRATEGIES = ("dp4", "tp4+sp", "dp2.tp2+zero3", "pp2.tp2")


def read(*words: str):
    """The JSON that a command writes to stdout."""
    status, out, err = fxpar(*words, "--json", "-")
    assert status == 0, err
    return json.loads(out)


@cache
def dump(strategy: str, tokens: int | None = None) -> dict:
    return read("dump", "llama", "-s", strategy, *(("--tokens", str(tokens)) if tokens else ()))


# ---------------------------------------------------------------------------------------------------- one figure
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dump_and_explain_agree(strategy):
    found = read("explain", "llama", "-s", strategy)
    assert found["sent"] == dump(strategy)["sent"]
    assert found["sent"]["tokens"] == (64 if "+sp" in strategy else 61)  # as many as a run has
    text = fxpar("explain", "llama", "-s", strategy)[1]
    for line in (f"{found['sent']['micro_batch_bytes']:,} bytes", f"{found['sent']['mini_batch_bytes']:,} bytes"):
        assert line in text


@pytest.mark.parametrize(("old", "new"), [STRATEGIES[:2], STRATEGIES[2:]])
def test_diff_agrees(old, new):
    found = read("diff", "llama", "-s", old, "-s", new)
    for side, strategy in (("old", old), ("new", new)):
        assert found[side]["sent"] == pytest.approx(dump(strategy)["sent"], abs=1)


def test_viz_agrees(tmp_path):
    """At a number of tokens that one strategy pads and the other does not."""
    path = tmp_path / "page.json"
    shown = ("tp4+sp", "pp2.tp2")
    status, _, err = fxpar("viz", "llama", "-s", ",".join(shown), "--format", "json", "-o", path, "--tokens", "61")
    assert status == 0, err
    page = json.loads(path.read_text())
    for strategy in shown:
        assert page["sent"][strategy] == dump(strategy, 61)["sent"]
        each = f"{page['sent'][strategy]['micro_batch_bytes']:,} bytes per micro-batch"
        assert any(value.startswith(each) for _, value in page["about"][strategy])


def test_order_agrees():
    """Under replicas a run moves what a dump reduces: weights from home and gradients to it are an all-reduce in two
    halves. `order` says bytes of all ranks, the others of one.
    """
    sent = dump("dp4", 64)["sent"]
    found = read("order", "llama", "-s", "dp4", "--dtype", "float32", "--tokens", "64")
    moved = found["intra_node_bytes"] + found["inter_node_bytes"]
    of_loss = 2 * 3 / 4 * 4  # a dump reduces it with the gradients
    assert moved == 4 * (sent["mini_batch_bytes"] - of_loss)
    assert found["per_token_bytes"] == moved / 64
    assert sent["per_token_bytes"] == sent["micro_batch_bytes"] == 0  # nothing grows with tokens


PADDED = """
import torch
from fxpar.losses import causal_lm
from fxpar.models.gpt import Gpt, GptOptions


def make():
    ids = torch.arange(48).reshape(3, 16) % 32
    return Gpt(GptOptions(dim=16, heads=2, ffn=32, vocab=32, positions=32, dropout=0.0)), causal_lm, {
        "input_ids": ids, "labels": ids, "position_ids": torch.arange(16).repeat(3, 1)
    }
"""


@pytest.fixture(scope="module")
def padded(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("models") / "padded.py"
    path.write_text(PADDED)
    return f"{path}:make"


@pytest.mark.parametrize(("strategy", "kind"), crossed(["tp2+sp", "pp2", "dp2.cp2"], ["padded", "packed"]))
def test_all_commands_say_the_same(strategy, kind, padded, tmp_path):
    """Of a batch of three rows whose number is fixed in the graph, and of one packed row, which is padded if cut."""
    page, tokens = tmp_path / "page.json", 48 if kind == "padded" else 61 if strategy == "pp2" else 62
    model = (padded,) if kind == "padded" else ("llama", "--tokens", "61")
    explain, dumped = read("explain", *model, "-s", strategy), read("dump", *model, "-s", strategy)
    diff = read("diff", *model, "-s", "tp2", "-s", strategy)["new"]
    memory = read("memory", *model, "-s", strategy)
    status, _, err = fxpar("viz", *model, "-s", strategy, "--json", page)
    assert status == 0, err
    viz = json.loads(page.read_text())
    sent = explain["sent"]
    assert sent["tokens"] == memory["tokens"] == tokens
    assert sent == dumped["sent"] == viz["sent"][strategy]
    assert sent == pytest.approx(diff["sent"], abs=1)
    assert explain["weight_bytes"] == diff["weight_bytes"]
    brief = fxpar("dump", *model, "-s", strategy, "--brief")[1]
    text = fxpar("explain", *model, "-s", strategy)[1]
    each, once = f"{sent['micro_batch_bytes']:,} bytes", f"once: {sent['mini_batch_bytes']:,} bytes"
    for shown in (brief, text):
        assert f"per micro-batch: {each}" in shown
        assert f"per mini-batch, {once}" in shown
    count = str(memory["micro_batches"])
    assert dict(map(tuple, viz["about"][strategy]))["micro-batches"] == count == str(4 if strategy == "pp2" else 2)
    shown = viz["sections"]["memory"]["by_strategy"][strategy]
    assert (shown["micro_batches"], shown["peak_bytes"]) == (int(count), memory["peak_bytes"])
    (group,) = viz["sections"]["timeline"]["steps"][0]["groups"]
    assert group["tokens"] == tokens * int(count) * len(group["replicas"])
    if strategy != "pp2":
        rows = viz["sections"]["timeline"]["inside"][strategy]["stages"][0]["body"]["rows"]
        (length, squares, _), *_ = group["replicas"][0]
        took = sum(c0 + c1 * length + c2 * squares for *_, (c0, c1, c2), _ in rows)
        assert took == pytest.approx(1e3 * dumped["time"]["micro_batch_s"], rel=0.02)
    else:
        between = [row for row in explain["modules"] if row["module"] == "between stages"]
        assert sum(row["micro_batch_bytes"] for row in between) == explain["message_bytes"]
        assert explain["message_bytes"] == 2 * sent["micro_batch_bytes"]
        assert sent["fixed_bytes"] == 0
        assert explain["weight_bytes"] < sum(row["local_bytes"] for row in explain["params"])


@pytest.mark.parametrize("strategy", ["tp4+sp", "dp2.tp2+zero3"])
def test_a_collective_has_one_owner(strategy):
    """And counts for a micro-batch or once for a mini-batch: of what parameters cause and modules send neither is more
    than a rank sends.
    """
    names = ("micro_batch_bytes", "mini_batch_bytes")
    by_dump: dict[tuple[str, str], float] = defaultdict(float)
    for each in dump(strategy)["collectives"]:
        once = each["part"] in ("prologue", "epilogue")
        by_dump[re.sub(r"\.\d+", ".*", each["fqn"]), names[once]] += each["bytes"]
    found = read("explain", "llama", "-s", strategy)
    by_explain: dict[tuple[str, str], float] = defaultdict(float)
    for row in found["modules"]:
        for name in filter(row.get, names):
            by_explain[row["module"], name] += row[name]
    assert by_explain == pytest.approx(by_dump, abs=8)
    for name in names:
        assert sum(row[name] for row in found["modules"]) == pytest.approx(found["sent"][name], abs=8)
        assert sum(row[name] for row in found["params"]) <= found["sent"][name] + len(found["params"])


def test_a_dump_says_what_is_sent_and_how_long_it_takes():
    out = fxpar("dump", "llama", "-s", "tp4+sp", "--brief")[1]
    found = dump("tp4+sp")
    assert (
        f"per micro-batch: {found['sent']['micro_batch_bytes']:,} bytes (25,152 at any length + 3,666.0 per token)"
        in out
    )
    assert re.search(
        r"time of a rank, predicted for usual GPUs \(.*TFLOP/s.*\n  .* ms per micro-batch \(.* µs per", out
    )
    assert found["time"]["per_token_s"] == pytest.approx(found["time"]["micro_batch_s"] / 64)
    assert out.index("time of a rank") < out.index("parameters:")  # in the head
    assert "time" not in read("dump", "mlp", "-s", "tp2")


def test_times_are_those_of_the_devices_that_are_named(tmp_path):
    """`--tflops` wins over the cluster's; dump and viz say in their heads what they assume."""
    cluster = tmp_path / "cluster.toml"
    links = "nodes = 1\ndevices_per_node = 4\nintra_gb_per_s = 200\ninter_gb_per_s = 25\nlatency_us = 20\n"
    cluster.write_text(
        f"{links}[device]\ntflops = 0.5\nmemory_gb_per_s = 2000\nlaunch_us = 4\noverlap_slowdown = 1.13\n"
    )
    page, times = tmp_path / "page.json", []
    for given, tflops in (((), 300), (("--cluster", cluster), 0.5), (("--cluster", cluster, "--tflops", "0.25"), 0.25)):
        times.append(read("dump", "llama", "-s", "tp4+sp", *given)["time"]["micro_batch_s"])
        head = fxpar("dump", "llama", "-s", "tp4+sp", "--brief", *given)[1].partition("parameters:")[0]
        words = f"{tflops:g} TFLOP/s and 2000 GB/s of memory, 4 µs per kernel"
        assert f"predicted for {'devices' if given else 'usual GPUs'} ({words}):" in head
        status, _, err = fxpar("viz", "llama", "-s", "tp4+sp", "--format", "json", "-o", page, *given)
        assert status == 0, err
        found = json.loads(page.read_text())
        assert ["device", words] in found["about"]["tp4+sp"]
        assert found["sections"]["timeline"]["assumed"][0] == f"Devices of {words}."
    assert times[0] < times[1] < times[2]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0], rel=0.01)  # products take as long again
    status, _, err = fxpar("dump", "llama", "--tflops", "100")
    assert (status, "name a strategy" in " ".join(err.split())) == (2, True)


def test_a_schedule_is_the_same_in_dump_and_viz(tmp_path):
    """Its bubble and its length, with as many micro-batches."""
    path = tmp_path / "page.json"
    words = ("--tflops", "0.5")
    for strategy in ("pp2.tp2+zb_h1", "dp2.pp2"):
        status, _, err = fxpar(
            "viz", "llama", "-s", strategy, "--format", "json", "-o", path, "--micro-batches", "4", *words
        )
        assert status == 0, err
        sections = json.loads(path.read_text())["sections"]
        (timeline,) = sections["timeline"]["steps"][0]["timelines"]
        found = read("dump", "llama", "-s", strategy, "--schedule", "--micro-batches", "4", *words)
        assert found["bubble_fraction"] == pytest.approx(timeline["groups"][0]["bubble"], rel=1e-6)
        ends = [rank["end_ms"] for rank in sections["memory"]["by_strategy"][strategy]["ranks"]]
        assert ends == pytest.approx([found["makespan_ms"]] * 2)
        actions = [span for span in timeline["spans"] if span[1] in "FBIW"]
        assert found["makespan_ms"] == pytest.approx(max(s[3] + s[4] for s in actions) - min(s[3] for s in actions))
        assert (
            f"bubble {found['bubble_fraction']:.1%}"
            in fxpar("dump", "llama", "-s", strategy, "--schedule", "--micro-batches", "4", *words)[1]
        )


# ---------------------------------------------------------------------------------------------------- choose.md
def commands(program: str) -> list[list[str]]:
    """The command lines of the page that run this command on the small llama."""
    lines = [shlex.split(line) for line in CHOOSE.splitlines() if line.startswith(f"fxpar {program} llama")]
    return [words[1:] for words in lines]


def test_replicas_send_once_and_tp_per_token():
    """Step 3: the figures of the page are those of its commands, hold at any length, and the rule follows from them."""
    first, second = commands("dump")
    assert (first[3], second[3]) == ("dp4", "tp4+sp")
    dp, tp = (read(*words)["sent"] for words in (first, second))
    for name, sent in (("dp4", dp), ("tp4+sp", tp)):
        once, fixed, each = sent["mini_batch_bytes"], sent["fixed_bytes"], sent["per_token_bytes"]
        assert f"| `{name}` | {once:,} | {fixed:,} | {each:,.0f} |" in CHOOSE
        longer = dump(name, 1000)["sent"]  # two lengths make a line
        assert fixed + each * 1000 == longer["micro_batch_bytes"]
        assert once == longer["mini_batch_bytes"]
    assert f"`{tp['mini_batch_bytes']:,} + {tp['fixed_bytes']:,} M + {tp['per_token_bytes']:,.0f} N`" in CHOOSE
    even = (dp["mini_batch_bytes"] - tp["mini_batch_bytes"] - tp["fixed_bytes"]) / tp["per_token_bytes"]
    assert int(re.search(r"about (\d+) tokens", CHOOSE)[1]) == round(even)
    assert int(re.search(r"as much as (\d+) tokens", CHOOSE)[1]) == round(tp["fixed_bytes"] / tp["per_token_bytes"])


def test_tp_has_four_collectives_per_layer():
    def of_a_layer(strategy):
        return [c for c in dump(strategy)["collectives"] if c["fqn"].startswith("layers.1.") and c["part"] == "body"]

    assert len(of_a_layer("tp4")) == 4
    assert "4 collectives per layer and micro-batch" in CHOOSE


def test_sp_sends_about_the_same_and_holds_less():
    each = [dump(name, 64)["sent"]["micro_batch_bytes"] for name in ("tp4", "tp4+sp")]
    assert each[1] == pytest.approx(each[0], rel=0.1)
    found = read("memory", "llama", "-s", "tp4,tp4+sp", "--tokens", "4096")["strategies"]
    assert found[1]["peak_bytes"] < found[0]["peak_bytes"]


def test_a_switch_into_a_view_moves_nothing(tmp_path, monkeypatch):
    """Step 4."""
    cluster = re.search(r'```toml title="cluster.toml"\n(.*?)```', CHOOSE, re.DOTALL)[1]
    (tmp_path / "cluster.toml").write_text(cluster)
    monkeypatch.chdir(tmp_path)
    (switch,), (order,) = commands("switch"), commands("order")
    plan = read(*switch)
    assert (plan["inter_node_bytes"], plan["intra_node_bytes"]) == (0, 0)
    found = read(*order)
    assert found["gradients"] == "home"  # as in training
    assert {hop["target"] for hop in found["hops"] if hop["kind"] == "gradients"} == {"home"}
    first, *others = (hop for hop in found["hops"] if hop["kind"] == "weights")
    assert (first["target"], first["source"]) == ("dp4", "home")
    assert first["intra_node_bytes"] > 0
    assert [hop["intra_node_bytes"] for hop in others] == [0, 0]
