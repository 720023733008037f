"""Every benchmark runs from end to end in its tiny form, so that none of them breaks unseen.

Each in a fork of its own: what torch imports is imported once, and no process group stays for the next one.
"""

from __future__ import annotations

import multiprocessing
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fxpar.runtime.forked import run_forked
from fxpar.torch_api.fork import forget_parent_threads

pytestmark = pytest.mark.benchmarks
torch.set_num_threads(1)  # a forked child cannot use its parent's threads

ROOT = Path(__file__).parents[2]
TITAN = {"bench_torchtitan", "bench_experts"}
# Long even in their tiny form (five CPU seconds and more), with tests that run by day what they run. All are imported
# by day.
NIGHTLY = {
    "bench_commands": "tests/test_docs.py",
    "bench_plan": "tests/train/test_auto.py",
    "bench_precision": "tests/runtime/test_precision.py",
    "bench_step": "tests/runtime/test_engine.py",
    "offload": "tests/passes/test_offload.py",
    "switch": "tests/runtime/test_engine.py",
}
NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("bench_*.py"))


def run(main: Callable[[list[str]], object], *words: str) -> None:
    """`main(words)` in a fork; fails if that does."""

    def work() -> None:
        forget_parent_threads()
        main(list(words))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(300)
    ended, code = not process.is_alive(), process.exitcode
    process.kill()
    assert (ended, code) == (True, 0)


def test_all_scripts_are_imported(script):
    """Also those whose tiny form is nightly; the others import torchtitan, and run in `make test-titan`."""
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        assert path.stem in TITAN or script(path.stem).__doc__, path.stem


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.titan] * (name in TITAN) + [pytest.mark.nightly] * (name in NIGHTLY)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in NAMES])
def test_runs(script, capfd, tmp_path, name):
    run(script(name).main, "--tiny", "--json", str(tmp_path / "found.json"))
    assert capfd.readouterr().out.strip()
    assert (tmp_path / "found.json").stat().st_size > 2


PIECES = ("step", "experts", "offload", "attention", "packed", "switch")


@pytest.mark.parametrize("piece", [pytest.param(piece, marks=marks(piece)) for piece in PIECES])
def test_pieces_for_a_gpu_run(script, capfd, piece):
    run(script("gpu_single").main, piece, "--device", "cpu", "--tiny")
    assert capfd.readouterr().out.strip()


def test_the_exchanges_of_two_nodes(script, capsys):
    """Without a slow network: what they carry and print, not how long they take."""
    module = script("two_nodes")
    found = run_forked(module.WORLD, lambda rank: module.measure(rank, 1, 1))[0]
    module.show(found, 1)
    assert "node first" in capsys.readouterr().out
    assert found["reduction"]["node first"]["inter_node_bytes"] * 2 == found["reduction"]["direct"]["inter_node_bytes"]
    assert found["switch"]["relay"]["inter_node_bytes"] * 2 == found["switch"]["hotspa"]["inter_node_bytes"]


@pytest.mark.parametrize("paced", [False, True])
def test_the_borders_of_steps_on_two_nodes(script, capsys, paced):
    borders = script("borders")
    borders.compiled(tuple(borders.STRATEGIES.items()), True)  # once, before ranks are forked
    found = run_forked(4, lambda _: borders.measure(1e4, 1, paced, tiny=True))[0]
    script("two_nodes").show_borders({"mbit": 1e4, **found})
    assert "exposed" in capsys.readouterr().out
    assert 0 < found["exposed"] < found["overlapped"]


@pytest.mark.nightly  # paced groups by day: test_the_borders_of_steps_on_two_nodes
@pytest.mark.parametrize("lengths", ["github", "rounds"])
def test_a_plan_against_one_strategy_on_two_nodes(script, capsys, lengths):
    module = script("plan_nodes")
    plans = module.choose(lengths, 1e3, tiny=True, samples=2, rules=lengths == "github")
    found = run_forked(4, lambda _: module.measure(plans, lengths, 1e3, 1, True, tiny=True))[0]
    module.show(found, plans, lengths, 1e3)
    assert "planned set" in capsys.readouterr().out
    assert set(found) == set(plans)
    # Paced groups wait for what is predicted.
    assert all(one["measured_s"] > 0.9 * one["predicted_s"] for one in found.values())


@pytest.mark.nightly  # by day: test_runs[bench_lsh]
@pytest.mark.parametrize("paced", [False, True])
def test_compressed_experts_on_two_nodes(script, capsys, monkeypatch, paced):
    module = script("lsh_nodes")
    monkeypatch.setattr(module, "SLOWER", 300)  # so that what a tiny model really takes is nothing beside it
    found = run_forked(4, lambda _: module.measure(1e3, 1, paced, tiny=True))[0]
    module.show(found, 1e3, 0.45)
    assert "times as fast" in capsys.readouterr().out
    # Paced kernels wait for what they are priced.
    assert not paced or all(one["measured_s"] > 0.9 * one["predicted_s"] for one in found.values())


def test_make_bench_runs_the_commands_of_the_page(script):
    """As they stand there, in the same order; and it leaves no benchmark out."""
    run = [piece.words for piece in script("run_cpu").PIECES]
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert run == re.findall(r"^(?:    OMP_NUM_THREADS=1 )?(?:    )?python (benchmarks/bench_.*)$", page, re.MULTILINE)
    assert {Path(shlex.split(words)[0]).stem for words in run} == set(NAMES)
