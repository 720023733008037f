"""Folders of weights: what transformers wrote is trained from, what we write is what transformers reads."""

import copy
import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import AutoConfig

import fxpar
from fxpar.checkpoint import export_checkpoint, save_checkpoint, save_weights
from fxpar.checkpoint.weights import HF_CONFIG, hf_config, hf_generation
from fxpar.errors import CheckpointWriteError, WeightsMismatchError
from fxpar.runtime.forked import run_forked
from tests import warm  # noqa: F401

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 30}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS = {
    "llama": {**SIZES, "intermediate_size": 24, "num_key_value_heads": 2},
    "gpt2": {
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "vocab_size": 30,
        "n_positions": 32,
        **NO_DROPOUT,
    },  # tied, names of its own
    "gemma2": {**SIZES, "intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 4},  # tied, buffers
}


def config_of(kind):
    return AutoConfig.for_model(kind, **CONFIGS[kind])


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def sequences():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(30, (n,), generator=generator) for n in (9, 4, 12)]


def mean_loss(model, sequences):
    """One sequence at a time, with plain autograd."""
    losses = []
    for ids in sequences:
        logits = model(input_ids=ids[None]).logits[0]
        losses.append(nn.functional.cross_entropy(logits[:-1].float(), ids[1:], reduction="sum"))
    return sum(losses) / sum(len(ids) - 1 for ids in sequences)


def trained_here(model, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        mean_loss(model, sequences()).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    "kind",
    ["gpt2", pytest.param("llama", marks=pytest.mark.nightly), pytest.param("gemma2", marks=pytest.mark.nightly)],
)
def test_there_and_back(tmp_path, kind):
    """From a folder in several files, on meta, over two ranks, to a folder in several files: as plain torch does it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32)
    model.save_pretrained(tmp_path / "start", max_shard_size="4KB")

    def work(rank):
        model = on_meta(config_of(kind))
        options = {"strategies": {8: "dp2", 16: "tp2"}, "initializer": model._init_weights}
        model = fxpar.parallelize(model, weights=tmp_path / "start", **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model.train_step(sequences())
            optimizer.step()
        save_weights(model, tmp_path / "trained", shard_bytes=3_000)
        save_checkpoint(tmp_path / "checkpoints", 2, model, optimizer, {HF_CONFIG: hf_config(model)})

    run_forked(2, work, 120)
    truth = trained_here(AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.float32))
    exported = export_checkpoint(tmp_path / "checkpoints" / "step-00000002", tmp_path / "exported")
    for folder in (tmp_path / "trained", exported):
        found, about = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert type(found) is type(truth)
        assert not about["missing_keys"]
        assert not about["unexpected_keys"]
        for (name, one), other in zip(truth.named_parameters(), found.parameters(), strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-6), (folder.name, name)
        with torch.no_grad():
            one, other = (model.eval()(sequences()[0][None]).logits for model in (truth, found))
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6), folder.name
    assert len(list((tmp_path / "trained").glob("*.safetensors"))) > 1


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)
        self.b = nn.Linear(3, 4)
        self.b.weight.data = torch.arange(12.0).view(4, 3)
        self.register_buffer("count", torch.tensor(7))


def test_one_process_writes_floats_in_the_dtype_asked_for(tmp_path):
    model = Small()
    save_weights(model, tmp_path / "out", dtype=torch.bfloat16)
    again = copy.deepcopy(model)
    again.b.weight.data.zero_()
    from fxpar.store.folder import Given, WeightsFolder

    folder = WeightsFolder.open(tmp_path / "out")
    assert folder.form("b.weight") == ((4, 3), "BF16")
    assert folder.form("count") == ((), "I64")
    Given.to(again, tmp_path / "out").fill_module(again)
    assert torch.equal(again.b.weight, model.b.weight)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "out").mkdir()
    save_weights(Small(), tmp_path / "out")
    with pytest.raises(CheckpointWriteError, match=r"already exists\. Name a folder that is empty"):
        save_weights(Small(), tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointWriteError, match="cannot be written: NotADirectoryError"):
        save_weights(Small(), tmp_path / "file" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


def test_other_weights_are_refused_on_all_ranks_before_anything_runs(tmp_path):
    model = AutoModelForCausalLM.from_config(config_of("llama"))
    model.save_pretrained(tmp_path / "w")
    other = AutoConfig.for_model("llama", **{**CONFIGS["llama"], "intermediate_size": 32})

    def work(rank):
        with pytest.raises(WeightsMismatchError, match=r"of another form: model\.layers\.0\.mlp.*\[24, 16\] in the"):
            fxpar.parallelize(on_meta(other), strategies={16: "dp2"}, weights=tmp_path / "w")

    run_forked(2, work, 60)


def test_config_of_a_model(tmp_path):
    assert hf_config(Small()) is None
    text = hf_config(on_meta(config_of("gpt2")))
    assert text is not None
    assert json.loads(text)["architectures"] == ["GPT2LMHeadModel"]


def test_how_a_model_generates():
    assert hf_generation(Small()) is None
    model = on_meta(config_of("gpt2"))
    model.generation_config.max_new_tokens = 9
    text = hf_generation(model)
    assert text is not None
    assert json.loads(text)["max_new_tokens"] == 9
