"""Command lines of the documentation: `fxpar` runs in this process, of all others is checked what they name.

A command that names a file, a target, an option, a module or an extra that is not there is an error; so is a program
that this module does not know.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.run import get_args_parser

from fxpar.cli.request import parse_strategies
from fxpar.ir.module_rules import split_outside

ROOT = Path(__file__).resolve().parents[2]
_ASSIGNED = re.compile(r"^[A-Za-z_]\w*=")
_SBATCH = {
    "job-name", "nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "output", "partition",
    "exclusive", "account", "signal", "mem",
}  # fmt: skip


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a block as words: continued lines joined, comments, prompts and assignments left out."""
    joined = re.sub(r"\$\([^)]*\)", "VALUE", re.sub(r"\\\n\s*", " ", text))
    for raw in joined.splitlines():
        line = raw.removeprefix("$ ")
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in (";", "&&", "||", "|"):
                while words and (words[0] == "export" or _ASSIGNED.match(words[0])):
                    words.pop(0)
                if words:
                    yield words
                words = []
            elif word != "...":  # stands for further words
                words.append(word)


class CommandError(AssertionError):
    """A command of the documentation that would not work."""


def check_command(words: Sequence[str], folder: Path) -> None:
    """Check what a command names. `folder` is where it is run; names are also looked up in the repository."""
    program, rest = words[0].rpartition("/")[2] or words[0], list(words[1:])
    if program not in CHECKS:
        raise CommandError(f"unknown program {program!r}; add it to CHECKS in {Path(__file__).name}")
    CHECKS[program](rest, folder)


def exists(name: str, folder: Path) -> Path:
    """The path of a file that a command names. Raises CommandError."""
    for place in (folder, ROOT):
        if (place / name).exists():
            return place / name
    raise CommandError(f"there is no file {name!r}")


def _make(words: list[str], _folder: Path) -> None:
    text = (ROOT / "Makefile").read_text()
    targets = {target for line in re.findall(r"^([\w -]+):", text, re.MULTILINE) for target in line.split()}
    variables = set(re.findall(r"^(\w+)\s*[:?]?=", text, re.MULTILINE))
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in (variables if equals else targets):
            raise CommandError(f"the Makefile has no {'variable' if equals else 'target'} {name!r}")


def _pip(words: list[str], folder: Path) -> None:
    if not words or words[0] != "install":
        raise CommandError(f"pip {words[:1]} is not pip install")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words[1:]:
        match = re.fullmatch(r"(?:fxpar|\.)(?:\[([\w,]+)\])?", word)
        if match is None and not word.startswith("-"):
            raise CommandError(f"pip install {word!r} is not this package")
        for extra in (match[1] or "").split(",") if match else ():
            if extra and extra not in project["optional-dependencies"]:
                raise CommandError(f"pyproject.toml has no extra {extra!r}")


def _python(words: list[str], folder: Path) -> None:
    if words[:2] == ["-m", "venv"]:
        return
    if words[:1] == ["-m"]:
        _module(words[1], words[2:], folder)
        return
    script = exists(words[0], folder)
    _options_in(script, words[1:])


def _options_in(script: Path, words: Sequence[str]) -> None:
    text = script.read_text()
    for word in words:
        if word.startswith("--") and f'"{word.partition("=")[0]}"' not in text:
            raise CommandError(f"{script.name} has no option {word!r}")


def _module(name: str, words: list[str], folder: Path) -> None:
    if name == "pytest":
        _pytest(words, folder)
    elif name == "mkdocs":
        exists("mkdocs.yml", folder)
    elif importlib.util.find_spec(name) is None:
        raise CommandError(f"there is no module {name!r}")
    elif name.startswith("torchtitan"):
        _titan(words, folder)
    elif name == "fxpar":
        check_fxpar(words, folder)


def _pytest(words: list[str], folder: Path) -> None:
    paths = [exists(word, folder) for word in words if word.startswith("tests/")]
    if "-k" in words:
        wanted = words[words.index("-k") + 1]
        if not any(wanted in path.read_text() for path in paths):
            raise CommandError(f"no test is called like {wanted!r}")


def _titan(words: list[str], folder: Path) -> None:
    """`--module M --config F`: the module has the function."""
    if "--module" not in words:
        return
    module, config = words[words.index("--module") + 1], words[words.index("--config") + 1]
    local = folder / f"{module.replace('.', '/')}.py"
    spec = None if local.exists() else importlib.util.find_spec(module)
    if not local.exists() and (spec is None or spec.origin is None):
        raise CommandError(f"there is no module {module!r}")
    source = local if local.exists() else Path(str(spec.origin))  # type: ignore[union-attr]
    if not re.search(rf"^(def {config}\b|{config} = )", source.read_text(), re.MULTILINE):
        raise CommandError(f"{module} has no configuration {config!r}")


def torchrun(words: Sequence[str]) -> tuple[int, str, bool, list[str]]:
    """Ranks per node, script or module, whether it is a module, its arguments. Raises CommandError."""
    parser = get_args_parser()
    parser.error = _parse_error  # type: ignore[method-assign]
    args = parser.parse_args([re.sub(r"^\$\{?\w+\}?$|^\$\(.*\)$", "1", word) for word in words])
    ranks = int(args.nproc_per_node) if str(args.nproc_per_node).isdecimal() else 0
    nodes = 1 if args.nnodes == "1:1" else 0
    return ranks * nodes, args.training_script, args.module, args.training_script_args


def _parse_error(message: str) -> None:
    raise CommandError(f"torchrun: {message}")


def _torchrun(words: list[str], folder: Path) -> None:
    _, script, is_module, rest = torchrun(words)
    if is_module:
        _module(script, rest, folder)
    else:
        exists(script, folder)


def _sbatch(words: list[str], folder: Path) -> None:
    script = exists(words[-1], folder).read_text()
    found = re.findall(r"^#SBATCH --([\w-]+)", script, re.MULTILINE)
    if not found or set(found) - _SBATCH:
        raise CommandError(f"{words[-1]} has options that sbatch does not know: {sorted(set(found) - _SBATCH)}")


def _srun(words: list[str], folder: Path) -> None:
    while words and words[0].startswith("-"):
        words = words[1:]
    check_command(words, folder)


def check_fxpar(words: Sequence[str], folder: Path) -> None:
    """The command and its options exist. Raises CommandError."""
    from fxpar.cli.app import command_named

    if not words or words[0].startswith("-"):
        return
    try:
        params: list[Any] = command_named(words[0]).params
    except KeyError:
        raise CommandError(f"there is no command fxpar {words[0]}") from None
    known = {option for p in params for option in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}
    for word in words[1:]:
        option = word.partition("=")[0]
        if re.match(r"--?[a-z]", word) and option not in known:
            raise CommandError(f"fxpar {words[0]} has no option {option!r}")
    for option, value in itertools.pairwise(words):
        if option in STRATEGY_OPTIONS:
            texts = split_outside(value, ",")
            if words[0] == "simulate":  # STRATEGY:LIMIT
                texts = [split_outside(text, ":")[0] for text in texts]
            parse_strategies(texts, (), None)


def _nothing(_words: list[str], _folder: Path) -> None:
    """Nothing to check: a program of the shell."""


STRATEGY_OPTIONS = {"-s", "--strategy", "--strategies", "--from", "--to"}
CHECKS: dict[str, Callable[[list[str], Path], None]] = {
    "fxpar": check_fxpar,
    "make": _make,
    "pip": _pip,
    "python": _python,
    "python3": _python,
    "pytest": _pytest,
    "mkdocs": lambda words, folder: _module("mkdocs", words, folder),
    "torchrun": _torchrun,
    "sbatch": _sbatch,
    "srun": _srun,
    **dict.fromkeys(("cd", "mkdir", ".", "git", "set", "head", "scontrol", "ls"), _nothing),
}
