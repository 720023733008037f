"""`fxpar diff`: two strategies, two files, two passes; narrow terminals; bad input.

To accept a change of the goldens: EXPECTTEST_ACCEPT=1 pytest tests/cli/test_diff.py, then read the diff.
"""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from fxpar.cli.diff_show import report, show
from tests.cli.helpers import fxpar
from tests.graph_diff.graphs import difference

GOLDEN = Path(__file__).parents[1] / "golden"


def compare_golden(name: str, text: str) -> None:
    path = GOLDEN / f"diff_{name}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Graph files of the mlp: two strategies, and an annotated graph."""
    path = tmp_path_factory.mktemp("graphs")
    for name, words in (("tp2", ("-s", "tp2")), ("dp2", ("-s", "dp2")), ("plain", ())):
        status, _, err = fxpar("dump", "mlp", *words, "-o", path / f"{name}.fxpar")
        assert status == 0, err
    return path


def test_golden_strategies():
    status, out, err = fxpar("diff", "llama", "-s", "tp2", "-s", "tp2+sp", "--text")
    assert status == 0, err
    head, *sections = re.split(r"\n(?=@@ )", out)
    norm = next(s for s in sections if s.startswith("@@ norm, forward"))
    compare_golden("tp2_sp", f"{head}\n{norm}")


def test_golden_pass():
    status, out, err = fxpar("diff", "mlp", "-s", "dp2.tp2", "--after", "lower_collectives", "--text")
    assert status == 0, err
    compare_golden("lower_collectives", out)


def test_bytes_of_a_micro_batch_and_of_a_mini_batch_are_not_added():
    """Neither in the table of collectives nor in that of blocks, whose sums are the same."""
    out = fxpar("diff", "llama", "-s", "dp2.tp2", "-s", "dp2.tp2+zero3", "--brief")[1]
    sums = [line.split() for line in out.splitlines() if line.startswith(("  per micro-batch", "  per mini-batch"))]
    assert len(sums) == 4
    sent = [" ".join(words).partition("B ->")[0].split()[-1] for words in sums]  # by the old strategy
    assert sent[:2] == sent[2:]
    assert not any(line.startswith(("  all ", "  others   0")) for line in out.splitlines())


def test_equal():
    for words in (("-s", "tp2", "-s", "tp2"), ("--strategies", "tp2,tp2", "--text", "--exit-code")):
        status, out, _ = fxpar("diff", "mlp", *words)
        assert status == 0
        assert out.endswith("no differences\n")


def test_exit_status():
    assert fxpar("diff", "mlp", "-s", "tp2", "-s", "dp2")[0] == 0
    assert fxpar("diff", "mlp", "-s", "tp2", "-s", "dp2", "--exit-code")[0] == 1


def test_plain_and_brief():
    whole = fxpar("diff", "mlp", "-s", "tp2", "-s", "dp2")[1]
    brief = fxpar("diff", "mlp", "-s", "tp2", "-s", "dp2", "--brief")[1]
    assert "\x1b" not in whole
    assert whole.startswith(brief)
    assert "nodes that differ" in whole
    assert "nodes that differ" not in brief


def test_files(folder):
    by_name = fxpar("diff", "mlp", "-s", "tp2", "-s", "dp2", "--text")[1]
    status, out, err = fxpar("diff", folder / "tp2.fxpar", folder / "dp2.fxpar", "--text")
    assert status == 0, err
    assert out.splitlines()[1:3] == [f"--- {folder}/tp2.fxpar (tp2)", f"+++ {folder}/dp2.fxpar (dp2)"]
    assert out.splitlines()[3:] == by_name.splitlines()[3:]
    plain = fxpar("diff", folder / "plain.fxpar", "-s", "tp2", "-s", "dp2", "--text")[1]
    assert plain == by_name
    assert fxpar("diff", folder / "tp2.fxpar", "mlp", "-s", "tp2")[1].endswith("no differences\n")
    assert fxpar("diff", "mlp", "-s", "tp2", "-s", "dp2", "--text", "--no-cache")[1] == by_name


def test_passes_by_name_and_number():
    first = fxpar("diff", "mlp", "-s", "dp2", "--passes", "cleanup", "15")[1]
    assert first.splitlines()[1:3] == ["--- dp2 after cleanup", "+++ dp2 after lower_collectives"]
    before = fxpar("diff", "mlp", "-s", "dp2", "--before", "global_to_local", "--after", "lower_collectives")[1]
    assert before == first
    alone, other = (fxpar("diff", "mlp", "-s", "dp2", word, "casts")[1] for word in ("--before", "--after"))
    assert alone == other
    assert "--- dp2 after zero_shard\n+++ dp2 after casts\n" in alone


def test_passes_of_a_pipeline():
    status, out, err = fxpar("diff", "llama", "-s", "pp2.tp2", "--after", "lower_collectives")
    assert status == 0, err
    assert out.startswith("model llama\n--- pp2.tp2 after sort_rows\n")
    assert "bytes that a rank of each stage sends" in out
    assert re.search(r"forward +send +pp +1 -> +1 +15.6 kB -> +15.6 kB", out)


def test_reshards_have_no_bytes():
    out = fxpar("diff", "llama", "-s", "tp2", "--after", "reshard_to_collectives")[1]
    assert re.search(r"forward +reshard +\d+ -> +0\n", out)
    assert "bytes of a reshard are known after reshard_to_collectives" in out


def test_one_module():
    out = fxpar("diff", "llama", "-s", "tp2", "-s", "dp2", "--fqn", "layers.1")[1]
    assert re.search(r"layers.1.ffn.up_proj.weight +x1 ", out)
    assert "layers.0" not in out


def test_json(tmp_path):
    file = tmp_path / "diff.json"
    status, out, _ = fxpar("diff", "llama", "-s", "tp2", "-s", "tp2+sp", "--json", file)
    assert (status, out[:6]) == (0, "model ")
    data = json.loads(file.read_text())
    assert (data["model"], data["old"]["title"], data["new"]["title"]) == ("llama", "tp2", "tp2+sp")
    assert data["timings"]["total_cpu_s"] > 0
    assert json.loads(fxpar("diff", "llama", "-s", "tp2", "-s", "tp2+sp", "--json", "-")[1])["params"] == data["params"]


@pytest.mark.parametrize("width", [60, 44])
def test_no_number_is_lost_in_a_narrow_terminal(width):
    """The tables stay inside, and the wide table's numbers are all there."""
    diff = difference("tp2", "dp2.tp2+sp+zero3")
    wide, narrow = ([line.text for line in report(diff, w)] for w in (None, width))
    assert all(len(line) <= width for line in narrow if not line.startswith(("collectives (", "blocks that", "    +")))
    numbers = [sorted(re.findall(r"[\d.]+ [kM]?B|\d+", "\n".join(lines))) for lines in (wide, narrow)]
    assert numbers[0] == numbers[1]


def test_colours_on_a_terminal_only():
    diff = difference("tp2", "tp2+sp")
    texts = []
    for options in ({"force_terminal": True, "color_system": "standard"}, {"force_terminal": False}):
        file = io.StringIO()
        show(Console(file=file, width=60, **options), diff, text=True)
        texts.append(file.getvalue())
    assert "\x1b[31m-%" in texts[0]
    assert "\x1b[32m+%" in texts[0]
    assert "\x1b" not in texts[1]
    assert re.sub(r"\x1b\[[\d;]*m", "", texts[0]).count("\n-%") == texts[1].count("\n-%")


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("mlp",), 1, "there is only one side"),
        (("mlp", "-s", "tp2"), 1, "there is only one side"),
        (("mlp", "-s", "tp2", "-s", "dp2", "-s", "cp2"), 1, "3 strategies are given. Give two"),
        (("mlp", "-s", "tp2", "-s", "dp2", "--after", "casts"), 1, "Give one MODEL and one strategy"),
        (("mlp", "--after", "casts"), 1, "Give one MODEL and one strategy"),
        (("mlp", "-s", "tp2", "--before", "annotate"), 1, "there is nothing before 'annotate'"),
        (("mlp", "-s", "tp2", "--after", "cats"), 1, "did you mean 'casts'"),
        (("mlp", "-s", "tp2", "--after", "share_weights"), 1, "See: fxpar dump MODEL -s A,B --after share_weights"),
        (
            ("mlp", "-s", "tp2", "--before", "accumulate_gradients"),
            1,
            "is not a step of the lowering, so no graph comes",
        ),
        (
            ("mlp", "-s", "tp2", "--after", "casts", "--passes", "1", "2"),
            2,
            "it cannot be combined with --before or --after",
        ),
        (("mlp", "-s", "tp2", "-s", "dp2", "--text", "--brief"), 2, "it contradicts --text"),
        (("mlp", "-s", "tp2", "-s", "dp"), 1, "an axis is a name and a degree"),
        (("mlp", "-s", "tp2", "-s", "dp2", "--fqn", "layer.0"), 1, "did you mean 'layers.0'"),
        (("mlp", "-s", "tp2", "-s", "dp2", "--json", "no/folder/x"), 1, "there is no folder"),
        (("mlp", "llama", "-s", "tp2"), 1, "mlp (tp2) and llama (tp2) are different models"),
        (("a.fxpar", "b.fxpar"), 1, "graph file 'a.fxpar': there is no such file"),
    ],
)
def test_bad_input(words, status, message):
    found, out, err = fxpar("diff", *words)
    assert found == status
    assert out == ""
    assert message in err


def test_the_schedule_is_said():
    status, out, err = fxpar("diff", "llama", "-s", "pp2", "-s", "pp2+zb_h1", "--exit-code")
    assert status == 0, err
    assert re.search(r"^  schedule +1f1b +zb_h1$", out, re.MULTILINE)
    assert out.endswith("no differences except the schedule\n")
