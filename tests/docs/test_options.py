"""The pages name every option that the commands have, and no table names another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fxpar.cli.app import COMMANDS, command_named

DOCS = Path(__file__).resolve().parents[2] / "docs"
# Commands whose options are on a page of their own; the others have a section of cli.md.
PAGES = {"train": "train", "diff": "diff", "explain": "explain", "viz": "viz", "profile": "cluster"}
PAGES |= {name: name for name in ("plan", "simulate", "rounds", "tasks")}
SHARED = "Options of several commands"


def options(command: str) -> set[str]:
    """The long names of its options, `--full` of `--fold/--full` included."""
    found: list[Any] = command_named(command).params
    return {name for p in found for name in (*p.opts, *p.secondary_opts) if name.startswith("--")}


def section(title: str) -> str:
    """What stands below a heading of cli.md, to the next one."""
    (text,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", (DOCS / "cli.md").read_text(), re.M | re.S)
    return text


def in_table(text: str) -> set[str]:
    """Options that begin a row of a table."""
    rows = re.findall(r"^\| (`--.*?) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"--[a-z-]+", row)}


def named(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


@pytest.mark.parametrize("command", [name for name, *_ in COMMANDS])
def test_every_option_is_named(command):
    if command in PAGES:
        text = (DOCS / f"{PAGES[command]}.md").read_text()
    else:
        text = section("switch and order" if command in ("switch", "order") else command)
    if command in ("check", "memory"):
        assert in_table(text) <= options(command)
        text = "".join(f"{name}\n" for name in in_table(text))  # the table names them all
    missing = options(command) - named(text) - in_table(section(SHARED))
    assert missing == set(), f"docs do not name {sorted(missing)} of `fxpar {command}`"


def test_shared_options_are_those_of_several_commands():
    for name in in_table(section(SHARED)):
        assert sum(name in options(command) for command, *_ in COMMANDS) > 1, name


def test_what_takes_a_model_takes_its_options():
    for command, *_ in COMMANDS:
        if any(param.name == "model" for param in command_named(command).params):
            assert {"--set", "--dtype", "--no-cache", "--json", "--debug"} <= options(command), command
