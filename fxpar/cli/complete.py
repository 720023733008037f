"""What the shell offers behind TAB: models, strategies, passes. Nothing here imports torch."""

from __future__ import annotations

from pathlib import Path

from fxpar.cli.names import EXAMPLE_NAMES, SUFFIX
from fxpar.ir.axes import AXES
from fxpar.ir.pass_names import LADDER, PASSES
from fxpar.ir.strategy_text import FLAGS

_HF = ("llama", "qwen3", "gpt2", "mistral", "gemma2", "phi3")  # the ones that people try first


def models(incomplete: str) -> list[str]:
    """Built-in examples, some of transformers, and graph and Python files that begin so."""
    names = [*EXAMPLE_NAMES, *(f"hf:{name}" for name in _HF)]
    files = sorted(str(path) for path in Path(".").glob(f"{_plain(incomplete)}*") if path.suffix in (SUFFIX, ".py"))
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


def _plain(text: str) -> str:
    """As a glob that stands for itself."""
    return "".join(f"[{sign}]" if sign in "*?[" else sign for sign in text)
