"""Pieces of a long measurement: what is done is kept, what failed or was cut off is done again."""

from __future__ import annotations

import argparse
import json

import pytest

WRITES = """-c 'import json, sys; json.dump({"table": [{"way": "a", "ms": 1234.5, "n": 7}]}, open(sys.argv[2], "w"))'"""


@pytest.fixture
def run(script, tmp_path, capsys):
    """Run pieces (name -> words of the command) with options; returns the exit code and what was printed."""
    pieces = script("pieces")

    def runs(words, *options, limit_s=60, **more):
        made = [pieces.Piece(name, name.title(), text, limit_s, **more) for name, text in words.items()]
        parser = argparse.ArgumentParser()
        pieces.add_options(parser, made, "unused")
        code = pieces.run_pieces(made, parser.parse_args(["--folder", str(tmp_path), *options]))
        return code, capsys.readouterr().out

    return runs


def test_what_is_done_is_kept(run, tmp_path):
    code, printed = run({"first": WRITES})
    assert code == 0
    assert "| way | ms | n |\n|---|---|---|\n| a | 1,234 | 7 |" in printed
    assert (tmp_path / "results.md").read_text() in printed
    made = (tmp_path / "first.json").stat().st_mtime_ns
    code, printed = run({"first": WRITES})
    assert code == 0
    assert "first: done before" in printed
    assert "| a | 1,234 | 7 |" in printed
    assert (tmp_path / "first.json").stat().st_mtime_ns == made
    run({"first": WRITES}, "--again")
    assert (tmp_path / "first.json").stat().st_mtime_ns > made


def test_another_command_or_commit_is_not_done(run, tmp_path):
    run({"first": "-c 'print(1)'"}, measures=False)
    assert "done before" not in run({"first": "-c 'print(2)'"}, measures=False)[1]
    path = tmp_path / "first.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"commit": "0000000"}))
    assert "done before" not in run({"first": "-c 'print(2)'"}, measures=False)[1]


def test_failures_are_told_and_run_again(run):
    bad = {"bad": "-c 'print(\"why\"); raise SystemExit(4)'"}
    for _ in range(2):
        code, printed = run(bad, measures=False)
        assert code == 1
        assert "bad: failed" in printed
        assert "Failed with exit code 4." in printed
        assert "why" in printed


def test_what_takes_too_long_is_cut_off(run):
    code, printed = run({"slow": "-c 'import time; time.sleep(60)'"}, limit_s=1, measures=False)
    assert code == 1
    assert "Cut off." in printed


def test_a_long_output_keeps_its_first_and_last_lines_whole(run, tmp_path):
    program = tmp_path / "long.py"
    program.write_text("print('[rank1]:W1124 slow')\nfor i in range(1000, 1200): print(str(i) * 40)")
    _, printed = run({"long": str(program)}, measures=False)
    lines = printed.splitlines()
    shown = [line for line in lines if line[:4].isdigit() and len(line) == 160]
    assert (shown[0], shown[-1]) == ("1000" * 40, "1199" * 40)
    assert f"[{200 - len(shown)} lines left out]" in lines
    assert "[rank1]:W" not in printed


def test_a_run_that_may_only_take_so_long_says_what_is_left(run):
    code, printed = run({"first": WRITES, "second": WRITES}, "--total-s", "0.5")
    assert code == 3
    assert "no time left for first, second" in printed


def test_without_a_gpu_nothing_is_measured(script, capsys):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert script("run_gpu").main([]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert "sees no CUDA GPU" in line
    assert torch.__version__ in line


def test_a_missing_package_is_named(script, capsys, monkeypatch):
    run_gpu = script("run_gpu")
    monkeypatch.setattr(run_gpu, "NEEDED", ("torch", "no_such_package"))
    assert run_gpu.main(["--device", "cpu"]) == 2
    assert "no_such_package" in capsys.readouterr().out
