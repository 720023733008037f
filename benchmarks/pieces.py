"""Measurements one after the other, each in a process of its own with a time limit.

What a piece found is kept in a folder, one JSON file each, and it is not run again unless its command or the commit has
changed, or it has failed or was cut off. At the end all results stand as markdown in results.md there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CUT_OFF, NO_TIME = 124, 3
_WARNING = re.compile(r"Warning|^\[rank\d+\]:W\d")
Found = dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """`python` with these words. One that `measures` takes --tiny and --json, and may take the words of a run."""

    name: str
    title: str
    words: str
    limit_s: int = 540
    measures: bool = True


def _shortened(text: str, most: int = 6000) -> str:
    """Whole lines: the first ones, where the head of a table stands, and the last."""
    if len(text) <= most:
        return text
    head, tail = text[: most // 3].rpartition("\n")[0], text[len(text) - most * 2 // 3 :].partition("\n")[2]
    return f"{head}\n[{text[len(head) : len(text) - len(tail)].count(chr(10)) - 1} lines left out]\n{tail}"


def run_pieces(pieces: Sequence[Piece], args: argparse.Namespace, words: Sequence[str] = ()) -> int:
    """Run what is to be run, print and keep it. 0: all is done, 1: a piece has failed, 3: `--total-s` has run out.

    `args` are those of `add_options`, `words` are added to each command that measures.
    """
    args.folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + args.total_s
    found: dict[str, Found] = {}
    left = []
    for piece in pieces:
        if args.only and piece.name not in args.only:
            continue
        command = [*shlex.split(piece.words), *([*words, *["--tiny"] * args.tiny] if piece.measures else [])]
        path = args.folder / f"{piece.name}.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        limit_s = min(piece.limit_s, ends - time.monotonic())
        if not args.again and _is_done(before, command):
            print(f"{piece.name}: done before", flush=True)
            found[piece.name] = before
        elif limit_s < 1:
            left.append(piece.name)
        else:
            print(f"{piece.name}: ", end="", flush=True)
            found[piece.name] = one = _run(piece, command, args.folder, limit_s)
            path.write_text(json.dumps(one, indent=1))
            print(f"{'failed' if one['code'] else 'done'} in {one['s']:.0f} s")
    report = "\n".join(line for piece in pieces if piece.name in found for line in _section(piece, found[piece.name]))
    (args.folder / "results.md").write_text(report)
    print(f"\n{report}")
    if left:
        print(f"no time left for {', '.join(left)}; the same command goes on from there")
        return NO_TIME
    return int(any(one["code"] for one in found.values()))


def add_options(parser: argparse.ArgumentParser, pieces: Sequence[Piece], folder: str) -> None:
    """What all runs of pieces take."""
    parser.add_argument("--only", nargs="*", choices=[piece.name for piece in pieces], help="these pieces")
    parser.add_argument("--again", action="store_true", help="also what is done")
    parser.add_argument("--total-s", type=float, default=float("inf"), help="stop after so many seconds")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / folder)
    parser.add_argument("--tiny", action="store_true", help="everything small and once, to see that it runs")


def _run(piece: Piece, command: list[str], folder: Path, limit_s: float) -> Found:
    """One piece: its exit code, seconds, the end of its output, and what it has written as JSON."""
    measured = folder / f"{piece.name}.measured"
    measured.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    load, begun = os.getloadavg()[0], time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *command, *(["--json", str(measured)] if piece.measures else [])],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            timeout=limit_s,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, output = CUT_OFF, error.stdout or b""
    text = "\n".join(line for line in output.decode(errors="replace").splitlines() if not _WARNING.search(line))
    found: Found = {
        "command": command,
        "commit": _commit(),
        "code": code,
        "s": time.perf_counter() - begun,
        "load": [load, os.getloadavg()[0]],
        "output": _shortened(text),
        "measured": json.loads(measured.read_text()) if measured.exists() else None,
    }
    measured.unlink(missing_ok=True)
    return found


def _is_done(before: Found, command: list[str]) -> bool:
    return bool(before) and not before["code"] and before["command"] == command and before["commit"] == _commit()


def _commit() -> str:
    """Of the checkout; empty where there is none."""
    words = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _section(piece: Piece, one: Found) -> list[str]:
    """Markdown: the command, and the rows that a piece measured as a table, or what it printed."""
    lines = [f"## {piece.title}", "", f"    python {shlex.join(one['command'])}", ""]
    if one["code"]:
        lines += ["Cut off." if one["code"] == CUT_OFF else f"Failed with exit code {one['code']}.", ""]
    measured = one["measured"] if isinstance(one["measured"], dict) else {}
    rows = measured.get("table")
    if rows:
        lines += [f"| {' | '.join(rows[0])} |", "|" + "---|" * len(rows[0])]
        lines += ["| " + " | ".join(map(_cell, row.values())) + " |" for row in rows]
    else:
        lines += ["```text", one["output"].strip(), "```"]
    ran = measured.get("place", {"python": platform.python_version()})
    facts = [*(f"{key} {value}" for key, value in ran.items()), f"commit {one['commit'] or 'unknown'}"]
    load = " to ".join(f"{value:.1f}" for value in one["load"])
    return [*lines, "", f"{', '.join(facts)}; {one['s']:.0f} s, load average {load}.", ""]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
