"""`fxpar check`: verdicts, exit status, JSON, and one clear error for each kind of bad input."""

from __future__ import annotations

import json
import re

import pytest
from rich.console import Console

from fxpar.checking import CheckResult, compare
from fxpar.cli import check as cli_check
from fxpar.cli.check import _error
from fxpar.ir.strategy import Strategy
from tests.cli.helpers import fxpar

KEYS = {
    "strategy",
    "world",
    "ok",
    "loss_rel_err",
    "grad_max_rel_err",
    "worst_param",
    "collectives",
    "collective_bytes",
    "capture_cpu_s",
    "annotate_cpu_s",
    "lower_cpu_s",
    "nodes",
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """What `fxpar check` of four strategies prints, and its JSON."""
    file = tmp_path_factory.mktemp("check") / "out.json"
    words = ("--dtype", "float64", "--tokens", "24,13", "--json", file)
    status, out, err = fxpar("check", "llama", "--strategies", "dp2,tp2+sp,pp2,dp2.pp2+zb_h1", *words)
    assert status == 0, out + err
    return out, json.loads(file.read_text())


def test_all_agree(checked):
    out, data = checked
    assert "4 of 4 strategies agree" in out
    assert (data["model"], data["dtype"]) == ("llama", "float64")
    first, second = data["results"][:2]
    assert set(first) >= KEYS
    assert (first["strategy"], first["world"], first["ok"]) == ("dp2", 2, True)
    assert first["collectives"] == {"all_reduce": 1}
    assert second["collectives"]["reduce_scatter"] > 4
    assert 0 <= second["grad_max_rel_err"] < 1e-10
    assert second["collective_bytes"] > 0
    assert second["capture_cpu_s"] > 0
    assert "\ndocuments packed in rows\nstrategy" in out
    assert [result["documents"] for result in data["results"]] == ["in rows"] * 4


def test_pipelines(checked):
    for result in checked[1]["results"][2:]:
        assert result["collectives"]["send"] == 2
        assert result["collective_bytes"] > 0 == result["loss_rel_err"]


def test_float32_and_options():
    status, out, _ = fxpar("check", "mlp", "-s", "dp2", "--set", "layers=3", "--set", "dim=30")
    assert status == 0
    assert "2,827 parameters" in out
    assert "documents" not in out  # it has no tokens


def test_models_of_transformers():
    pytest.importorskip("transformers", reason="the extra fxpar[hf] is not installed")
    status, out, err = fxpar("check", "hf:llama", "-s", "tp2", "--dtype", "float64", "--tokens", "20")
    assert status == 0, out + err
    assert out.startswith("hf:llama: ")  # and not an emoji


def test_override_is_checked_like_any_placement():
    status, out, _ = fxpar("check", "mlp", "-s", "tp2", "--dtype", "float64", "--override", "*=R@tp")
    assert status == 0, out


def test_a_miss_is_status_1(monkeypatch):
    monkeypatch.setattr(compare, "relative_error", lambda *_: 0.5)
    status, out, _ = fxpar("check", "mlp", "-s", "dp2")
    assert status == 1
    assert re.search(r"dp2 +2 +MISS", out)
    assert "0 of 1 strategies agree" in out


def test_one_strategy_fails_the_others_run(tmp_path):
    file = tmp_path / "out.json"
    status, out, _ = fxpar("check", "mlp", "-s", "pp4,dp2", "--json", file)
    assert status == 1
    assert "pp4: model 'mlp' cannot be cut into pipeline stages: 4 stages need 4 layers, there are 2" in out
    assert "1 of 2 strategies agree" in out
    failed, good = json.loads(file.read_text())["results"]
    assert (failed["ok"], failed["loss_rel_err"], good["ok"]) == (False, None, True)
    assert set(failed) >= KEYS


def test_a_bug_in_one_strategy_is_named(monkeypatch):
    def broken(*args, **kwargs):
        raise KeyError("node")

    monkeypatch.setattr(cli_check, "check", broken)
    status, out, _ = fxpar("check", "mlp", "-s", "dp2")
    assert status == 1
    assert "dp2: KeyError: 'node'. Add --debug" in out


def test_json_on_stdout():
    status, out, err = fxpar("check", "mlp", "-s", "dp2", "--json", "-")
    assert status == 0
    assert json.loads(out)["results"][0]["ok"] is True
    assert "1 of 1 strategies agree" in err


def test_override_that_matches_nothing():
    status, out, _ = fxpar("check", "mlp", "-s", "tp2", "--override", "*.q_proj.weight=R@tp")
    assert status == 1
    assert "override '*.q_proj.weight': matches no parameter" in out


BAD = [
    (("llama", "-s", "dp2,tp2+zro1"), "unknown flag 'zro1'; did you mean 'zero1'"),
    (("llama", "-s", "dp2,,tp2"), "a strategy in the list is empty"),
    (("llama", "-s", " "), "strategy '': it is empty. A strategy is axes"),
    (("llama", "-s", "dp2,tp4", "--world", "4"), "needs 2 ranks (the product of its degrees), but the world has 4"),
    (("llama", "-s", "tp2", "--override", "*.weight"), "override '*.weight': is not an assignment"),
    (("llama", "-s", "tp2", "--override", "*.weight=X(0)@tp"), "'X(0)@tp' is not a placement"),
    (("lama", "-s", "tp2"), "no built-in model 'lama'; did you mean 'llama'?"),
    (("llama", "-s", "tp2", "--set", "layer=3"), "option 'layer' is unknown to the built-in 'llama'"),
    (("llama", "-s", "tp2", "--set", "layers"), "write key=value"),
    (("llama", "-s", "tp2", "--dtype", "float46"), "dtype 'float46' is not known; did you mean 'float64'?"),
    (("llama", "-s", "tp2", "--tokens", "64,x"), "--tokens '64,x': write the lengths"),
    (("llama", "-s", "tp2", "--tokens", "64,1"), "each is at least 2"),
    (("llama", "-s", "tp2", "--tokens", "9" * 21), "no more than 2^30"),
    (("mlp", "-s", "dp2048"), "one process can simulate at most 1024"),
    (("no.py", "-s", "tp2"), "'no.py': it names no function. Write no.py:FUNCTION"),
    (("no.py:make", "-s", "tp2"), "there is no file 'no.py'"),
    (("no_such_module:make", "-s", "tp2"), "cannot import 'no_such_module'"),
    (("fxpar.losses:mean", "-s", "tp2"), "has no function 'mean'"),
    (("llama", "-s", "tp2", "--json", "no/folder/out.json"), "cannot write 'no/folder/out.json': there is no folder"),
    (("llama", "-s", "tp2", "--json", "."), "cannot write '.': it is a folder"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_bad_input_is_one_message(words, message, monkeypatch):
    """Found before anything is captured."""
    monkeypatch.setattr(cli_check, "capture_model", lambda _: pytest.fail("captured"))
    status, out, err = fxpar("check", *words)
    assert status == 1
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_bad_strategy_says_what_there_is():
    _, _, err = fxpar("check", "mlp", "-s", "dp2.xp2")
    assert "Axes are dp, pp, cp, ring, tp, rows, ep" in err


@pytest.mark.parametrize(
    "words",
    [
        ("check",),
        ("check", "mlp"),
        ("check", "mlp", "-s", "dp2", "--compile", "llvm"),
        ("check", "mlp", "-s", "dp2", "--tolerance", "-1"),
        ("chek", "mlp"),
        ("check", "mlp", "--no"),
    ],
)
def test_mistakes_of_usage_are_status_2(words):
    status, out, err = fxpar(*words)
    assert status == 2
    assert out == ""
    assert "Usage: " in err


def test_debug_shows_the_traceback():
    status, _, err = fxpar("check", "lama", "-s", "dp2", "--debug")
    assert status == 1
    assert "Traceback" in err
    assert "UnknownModelError" in err


def test_error_inside_the_users_model(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class M(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return x.view(3, 7, 11)\n"
        "def make():\n"
        "    return M(2, 2), lambda m, b: m(b['x']).sum(), {'x': torch.ones(4, 2)}\n"
    )
    status, _, err = fxpar("check", f"{tmp_path}/mine.py:make", "-s", "dp2")
    assert status == 1
    assert err.startswith("error: RuntimeError: ")
    assert "mine.py:4" in err
    assert "--debug" in err


def test_columns_fit_the_terminal():
    strategy = Strategy.parse("dp2.cp2.tp4+sp+zero3")
    result = CheckResult(str(strategy), strategy.world, False, 1e-3, 1e-3, "a.b", {}, 1, 0, 0, 0, 1)
    for width in (60, 80, 160):
        console = Console(width=width, force_terminal=True, no_color=True)
        shown = cli_check.fitting([result], width)
        with console.capture() as caught:
            console.print(cli_check._rich_table(shown, [result]))
        text = re.sub(r"\x1b\[[\d;]*m", "", caught.get())
        assert max(map(len, text.splitlines())) <= width
        assert "dp2.cp2.tp4+sp+zero3" in text
        assert len(text.splitlines()) == 2  # nothing is wrapped
        assert all(column.title in text for column in shown)
        assert len(shown) == {60: 5, 80: 7, 160: 9}[width]  # as many as there is room for


def test_in_another_precision(tmp_path):
    """The single device computes in it too; the tolerance is that of the narrowest parameters."""
    file = tmp_path / "out.json"
    status, out, err = fxpar("check", "llama", "-s", "tp2+sp,pp2", "--precision", "bf16", "--json", file)
    assert status == 0, out + err
    for result in json.loads(file.read_text())["results"]:
        assert 1e-4 < result["grad_max_rel_err"] < 3e-2


@pytest.mark.parametrize("command", ["check", "dump"])
def test_a_precision_is_read_before_the_model(command):
    status, _, err = fxpar(command, "no/such/model.py:make", "-s", "tp2", "--precision", "bf17")
    assert status != 0
    assert "did you mean 'bf16'?" in err


def test_weights_that_are_no_numbers(monkeypatch, tmp_path):
    (tmp_path / "nan.py").write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Linear(2, 2)\n"
        "    model.weight.data[0, 0] = float('nan')\n"
        "    return model, lambda m, b: m(b['x']).sum(), {'x': torch.ones(4, 2)}\n"
    )
    status, _, err = fxpar("check", f"{tmp_path}/nan.py:make", "-s", "dp2")
    assert status == 1
    assert "weight holds NaN or infinite values" in err
    assert "result" not in err


def test_a_loss_that_is_no_number(monkeypatch):
    monkeypatch.setattr(compare, "relative_error", lambda *_: float("inf"))
    status, out, _ = fxpar("check", "mlp", "-s", "dp2")
    assert (status, "is not a number (NaN or infinite)" in out) == (1, True)


@pytest.mark.parametrize("option", ["layers=-1", "dim=0"])
def test_sizes_are_counts(option):
    status, _, err = fxpar("check", "mlp", "-s", "dp2", "--set", option)
    assert (status, f"option {option!r} must be a number from 1 to 16,777,216" in err) == (1, True)


def test_errors_that_no_dtype_resolves_are_not_told_as_numbers():
    assert [_error(value) for value in (0.0, 1e-41, 3.4e-7, float("inf"))] == ["0", "< 1e-30", "3.4e-07", "-"]
