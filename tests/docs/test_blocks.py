"""The finder of blocks, the checks of commands and the comparison of outputs can fail."""

import pytest

from fxpar.errors import FxparError
from tests.docs.blocks import find_blocks
from tests.docs.shell import CommandError, check_command, commands, torchrun
from tests.test_docs import HANDLERS, shows

pytestmark = pytest.mark.docs

PAGE = """# A page

```python title="a.py"
x = 1
```

<!-- test: ranks=4 -->
```python
y = 2
```

    python benchmarks/bench_step.py --steps 6
    make bench

```
fxpar dump llama
```

```
what is this
```

- in a list:
  ```output
  1
  ```
"""


def test_blocks_are_found(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    blocks = find_blocks(tmp_path / "page.md", "page.md")
    found = [(b.language, b.text, b.title, b.ranks) for b in blocks]
    assert found == [
        ("python", "x = 1", "a.py", 0),
        ("python", "y = 2", "", 4),
        ("sh", "python benchmarks/bench_step.py --steps 6", "", 0),
        ("sh", "make bench", "", 0),
        ("sh", "fxpar dump llama", "", 0),
        ("", "what is this", "", 0),
        ("output", "1", "", 0),
    ]
    assert blocks[0].where == "page.md:4"
    assert "" not in HANDLERS  # a block of no language is an error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nx = 1\n", "does not end"),
        ("<!-- test: skip=slow -->\n```sh\nmake\n```\n", "none of"),
        ("<!-- test: rank=4 -->\n```sh\nmake\n```\n", "none of"),
    ],
)
def test_bad_pages(tmp_path, text, message):
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(ValueError, match=message):
        find_blocks(tmp_path / "page.md", "page.md")


def test_commands():
    text = "$ OMP_NUM_THREADS=1 python a.py \\\n   --x 1  # why\nexport A=1\nfirst=$(scontrol a | head -n 1)\n"
    text += "cd a && make b; make c"
    assert list(commands(text)) == [["python", "a.py", "--x", "1"], ["cd", "a"], ["make", "b"], ["make", "c"]]
    assert list(commands("fxpar check m -s 'pp2+cut(a|b)' ... ")) == [["fxpar", "check", "m", "-s", "pp2+cut(a|b)"]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("make nothing", "no target 'nothing'"),
        ("make bench NOTHING=1", "no variable 'NOTHING'"),
        ("pip install fxpar[nothing]", "no extra 'nothing'"),
        ("pip install torch", "not this package"),
        ("python benchmarks/bench_nothing.py", "no file"),
        ("python benchmarks/bench_step.py --nothing 1", "no option '--nothing'"),
        ("python -m pytest tests/test_docs.py -k nothing_there", "no test"),
        ("python -m nothing_there", "no module"),
        ("torchrun --nproc-per-nod 4 train.py", "there is no file|torchrun"),
        ("torchrun --nproc-per-node 4 train.py", "there is no file"),
        ("torchrun --nproc-per-node 2 -m torchtitan.train --module fxpar.recipes.llama3 --config nothing", "no config"),
        ("torchrun --nproc-per-node 2 -m fxpar train --nothing", "no option '--nothing'"),
        ("fxpar nothing", "no command"),
        ("fxpar dump llama --nothing", "no option"),
        ("fxpar dump llama -s dp2.zero1", "strategy"),
        ("sbatch train.sbatch", "no file"),
        ("nothing here", "unknown program"),
    ],
)
def test_bad_commands(tmp_path, line, message):
    (words,) = commands(line)
    with pytest.raises((CommandError, FxparError), match=message):
        check_command(words, tmp_path)


def test_good_commands(tmp_path):
    (tmp_path / "train.py").touch()
    for line in (
        "make docs",
        "pip install -e '.[hf,train]'",
        "python benchmarks/bench_step.py --steps 6",
        "torchrun --nproc-per-node 4 train.py",
        "torchrun --nproc-per-node 2 -m torchtitan.train --module fxpar.recipes.llama3 --config debug_stock",
        "fxpar check llama -s dp2 --json -",
        ". .venv/bin/activate",
    ):
        (words,) = commands(line)
        check_command(words, tmp_path)
    assert torchrun(["--nproc-per-node", "4", "train.py"]) == (4, "train.py", False, [])
    assert torchrun(["--nnodes", "2", "--nproc-per-node", "4", "train.py"])[0] == 0


def test_output_is_compared():
    got = "a  1\n\nb 2.345\nc\nd\n"
    for wanted in ("a 1\nb 2.345\nc\nd", "...\nd", "a 1\n...", "a 1\nb ...\n...\nd", "a 1\n...\nb 2.345\nc\nd"):
        assert shows(wanted, got), wanted
    for wanted in ("a 1\nd", "a 1\n...\ne", "b ...\nc\nd", "", "a 1"):
        assert not shows(wanted, got), wanted
