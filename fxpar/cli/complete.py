"""What the shell offers behind TAB: models, strategies, passes. Nothing here imports torch."""

from __future__ import annotations

import glob
import io
import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, redirect_stdout

from fxpar.cli.names import EXAMPLE_NAMES, SUFFIX
from fxpar.ir.axes import AXES
from fxpar.ir.pass_names import LADDER, PASSES
from fxpar.ir.strategy_text import FLAGS

_HF = ("llama", "qwen3", "gpt2", "mistral", "gemma2", "phi3")  # the ones that people try first


def models(incomplete: str) -> list[str]:
    """Built-in examples, some of transformers, and graph and Python files that begin so."""
    names = [*EXAMPLE_NAMES, *(f"hf:{name}" for name in _HF)]
    found = glob.glob(f"{glob.escape(incomplete)}*")
    files = sorted(path for path in found if path.endswith((SUFFIX, ".py")))
    return [name for name in [*names, *files] if name.startswith(incomplete)]


def strategies(incomplete: str) -> list[str]:
    """The last axis or flag of the last strategy: `dp2.t` to `dp2.tp2`, `tp2+s` to `tp2+sp`."""
    cut = max(incomplete.rfind(sign) for sign in ".+,") + 1
    head, word = incomplete[:cut], incomplete[cut:]
    words = FLAGS if head.endswith("+") else [f"{axis}2" for axis in AXES]
    return [head + each for each in words if each.startswith(word)]


def passes(incomplete: str) -> list[str]:
    """Names of passes, those of the lowering in their order first."""
    others = [name for name in PASSES.available() if name not in LADDER]
    return [name for name in [*LADDER, *others] if name.startswith(incomplete)]


@contextmanager
def words_of_bash() -> Iterator[None]:
    """While a program answers bash: words are whole that bash cuts at colons, as `hf:llama`, and of the answers bash
    gets what is behind the last colon of the word, which is all that it replaces.
    """
    kept, said = join_words(os.environ), io.StringIO()
    try:
        with redirect_stdout(said):
            yield
    finally:
        sys.stdout.writelines(line.removeprefix(kept) for line in said.getvalue().splitlines(keepends=True))


def join_words(environ: MutableMapping[str, str]) -> str:
    """Join the words that bash hands over where it has cut them; what of the last one bash keeps as it is."""
    text, at = environ.get("COMP_WORDS", ""), int(environ.get("COMP_CWORD", 0))
    cut = text.split("\n" if "\n" in text else " ")
    joined: list[str] = []
    kept = ""
    for number, word in enumerate(cut[: at + 1]):
        whole = not joined or not word or not (word.startswith(":") or joined[-1].endswith(":"))
        joined[len(joined) - (not whole) :] = [word if whole else joined[-1] + word]
        if number == at and not whole:
            kept = joined[-1][: joined[-1].rfind(":") + 1]
    environ.update({"COMP_WORDS": "\n".join(joined), "COMP_CWORD": str(len(joined) - 1)})
    return kept
