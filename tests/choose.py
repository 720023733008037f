"""Choose which tests run by day, and write the names of the others to tests/nightly.txt.

    python -m tests.choose [--keep FOLDER] [--measured FOLDER] [--more]

It runs what `make test` would if tests/nightly.txt were empty: half an hour on two idle cores. Then the dearest tests
become nightly one by one, as long as each block of the library (tests/blocks.py) that one runs is still run by day by
two tests, and by one of the same room. The last case of a test stays by day where it is cheap, or where what it looks
at is no block (`LOOK_ELSEWHERE`). `--more` runs what `make test` does, and adds to the names. Both sums of CPU seconds
and both numbers of blocks are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.blocks import RESULTS, ROOT, first_blocks
from tests.nightly import MEASURED

OF_ANY_ROOM, OF_ITS_ROOM = 2, 1  # tests by day that still run a block
CHEAP_CASE, CHEAP_TEST = 0.15, 0.7  # CPU seconds: nothing is won below
# They look at sources, at what is imported, or at processes.
LOOK_ELSEWHERE = (
    "cli/test_early.py",
    "cli/test_main.py",
    "ir/test_node_meta.py",
    "ir/test_strategy.py",
    "test_layers.py",
)
# Each case is a model, a value or a file of its own that was once wrong: the same blocks, another question.
EACH_CASE_ASKS = (
    "flow/",
    "graph_files/",
    "checkpoint/",
    "search/test_stages.py",
    "tracer/test_repeats.py",
    "tracer/test_state.py",
    "runtime/test_plain.py",
    "runtime/test_arrivals.py",
    "runtime/test_session.py",
    "switch/test_node_first.py",
    "ops/test_registration.py",
    "cli/test_train.py",
    "cli/test_language.py",
)
OTHER_TARGETS = "not (benchmarks or browser or packaging or docs or titan or compiler)"


@dataclass(frozen=True)
class Measured:
    """What a test took, children included, and the blocks that it ran."""

    cpu_s: float
    blocks: frozenset[int]


def measure(folder: Path, more: bool = False) -> None:
    """Run what would be by day, or with `more` what is, with what tests run and take written to `folder`."""
    firsts, _ = first_blocks()
    (folder / "first_blocks.json").write_text(json.dumps(firsts))
    (folder / "sitecustomize.py").write_text("import tests.blocks\n\ntests.blocks.install()\n")
    path = os.pathsep.join(filter(None, (str(folder), str(ROOT), os.environ.get("PYTHONPATH"))))
    ignored = [f"--ignore=tests/{one}" for one in ("docs", "recipes", "titan")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.blocks", "-n", "2", "--dist", "loadfile"]
    command += [] if more else ["--anew"]
    command += ["-m", f"not nightly and {OTHER_TARGETS}", *ignored]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path, RESULTS: str(folder)}, check=False)


def read(folder: Path) -> dict[str, Measured]:
    """By test."""
    rows = (json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines())
    return {row["test"].removeprefix("tests/"): Measured(row["cpu_s"], frozenset(row["blocks"])) for row in rows}


def chosen(tests: Mapping[str, Measured]) -> list[str]:
    """Those that may be nightly, the dearest first."""
    anywhere, rooms, cases = Counter(), defaultdict(Counter), Counter(map(_test, tests))
    for name, one in tests.items():
        anywhere.update(one.blocks)
        rooms[_room(name)].update(one.blocks)
    found = []
    for name in sorted((n for n in tests if tests[n].cpu_s >= CHEAP_CASE), key=lambda n: -tests[n].cpu_s):
        blocks, room = tests[name].blocks, rooms[_room(name)]
        if name.startswith(EACH_CASE_ASKS):
            continue
        last = cases[_test(name)] == 1
        if last and (tests[name].cpu_s < CHEAP_TEST or name.startswith(LOOK_ELSEWHERE)):
            continue
        if all(anywhere[b] > OF_ANY_ROOM and room[b] > OF_ITS_ROOM for b in blocks):
            found.append(name)
            cases[_test(name)] -= 1
            anywhere.subtract(blocks)
            room.subtract(blocks)
    return found


def _test(name: str) -> str:
    return name.partition("[")[0]


def _room(name: str) -> str:
    return name.partition("/")[0]


def as_lines(nightly: Iterable[str], tests: Iterable[str]) -> list[str]:
    """A name for each test of which no case is left by day, else one for each case."""
    nightly = set(nightly)
    by_day = {_test(name) for name in tests if name not in nightly}
    return sorted({name if _test(name) in by_day else _test(name) for name in nightly})


def merged(known: Iterable[str], lines: Iterable[str]) -> list[str]:
    """All names, without cases of a test that is named itself."""
    every = {*known, *lines}
    return sorted(name for name in every if _test(name) == name or _test(name) not in every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="where to leave what was measured; a new folder")
    parser.add_argument("--measured", type=Path, help="do not measure: take what --keep left")
    parser.add_argument("--more", action="store_true", help="leave what is nightly where it is")
    args = parser.parse_args()
    folder = args.measured or args.keep or Path(tempfile.mkdtemp())
    if not args.measured:
        folder.mkdir(exist_ok=True)
        measure(folder, args.more)
    tests = read(folder)
    nightly = chosen(tests)
    known = MEASURED.read_text().splitlines() if args.more else []
    MEASURED.write_text("\n".join(merged(known, as_lines(nightly, tests))) + "\n")
    kept = {name: one for name, one in tests.items() if name not in set(nightly)}
    for words, some in (("all", tests), ("by day", kept)):
        blocks = len(frozenset().union(*(one.blocks for one in some.values())))
        print(f"{words}: {len(some)} tests, {sum(one.cpu_s for one in some.values()):.0f} CPU s, {blocks} blocks")


if __name__ == "__main__":
    main()
