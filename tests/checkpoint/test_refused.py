"""Corrupt checkpoints and those of other models: one clear error, the same on all ranks, and nothing is loaded."""

import shutil
import warnings

import pytest
import torch
from torch import nn

from fxpar.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from fxpar.checkpoint.load import check_shapes
from fxpar.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointValueError,
    CorruptCheckpointError,
    FxparWarning,
    MissingCheckpointError,
)
from fxpar.runtime.forked import run_forked
from tests.checkpoint.small import assert_same, make, step, whole

FILES = ["__0_0.distcp", "__1_0.distcp", ".metadata", "state.json", "manifest.json"]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def test_each_corrupt_file_is_named_on_all_ranks(tmp_path):
    def save(rank):
        model, optimizer = make(2)
        step(model, optimizer, 1)
        return str(save_checkpoint(tmp_path / "good", 1, model, optimizer, {}))

    good = run_forked(2, save, 60)[0]
    cases = {f"{damage.__name__} {file}": (damage, file) for damage in (flip, truncate) for file in FILES}
    cases |= {f"missing {file}": (lambda path: path.unlink(), file) for file in FILES}
    for case, (damage, file) in cases.items():
        shutil.copytree(good, tmp_path / case)
        damage(tmp_path / case / file)

    def load(rank):
        model, optimizer = make(3, seed=4)
        before = whole(model, optimizer)
        errors = {}
        for case in cases:
            try:
                load_checkpoint(tmp_path / case, model, optimizer)
            except CheckpointError as error:
                errors[case] = f"{type(error).__name__}: {error}"
        assert_same(whole(model, optimizer), before)
        assert not optimizer.state
        load_checkpoint(good, model, optimizer)  # the ranks are still in step
        return errors

    results = run_forked(3, load, 60)
    assert results[0].keys() == cases.keys()
    assert results[0] == results[1] == results[2]
    for case, text in results[0].items():
        assert text.startswith("CorruptCheckpointError")
        assert case.split()[1] in text


def test_no_checkpoint(tmp_path):
    model, optimizer = make(1)
    with pytest.raises(MissingCheckpointError, match="step-00000003': there is no such folder"):
        load_checkpoint(tmp_path / "step-00000003", model, optimizer)
    (tmp_path / "step-00000003").mkdir()
    with pytest.raises(CorruptCheckpointError, match=r"there is no manifest\.json"):
        load_checkpoint(tmp_path / "step-00000003", model, optimizer)
    (tmp_path / "notes").write_text("")
    with pytest.raises(MissingCheckpointError, match="notes': is a file"):
        load_checkpoint(tmp_path / "notes", model, optimizer)


def test_a_folder_of_checkpoints_names_its_newest(tmp_path):
    model, optimizer = make(1)
    folder = tmp_path / "checkpoints"
    for i in (40, 25):
        save_checkpoint(folder, i, model, optimizer, {})
    for path in (folder, tmp_path):  # a folder of checkpoints, the folder of a run of `fxpar train`
        with pytest.raises(MissingCheckpointError, match=r"with checkpoints in it.* the newest is .*step-00000025'"):
            load_checkpoint(path, model, optimizer)
    with pytest.raises(MissingCheckpointError, match=r"no such folder; the newest one in .* is 'step-00000025'"):
        load_checkpoint(folder / "step-25", model, optimizer)


def test_latest_says_when_a_manifest_is_broken(tmp_path):
    model, optimizer = make(1)
    for i in (1, 2):
        save_checkpoint(tmp_path, i, model, optimizer, {})
    (tmp_path / "step-00000002" / "manifest.json").write_text("{")
    with pytest.raises(CorruptCheckpointError, match="step-00000002"):
        latest_checkpoint(tmp_path)
    save_checkpoint(tmp_path, 3, model, optimizer, {}, keep=1)  # a broken one is no reason not to save


def rename(model):
    model.core = model.body
    del model.body


OTHERS = {
    "width": (dict(width=8), lambda m: None, r"embed\.weight \(float32\[11, 6\] saved, float32\[11, 8\] here\)"),
    "name": ({}, rename, r"2 missing in the checkpoint: core\.weight, core\.bias; 2 in the checkpoint but not in the"),
    "dtype": ({}, lambda m: m.body.bfloat16(), r"body\.weight \(float32\[3, 6\] saved, bfloat16\[3, 6\] here\)"),
    "extra state": ({}, lambda m: m.add_module("more", WithExtraState()), r"missing in the checkpoint: more\._extra"),
}


class WithExtraState(nn.Module):
    def get_extra_state(self):
        return 1

    def set_extra_state(self, state):
        assert state == 1


@pytest.mark.parametrize("case", OTHERS)
def test_another_model(tmp_path, case):
    model, optimizer = make(1)
    path = save_checkpoint(tmp_path, 1, model, optimizer, {})
    options, change, message = OTHERS[case]
    other, _ = make(1, seed=2, **options)
    change(other)
    other_optimizer = torch.optim.AdamW(other.parameters())
    before = whole(other, other_optimizer)
    with pytest.raises(CheckpointMismatchError, match=message):
        load_checkpoint(path, other, other_optimizer)
    assert_same(whole(other, other_optimizer), before)
    if case == "dtype":
        check_shapes(path, other, other)
    else:
        with pytest.raises(CheckpointMismatchError, match=message):
            check_shapes(path, other, other)


def test_sizes_that_are_not_known_yet(tmp_path):
    """Two models differ in width, so it may be any; rows and the number of dims may not."""
    path = save_checkpoint(tmp_path, 1, *make(1), {})
    one, other = make(1, width=8)[0], make(1, width=9)[0]
    check_shapes(path, one, other)
    for changed in (nn.Linear(6, 4), nn.Conv1d(6, 3, 1)):
        one.body = other.body = changed
        with pytest.raises(CheckpointMismatchError, match=r"of another shape or dtype: body\.weight \("):
            check_shapes(path, one, other)
    with torch.device("meta"):
        model = make(1)[0]
    check_shapes(path, model, model)
    (path / "state.json").write_text("{")
    with pytest.raises(CorruptCheckpointError, match=r"state\.json cannot be read"):
        check_shapes(path, model, model)


def test_extra_state_is_loaded(tmp_path):
    model = WithExtraState()
    model.weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
    path = save_checkpoint(tmp_path, 1, model, optimizer, {})
    load_checkpoint(path, model, optimizer)


def test_another_optimizer(tmp_path):
    model, optimizer = make(1)
    step(model, optimizer, 1)
    path = save_checkpoint(tmp_path, 1, model, optimizer, {})
    refused = [
        (torch.optim.SGD(model.parameters()), "holds the state of AdamW, and the optimizer here is SGD"),
        (
            torch.optim.AdamW(model.parameters()),
            "holds 2 param groups, and the optimizer here has 1. Saved are body.weight, body.bias; ",
        ),
        (torch.optim.AdamW(model.parameters()), r"For the weights alone: load_checkpoint\(path, model, None\)"),
        (
            torch.optim.AdamW([{"params": [model.gain]}, {"params": [model.unused, model.frozen]}]),
            r"param group 0 holds other parameters than here: body\.bias, body\.weight, gain",
        ),
        (make(1)[1], "is not a parameter of the model"),
    ]
    before = whole(model, optimizer)
    for other, message in refused:
        with pytest.raises(CheckpointMismatchError, match=message):
            load_checkpoint(path, model, other)
    assert_same(whole(model, optimizer), before)
    assert latest_checkpoint(tmp_path) == path


def test_options_of_the_optimizer_that_loading_changes_are_told(tmp_path):
    """The learning rate, which a schedule changes, and how it computes are none of them."""
    model, optimizer = make(1, amsgrad=False)
    step(model, optimizer, 0)
    path = save_checkpoint(tmp_path, 1, model, optimizer, {})
    other, its = make(1, amsgrad=True, foreach=False, betas=(0.5, 0.6))
    its.param_groups[0]["lr"] = 0.7
    with pytest.warns(FxparWarning) as said:
        load_checkpoint(path, other, its)
    (text,) = [str(one.message) for one in said]
    assert text.startswith("checkpoint step-00000001: the optimizer goes on with ")
    assert "amsgrad False instead of True" in text
    assert "betas (0.9, 0.999) instead of (0.5, 0.6)" in text
    assert "lr" not in text
    assert "foreach" not in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(path, *make(1, seed=1))


def test_nothing_to_load_and_a_step_that_is_no_number_are_named(tmp_path):
    def work(rank):
        model, optimizer = make(1)
        assert latest_checkpoint(tmp_path) is None
        with pytest.raises(
            MissingCheckpointError, match=r"latest_checkpoint found none\. Load only where it finds one"
        ):
            load_checkpoint(latest_checkpoint(tmp_path), model, optimizer)
        with pytest.raises(CheckpointValueError, match="step '1' must be an integer"):
            save_checkpoint(tmp_path / "new", "1", model, optimizer, {})

    run_forked(1, work, 60)
