"""Weights from a folder of safetensors: what fits is read by slice, what does not is named before anything changes."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fxpar.errors import FxparWarning, WeightsFolderError, WeightsMismatchError
from fxpar.store.folder import INDEX, Given, Weights, WeightsFolder


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0))


def values(**changed):
    """A state that fits `Tied`; None leaves a name out."""
    torch.manual_seed(1)
    state = {name: value.clone() for name, value in Tied().state_dict().items() if name != "head.weight"}
    state["norm.running_mean"] += 3.0
    state["scale"] = torch.tensor(5.0)
    return {name: value for name, value in {**state, **changed}.items() if value is not None}


def write(folder, *files):
    """`files` are states; more than one get an index."""
    folder.mkdir(exist_ok=True)
    if len(files) == 1:
        save_file(files[0], folder / "model.safetensors")
        return folder
    named = {f"part-{i}.safetensors": state for i, state in enumerate(files)}
    for name, state in named.items():
        save_file(state, folder / name)
    index = {key: name for name, state in named.items() for key in state}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return folder


def split(state):
    names = list(state)
    return [{n: state[n] for n in names[:2]}, {n: state[n] for n in names[2:]}]


@pytest.mark.parametrize("parts", [1, 2])
def test_a_module_gets_parameters_and_buffers(tmp_path, parts):
    state = values()
    folder = write(tmp_path / "w", *([state] if parts == 1 else split(state)))
    model = Tied()
    Given.to(model, folder).fill_module(model)
    for name, value in state.items():
        assert torch.equal(model.state_dict()[name], value), name
    assert model.head.weight is model.embed.weight


def test_slices(tmp_path):
    folder = WeightsFolder.open(write(tmp_path / "w", {"a": torch.arange(24.0).view(4, 6), "s": torch.tensor(3.0)}))
    assert torch.equal(folder.read("a", ((1, 3), (2, 6))), torch.arange(24.0).view(4, 6)[1:3, 2:6])
    assert folder.read("a", ((0, 0), (0, 0))).numel() == 0  # a rank that has nothing of it
    assert folder.read("s", ()) == 3.0


CASES = {
    "missing": (
        values(**{"norm.weight": None}),
        {},
        r"1 not in the folder: norm\.weight.*allow it: missing=\[globs\]; what is missing",
    ),
    "extra": (values(adapter=torch.ones(2)), {}, r"1 not in the model: adapter\. .*unused=\[globs\]"),
    "shape": (values(scale=torch.ones(2)), {}, r"1 of another form: scale \(\[2\] in the folder, \[\] in the model\)"),
    "compressed": (
        values(**{"embed.weight": torch.zeros(6, 4, dtype=torch.int8)}),
        {},
        r"embed\.weight \(I8 in the folder\)",
    ),
    "misspelt": (
        {("nrom.weight" if k == "norm.weight" else k): v for k, v in values().items()},
        {},
        r"norm\.weight \(did you mean 'nrom\.weight'\?\); 1 not in the model: nrom.* A layer that wraps another",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_another_model(tmp_path, case):
    state, options, message = CASES[case]
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(WeightsMismatchError, match=message):
        Given.to(model, Weights(write(tmp_path / "w", state), **options))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_is_allowed_to_differ(tmp_path):
    state = values(**{"norm.weight": None, "adapter": torch.ones(2)})
    about = Weights(write(tmp_path / "w", state), missing=["norm.*"], unused=["adap*"])
    model = Tied()
    Given.to(model, about).fill_module(model)
    assert torch.equal(model.norm.weight, torch.ones(4))
    assert model.scale == 5.0
    model.embed.weight.requires_grad_(False)
    Given.to(model, about)  # frozen, but in the folder
    model.norm.weight.requires_grad_(False)
    with pytest.warns(FxparWarning, match=r"^1 frozen parameters are not in .*: norm\.weight\. Train them"):
        Given.to(model, about)


def test_both_names_of_a_tied_weight(tmp_path):
    state = values()
    same = {**state, "head.weight": state["embed.weight"].clone()}
    model = Tied()
    Given.to(model, write(tmp_path / "same", same)).fill_module(model)
    assert torch.equal(model.head.weight, state["embed.weight"])
    other = {**state, "head.weight": state["embed.weight"] + 1}
    given = Given.to(model, write(tmp_path / "other", other))
    with pytest.raises(WeightsFolderError, match=r"'embed\.weight' and 'head\.weight' with different values"):
        given.fill_module(model)


def test_a_weight_that_holds_nan(tmp_path):
    state = values(scale=torch.tensor(float("nan")))
    given = Given.to(Tied(), write(tmp_path / "w", state))
    with pytest.raises(WeightsFolderError, match=r"'scale' holds NaN, so every loss would be NaN\. Save"):
        given.fill_module(Tied())


def broken(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 40)


def escaping(folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def lost(folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"nowhere": "model.safetensors"}}))


def gone(folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00002.safetensors"}}))


def no_index(folder):
    (folder / INDEX).write_text("[]")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (broken, r"'.*w': the file model.safetensors cannot be read: .*\. Copy the folder again"),
        (gone, r"': the file model-00002\.safetensors is missing\. Copy the folder again"),
        (escaping, "names '../model.safetensors', which is none of its files"),
        (pickled, r"pytorch_model\.bin is a pickle, which could run code"),
        (lost, "model.safetensors has no 'nowhere'"),
        (no_index, "index.json cannot be read"),
    ],
)
def test_folders_that_cannot_be_read(tmp_path, damage, message):
    damage(write(tmp_path / "w", values()))
    with pytest.raises(WeightsFolderError, match=message):
        WeightsFolder.open(tmp_path / "w")


def test_no_folder(tmp_path):
    with pytest.raises(WeightsFolderError, match=r"the folder does not exist\. Nothing is downloaded"):
        WeightsFolder.open(tmp_path / "meta-llama")
    (tmp_path / "file").touch()
    with pytest.raises(WeightsFolderError, match=r"the folder is a file\. Nothing is downloaded"):
        WeightsFolder.open(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsFolderError, match=r"has no \*\.safetensors$"):
        WeightsFolder.open(tmp_path / "empty")
