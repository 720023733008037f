"""The built-in examples: they run, take options, and are what they say."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from fxpar.errors import DtypeError, ModelFunctionError, ModelOptionError, UnknownModelError
from fxpar.models import load
from fxpar.models.builtin import EXAMPLES

SMALLER = {
    "llama": {"heads": "2", "dim": "32"},
    "gpt": {"dropout": "0.0"},
    "vit": {"image": "8"},
    "mlp": {"layers": "3"},
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_loss_and_gradients(name):
    loaded = load(name, dtype="float64", options=SMALLER[name])
    assert loaded.name == name
    losses = [loaded.loss_fn(loaded.model, batch) for batch in loaded.batches]
    assert len({loss.item() for loss in losses}) == 3  # other data in each micro-batch
    (torch.stack(losses).sum() * loaded.scale()).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in loaded.model.parameters())


@pytest.mark.parametrize("name", EXAMPLES)
def test_meta_allocates_nothing(name):
    loaded = load(name, device="meta")
    assert all(t.is_meta for t in (*loaded.model.parameters(), *loaded.model.buffers()))


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_documents_do_not_see_each_other(name):
    loaded = load(name, dtype="float64", options={"dropout": "0"} if name == "gpt" else {})
    batch = loaded.example_batch
    positions = batch["position_ids"][0]
    starts = [*(positions == 0).nonzero()[:, 0].tolist(), len(positions)]
    parts = [{k: v[:, a:b] for k, v in batch.items()} for a, b in pairwise(starts)]
    assert len(parts) > 1
    alone = sum(loaded.loss_fn(loaded.model, part) for part in parts)
    torch.testing.assert_close(alone, loaded.loss_fn(loaded.model, batch), rtol=1e-12, atol=0)


def test_tied():
    assert "head.weight" not in load("gpt").params()
    assert "head.weight" in load("gpt", options={"tied": "false"}).params()
    assert "head.weight" in load("llama").params()
    assert "head.weight" not in load("llama", options={"tied": "true"}).params()


def test_tokens_set_the_lengths():
    loaded = load("llama", tokens=(9, 5))
    assert [b["input_ids"].shape[1] for b in loaded.batches] == [9, 5]
    assert [len(b["labels"]) for b in load("mlp", tokens=(3,)).batches] == [3]


def test_global_random_state_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    load("mlp", seed=7)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    ("spec", "options", "dtype", "error", "words"),
    [
        ("lama", {}, "float32", UnknownModelError, r"did you mean 'llama'\? Built-in models are llama, gpt, vit, mlp;"),
        ("llama", {"layer": "3"}, "float32", ModelOptionError, "did you mean 'layers'"),
        ("llama", {"layers": "x"}, "float32", ModelOptionError, "must be an integer"),
        ("llama", {"layers": "9" * 5000}, "float32", ModelOptionError, "must be an integer"),
        ("llama", {"dim": "99999999999999999999"}, "float32", ModelOptionError, "finite and below 2"),
        (
            "llama",
            {"dim": "1000000000000"},
            "float32",
            ModelOptionError,
            "'dim=1000000000000' must be a number from 1 to",
        ),
        ("llama", {"theta": "1e400"}, "float32", ModelOptionError, "finite and below 2"),
        ("llama", {"heads": "3"}, "float32", ModelOptionError, "'heads=3' does not fit dim=64, .* multiple of 6"),
        ("llama", {"dim": "60", "heads": "4"}, "float32", ModelOptionError, "'heads=4' does not fit dim=60, .* of 8"),
        ("llama", {"kv_heads": "3"}, "float32", ModelOptionError, "'kv_heads=3' does not fit heads=4"),
        ("gpt", {"heads": "3"}, "float32", ModelOptionError, "'heads=3' does not fit dim=64, .* multiple of 3"),
        ("vit", {"heads": "3"}, "float32", ModelOptionError, "'heads=3' does not fit dim=64, .* multiple of 3"),
        (":", {}, "float32", ModelFunctionError, "write a module or a file, and a function in it"),
        (":make", {}, "float32", ModelFunctionError, "write a module or a file, and a function in it"),
        ("os:", {}, "float32", ModelFunctionError, "write a module or a file, and a function in it"),
        ("llama", {}, "float6", DtypeError, "Write one of float64, float32"),
    ],
)
def test_bad_words(spec, options, dtype, error, words):
    with pytest.raises(error, match=words):
        load(spec, options=options, dtype=dtype)


@pytest.mark.parametrize(
    ("spec", "written"), [("./mine", r"hf:\./mine\. Built-in models"), ("mine", r"hf:\./mine\. Built-in models")]
)
def test_a_folder_without_a_prefix(tmp_path, monkeypatch, spec, written):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownModelError, match=written):
        load(spec)
