"""`fxpar export`: the latest checkpoint of a run becomes a folder of safetensors."""

import pytest
import torch
from torch import nn

from fxpar.checkpoint import save_checkpoint
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


def test_what_cannot_be_exported(run, tmp_path):
    code, _, err = fxpar("export", tmp_path / "nothing", tmp_path / "out")
    assert (code, "there is no complete checkpoint in this folder" in err) == (1, True)
    code, _, err = fxpar("export", run, run)
    assert (code, "is there already" in err) == (1, True)
    code, _, err = fxpar("export", run, tmp_path / "out", "--dtype", "int4")
    assert (code, "dtype 'int4' is not known" in err) == (1, True)
    (run / "checkpoints" / "step-00000002" / "__0_0.distcp").write_bytes(b"")
    code, _, err = fxpar("export", run, tmp_path / "out")
    assert (code, "__0_0.distcp" in err) == (1, True)
    assert not (tmp_path / "out").exists()
