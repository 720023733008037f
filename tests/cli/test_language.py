"""Help and messages are in plain English: phrases that were translated word by word do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fxpar
from fxpar.cli.app import COMMANDS, app
from tests.cli.helpers import fxpar as fxpar_command

ERRORS = Path(fxpar.__file__).parent / "errors"
ROOMS = [ERRORS.parent, *(ERRORS.parents[1] / name for name in ("passes", "recipes"))]
SAYS = ("warn", "append", "BadParameter")
TRANSLATED = re.compile(
    r"\bsay (why|which)\b|\blies? (as|so|otherwise)\b|as it does|(?<!there )\bis no [a-z]|\banew\b|what else would"
    r"|belongs into|\bplays\b|of which the|as a further|if another\b",
    re.IGNORECASE,
)


def strings(tree: ast.AST) -> Iterator[str]:
    """The texts of messages in code: every string that is not a docstring, parts of f-strings joined."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


@pytest.mark.parametrize("path", sorted(ERRORS.glob("*.py")), ids=lambda path: path.stem)
def test_messages(path):
    assert [text for text in strings(ast.parse(path.read_text())) if TRANSLATED.search(text)] == []


def test_messages_that_are_written_where_they_are_raised():
    """Also warnings, and lists of what is wrong."""
    found = {}
    for path in (path for room in ROOMS for path in sorted(room.rglob("*.py"))):
        if TRANSLATED.search(path.read_text()):  # else it need not be parsed
            tree = ast.parse(path.read_text())
            said = [node for node in ast.walk(tree) if isinstance(node, ast.Raise) or _called(node) in SAYS]
            bad = {text for node in said for text in strings(node) if TRANSLATED.search(text)}
            found |= {str(path): bad} if bad else {}
    assert found == {}


def _called(node: ast.AST) -> str:
    """The name of the function in a call."""
    function = node.func if isinstance(node, ast.Call) else None
    return str(getattr(function, "attr", getattr(function, "id", "")))


def test_help():
    """All commands in one process: each start takes half a second."""
    for words in ([], *([name] for name, *_ in COMMANDS)):
        text = CliRunner().invoke(app, [*words, "--help"], terminal_width=120).output
        assert (words, TRANSLATED.search(" ".join(text.split()))) == (words, None)


LONG = "m" * 10_000


@pytest.mark.parametrize(
    "words",
    [
        ("dump", LONG, "-s", "tp2"),
        ("dump", f"hf:{LONG}", "-s", "tp2"),
        ("dump", f"{LONG}.py:make", "-s", "tp2"),
        ("dump", "llama", "-s", LONG),
        ("dump", "llama", "-s", "tp2", "--tokens", LONG),
        ("dump", "mlp", "-s", "tp2", "--set", f"{LONG}=3"),
        ("memory", "llama", "-s", "tp2", "--cluster", LONG),
        ("train", LONG),
        ("train", "--demo", "--set", f"run.{LONG}=3"),
        ("export", LONG, "folder"),
    ],
    ids=lambda words: " ".join(words).replace(LONG, "X"),
)
def test_a_long_name_is_not_printed_whole(words):
    """It would hide what is said of it."""
    status, _, err = fxpar_command(*words)
    assert status == 1
    assert err.startswith("error: ")
    assert "characters left out" in err
    assert "--debug" not in err
    assert len(err) < 900
