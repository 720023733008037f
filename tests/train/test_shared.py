"""What rank 0 makes of tasks, on the ranks that read it."""

from __future__ import annotations

import pickle

import pytest
import torch

import fxpar
from fxpar.errors import GraphFormatError
from fxpar.train import shared
from tests.runtime.test_pipeline_towers import Two

STRATEGIES = {8: "cp2", 16: "tp1+zb_h1+cut(other) > tp1"}


@pytest.fixture(scope="module")
def compiled():
    example = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    rows = {"x": {0: "B"}, "y": {0: "B"}}
    task = fxpar.Task(lambda model, batch: model(batch["x"], batch["y"]).sum(), example, dynamic=rows)
    return fxpar.compile_task(Two(), task, STRATEGIES, "bf16")


def test_programs_are_those_that_were_made(compiled):
    found = shared._read(pickle.loads(pickle.dumps(shared._written(compiled))))
    assert {name: one.fingerprint() for name, one in found.programs.items()} == {
        name: one.fingerprint() for name, one in compiled.programs.items()
    }
    assert list(found.programs) == list(STRATEGIES.values())
    assert found.logical.inputs == compiled.logical.inputs
    assert (found.precision, found.packing, found.unpacked) == (
        compiled.precision,
        compiled.packing,
        compiled.unpacked,
    )


@pytest.mark.parametrize("writes", [True, False])
def test_a_rank_makes_what_no_file_holds_itself(compiled, monkeypatch, writes):
    """Rank 0 keeps what it has made, and sends its graphs where they can be written."""
    sent, made = [], []

    def on_rank_0(make, elsewhere):
        sent.append(make())
        return sent[-1]

    def written(one):
        if not writes:
            raise GraphFormatError("a role of another package")
        return shared._read, one  # any value: nothing is read here

    monkeypatch.setattr(shared, "on_rank_0", on_rank_0)
    monkeypatch.setattr(shared, "_written", written)
    monkeypatch.setattr(shared, "_compiled", lambda *_: made.append(1) or {"both": compiled})
    monkeypatch.setattr(shared.dist, "get_world_size", lambda: 2)
    assert shared.compiled_tasks(None, None, {}, None) == {"both": compiled}
    assert (sent[0] is not None) == writes
    monkeypatch.setattr(shared, "on_rank_0", lambda make, elsewhere: sent[0])
    monkeypatch.setattr(shared, "_read", lambda sent: sent[1])
    assert shared.compiled_tasks(None, None, {}, None) == {"both": compiled}
    assert len(made) == (1 if writes else 2)
