"""`file.py:function` and `pkg.module:function`."""

from __future__ import annotations

import textwrap
import warnings

import pytest
import torch

from fxpar.errors import ModelFunctionError, ModelOptionError
from fxpar.models import load
from fxpar.models.user_function import load_module

GOOD = """
    import torch
    from torch import nn
    SEEN = []

    def loss(model, batch):
        return (model(batch["x"]) - batch["target"]).pow(2).sum()

    def make(width: int = 4, **extra):
        SEEN.append(torch.empty(1).device.type)
        batch = {"x": torch.randn(3, 2), "target": torch.randn(3, width)}
        return nn.Linear(2, width), loss, batch

    def alone():
        return nn.Linear(2, 3)

    def loss_of_none():
        return loss

    def several():
        batches = [{"x": torch.randn(n, 2), "target": torch.randn(n, 4)} for n in (5, 6)]
        return {"model": nn.Linear(2, 4), "loss_fn": loss, "example_batch": batches[0], "batches": batches}

    def strict(width: int = 4):
        return make(width)

    def only_on_cpu():
        float(torch.ones(1))
        return make()

    def loading():
        model = nn.Linear(2, 4)
        model.load_state_dict({"weight": torch.ones(4, 2, device="cpu"), "bias": torch.ones(4, device="cpu")})
        return (model, *make()[1:])

    def nothing(): return None
    def no_module(): return 3, loss, {"x": torch.ones(1)}
    def no_loss(): return nn.Linear(2, 2), None, {"x": torch.ones(1)}
    def no_batch(): return nn.Linear(2, 2), loss, [torch.ones(1)]
    def no_tensor(): return nn.Linear(2, 2), loss, {"x": torch.ones(1), "y": [1, 2]}
    def two(): return nn.Linear(2, 2), loss
    def half(): return {"model": nn.Linear(2, 2)}
    def breaks(): raise KeyError("oh")
    value = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(GOOD))
    return path


def test_file(file):
    loaded = load(f"{file}:make", options={"width": "7"}, dtype="float64")
    assert loaded.name == "mine.py:make"
    assert loaded.model.weight.shape == (7, 2)
    assert loaded.model.weight.dtype == loaded.example_batch["x"].dtype == torch.float64
    assert loaded.batches == (loaded.example_batch,)


def test_dict_with_batches(file):
    loaded = load(f"{file}:several")
    assert [len(b["x"]) for b in loaded.batches] == [5, 6]
    assert loaded.scale() == 1 / 11


def test_module_of_the_current_folder(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert load("mine:make").model.weight.shape == (4, 2)


def test_meta_allocates_nothing(file):
    loaded = load(f"{file}:make", device="meta")
    assert loaded.model.weight.is_meta
    assert not loaded.example_batch["x"].is_meta


def test_a_function_that_loads_weights_is_not_warned_of_without_values(file):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(f"{file}:loading", device="meta").model.weight.is_meta
    assert load(f"{file}:loading").model.weight.sum() == 8


def test_function_that_needs_values_is_called_again_without_meta(file):
    assert load(f"{file}:only_on_cpu", device="meta").model.weight.shape == (4, 2)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mke", "has no function 'mke'; did you mean 'make'"),
        ("value", "'value' is int, not a function"),
        ("nothing", "returned NoneType; it must return"),
        ("no_module", "is int, not a torch.nn.Module"),
        ("no_loss", "loss function it returned is NoneType"),
        ("no_batch", "is list, not a dict of tensors"),
        ("no_tensor", "has 'y' of type list, not a tensor"),
        ("two", "returned tuple of 2; it must return"),
        ("half", "has no 'loss_fn'"),
        ("breaks", "the function raised KeyError: 'oh'"),
    ],
)
def test_bad_functions(file, name, words):
    with pytest.raises(ModelFunctionError, match=words):
        load(f"{file}:{name}")


def test_missing_file_and_module(tmp_path):
    with pytest.raises(ModelFunctionError, match="there is no file"):
        load(f"{tmp_path}/none.py:make")
    with pytest.raises(ModelFunctionError, match="cannot import 'no_such_module'"):
        load("no_such_module:make")


def test_file_that_does_not_run(tmp_path):
    (tmp_path / "bad.py").write_text("import no_such_module\n")
    with pytest.raises(ModelFunctionError, match="does not run: ModuleNotFoundError"):
        load(f"{tmp_path}/bad.py:make")


def test_options_of_the_function(file):
    with pytest.raises(ModelOptionError, match="did you mean 'width'"):
        load(f"{file}:strict", options={"widht": "3"})
    with pytest.raises(ModelOptionError, match=r"as long as the function makes .* return 'batches' from your function"):
        load(f"{file}:make", tokens=(4,))


def test_a_model_alone_is_enough_for_tasks(file):
    how = {"dtype": torch.float64, "device": "cpu", "seed": 0}
    alone = load_module(f"{file}:alone", {}, **how)
    assert (alone.weight.shape, alone.weight.dtype) == ((3, 2), torch.float64)
    assert load_module(f"{file}:make", {"width": "5"}, **how).weight.shape == (5, 2)
    with pytest.raises(ModelFunctionError, match="it returned"):
        load_module(f"{file}:loss_of_none", {}, **how)
