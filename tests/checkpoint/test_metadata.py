"""The metadata of a checkpoint is a pickle of anybody: it is read, or refused by name, and nothing of it runs."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fxpar.checkpoint import export_checkpoint, load_checkpoint, save_checkpoint
from fxpar.checkpoint.load import read_extra
from fxpar.checkpoint.manifest import MANIFEST, FileSum, Manifest, read_manifest, sum_file, write_manifest
from fxpar.checkpoint.metadata import METADATA, SafePlanner, SafeReader, check_plain_pickle, read_metadata
from fxpar.checkpoint.weights import TOKENIZER
from fxpar.errors import CheckpointError, CorruptCheckpointError
from tests.checkpoint.small import make, step, whole
from tests.watched import watched


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model, optimizer = make(1)
    step(model, optimizer, 1)
    return save_checkpoint(tmp_path_factory.mktemp("saved"), 1, model, optimizer, {"a": 1})


def signed(saved, folder, name=METADATA, content=b""):
    """A copy with another file in it, and a manifest that says so: anybody can compute its checksum."""
    path = folder / "step-00000001"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(saved, path)
    (path / name).write_bytes(content)
    manifest = read_manifest(saved)
    write_manifest(path, Manifest(manifest.step, 1, 1, {**manifest.files, name: sum_file(path / name)}))
    return path


def test_what_dcp_wrote_is_read_as_dcp_reads_it(saved):
    with open(saved / METADATA, "rb") as file:
        expected = pickle.load(file)
    found = read_metadata(saved)
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data
    assert found.planner_data == expected.planner_data


class Calls:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def with_state(saved, change):
    """The metadata after `change(it)`, as DCP would write it."""
    metadata = pickle.loads((saved / METADATA).read_bytes())
    change(metadata)
    return pickle.dumps(metadata)


def first(metadata):
    return next(iter(metadata.state_dict_metadata.values()))


def stored(metadata):
    return next(iter(metadata.storage_data.values()))


def setting(find, name, value):
    return lambda metadata: setattr(find(metadata), name, value)


HARM = [
    lambda saved: pickle.dumps(Calls(os.system, "touch made")),
    lambda saved: b"cos\nsystem\n(S'touch made'\ntR.",
    lambda saved: b'cbuiltins\nexec\n(S\'open("made", "w")\'\ntR.',
    lambda saved: b"ctorch.distributed.checkpoint.metadata\nos.system\n(S'touch made'\ntR.",
    lambda saved: b"\x80\x04\x8c\x10torch.storage\xff\x8c\x0f_load_from_bytes\x93.",
    lambda saved: pickle.dumps(Calls(torch.load, "x")),
    lambda saved: pickle.dumps(Calls(getattr, "x", "join")),
    # A class cannot be changed by what is done to what stands for it.
    lambda saved: b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}S'__init__'\nS'x'\nstb.",
    lambda saved: with_state(saved, lambda m: m.state_dict_metadata.update(x=Calls(os.system, "touch made"))),
    lambda saved: with_state(saved, setting(stored, "relative_path", "../../../etc/passwd")),
    lambda saved: with_state(saved, setting(stored, "relative_path", "/etc/passwd")),
    lambda saved: with_state(saved, setting(stored, "relative_path", "state.json\0")),
    lambda saved: with_state(saved, setting(stored, "length", 10**15)),
    lambda saved: with_state(saved, setting(stored, "offset", -1)),
    lambda saved: with_state(saved, setting(stored, "transform_descriptors", ["zstd"])),
    lambda saved: with_state(saved, setting(first, "size", torch.Size([2**50]))),
    lambda saved: with_state(saved, setting(first, "size", (2, "3"))),
    lambda saved: with_state(saved, setting(first, "chunks", [])),
    lambda saved: with_state(saved, setting(first, "properties", None)),
    lambda saved: with_state(saved, lambda m: m.storage_data.clear()),
    lambda saved: with_state(saved, lambda m: setattr(m, "storage_data", None)),
    lambda saved: b"",
    lambda saved: b"N.",
    lambda saved: b"(" * 10_000,
    lambda saved: b"\x80\x04]" + b"\x8c\x01a" * 10,
    lambda saved: b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",
]


@pytest.mark.parametrize("case", range(len(HARM)))
def test_metadata_that_would_do_harm(case, saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = signed(saved, tmp_path, content=HARM[case](saved))
    model, optimizer = make(1, seed=2)
    before = whole(model, optimizer)
    with watched() as seen, pytest.raises(CorruptCheckpointError, match=r"metadata") as info:
        load_checkpoint(path, model, optimizer)
    assert not seen
    assert str(info.value).isprintable()
    assert "Nothing was loaded" in str(info.value)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
    after = whole(model, optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)


# A tuple of two of a tuple of two ...: two to the power of its levels parts, in four bytes a level.
SHARED = b"K\x01\x85\x94" + b"".join(b"h%c\x86\x94" % i for i in range(60))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x04}" + SHARED + b"K\x01s.", "a key of a table is of class tuple"),
        (
            b"\x80\x04\x8c\x13torch.serialization\x8c\x0b_get_layout\x93" + SHARED + b"\x85R.",
            "where str belongs",
        ),
        (b"\x80\x04\x8c\x07pathlib\x8c\x09PosixPath\x93" + SHARED + b"\x85R.", "there is no Metadata"),
        (
            b"\x80\x04Nr\xff\xff\xff\x01.",
            "an opcode that neither metadata nor plain values need",
        ),  # a memo of 33 million entries
        (b"\x80\x04" + b"(" * 101, "more than 100 levels"),
        (b"\x80\x04h\x00.", "list index out of range"),
        (b"\x80\x04K\x01\x86.", "more parts than there are values"),
        (b"\x80\x04\x8c\x05torch\x8c\x04Size\x93)\x81.", "made of what is not a class"),
        (b"\x80\x04\x8c\x09x\x93.", "cut off"),
    ],
)
def test_metadata_that_would_take_for_ever(content, message, tmp_path):
    """Python's unpickler hashes and prints what it is told to: a hundred bytes keep it busy for years."""
    (tmp_path / METADATA).write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=message):
        read_metadata(tmp_path)


class Harmful:
    def __reduce__(self):
        return os.system, ("touch made",)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_value_that_is_no_tensor_is_loaded_under_an_allow_list(tmp_path, monkeypatch):
    """torchtitan's checkpoints hold some; DCP itself unpickles them without one."""
    monkeypatch.chdir(tmp_path)
    plain = {"step": 3, "lr": 0.5, "name": "x", "data": pickle.dumps([1, 2]), "nested": {"t": torch.ones(2)}}
    dcp.save({**plain, "last": Harmful()}, checkpoint_id=tmp_path / "c")
    found = {"step": 0, "lr": 0.0, "name": "", "data": b"", "nested": {"t": torch.zeros(2)}}
    dcp.load(found, storage_reader=SafeReader(tmp_path / "c"), planner=SafePlanner())
    assert found.pop("nested")["t"].tolist() == plain.pop("nested")["t"].tolist()
    assert found == plain
    with watched() as seen, pytest.raises(dcp.CheckpointException, match="UnpicklingError"):
        dcp.load({"last": 0}, storage_reader=SafeReader(tmp_path / "c"), planner=SafePlanner())
    assert not seen
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize(
    "files",
    [
        {"../x": FileSum(1, "a")},
        {"/etc/passwd": FileSum(1, "a")},
        {"x": FileSum("1", "a")},
        {"x": FileSum(-1, "a")},
        {"..": FileSum(1, "a")},
    ],
)
def test_a_manifest_names_files_of_its_own_folder(files, tmp_path):
    write_manifest(tmp_path, Manifest(1, 1, 1, files))
    with pytest.raises(CorruptCheckpointError, match=MANIFEST):
        read_manifest(tmp_path)


def test_files_that_no_manifest_counts(saved, tmp_path):
    path = signed(saved, tmp_path, "__9_9.distcp", (saved / "__0_0.distcp").read_bytes())
    change = setting(stored, "relative_path", "__9_9.distcp")
    path = signed(path, tmp_path / "b", content=with_state(saved, change))
    manifest = read_manifest(path)
    del manifest.files["__9_9.distcp"]
    write_manifest(path, manifest)
    model, optimizer = make(1)
    with pytest.raises(CorruptCheckpointError, match=r"__9_9\.distcp is not in its manifest"):
        load_checkpoint(path, model, optimizer)


def test_plain_pickles():
    check_plain_pickle(pickle.dumps({"a": [1, (2.0, b"x", None)], "b": {3}}), "it")
    with pytest.raises(pickle.UnpicklingError, match=r"it names .*system, and may hold plain values only"):
        check_plain_pickle(pickle.dumps(Calls(os.system, "touch made")), "it")
    for content in (b"\x80\x04}" + SHARED + b"K\x01s.", b"\x80\x04\x8f(" + SHARED + b"\x90."):
        with pytest.raises(pickle.UnpicklingError, match=r"a key of a table is of class tuple|belong into a set"):
            check_plain_pickle(content, "it")


def mutate(name, content, rng):
    """Bytes changed, left out, doubled or replaced by pieces of pickles that call."""
    data = bytearray(content)
    pieces = [b"cos\nsystem\n", b"R", b"b", b"\x93", b"}", b"(", b"t", b"\x81", b"N", b"0", b"2", b"\x92", b"i", b"."]
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at : at + rng.randrange(1, 20)] = b""
            case 2:
                start = rng.randrange(len(data))
                data[at:at] = data[start : start + rng.randrange(1, 60)]
            case _:
                data[at:at] = rng.choice(pieces)
    return bytes(data)


def fuzz(saved, folder, cases):
    """How many of the changed checkpoints were refused."""
    names = (METADATA, METADATA, "state.json", "__0_0.distcp")
    refused = 0
    for case in cases:
        rng = random.Random(case)
        name = rng.choice(names)
        path = signed(saved, folder, name, mutate(name, (saved / name).read_bytes(), rng))
        model, optimizer = make(1, seed=2)
        with watched() as seen:
            try:
                load_checkpoint(path, model, optimizer)
            except CheckpointError as error:
                if not str(error).isprintable():
                    raise AssertionError(f"case {case}: {error!r}") from error
                refused += 1
            except Exception as error:
                raise AssertionError(f"case {case}: {type(error).__name__}: {error}") from error
        assert not seen, (case, seen)
        assert [found.name for found in folder.iterdir()] == [path.name], case
    return refused


def test_changed_checkpoints(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fuzz(saved, tmp_path, range(60)) > 30


@pytest.mark.nightly
@pytest.mark.slow
def test_thousands_of_changed_checkpoints(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fuzz(saved, tmp_path, range(1000, 6000))


def test_what_torch_says_of_a_changed_file_gives_a_terminal_no_orders(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fuzz(saved, tmp_path, [1172])  # torch's message has the colours of a terminal in it


def test_deep_tables_are_refused(saved, tmp_path):
    deep = b"[" * 100_000 + b"]" * 100_000
    path = signed(saved, tmp_path, "state.json", b'{"model": {}, "extra": ' + deep + b"}")
    model, optimizer = make(1)
    with pytest.raises(CorruptCheckpointError, match="RecursionError"):
        load_checkpoint(path, model, optimizer)
    (path / MANIFEST).write_bytes(deep)
    with pytest.raises(CorruptCheckpointError, match="RecursionError"):
        read_manifest(path)
    assert json.loads((saved / "state.json").read_text())["extra"] == {"a": 1}


@pytest.mark.parametrize(
    "extra",
    [
        "[" * 100_000 + "]" * 100_000,
        '{"x": {"__fxpar__": "tensor", "dtype": "int64", "shape": [3], "items": [1]}}',
        "[1]",
    ],
)
def test_plain_values_of_anybody(extra, saved, tmp_path):
    path = signed(saved, tmp_path, "state.json", f'{{"extra": {extra}}}'.encode())
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):
        read_extra(path)


def test_a_tokenizer_that_leads_elsewhere_is_not_copied(saved, tmp_path):
    path = tmp_path / "mine" / "step-00000001"
    shutil.copytree(saved, path)
    (tmp_path / "secret").write_text("a key")
    (path.parent / TOKENIZER).mkdir()
    (path.parent / TOKENIZER / "vocab.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CorruptCheckpointError, match=r"tokenizer/vocab\.json beside it is not a file of its own"):
        export_checkpoint(path, tmp_path / "exported")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["mine", "secret"]
