"""`fxpar simulate` by its words."""

from __future__ import annotations

import json

import pytest

from tests.cli.helpers import fxpar

LENGTHS = ["--lengths", "github:256", "--tokens-per-step", "2048", "--samples", "2"]


def test_it_prices_what_is_named(tmp_path):
    path, ruled = tmp_path / "set.json", "dp2[*.ffn: +remat]"  # the limit is what stands behind the rules
    words = ["--set", "layers=1", "--set", f"{ruled}:64", "cp2", *LENGTHS, "--json", path]
    status, text, _ = fxpar("simulate", "llama", *words)
    assert status == 0
    data = json.loads(path.read_text())
    assert [(group["limit"], group["strategy"]) for group in data["groups"]] == [(64, ruled), (256, "cp2")]
    assert {"predicted_s", "memory_bytes", "switch_s", "reduce_s"} <= data.keys()
    assert set(data["static_s"]) == {ruled, "cp2"}
    assert data["best_static"]["predicted_s"] == min(data["static_s"].values())
    # Such short mini-batches are not worth a switch: one group takes all, and a line says so.
    assert [group["tokens"] > 0 for group in data["groups"]] == [False, True]
    assert "sequences of 1 to 64 tokens: 100.0% of their tokens run in a group for longer ones" in text
    assert all(word in text for word in ("up to 64", "up to 256", "switches", "reductions", "best of them alone"))


MODEL = """
import torch
import fxpar
from torch import nn

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))

def build():
    return Words(), lambda model, batch: model(batch["input_ids"]).std(), {"input_ids": torch.ones(1, 9).long()}
"""


def test_what_is_noted_of_a_model_is_told(tmp_path):
    (tmp_path / "words.py").write_text(MODEL)
    model = [f"{tmp_path / 'words.py'}:build", *LENGTHS]
    for words in (["simulate", *model, "-s", "dp2", "--json", "-"], ["plan", *model, "--world", "2", "--json", "-"]):
        status, out, err = fxpar(*words)
        assert status == 0
        (note,) = json.loads(out)["notes"]
        assert note.startswith("the loss is neither a sum over tokens or rows nor a mean of them: `std` at words.py:")
        assert f"note: {note}" in err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["llama", "--set", "dp2"], "--lengths"),
        (["llama", *LENGTHS], "name the strategies of the set"),
        (["llama", "--set", "layers=1", *LENGTHS], "name the strategies of the set"),
        (["llama", "dp2", "dp4", *LENGTHS], "4"),
        (["llama", "dp2:x", *LENGTHS], "write a number of tokens"),
        (["llama", "dpp2", *LENGTHS], "dpp2"),
        (["lama", "dp2", *LENGTHS], "did you mean 'llama'"),
        (["hotspa-fig8", "dp2"], "which has its own"),
        (["hotspa-fig8", "--set", "dp2"], "--set: it is not for hotspa-fig8"),
        (["hotspa-table3", "--world", "4"], "--world: it is not for hotspa-table3"),
        (["hotspa-fig8", "--samples", "4"], "--samples: it is not for hotspa-fig8"),
        (["hotspa-fig9"], "did you mean 'hotspa-fig8'?"),
        (["hotspa-fig9", "--set", "dp2", *LENGTHS], "did you mean 'hotspa-fig8'?"),
    ],
)
def test_bad_words_are_one_error(words, why):
    status, out, err = fxpar("simulate", *words)
    assert status in (1, 2)
    assert why in " ".join(err.replace("│", " ").split())
    assert not out
