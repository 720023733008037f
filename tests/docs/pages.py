"""What readers have at hand when they copy a block, and the commands that are not run as they stand.

SETUPS: per page a function that fills the namespace of its Python blocks and the folder that its commands run in.
WAYS: commands that would take minutes or start processes, each with the reason.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import fxpar
from fxpar.models import LoadedModel, load
from tests.docs.extras import install

ROOT = Path(__file__).resolve().parents[2]
Namespace = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """How a command that matches is tried: "parsed" looks at its words only (options and strategies); "swapped" runs it
    with its `hf:` model replaced by `model`; "once" does so for the first one of each command and parses the others.
    """

    pattern: str
    how: Literal["parsed", "swapped", "once"]
    reason: str
    model: str = ""


WAYS = (
    Way(r"^train\b", "parsed", "starts a process per rank, seconds each; tests/cli/test_train.py trains"),
    Way(r"^profile\b|--cluster one\.json", "parsed", "measures for half a minute; tests/cli/test_profile.py"),
    Way(r"^check .*-s?\S* \S*(,\S+){7}", "parsed", "many strategies: a figure of the benchmarks"),
    Way(
        r"^plan .*(PROFILES|galvatron_config)",
        "parsed",
        "files of Galvatron's; tests/cli/test_plan_galvatron.py has some",
    ),
    Way(r"^check llama ", "parsed", "tests/checking checks such strategies; the check of README.md is run"),
    Way(r"--compile inductor", "parsed", "compiles for a minute; tests/runtime/test_bound.py runs it"),
    Way(r"hf:\w+@\w+(?=.*\bpp4\b)", "once", "a published size takes 20 CPU s", "llama --set layers=4"),
    Way(r"hf:\w+@\w+", "once", "a published size takes 20 CPU s", "llama"),
    Way(r"^\w+ hf:mixtral", "parsed", "seconds of capture; tests/passes/test_exchange_tokens.py checks experts"),
    Way(r"^check hf:\w+", "swapped", "tests/models/test_huggingface.py checks decoders", "llama"),
)


# Pages whose Python starts with torchrun and that have no comments for tests.
RANKS = {"README.md": 4}


def way_of(command: str) -> Way | None:
    """The first row that matches the words behind `fxpar`; None: it runs as it stands."""
    return next((way for way in WAYS if re.search(way.pattern, command)), None)


# ------------------------------------------------------------------------------------------------ hidden set-ups
class TinyBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class TinyModel(nn.Module):
    """The smallest causal language model with an attention, [B, T] -> [B, T, 64]: what pages call "your model"."""

    def __init__(self, layers: int = 1, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, dim)
        self.layers = nn.ModuleList(TinyBlock(dim) for _ in range(layers))
        self.head = nn.Linear(dim, 64)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def row(length: int = 24) -> dict[str, Tensor]:
    ids = torch.arange(length)[None] % 64
    return {"input_ids": ids, "labels": ids.roll(-1, 1), "position_ids": torch.arange(length)[None]}


def mini_batch(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, (n,), generator=generator) for n in (5, 9, 300, 700)]


def _your_model(names: Namespace, folder: Path) -> None:
    names.update(model=TinyModel(), batch=row(), MyModel=TinyModel, nn=nn, torch=torch, fxpar=fxpar)


@functools.cache
def _llama(layers: int) -> tuple[LoadedModel, fxpar.LogicalGraph]:
    loaded = load("llama", options={"layers": str(layers)})
    return loaded, fxpar.capture(loaded.model, loaded.loss_fn, loaded.example_batch, name="llama")


def _captured(names: Namespace, folder: Path, layers: int = 1) -> None:
    _your_model(names, folder)
    loaded, logical = _llama(layers)
    names.update(logical=logical, params=loaded.params(), buffers=loaded.buffers(), batches=loaded.batches[:1])


def _staged(names: Namespace, folder: Path) -> None:
    """Four layers for four stages; the model that is trained in two stages has two."""
    _captured(names, folder, layers=4)
    names.update(model=TinyModel(layers=2))


def _readme(names: Namespace, folder: Path) -> None:
    _module(
        folder,
        "mine",
        """
        from tests.docs.pages import TinyModel as MyModel, mini_batch
        loader = [mini_batch(seed) for seed in range(2)]
        """,
    )


def _hot(names: Namespace, folder: Path) -> None:
    _your_model(names, folder)
    _module(
        folder,
        "mine",
        """
        from tests.docs.pages import TinyModel as Model, mini_batch
        loader = [mini_batch(seed) for seed in range(2)]
        """,
    )
    ids = torch.arange(24)[None] % 64
    names.update(F=nn.functional, ids=ids, positions=ids, labels=ids)


def _module(folder: Path, name: str, text: str) -> None:
    """A module that a page imports; it lies in the page's folder."""
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    sys.modules.pop(name, None)


def _nothing(names: Namespace, folder: Path) -> None:
    """Pages that bring all that they need."""


def _resume(names: Namespace, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401 - once, not in every forked rank

    _module(folder, "my_model", "from tests.docs.pages import TinyModel as MyModel, mini_batch")


def _fine_tune(names: Namespace, folder: Path) -> None:
    """What the two runs of the page leave: a checkpoint of the model, and one of the model with LoRA."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from fxpar.checkpoint import save_checkpoint
    from fxpar.checkpoint.weights import HF_CONFIG, hf_config

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 320}
    for run in ("tuned", "lora"):
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1, **sizes))
        if run == "lora":
            for layer in (model.model.layers[0].self_attn.q_proj, model.model.layers[0].self_attn.v_proj):
                layer.lora_a, layer.lora_b = nn.Parameter(torch.ones(4, 32)), nn.Parameter(torch.ones(32, 4))
        optimizer = torch.optim.SGD(model.parameters())
        save_checkpoint(folder / run / "checkpoints", 2, model, optimizer, {HF_CONFIG: hf_config(model)})


def _extras(names: Namespace, folder: Path) -> None:
    """The example package, as if it was installed."""
    install(folder)


SETUPS: dict[str, Callable[[Namespace, Path], None]] = {
    "capture.md": _your_model,
    "strategies.md": _captured,
    "pipeline.md": _staged,
    "precision.md": _captured,
    "hot_switching.md": _hot,
    "torchtitan.md": _captured,
    "passes.md": _captured,
    "resume.md": _resume,
    "how-to-add.md": _extras,
    "fine_tune.md": _fine_tune,
    "README.md": _readme,
}


def prepare(page: str, folder: Path) -> Namespace:
    """The namespace of a page; its folder sees the examples and benchmarks of the repository."""
    for name in ("examples", "benchmarks", "tests"):
        os.symlink(ROOT / name, folder / name)
    names: Namespace = {"__name__": "__main__"}
    SETUPS.get(page, _nothing)(names, folder)
    return names
