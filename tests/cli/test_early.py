"""What is wrong with the words is said before torch is imported; one set of names for strategies."""

from __future__ import annotations

import pytest

from fxpar.cli.complete import join_words, models, passes, strategies
from fxpar.cli.early import check_early
from fxpar.cli.names import EXAMPLE_NAMES
from fxpar.cli.options import one_strategy, split_strategies
from fxpar.models.builtin import EXAMPLES
from tests.cli.helpers import fxpar
from tests.cli.test_main import run

WITHOUT_TORCH = """
import sys
from fxpar.cli import run
for words in {words}:
    sys.argv = ["fxpar", *words.split()]
    try:
        run()
    except SystemExit as end:
        print(f"status {{end.code}}")
print("torch" in sys.modules)
"""


def test_answers_that_need_no_torch():
    """A list of passes, one of them, and mistakes in strategies, lengths, MODEL, files to read and write."""
    words = (
        "passes",
        "passes casts",
        "check llama -s xp2",
        "dump lama -s tp2",
        "memory llama -s tp2 --json nowhere/a.json",
        "check llama -s tp2 --tokens 1",
        "check no.py -s tp2",
        "check no.py: -s tp2",
        "switch llama --from tp2 --to t2",
        "order llama -s dp2,",
        "plan llama --world 2 --lengths nothing.txt --tokens-per-step 9",
        "plan llama --cluster nothing.toml --lengths github:9 --tokens-per-step 9",
        "train nothing.toml",
        "train --demo --set run.stepz=3",
        "train --demo --plan nothing.toml",
    )
    result = run(code=WITHOUT_TORCH.format(words=words))
    assert result.stdout.endswith("False\n"), result.stdout + result.stderr
    assert result.stdout.count("status 1") == len(words) - 2
    for said in (
        "unknown axis 'xp'",
        "did you mean 'llama'",
        "no folder 'nowhere'",
        "lengths 'nothing.txt'",
        "cluster 'nothing.toml'",
        "--tokens '1'",
        "no function",
        "'nothing.toml'",
        "did you mean 'steps'",
    ):
        assert said in result.stderr


def test_a_start_imports_no_arrays():
    """scipy alone takes 0.3 CPU seconds; commands that solve something import it."""
    code = "import sys\nimport fxpar.cli.app\nprint(sorted({'numpy', 'scipy', 'torch'} & set(sys.modules)))\n"
    assert run(code=code).stdout == "[]\n"


def test_answers_from_the_cache_do_without_the_compiler():
    """What commands on a graph import: torch._dynamo alone takes a second, and only captures need it."""
    code = (
        "import sys\n"
        "import fxpar.cli.dump, fxpar.cli.explain, fxpar.cli.diff, fxpar.cli.order, fxpar.cli.switch\n"
        "import fxpar.cli.viz\n"
        "late = {'torch._dynamo', 'torch._inductor', 'transformers', 'networkx', 'fxpar.viz.viewed', 'fxpar.memory'}\n"
        "print(sorted(late & set(sys.modules)))\n"
    )
    assert run(code=code).stdout == "[]\n"


def test_commands_that_look_at_layouts_do_without_dtensors():
    code = (
        "import sys\nimport fxpar.cli.viz, fxpar.cli.memory, fxpar.cli.order\n"
        "print(sorted({'torch.distributed.tensor', 'torch._dynamo'} & set(sys.modules)))\n"
    )
    assert run(code=code).stdout == "[]\n"


def test_lists_for_who_has_no_torch_are_those_of_the_modules():
    assert list(EXAMPLES) == list(EXAMPLE_NAMES)


@pytest.mark.parametrize("name", ["--strategy", "-s", "--strategies"])
def test_one_set_of_names(name):
    """All commands take the same ones, as often as one likes; those for one strategy say that there are several."""
    status, _, err = fxpar("order", "mlp", name, "dp2", name, "tp4")
    assert (status, "'tp4' has 4" in err) == (1, True), err
    for command in ("dump", "explain"):
        status, _, err = fxpar(command, "mlp", name, "dp2", name, "tp2")
        assert status == 2
        assert "dp2, tp2" in " ".join(err.split())


def test_strategies_of_repeated_lists():
    assert split_strategies(("dp2,tp2", "cp2")) == ["dp2", "tp2", "cp2"]
    assert one_strategy(()) is None


def test_a_file_without_a_function_names_one(tmp_path):
    file = tmp_path / "m.py"
    file.write_text("def _no(): ...\ndef needs(x): ...\ndef make(width: int = 3): ...\n")
    status, _, err = fxpar("check", file, "-s", "tp2")
    assert (status, err.strip().endswith(f"Write {file}:make")) == (1, True)
    file.write_text("def broken(")
    assert "m.py:FUNCTION" in fxpar("check", file, "-s", "tp2")[2]


def test_words_without_a_model():
    assert check_early(object()) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("check", "mlp", "-s", "dp2", "--tolerance", "inf"), "it must be a finite number >= 0"),
        (("dump", "mlp", "-s", "pp2", "--schedule", "--micro-batches", "1000000"), "4096"),
        (("memory", "mlp"), "name a strategy"),
        (("check", "mlp"), "name the strategies"),
        (("order", "mlp"), "name the strategies"),
    ],
)
def test_usage(words, said):
    status, _, err = fxpar(*words)
    assert (status, said in " ".join(err.split())) == (2, True), err


def test_what_the_shell_offers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llm.py").touch()
    (tmp_path / "notes.txt").touch()
    assert models("ll") == ["llama", "llm.py"]
    assert models("hf:q") == ["hf:qwen3"]
    assert models("n[") == []
    assert models(f"{tmp_path}/l") == [f"{tmp_path}/llm.py"]
    assert strategies("dp2.t") == ["dp2.tp2"]
    assert strategies("dp2,tp2+s") == ["dp2,tp2+sp"]
    assert passes("cas") == ["casts"]


def test_the_shell_is_told_by_the_program():
    """Bash's words, as its script hands them over: it cuts them at colons, and replaces what is behind the last one."""
    for words, offered in (("fxpar dump llama --strategy cp", ["cp2"]), ("fxpar dump hf : q", ["qwen3"])):
        bash = {"COMP_WORDS": words.replace(" ", "\n"), "COMP_CWORD": "4"}
        assert run(**bash, _FXPAR_COMPLETE="complete_bash").stdout.split() == offered


@pytest.mark.parametrize(
    ("cut", "at", "whole", "kept"),
    [
        ("fxpar dump hf :", 3, "fxpar dump hf:", "hf:"),
        ("fxpar dump m.py : make -s tp", 6, "fxpar dump m.py:make -s tp", ""),
        ("fxpar simulate llama -s dp4 : 5", 6, "fxpar simulate llama -s dp4:5", "dp4:"),
        ("fxpar dump hf:q", 2, "fxpar dump hf:q", ""),  # where COMP_WORDBREAKS has no colon
        ("fxpar dump llama ", 3, "fxpar dump llama ", ""),
    ],
)
def test_words_that_bash_cuts(cut, at, whole, kept):
    bash = {"COMP_WORDS": cut.replace(" ", "\n"), "COMP_CWORD": str(at)}
    assert join_words(bash) == kept
    assert bash == {"COMP_WORDS": whole.replace(" ", "\n"), "COMP_CWORD": str(whole.count(" "))}


def test_ranks_that_a_machine_cannot_mean(tmp_path):
    status, _, err = fxpar("profile", "--ranks", "100000", "-o", tmp_path / "c.json")
    assert (status, "100,000 ranks" in err) == (1, True)


def test_without_a_cluster_times_are_of_usual_gpus():
    status, out, err = fxpar("switch", "mlp", "--from", "dp2", "--to", "tp2")
    assert status == 0, err
    assert "predicted" in out
