"""Tokenizers, tokens on disk, their cache, held-out documents."""

from __future__ import annotations

import json
import os
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpar.data import (
    MiniBatchLoader,
    default_cache_dir,
    load,
    load_tokenizer,
    open_corpus,
    prepare,
    tokenizer,
)
from fxpar.data import tokens as tokens_module
from fxpar.data.cache import publish
from fxpar.data.tokenizer import END_TOKEN, train_tokenizer
from fxpar.errors import (
    DataCacheError,
    HeldOutError,
    MissingDataPackageError,
    TokenizerError,
)
from tests.data.plain import in_memory

pytest.importorskip("tokenizers")

TEXTS = {"a.py": "def f(x):\n    return x\n" * 9, "b.py": "ünïcode 漢字 \U0001f600", "c.py": f"x = '{END_TOKEN}'"}


def text_folder(root, texts=TEXTS):
    root.mkdir(exist_ok=True)
    for name, text in texts.items():
        (root / name).write_text(text)
    return root


@pytest.fixture
def corpus(tmp_path):
    return open_corpus(text_folder(tmp_path / "texts"))


@pytest.fixture
def trained(corpus, tmp_path):
    return train_tokenizer(corpus, 300, cache_dir=tmp_path / "cache")


# ---------------------------------------------------------------------------------------------------------- tokenizers
def test_every_text_comes_back(corpus, trained):
    texts = [*(corpus.text(i) for i in range(len(corpus))), "\0 never seen Ж\r\n\t"]
    for text, ids in zip(texts, trained.encode(texts), strict=True):
        assert trained.decode(ids) == text + END_TOKEN
        assert ids[-1] == trained.end_id == 0
        # The characters of the end token inside a text do not end it.
        assert (ids[:-1] != 0).all()
        assert ids.max() < trained.vocab_size <= 300


def test_trained_once(corpus, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "_train", lambda *_: pytest.fail("trained again"))
    again = train_tokenizer(corpus, 300, cache_dir=tmp_path / "cache")
    assert again.fingerprint == trained.fingerprint


def test_trained_anew_for_other_text_size_or_sample(trained, tmp_path, monkeypatch):
    calls = []
    train = tokenizer._train
    monkeypatch.setattr(tokenizer, "_train", lambda *args: (calls.append(args), train(*args))[1])
    corpus, cache = open_corpus(tmp_path / "texts"), tmp_path / "cache"
    train_tokenizer(corpus, 290, cache_dir=cache)
    train_tokenizer(corpus, 300, cache_dir=cache, sample_bytes=50)
    assert len(calls) == 2
    (tmp_path / "texts" / "a.py").write_text("other words, other words, other words")
    changed = train_tokenizer(open_corpus(tmp_path / "texts"), 300, cache_dir=cache)
    assert len(calls) == 3
    assert changed.fingerprint != trained.fingerprint


def test_sample_is_of_whole_documents_and_never_empty(corpus):
    assert len(list(tokenizer._sample(corpus, 10**6))) == len(TEXTS)
    for size in range(1, corpus.report.text_bytes):
        taken = list(tokenizer._sample(corpus, size))
        assert taken
        assert set(taken) <= set(TEXTS.values())
        assert len(taken) == 1 or sum(len(text.encode()) for text in taken) <= size


def write_tokenizer(path, vocab=("[UNK]", "a", "b"), **changes):
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(vocab)}, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    data = json.loads(backend.to_str())
    data.update(changes)
    path.write_text(json.dumps(data))
    return path


def test_tokenizer_file(tmp_path):
    file = write_tokenizer(tmp_path / "t.json")
    (ids,) = load_tokenizer(file).encode(["a b x"])
    assert ids.tolist() == [1, 2, 0]
    (ids,) = load_tokenizer(file, end_token="b").encode(["a"])
    assert ids.tolist() == [1, 2]
    (ids,) = load_tokenizer(file, end_token="b").encode(["a b"])
    assert ids.tolist() == [1, 2]


def test_tokenizer_file_that_cuts_or_pads_does_not(tmp_path):
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
    file = write_tokenizer(tmp_path / "t.json", truncation=cut, padding={**pad, "pad_token": "[UNK]"})
    assert [len(ids) for ids in load_tokenizer(file).encode(["a b a b", "a"])] == [4, 1]


def test_vocabulary_counts_gaps(tmp_path):
    file = write_tokenizer(tmp_path / "t.json")
    data = json.loads(file.read_text())
    data["model"]["vocab"]["b"] = 70_000
    file.write_text(json.dumps(data))
    loaded = load_tokenizer(file)
    assert loaded.vocab_size == 70_001


def test_tokenizer_errors(tmp_path, corpus, monkeypatch):
    with pytest.raises(TokenizerError, match="cannot be read: No such file"):
        load_tokenizer(tmp_path / "none.json")
    for content in (b"{", b"\xff", b"{}"):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(TokenizerError, match="is not a tokenizer file"):
            load_tokenizer(tmp_path / "bad.json")
    with pytest.raises(TokenizerError, match="empty vocabulary"):
        load_tokenizer(write_tokenizer(tmp_path / "empty.json", vocab=()))
    with pytest.raises(TokenizerError, match=r"has no token '</s>'"):
        load_tokenizer(write_tokenizer(tmp_path / "t.json"), end_token="</s>")
    with pytest.raises(TokenizerError, match="256 ids are too few"):
        train_tokenizer(corpus, 256, cache_dir=tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(MissingDataPackageError, match=r'pip install "fxpar\[train\]"'):
        load_tokenizer(tmp_path / "t.json")


# -------------------------------------------------------------------------------------------------------------- tokens
def test_documents_are_slices_of_the_file(corpus, trained, tmp_path):
    progress = []
    made = prepare(corpus, trained, cache_dir=tmp_path / "cache", progress=lambda *at: progress.append(at))
    assert progress[-1] == (3, 3)
    assert made.folder is not None
    for tokens in (made, load(made.folder)):
        assert tokens.flat.dtype == np.uint16
        assert len(tokens) == len(corpus)
        for i in range(len(corpus)):
            assert tokens.name(i) == corpus.name(i)
            assert tokens.document(i).tolist() == trained.encode([corpus.text(i)])[0].tolist()
            assert tokens.lengths[i] == len(tokens.document(i))
        assert tokens.identity == made.identity
        batch = next(MiniBatchLoader(tokens, batch_sequences=3, max_length=1000, shuffle=False))
        assert [sequence.tolist() for sequence in batch] == [tokens.document(i).tolist() for i in range(3)]
        assert {sequence.dtype for sequence in batch} == {torch.int64}


def test_large_vocabularies_take_four_bytes(corpus, tmp_path):
    file = write_tokenizer(tmp_path / "t.json")
    data = json.loads(file.read_text())
    data["model"]["vocab"]["x"] = 2**16
    file.write_text(json.dumps(data))
    tokens = prepare(corpus, load_tokenizer(file), cache_dir=tmp_path / "cache")
    assert tokens.flat.dtype == np.int32
    assert tokens.flat.max() == 2**16


def test_batches_do_not_change_the_tokens(corpus, trained, tmp_path, monkeypatch):
    whole = prepare(corpus, trained, cache_dir=tmp_path / "whole")
    monkeypatch.setattr(tokens_module, "_BATCH_CHARACTERS", 1)
    assert [len(batch) for batch in tokens_module._batches(corpus)] == [1, 1, 1]
    single = prepare(corpus, trained, cache_dir=tmp_path / "single")
    assert single.flat.tolist() == whole.flat.tolist()
    monkeypatch.setattr(tokens_module, "_BATCH_CHARACTERS", 10**6)
    monkeypatch.setattr(tokens_module, "_BATCH_TEXTS", 2)
    assert [len(batch) for batch in tokens_module._batches(corpus)] == [2, 1]


def test_tokenised_once_per_corpus_and_tokenizer(corpus, trained, tmp_path, monkeypatch):
    calls = []
    build = tokens_module._build
    monkeypatch.setattr(tokens_module, "_build", lambda *args: (calls.append(args), build(*args))[1])
    cache = tmp_path / "cache"
    first = prepare(corpus, trained, cache_dir=cache)
    assert prepare(open_corpus(tmp_path / "texts"), trained, cache_dir=cache).identity == first.identity
    assert len(calls) == 1
    (tmp_path / "texts" / "d.py").write_text("more")
    more = prepare(open_corpus(tmp_path / "texts"), trained, cache_dir=cache)
    other = prepare(corpus, train_tokenizer(corpus, 270, cache_dir=cache), cache_dir=cache)
    assert len(calls) == 3
    assert len({str(tokens.identity) for tokens in (first, more, other)}) == 3


def test_concurrent_builders_agree(corpus, trained, tmp_path, monkeypatch):
    ready = threading.Barrier(4)
    build = tokens_module._build

    def together(*args):
        build(*args)
        ready.wait(timeout=30)  # all four have built before the first one publishes

    monkeypatch.setattr(tokens_module, "_build", together)
    results = []
    work = lambda: results.append(prepare(corpus, trained, cache_dir=tmp_path / "cache"))  # noqa: E731
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({tokens.flat.tobytes() for tokens in results}) == 1
    assert len(results) == 4
    assert len(os.listdir(tmp_path / "cache" / "tokens")) == 1


def test_failed_build_leaves_nothing(corpus, trained, tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tokens_module, "_build", fail)
    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, trained, cache_dir=tmp_path / "cache")
    assert os.listdir(tmp_path / "cache" / "tokens") == []


def test_a_full_disk_is_a_clear_error(corpus, trained, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokens_module, "_build", fail)
    with pytest.raises(DataCacheError, match="cannot be written: No space left on device"):
        prepare(corpus, trained, cache_dir=tmp_path / "cache")


def test_leftovers_of_killed_builders_are_removed_after_a_day(tmp_path):
    for name, hours in ((".key.1.aaaa", 30.0), (".key.2.bbbb", 1.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokens.bin").write_bytes(b"half")
        then = time.time() - hours * 3600
        for path in (tmp_path / name / "tokens.bin", tmp_path / name):
            os.utime(path, (then, then))
    with publish(tmp_path / "key") as building:
        (building / "file").write_text("done")
    assert sorted(os.listdir(tmp_path)) == [".key.2.bbbb", "key"]


def test_cache_that_cannot_be_used(corpus, trained, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DataCacheError, match=r"cannot be written.*cache_dir"):
        prepare(corpus, trained, cache_dir=tmp_path / "file")
    with pytest.raises(DataCacheError, match="holds no complete tokens"):
        load(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.npy", "name_keys.npy", "about.json"])
def test_damaged_tokens_are_noticed(corpus, trained, tmp_path, name):
    folder = prepare(corpus, trained, cache_dir=tmp_path / "cache").folder
    assert folder is not None
    data = (folder / name).read_bytes()
    for damaged in (data[: len(data) // 2], b""):
        (folder / name).write_bytes(damaged)
        with pytest.raises(DataCacheError, match="remove it to have it built again"):
            prepare(corpus, trained, cache_dir=tmp_path / "cache")


def test_default_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "fxpar"
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_cache_dir().parts[-2:] == (".cache", "fxpar")


# ------------------------------------------------------------------------------------------------------------ held out
names = st.lists(st.text(max_size=5), unique=True, min_size=2, max_size=30)


@given(names=names, data=st.data())
def test_held_out_documents_partition_the_corpus(names, data):
    tokens = in_memory([[i, i] for i in range(len(names))], names)
    count = data.draw(st.integers(0, len(names) - 1))
    training, validation = tokens.hold_out(count)
    assert len(validation) == count
    kept = [part.name(i) for part in (training, validation) for i in range(len(part))]
    assert sorted(kept) == sorted(names)
    # Holding out in two steps comes to the same.
    first = data.draw(st.integers(0, count))
    twice = tokens.hold_out(first)[0].hold_out(count - first)[0]
    assert twice.identity == training.identity
    for part in (training, validation):
        assert all(part.document(i).tolist() == [names.index(part.name(i))] * 2 for i in range(len(part)))
        assert part.documents.tolist() == sorted(part.documents)


@given(names=names, data=st.data())
def test_added_files_never_move_training_documents_to_validation(names, data):
    more = data.draw(st.permutations(names + data.draw(st.lists(st.text(min_size=6), unique=True))))
    count = data.draw(st.integers(0, len(names) - 1))

    def held(of):
        validation = in_memory([[0, 0]] * len(of), of).hold_out(count)[1]
        return {validation.name(i) for i in range(len(validation))}

    assert held(more) & set(names) <= held(names)


def test_too_many_held_out():
    tokens = in_memory([[1, 2], [3, 4]])
    for count in (-1, 2):
        with pytest.raises(HeldOutError, match=f"cannot hold out {count} of 2 documents: hold out 0 to 1"):
            tokens.hold_out(count)
