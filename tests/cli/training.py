"""What runs of `fxpar train` are started with: a configuration, a corpus, and the command in a process of its own."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("weights", "go", "from", "one", "layout", "to", "another", "while", "a", "model", "trains", "on", "text")
CONFIG = """
[model]
name = "llama"
options = { layers = 1, dim = 32, heads = 4, kv_heads = 2, ffn = 48 }
[data]
source = "corpus"
vocab = 300
batch_sequences = 8
cache = "cache"
[strategies]
32 = "dp2"
128 = "tp2+sp"
[optimizer]
lr = 1e-2
[schedule]
kind = "constant"
[engine]
merge = false
[checkpoint]
every = 3
keep = 9
[run]
steps = 6
timeout_s = 100
folder = "out"
"""
# A model that is captured ten times as fast, for runs of which it says nothing.
BIGRAMS = ("model.name=bigrams.py:make", "model.options={}")
BIGRAMS_PY = """
import torch
from fxpar import losses
def make():
    ids = torch.zeros(1, 9, dtype=torch.int64)
    return torch.nn.Embedding(300, 300), losses.causal_lm, {"input_ids": ids, "labels": ids}
"""


def write_corpus(folder: Path) -> None:
    folder.mkdir()
    draw = random.Random(0)
    for i in range(60):
        text = " ".join(draw.choice(WORDS) for _ in range(draw.choice([5, 8, 12, 20, 40, 70])))
        (folder / f"{i:03d}.txt").write_text(text)


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "fxpar", "train", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise
    return process.returncode, out, err
