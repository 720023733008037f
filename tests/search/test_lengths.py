"""Lengths from files and distributions, and the mini-batches drawn from them."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import tokenizers

from fxpar.errors import LengthsError, TokenizerError
from fxpar.search.lengths import NAMED, check_lengths, length_edges, mini_batches, read_lengths


def test_files_of_all_kinds_hold_the_same(tmp_path):
    lengths = [5, 1, 700, 64]
    (tmp_path / "a.txt").write_text("5\n1\n700 64\n")
    (tmp_path / "a.json").write_text(json.dumps(lengths))
    np.save(tmp_path / "a.npy", np.array(lengths, np.uint32))
    np.savez(tmp_path / "a.npz", lengths=np.array(lengths))
    for name in ("a.txt", "a.json", "a.npy", "a.npz"):
        assert read_lengths(str(tmp_path / name)).tolist() == lengths


def test_a_corpus_is_cut_as_training_cuts_it(tmp_path):
    """Documents of 7, 3 and 1 words: what is longer is split, a piece of one token has nothing to predict."""
    folder, tokenizer = tmp_path / "corpus", tmp_path / "tokenizer.json"
    folder.mkdir()
    for name, words in (("a", "a b a b a b a"), ("b", "b a b"), ("c", "a")):
        (folder / f"{name}.txt").write_text(words)
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    split = tokenizers.Tokenizer(model)
    split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    split.save(str(tokenizer))
    for text, lengths in ((f"{folder}", [3, 7]), (f"{folder}:4", [3, 3, 4]), (f"{folder}/:2", [2, 2, 2, 2])):
        assert sorted(read_lengths(text, tokenizer=str(tokenizer))) == lengths
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n')
    assert read_lengths(f"{tmp_path / 'a.jsonl'}:8", tokenizer=str(tokenizer)).tolist() == [2]
    for text, given, why in (
        (f"{folder}:4", None, "is a corpus, whose documents become tokens by a tokenizer. Name its tokenizer"),
        (f"{folder}:1", str(tokenizer), "1 tokens are no sequence"),
        (f"{folder}s:4", str(tokenizer), "there is no such file or folder. Name"),
        ("github:64", str(tokenizer), "these are lengths already, in tokens. Leave out --tokenizer"),
    ):
        with pytest.raises(LengthsError, match=why):
            check_lengths(text, given)
    with pytest.raises(TokenizerError):
        read_lengths(str(folder), tokenizer=str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.txt", "", "has no lengths"),
        ("a.json", "[]", "has no lengths"),
        ("a.txt", "5\n-3\n", "has -3 as length 2"),
        ("a.txt", "5\n0\n", "has 0 as length 2"),
        ("a.txt", "5\nx\n", "has 'x' as length 2"),
        ("a.json", "[5, 2.5]", "has 2.5 as length 2"),
        ("a.json", '["3"]', "has '3' as length 1"),
        ("a.json", "[5, true]", "has True as length 2"),
        ("a.json", '{"a": 1}', "holds a dict"),
        ("a.json", "[5", "holds no .json of lengths"),
        ("a.json", "[" * 100_000, "holds no .json of lengths"),
        ("a.json", f"[5, {10**25}]", f"has {10**25} as length 2"),
        ("a.txt", f"{10**30}", r"Lengths are whole numbers of tokens, from 1 to 1,073,741,824"),
        ("a.txt", "5\n1_000\n", "has '1_000' as length 2"),
        ("a.npy", "", "holds no .npy of lengths"),
        ("a.npz", "PK\x03\x04 torn", "holds no .npz of lengths"),
    ],
)
def test_a_bad_file_is_one_error(tmp_path, name, content, why):
    (tmp_path / name).write_text(content)
    with pytest.raises(LengthsError, match=why):
        read_lengths(str(tmp_path / name))


def test_arrays_that_are_no_lengths(tmp_path):
    over = np.array([2**63 + 5], np.uint64), f"has {2**63 + 5} as length 1"
    for number, (array, why) in enumerate(
        ((np.ones((2, 2), int), "2 dims"), (np.ones(2), "float64"), (np.array([[], []]), "2 dims"), over)
    ):
        np.save(tmp_path / f"{number}.npy", array)
        with pytest.raises(LengthsError, match=why):
            read_lengths(str(tmp_path / f"{number}.npy"))
    np.save(tmp_path / "huge.npy", np.ones(2, int))
    content = (tmp_path / "huge.npy").read_bytes()
    (tmp_path / "huge.npy").write_bytes(content.replace(b"(2,), }" + 13 * b" ", b"(99999999999999,), }"))
    with pytest.raises(LengthsError, match=r"holds no .npy of lengths"):
        read_lengths(str(tmp_path / "huge.npy"))
    np.savez(tmp_path / "a.npz", sizes=np.ones(2, int))
    with pytest.raises(LengthsError, match="no array 'lengths', but sizes"):
        read_lengths(str(tmp_path / "a.npz"))


def test_a_pickle_is_not_run(tmp_path):
    """Files from others never run code."""
    ran = []

    class Bomb:
        def __reduce__(self):
            return ran.append, (1,)

    np.save(tmp_path / "a.npy", np.array([Bomb()], dtype=object), allow_pickle=True)
    with pytest.raises(LengthsError, match="holds no"):
        read_lengths(str(tmp_path / "a.npy"))
    assert not ran


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("commoncrawl", "names no longest sequence"),
        ("commoncrawl:x", "names no longest sequence"),
        ("commoncrawl:0", "names no longest sequence"),
        ("commoncrawl:" + 5000 * "9", "names no longest sequence"),
        (5000 * "x", "there is no such file or folder"),
        ("comoncrawl:4096", "there is no such file or folder; did you mean 'commoncrawl'"),
        ("nothing.txt", "there is no such file or folder"),
    ],
)
def test_a_wrong_name_is_one_error(text, why):
    with pytest.raises(LengthsError, match=why):
        read_lengths(text)


@pytest.mark.parametrize("name", NAMED)
def test_distributions_are_cut_and_repeatable(name):
    found = read_lengths(f"{name}:4096")
    assert found.min() >= 1
    assert found.max() == 4096
    assert abs(np.median(found) / NAMED[name].median - 1) < 0.05
    assert (found == read_lengths(f"{name}:4096")).all()
    assert (found != read_lengths(f"{name}:4096", seed=1)).any()


def test_commoncrawl_is_as_it_is_published():
    """About 620 tokens per document, 97 % of them below 8K of 32K."""
    found = read_lengths("commoncrawl:32768")
    assert 560 <= found.mean() <= 680
    assert (found < 8192).mean() >= 0.96


def test_mini_batches_are_cut_as_a_loader_does():
    lengths = np.array([10, 20, 400])
    batches = mini_batches(lengths, 1000, count=500)
    assert len(batches) == 500
    assert all(600 < sum(batch) <= 1000 for batch in batches)
    drawn = [length for batch in batches for length in batch]
    assert all(abs(drawn.count(length) / len(drawn) - 1 / 3) < 0.02 for length in (10, 20, 400))
    for batch, following in itertools.pairwise(batches):
        assert sum(batch) + following[0] > 1000
    assert mini_batches(lengths, 1000, count=500) == batches
    assert mini_batches(np.array([5000]), 1000, count=2) == ((5000,), (5000,))


@pytest.mark.parametrize(("sequences", "count"), [(10, 8), (511, 8), (1_000, 5), (3_000, 2), (9_000, 2)])
def test_large_mini_batches_are_drawn_less_often(sequences, count):
    assert [len(one) for one in mini_batches(np.array([7]), 7 * sequences)] == [sequences] * count


def test_edges_end_with_the_longest():
    assert length_edges(100) == (32, 48, 64, 96, 100)
    assert length_edges(64) == (32, 48, 64)
    assert length_edges(20) == (20,)
