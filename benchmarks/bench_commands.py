"""CPU seconds of the commands that look at a model: the first time, and when the cache has its graphs.

    OMP_NUM_THREADS=1 python benchmarks/bench_commands.py [--model hf:llama@8b] [--tiny] [--json OUT]

Each command is a process of its own, torch's import included where it needs torch. Runs in a cache folder of its own,
so the first column is without any cache.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

COLD_TARGET_S = 30.0
ABOVE_TORCH_TARGET_S = 0.6  # from the cache, beside the import of torch
QUICK_TARGET_S = 0.3  # of commands that need no torch
QUICK = ("--version", "--help", "passes", "passes casts", "dump --help")
CLUSTER = {"nodes": 4, "devices_per_node": 8, "intra_gb_per_s": 300, "inter_gb_per_s": 25, "latency_us": 10}
COMMANDS = {
    "dump": "dump {model} -s dp4.tp8+sp --brief",
    "diff": "diff {model} -s dp4.tp8 -s dp4.tp8+sp --brief",
    "explain": "explain {model} -s dp4.tp8+sp {parameter}",
    "switch": "switch {model} --from dp4.tp8 --to pp4.tp8 --cluster {cluster}",
    "memory": "memory {model} -s dp4.tp8+sp --tokens 8192",
    "viz": "viz {model} -s dp4.tp8+sp -o {folder}/out.html",
}


def cpu_s(words: list[str], environment: dict[str, str]) -> float:
    """User and system seconds of one command and its children. Raises CalledProcessError."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run_tiny(folder: str, cluster: Path) -> dict[str, str]:
    """Every command once, by name, on a small model, in a fork of this process: what torch imports is imported once."""
    from fxpar.cli.app import app

    def command(words: list[str]) -> None:
        os.environ["XDG_CACHE_HOME"] = folder
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
            app(words)

    done = {}
    for name, text in COMMANDS.items():
        model = "llama --set layers=4" if "pp4" in text else "llama"
        words = text.format(
            model=model, parameter="layers.1.ffn.up_proj.weight", cluster=cluster, folder=folder
        ).split()
        process = multiprocessing.get_context("fork").Process(target=command, args=(words,))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"fxpar {words} has failed")
        print(f"{name:8} runs")
        done[name] = shlex.join(words)
    return done


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="hf:llama@8b")
    parser.add_argument("--parameter", default="model.layers.3.self_attn.q_proj.weight", help="that is explained")
    parser.add_argument("--tiny", action="store_true", help="a small model, each command once, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder, "cluster.json")
        cluster.write_text(json.dumps(CLUSTER))
        if args.tiny:
            done = run_tiny(folder, cluster)
            if args.json:
                args.json.write_text(json.dumps(done))
            return
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": folder}
        import_s = min(cpu_s([sys.executable, "-c", "import torch"], environment) for _ in range(2))
        print(f"import torch {import_s:.1f} CPU s")
        quick = {text: cpu_s([sys.executable, "-m", "fxpar", *text.split()], environment) for text in QUICK}
        for text, spent in quick.items():
            print(f"fxpar {text:13} {spent:.2f} CPU s (target <= {QUICK_TARGET_S})")
        for name, text in COMMANDS.items():
            words = text.format(model=args.model, parameter=args.parameter, cluster=cluster, folder=folder).split()
            alone = {**environment, "XDG_CACHE_HOME": f"{folder}/{name}"}
            command = [sys.executable, "-m", "fxpar", *words]
            rows[name] = (cpu_s(command, alone), min(cpu_s(command, alone) for _ in range(2)))
            cold, cached = rows[name]
            print(f"{name:8} {cold:5.1f} CPU s the first time (target <= {COLD_TARGET_S:.0f}), ", end="")
            print(f"{cached:4.1f} from the cache, {cached - import_s:.2f} above the import of torch ", end="")
            print(f"(target <= {ABOVE_TORCH_TARGET_S})", flush=True)
    if args.json:
        args.json.write_text(
            json.dumps({"model": args.model, "import_torch_s": import_s, "quick": quick, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
