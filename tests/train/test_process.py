"""How processes of fxpar's own end: in one without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENDS = """
import atexit, os, sys
from fxpar.train.process import end_process
class Held:
    def __del__(self): os.write(1, b"freed")
held = Held()
held.itself = held
atexit.register(print, "done at exit")
print("printed")
end_process(3)
"""


def test_an_end_does_what_is_registered_and_frees_nothing():
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # what is printed waits to be written
    words = [sys.executable, "-c", ENDS]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "printed\ndone at exit\n", "")
