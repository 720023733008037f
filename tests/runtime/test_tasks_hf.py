"""Models of transformers with several towers as tasks, random weights: what is found is one device's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpar
from fxpar import losses
from fxpar.runtime.forked import run_forked
from tests import warm  # noqa: F401
from tests.repeat import thinned

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
    "projection_dim": 16,
}
WORDS = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
IMAGE = 46  # the id of a patch in a row of tokens


def ids(seed: int, *shape: int) -> Tensor:
    return torch.randint(3, 40, shape, generator=torch.Generator().manual_seed(seed))


def pixels(seed: int, rows: int) -> Tensor:
    return torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def llava() -> nn.Module:
    torch.manual_seed(1)
    words = transformers.LlamaConfig(**WORDS, num_key_value_heads=4)
    vision = transformers.CLIPVisionConfig(**VISION)
    config = transformers.LlavaConfig(vision_config=vision, text_config=words, image_token_index=IMAGE)
    return transformers.LlavaForConditionalGeneration(config).double()


def seen(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Text with an image at its beginning."""
    inner = model.model
    patches = inner.multi_modal_projector(inner.vision_tower(batch["pixels"]).last_hidden_state[:, 1:])
    tokens = inner.get_input_embeddings()(batch["input_ids"])
    count = patches.shape[0] * patches.shape[1]
    placed = F.pad(patches.reshape(1, count, -1), (0, 0, 0, tokens.shape[1] - count))
    x = torch.where((batch["input_ids"] == IMAGE)[..., None], placed, tokens)
    return losses.cross_entropy_sum(model.lm_head(inner.language_model(inputs_embeds=x)[0]), batch["labels"])


def with_image(seed: int, length: int) -> dict[str, Tensor]:
    row = torch.cat([torch.full((1, 4), IMAGE), ids(seed, 1, length)], 1)
    labels = losses.next_token_labels(row)
    labels[:, :4] = -100
    return {"input_ids": row, "labels": labels, "pixels": pixels(seed, 1)}


def read(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Text without an image."""
    return losses.cross_entropy_sum(
        model.lm_head(model.model.language_model(input_ids=batch["input_ids"])[0]), batch["labels"]
    )


def clip() -> nn.Module:
    torch.manual_seed(2)
    words = {**WORDS, "projection_dim": 16, "eos_token_id": 47, "bos_token_id": 1, "pad_token_id": 0}
    config = transformers.CLIPConfig(text_config=words, vision_config=VISION, projection_dim=16)
    return transformers.CLIPModel(config).double()


def pairs(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    scores = model(input_ids=batch["ids"], pixel_values=batch["pixels"]).logits_per_image
    right = torch.arange(scores.shape[0])
    return (F.cross_entropy(scores, right, reduction="sum") + F.cross_entropy(scores.T, right, reduction="sum")) / 2


def pair(seed: int, rows: int) -> dict[str, Tensor]:
    return {"ids": ids(seed, rows, 7), "pixels": pixels(seed, rows)}


def t5() -> nn.Module:
    torch.manual_seed(3)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4}
    config = transformers.T5Config(vocab_size=48, **sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    return transformers.T5ForConditionalGeneration(config).double()


def translate(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    words = model(input_ids=batch["source"], decoder_input_ids=batch["target"]).logits
    return losses.cross_entropy_sum(words, batch["labels"])


def translated(seed: int, source: int, target: int) -> dict[str, Tensor]:
    row = ids(seed, 1, target)
    return {"source": ids(seed + 1, 1, source), "target": row, "labels": losses.next_token_labels(row)}


def as_batch(item: Any) -> Mapping[str, Tensor]:
    if isinstance(item, Tensor):
        return {"input_ids": item[None], "labels": losses.next_token_labels(item[None])}
    return item


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    tasks: Mapping[str, fxpar.Task]
    batches: Mapping[str, Sequence[Any]]

    def compiled(self) -> dict[str, fxpar.Task]:
        model = self.make()
        return {name: replace(task, compiled=fxpar.compile_task(model, task)) for name, task in self.tasks.items()}

    def run(self, given: Mapping[str, fxpar.Task], rank: int) -> tuple[float, dict[str, Tensor | None]]:
        model: Any = fxpar.parallelize(self.make(), tasks=given, merge=False, monitor=False)
        loss = model.train_step(self.batches).loss
        return loss, {n: p.grad if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()}

    def one_device(self) -> tuple[float, dict[str, Tensor | None]]:
        model, total = self.make(), 0.0
        for name, items in self.batches.items():
            rows = [
                {"input_ids": one[None], "labels": losses.next_token_labels(one[None])}
                if isinstance(one, Tensor)
                else one
                for one in items
            ]
            count = sum(int((one["labels"] != -100).sum()) if "labels" in one else len(one["ids"]) for one in rows)
            for one in rows:
                loss = self.tasks[name].loss(model, one) * (self.tasks[name].weight / count)
                loss.backward()
                total += loss.item()
        return total, {name: p.grad for name, p in model.named_parameters()}


TEXT = {"input_ids": ids(0, 1, 11), "labels": ids(0, 1, 11)}
CASES = {
    "a vision-language model, with and without images": Case(
        llava,
        {
            "seen": fxpar.Task(seen, with_image(0, 15), 0.7, {64: "cp2[model.vision_tower: tp2]"}),
            "read": fxpar.Task(read, TEXT, 2.0, {16: "dp2", 64: "tp2+sp"}),
        },
        {"seen": [with_image(1, 8), with_image(2, 20)], "read": [ids(3, 9), ids(4, 30), ids(5, 14)]},
    ),
    "two towers": Case(
        clip,
        {"pairs": fxpar.Task(pairs, pair(0, 5), 1.0, {64: "cp2"}, dynamic={"ids": {0: "B"}, "pixels": {0: "B"}})},
        {"pairs": [pair(1, 4), pair(2, 6)]},
    ),
    "encoder and decoder": Case(
        t5,
        {
            "translate": fxpar.Task(
                translate,
                translated(0, 9, 7),
                1.0,
                {8: "dp2", 64: "tp2"},
                dynamic={"source": {1: "S"}, "target": {1: "T"}, "labels": {1: "T"}},
            )
        },
        {"translate": [translated(1, 12, 5), translated(2, 4, 9), translated(3, 8, 6)]},
    ),
}


@pytest.mark.parametrize("name", thinned(CASES, ["a vision-language model, with and without images"]))
def test_losses_and_gradients_are_those_of_one_device(name):
    case = CASES[name]
    want, gradients = case.one_device()
    for loss, found in run_forked(2, partial(case.run, case.compiled()), timeout_s=500):
        assert loss == pytest.approx(want, rel=1e-12)
        for fqn, gradient in gradients.items():
            assert (gradient is None) == (found[fqn] is None), fqn
            if gradient is not None:
                assert (found[fqn] - gradient).abs().max() <= 1e-10 * gradient.abs().max().clamp_min(1e-3), fqn
