"""CPU seconds and memory of `fxpar plan`: 32B on 32 devices and 70B on 1,024, shapes only.

    python benchmarks/bench_plan.py [--tiny] [--json OUT]

Each case is a process of its own; its CPU seconds are the search's, as printed by `fxpar plan`, and its memory is that
of the whole process. Targets: 15 CPU s for 32B; 60 CPU s and 2 GB for 70B.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

LENGTHS = ("--lengths", "commoncrawl:32768", "--tokens-per-step", "200000", "--memory", "80GB")
CASES = [
    ("32B on 32", ("hf:qwen3@32b", "--world", "32", *LENGTHS)),
    ("70B on 1,024", ("hf:llama@70b", "--world", "1024", "--max-strategies", "4", *LENGTHS)),
]
TINY_CASES = [("tiny", ("llama", "--world", "2", "--lengths", "github:256", "--tokens-per-step", "2048"))]
# The peak of a process' memory is the kernel's to tell, when it has ended.
RUN = """
import resource, subprocess, sys
code = subprocess.run([sys.executable, "-m", "fxpar", "plan", *sys.argv[1:]], stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model on two devices, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    found = []
    for label, words in TINY_CASES if args.tiny else CASES:
        found.append({"case": label, **measured(words)})
        print("{case}: {search_cpu_s:.1f} CPU s, {peak_mb:.0f} MB, {evaluated} strategies".format(**found[-1]))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))


def measured(words: Sequence[str]) -> dict[str, float]:
    """Of one `fxpar plan` with these words. Raises CalledProcessError."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-c", RUN, *words, "--json", str(path)]
        kilobytes = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        plan = json.loads(path.read_text())
    return {
        "search_cpu_s": plan["search_cpu_s"],
        "peak_mb": kilobytes / 1024,
        "evaluated": plan["evaluated"],
        "predicted_s": plan["plans"][0]["predicted_s"],
    }


if __name__ == "__main__":
    main()
