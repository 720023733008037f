"""`fxpar export`: the latest checkpoint of a run becomes a folder of safetensors."""

import json
import os
import stat

import pytest
import torch
from torch import nn

from fxpar.checkpoint import save_checkpoint
from fxpar.checkpoint.weights import HF_CONFIG, HF_GENERATION, TOKENIZER
from fxpar.data.tokenizer import copy_tokenizer, load_tokenizer
from fxpar.store.folder import WeightsFolder
from tests.cli.helpers import fxpar


@pytest.fixture
def run(tmp_path):
    model = nn.Linear(3, 2)
    for step in (1, 2):
        model.bias.data.fill_(step)
        optimizer = torch.optim.SGD(model.parameters())
        save_checkpoint(tmp_path / "run" / "checkpoints", step, model, optimizer, {})
    return tmp_path / "run"


@pytest.mark.parametrize(("place", "value"), [("", 2), ("checkpoints", 2), ("checkpoints/step-00000001", 1)])
def test_a_run_a_folder_of_checkpoints_or_a_checkpoint(run, tmp_path, place, value):
    code, out, _ = fxpar("export", run / place, tmp_path / "out", "--dtype", "bf16")
    assert code == 0
    assert out.endswith(f"-> {tmp_path / 'out'}\n")
    folder = WeightsFolder.open(tmp_path / "out")
    assert folder.form("weight") == ((2, 3), "BF16")
    assert torch.equal(folder.read("bias", ((0, 2),)), torch.full((2,), value, dtype=torch.bfloat16))


def test_others_may_read_the_files_as_far_as_the_umask_says(run, tmp_path):
    before = os.umask(0o027)
    try:
        assert fxpar("export", run, tmp_path / "out")[0] == 0
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()} == {0o640}


def test_what_cannot_be_exported(run, tmp_path):
    code, _, err = fxpar("export", tmp_path / "nothing", tmp_path / "out")
    assert (code, "there is no such folder" in err) == (1, True)
    (tmp_path / "empty").mkdir()
    code, _, err = fxpar("export", tmp_path / "empty", tmp_path / "out")
    assert (code, "in this folder; name the folder of a run" in err) == (1, True)
    code, _, err = fxpar("export", run, run)
    assert code == 1
    assert err.startswith("error: folder of weights '")
    assert "already exists. Name a folder that is empty" in err
    code, _, err = fxpar("export", run, tmp_path / "out", "--dtype", "int4")
    assert (code, "dtype 'int4' is not known" in err) == (1, True)
    (run / "checkpoints" / "step-00000002" / "__0_0.distcp").write_bytes(b"")
    code, _, err = fxpar("export", run, tmp_path / "out")
    assert (code, "__0_0.distcp" in err) == (1, True)
    assert not (tmp_path / "out").exists()


def test_how_a_model_of_transformers_generates_goes_with_the_weights(tmp_path):
    generation = json.dumps({"eos_token_id": 7, "max_new_tokens": 9})
    model = nn.Linear(3, 2)
    extra = {HF_CONFIG: json.dumps({"model_type": "any"}), HF_GENERATION: generation}
    save_checkpoint(tmp_path / "checkpoints", 1, model, torch.optim.SGD(model.parameters()), extra)
    assert fxpar("export", tmp_path, tmp_path / "out")[0] == 0
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == json.loads(generation)


def test_the_tokenizer_goes_with_the_weights(run, tmp_path):
    """As `fxpar train` leaves it beside the checkpoints: its file, what stands beside it, its end token."""
    tokenizers = pytest.importorskip("tokenizers")
    source = tmp_path / "source"
    source.mkdir()
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<end>": 1}, "a")).save(str(source / "mine.json"))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    copy_tokenizer(source / "mine.json", run / "checkpoints" / TOKENIZER, "<end>")
    assert fxpar("export", run, tmp_path / "out")[0] == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert load_tokenizer(tmp_path / "out" / "tokenizer.json").vocab_size == 2
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["eos_token"] == "<end>"
