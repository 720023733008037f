"""Checkpoints go from stock torchtitan to fxpar and back, under any strategies and ranks, mid-run."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fxpar.checkpoint.lock import LOCK, Holder, started
from fxpar.errors import RankError
from tests.repeat import thinned

from .runs import SWITCHING, recipe, train

pytestmark = pytest.mark.titan
STOCK = (1, None)
LEGS = [STOCK, (2, SWITCHING), (4, {160: "dp2.tp2+zero1", 512: "pp2.cp2"}), STOCK, (1, {512: "dp1"})]
"""(ranks, strategies) of two steps each."""
THERE_AND_BACK = [STOCK, (2, SWITCHING), STOCK]


def saving(strategies, ranks=1, **changes):
    """Ten steps, two rows each, saved every two."""

    def make():
        config = recipe("llama3", strategies)
        if strategies is None:
            config.training.local_batch_size = 2 // ranks
        config.checkpoint.enable = True
        config.checkpoint.interval = 2
        config.checkpoint.last_save_model_only = False
        for key, value in changes.items():
            setattr(config.checkpoint, key, value)
        return config

    return make


def until(step):
    """Stop after this step, as if interrupted."""

    def inspect(trainer):
        trainer.should_continue_training = lambda: trainer.step < step

    return inspect


def distance(found, expected):
    """The largest relative difference of a tensor, by its norm."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - w).norm() / w.norm()) for n, w in expected.items())


@pytest.mark.parametrize(
    ("mode", "legs"),
    [("async", THERE_AND_BACK), *thinned(itertools.product(["disabled", "async"], [LEGS]), [])],
    ids=["there and back", "five legs", "five legs, async"],
)
def test_a_run_in_legs_is_one_run(mode, legs, tmp_path):
    """Of what stock torchtitan does on one rank."""
    stock = saving(None, enable=False)
    straight = train(1, stock, tmp_path / "straight", weights=True, inspect=until(2 * len(legs)))
    losses, norms = {}, {}
    for leg, (ranks, strategies) in enumerate(legs):
        made = saving(strategies, async_mode=mode)
        found = train(ranks, made, tmp_path, weights=leg == len(legs) - 1, inspect=until(2 * leg + 2))
        assert list(found.losses) == [2 * leg + 1, 2 * leg + 2]
        losses.update(found.losses)
        norms.update(found.norms)
    assert max(abs(losses[step] - straight.losses[step]) for step in straight.losses) < 1e-5
    assert max(abs(norms[step] - straight.norms[step]) for step in straight.norms) < 1e-5
    assert distance(found.weights, straight.weights) < 1e-5


def test_the_data_of_stock_replicas_goes_on(tmp_path):
    """A run of two stock data-parallel ranks, mid-run, and what each of its ranks would have drawn next."""
    stock = train(2, saving(None, 2, enable=False), tmp_path / "stock", inspect=until(4))
    train(2, saving(None, 2), tmp_path / "both", inspect=until(2))

    def made():
        config = saving(SWITCHING)()
        config.fxpar.data_ranks = 2
        config.training.local_batch_size = 1
        return config

    found = train(2, made, tmp_path / "both", inspect=until(4))
    assert list(found.losses) == [3, 4]
    assert all(abs(found.losses[step] - stock.losses[step]) < 1e-5 for step in found.losses)


def test_hugging_face_export_equals_stock(tmp_path):
    changes = {"last_save_model_only": True, "last_save_in_hf": True, "interval": 100}
    exports = {}
    for name, ranks, strategies in (("stock", 1, None), ("switching", 2, SWITCHING)):
        made = saving(strategies, **changes)

        def two_steps(made=made):
            config = made()
            config.training.steps = 2
            return config

        train(ranks, two_steps, tmp_path / name)
        folder = tmp_path / name / "outputs" / "checkpoint" / "step-2"
        (file,) = folder.glob("*.safetensors")
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        exports[name] = load_file(file), index
    (stock, stock_index), (found, found_index) = exports["stock"], exports["switching"]
    assert found_index == stock_index
    assert "model.layers.0.self_attn.q_proj.weight" in found
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == {n: (t.shape, t.dtype) for n, t in stock.items()}
    assert distance(found, stock) < 1e-5


def test_a_checkpoint_of_another_model(tmp_path):
    train(1, saving(None), tmp_path, inspect=until(2))

    def other():
        config = recipe("qwen3", {512: "dp1"})
        config.checkpoint.enable = True
        return config

    with pytest.raises(RankError, match=r"CheckpointModelError: .* does not fit this run: Missing key"):
        train(1, other, tmp_path)


def test_the_data_of_another_number_of_ranks(tmp_path):
    train(1, saving(None), tmp_path, inspect=until(2))

    def made():
        config = saving({512: "dp2"})()
        config.fxpar.data_ranks = 2
        config.training.local_batch_size = 1
        return config

    with pytest.raises(RankError, match=r"--fxpar.data-ranks.*exclude-from-loading dataloader"):
        train(2, made, tmp_path)


def test_two_runs_in_one_folder(tmp_path):
    """The second is refused before it has saved anything; what it would have been is there when the first has ended."""

    def second(trainer):
        other = Holder.here("trains")
        (Path(trainer.checkpointer.folder).mkdir(parents=True, exist_ok=True))
        lock = replace(other, pid=os.getppid(), started=started(os.getppid()), command=os.getppid())
        (Path(trainer.checkpointer.folder) / LOCK).write_text(json.dumps(asdict(lock)))

    with pytest.raises(RankError, match=rf"CheckpointInUseError: .* process {os.getpid()} on "):
        train(2, saving(SWITCHING), tmp_path, inspect=second)
    assert not list((tmp_path / "outputs" / "checkpoint").glob("step-*"))


def test_a_checkpoint_with_code_in_it(tmp_path):
    """In its metadata, and in the place in the data, which torchtitan unpickles."""
    train(1, saving({512: "dp1"}), tmp_path, inspect=until(2))
    folder = tmp_path / "outputs" / "checkpoint" / "step-2"
    (folder / ".metadata").write_bytes(b"cos\nsystem\n(S'touch made'\ntR.")
    with pytest.raises(RankError, match=r"CorruptCheckpointError: .*\.metadata is none that DCP writes"):
        train(1, saving({512: "dp1"}), tmp_path)
    assert not (tmp_path / "made").exists()
