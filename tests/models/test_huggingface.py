"""`hf:TYPE`: tiny random decoders, published configurations, and what is refused. Skipped without transformers."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fxpar.errors import (
    MissingPackageError,
    ModelConfigError,
    ModelFolderError,
    ModelOptionError,
    ModelTypeError,
    PresetError,
    WeightsMismatchError,
)
from fxpar.models import load

transformers = pytest.importorskip("transformers", reason="the extra fxpar[hf] is not installed")


def config_of(spec: str, **more: Any) -> Any:
    """The configuration of the loaded model."""
    return load(spec, **more).model.config


def test_tiny_llama():
    loaded = load("hf:llama", dtype="float64")
    config: Any = loaded.model.config
    assert (config.num_hidden_layers, config.num_key_value_heads, config.vocab_size) == (2, 2, 131)
    assert all(p.dtype == torch.float64 for p in loaded.params().values())
    assert loaded.model.training
    assert set(loaded.example_batch) == {"input_ids", "labels"}
    loss = loaded.loss_fn(loaded.model, loaded.example_batch)
    assert loss.dim() == 0
    assert loss.item() > 0


def test_weights_show_errors_and_repeat_with_the_seed():
    one, again, other = (load("hf:gpt2", seed=seed).params() for seed in (0, 0, 1))
    norm, bias = one["transformer.h.0.ln_1.weight"], one["transformer.h.0.attn.c_attn.bias"]
    assert norm.std() > 0.01
    assert bias.std() > 0.01
    assert all(torch.equal(one[k], again[k]) for k in one)
    assert not torch.equal(one["transformer.wte.weight"], other["transformer.wte.weight"])


def test_tied_weights_stay_tied():
    loaded = load("hf:gpt2")
    assert "lm_head.weight" not in loaded.params()
    model: Any = loaded.model
    assert model.lm_head.weight is model.transformer.wte.weight


def test_options_reach_the_configuration_under_either_name():
    config = config_of("hf:gpt2", options={"num_hidden_layers": "3", "n_head": "2", "scale_attn_weights": "false"})
    assert (config.n_layer, config.n_head, config.scale_attn_weights) == (3, 2, False)


def test_a_mixture_of_experts_is_small_and_has_experts():
    """With layers of both kinds, and experts that run in float64 beside a captured graph."""
    config = config_of("hf:deepseek_v3")
    assert (config.n_routed_experts, config.num_experts_per_tok, config.first_k_dense_replace) == (8, 2, 1)
    assert (config.n_group, config.topk_group, config.moe_intermediate_size) == (2, 1, 44)
    assert config._experts_implementation == "eager"
    assert config_of("hf:dots1").n_routed_experts == 8  # which leaves it open


def test_published_size_on_meta():
    loaded = load("hf:llama@8b", device="meta")
    assert all(p.is_meta for p in loaded.model.parameters())
    assert sum(p.numel() for p in loaded.model.parameters()) == 8_030_261_248
    assert loaded.example_batch["input_ids"].device.type == "cpu"
    assert config_of("hf:llama@8b", device="meta", options={"num_hidden_layers": "1"}).hidden_size == 4096


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("qwen3@8b", 8_190_735_360),
        ("qwen3@0.6b", 596_049_920),
        ("llama@1b", 1_235_814_400),
        ("gemma2@9b", 9_241_705_984),
        ("gpt2@124m", 124_439_808),
    ],
)
def test_published_sizes_have_the_published_number_of_parameters(name, count):
    loaded = load(f"hf:{name}", device="meta")
    assert sum(p.numel() for p in loaded.model.parameters()) == count


def test_default_configuration_of_a_type():
    config = config_of("hf:gpt2@default", device="meta", options={"n_layer": "1"})
    assert (config.n_embd, config.n_layer) == (768, 1)


def test_type_without_position_ids_gets_one_document():
    assert set(load("hf:bloom").example_batch) == {"input_ids", "labels"}


def test_no_network(monkeypatch):
    import socket

    def refuse(*args, **kwargs):
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    load("hf:qwen3")


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("hf:lama", ModelTypeError, "unknown to transformers; did you mean 'llama'"),
        ("hf:vit", ModelTypeError, "no causal language model head"),
        ("hf:gemma3", ModelTypeError, "its decoder is 'hf:gemma3_text'"),
        ("hf:llama@9b", PresetError, "hf:llama@8b"),
        ("hf:bloom@7b", PresetError, "Known ones are hf:bloom@default"),
        ("hf:llama@", PresetError, "hf:llama@default"),
    ],
)
def test_refused(spec, error, words):
    with pytest.raises(error, match=words):
        load(spec)


def test_unknown_option():
    with pytest.raises(ModelOptionError, match=r"'hiden_size' is unknown .*did you mean 'hidden_size'"):
        load("hf:llama", options={"hiden_size": "8"})


def test_option_that_transformers_refuses():
    with pytest.raises(ModelConfigError, match=r"cannot build 'hf:llama' .*Change them with --set"):
        load("hf:llama", options={"hidden_act": "no_such_function"})


def test_without_transformers(monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackageError, match=r'pip install "fxpar\[hf\]"'):
        load("hf:llama")


def test_a_folder_brings_its_weights(tmp_path):
    from tests.models.folder import write_folder

    folder = write_folder(tmp_path / "base")
    truth = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()
    loaded = load(f"hf:{folder}", dtype="float64")
    assert all(torch.equal(value, truth[name]) for name, value in loaded.model.state_dict().items())
    assert loaded.weights == str(folder)
    assert loaded.batches[0]["input_ids"].max() < 40
    assert loaded.files == (folder / "config.json",)


def test_a_folder_on_meta_reads_no_weights(tmp_path):
    from tests.models.folder import write_folder

    folder = write_folder(tmp_path / "base")
    (folder / "model.safetensors").unlink()
    assert load(f"hf:{folder}", device="meta").model.config.hidden_size == 16


FOLDERS = {
    "compressed": ({"quantization_config": {"quant_method": "fp8"}}, {}, ModelFolderError, "holds compressed weights"),
    "no type": ({"model_type": None}, {}, ModelFolderError, "names no model_type"),
    "other type": ({"model_type": "vit"}, {}, ModelTypeError, "no causal language model head"),
    "other sizes": ({"hidden_size": 32}, {}, WeightsMismatchError, "of another form"),
    "option": ({}, {"hidden": "3"}, ModelOptionError, "hidden"),
    "code": ({"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil"}, {}, ModelTypeError, "unknown"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_that_are_refused(tmp_path, case):
    from tests.models.folder import write_folder

    changes, options, error, message = FOLDERS[case]
    folder = write_folder(tmp_path / "base", **changes)
    (folder / "evil.py").write_text("raise SystemExit('code of a folder ran')")
    with pytest.raises(error, match=message):
        load(f"hf:{folder}", options=options)


def test_no_folder_and_no_json(tmp_path):
    for name in ("meta-llama/Llama-3.1-8B", "./nofolder"):
        where = re.escape(str(Path(name).absolute()))
        with pytest.raises(ModelFolderError, match=rf"is not there \({where}\)\. .* name a local folder"):
            load(f"hf:{name}")
    with pytest.raises(ModelFolderError, match=r"model 'hf:\./nofolder'"):
        load("hf:./nofolder")
    with pytest.raises(ModelFolderError, match=r"has no config\.json that can be read .* name a local folder"):
        load(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(ModelFolderError, match="names no model_type of transformers"):
        load(f"hf:{tmp_path}")


def test_a_folder_without_a_slash_is_shown_how_to_write(tmp_path, monkeypatch):
    (tmp_path / "lama").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelTypeError, match=r"the folder of this name is written hf:\./lama$"):
        load("hf:lama")
