"""Sequences, mini-batches, exact resume, the same in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.data import LengthHistogram, MiniBatchLoader
from fxpar.data.cut import cut
from fxpar.errors import LoaderOptionError, LoaderStateError, NoSequencesError, OverlongError, TokenIdError
from tests.data.plain import in_memory
from tests.repeat import examples

ROOT = Path(__file__).resolve().parents[2]


def numbered(lengths):
    """Documents of consecutive numbers: a sequence tells where it comes from."""
    ends = np.cumsum(lengths)
    return [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def batches(loader, count=None):
    return [[sequence.tolist() for sequence in batch] for batch in islice(loader, count)]


many_lengths = st.lists(st.integers(0, 20), min_size=1, max_size=20).filter(lambda lengths: max(lengths) > 1)
budgets = st.sampled_from([{"batch_tokens": n} for n in (1, 7, 20, 1000)] + [{"batch_sequences": n} for n in (1, 3)])


# ----------------------------------------------------------------------------------------------------------- sequences
@given(lengths=many_lengths, max_length=st.integers(2, 25))
def test_split_keeps_every_token(lengths, max_length):
    tokens = in_memory(numbered(lengths))
    made = cut(tokens, max_length, "split")
    pieces = [tokens.flat[s : s + n].tolist() for s, n in zip(made.starts, made.lengths, strict=True)]
    assert all(2 <= len(piece) <= max_length for piece in pieces)
    kept = [token for piece in pieces for token in piece]
    assert kept == sorted(set(kept))
    # Only what cannot carry a label is left out.
    lost = set(range(sum(lengths))) - set(kept)
    assert len(lost) == made.report.short_tokens == sum(n == 1 or (n % 2 and max_length == 2) for n in lengths)
    assert all(any(set(piece) <= set(document) for document in numbered(lengths)) for piece in pieces)
    overlong = [n for n in lengths if n > max_length]
    assert made.report.overlong == len(overlong)
    assert made.report.pieces == sum(-(-n // max_length) for n in overlong)


@given(lengths=many_lengths, max_length=st.integers(2, 25), overlong=st.sampled_from(["split", "truncate"]))
def test_report_adds_up(lengths, max_length, overlong):
    made = cut(in_memory(numbered(lengths)), max_length, overlong)
    report = made.report
    assert report.tokens + report.truncated_tokens + report.short_tokens == sum(lengths)
    assert (report.sequences, report.tokens) == (len(made.lengths), made.lengths.sum())
    assert report.documents == len(lengths)
    if overlong == "truncate":
        assert report.short == sum(n < 2 for n in lengths)
        assert report.truncated_tokens == sum(max(n - max_length, 0) for n in lengths)


@given(
    lengths=many_lengths,
    max_length=st.integers(2, 25),
    overlong=st.sampled_from(["split", "truncate"]),
    each=st.integers(1, 5),
)
def test_lengths_that_are_multiples(lengths, max_length, overlong, each):
    """At most as many tokens are lost as the last sequence of a document has too many."""
    tokens = in_memory(numbered(lengths))
    try:
        made = cut(tokens, max_length, overlong, each)
    except (LoaderOptionError, NoSequencesError):
        assert min(max_length, max(lengths)) < max(each, 2)
        return
    report = made.report
    assert not (made.lengths % each).any()
    assert all(2 <= length <= max_length for length in made.lengths)
    assert report.tokens == made.lengths.sum()
    assert report.tokens + report.truncated_tokens + report.short_tokens + report.uneven_tokens == sum(lengths)
    if overlong == "split" and each > 1:
        assert report.tokens == sum(n - n % each for n in lengths)
    else:
        assert report.uneven_tokens <= (each - 1) * report.sequences


def test_reports_in_words():
    tokens = in_memory(numbered([9, 1, 3]))
    assert str(cut(tokens, 4, "split").report).splitlines() == [
        "3 documents give 4 sequences, 12 tokens",
        "1 overlong documents split into 3 sequences",
        "1 sequences of less than two tokens left out, 1 tokens",
    ]
    assert "1 overlong documents truncated, 5 tokens left out" in str(cut(tokens, 4, "truncate").report)
    assert str(cut(tokens, 5, "split", 3).report).splitlines() == [
        "3 documents give 4 sequences, 12 tokens",
        "1 overlong documents split into 3 sequences",
        "1 sequences of less than 3 tokens left out, 1 tokens",
    ]
    assert str(cut(tokens, 5, "truncate", 2).report).splitlines()[-1] == (
        "2 tokens at the ends of sequences left out: lengths are multiples of 2"
    )


def test_overlong_documents_can_be_an_error():
    tokens = in_memory(numbered([3, 9, 12]), ["a.txt", "b.txt", "c.txt"])
    with pytest.raises(
        OverlongError, match=r"'b\.txt' has 9 tokens, the longest sequence allowed has 8 \(the first of 2"
    ):
        MiniBatchLoader(tokens, batch_sequences=1, max_length=8, overlong="error")
    assert MiniBatchLoader(tokens, batch_sequences=1, max_length=12, overlong="error").report.overlong == 0


# -------------------------------------------------------------------------------------------------------- mini-batches
@given(lengths=many_lengths, budget=budgets, shuffle=st.booleans(), seed=st.integers(0, 2**40))
def test_an_epoch_gives_each_sequence_once(lengths, budget, shuffle, seed):
    tokens = in_memory(numbered(lengths))
    loader = MiniBatchLoader(tokens, max_length=6, seed=seed, shuffle=shuffle, epochs=2, **budget)
    made = list(loader)
    assert all(sequence.dtype == torch.int64 and sequence.dim() == 1 for batch in made for sequence in batch)
    sequences = [sequence.tolist() for batch in made for sequence in batch]
    half = len(sequences) // 2
    expected = [tokens.flat[s : s + n].tolist() for s, n in zip(*_cut_of(tokens, 6), strict=True)]
    for epoch in (sequences[:half], sequences[half:]):
        assert sorted(epoch) == sorted(expected)
        assert shuffle or epoch == expected
    assert list(loader) == []


def _cut_of(tokens, max_length):
    made = cut(tokens, max_length, "split")
    return made.starts, made.lengths


@given(lengths=many_lengths, limit=st.integers(1, 40))
def test_token_budget_is_filled_and_kept(lengths, limit):
    loader = MiniBatchLoader(in_memory(numbered(lengths)), max_length=6, batch_tokens=limit, epochs=1)
    made = [[len(sequence) for sequence in batch] for batch in loader]
    assert all(sum(batch) <= limit or len(batch) == 1 for batch in made)
    assert all(sum(batch) + after[0] > limit for batch, after in pairwise(made))


@given(lengths=many_lengths, budget=budgets, seed=st.integers(0, 5))
def test_drop_last_leaves_out_what_does_not_fill_a_mini_batch(lengths, budget, seed):
    def epoch(drop_last):
        return [
            [s.tolist() for s in batch]
            for batch in MiniBatchLoader(
                in_memory(numbered(lengths)), max_length=6, seed=seed, epochs=1, drop_last=drop_last, **budget
            )
        ]

    whole, full = epoch(False), epoch(True)
    last = whole[-1]
    asked = budget.get("batch_tokens", budget.get("batch_sequences"))
    has = sum(map(len, last)) if "batch_tokens" in budget else len(last)
    assert full == (whole[:-1] if has < asked and len(whole) > 1 else whole)


def test_a_resumed_loader_may_drop_the_last_mini_batch():
    def loader(drop_last):
        return MiniBatchLoader(in_memory(numbered([3] * 5)), max_length=6, batch_sequences=2, drop_last=drop_last)

    first = loader(False)
    batches(first, 2)
    resumed = loader(True)
    resumed.load_state_dict(first.state_dict())
    assert (first.epoch, first.position, resumed.epoch, resumed.position) == (0, 4, 1, 0)
    assert [len(batch) for batch in batches(resumed, 4)] == [2, 2, 2, 2]


def test_sequence_budget():
    loader = MiniBatchLoader(in_memory(numbered([3] * 7)), max_length=6, batch_sequences=3, epochs=1)
    assert [len(batch) for batch in loader] == [3, 3, 1]


def test_mini_batches_are_copies():
    tokens = in_memory(numbered([3, 4]))
    for sequence in next(MiniBatchLoader(tokens, max_length=6, batch_sequences=2)):
        sequence.fill_(-1)
    assert tokens.flat.tolist() == list(range(7))


def test_epochs_and_seeds_have_their_own_orders():
    tokens = in_memory(numbered([2] * 50))
    loader = MiniBatchLoader(tokens, max_length=6, batch_sequences=50)
    orders = [str(batch) for batch in batches(loader, 3)]
    orders += [str(batches(MiniBatchLoader(tokens, max_length=6, batch_sequences=50, seed=1), 1)[0])]
    assert len(set(orders)) == 4


def test_order_is_the_one_of_earlier_versions():
    """A checkpoint of an earlier version goes on with the same sequences: this list must never change."""
    loader = MiniBatchLoader(in_memory(numbered([2] * 10)), max_length=2, batch_sequences=10, seed=5)
    first, second = batches(loader, 2)
    assert [sequence[0] // 2 for sequence in first] == [3, 6, 2, 4, 5, 7, 0, 9, 8, 1]
    assert [sequence[0] // 2 for sequence in second] == [2, 9, 0, 6, 1, 5, 8, 7, 4, 3]


# -------------------------------------------------------------------------------------------------------------- resume
@settings(max_examples=examples(40))
@given(lengths=many_lengths, budget=budgets, stop=st.integers(0, 30), seed=st.integers(0, 5), shuffle=st.booleans())
def test_resume_is_exact(lengths, budget, stop, seed, shuffle):
    def loader():
        tokens = in_memory(numbered(lengths))
        return MiniBatchLoader(tokens, max_length=6, seed=seed, shuffle=shuffle, epochs=3, **budget)

    whole = batches(loader())
    first = loader()
    before = batches(first, stop)
    state = json.loads(json.dumps(first.state_dict()))
    second = loader()
    second.load_state_dict(state)
    assert before + batches(second) == whole
    # Back to the same place, in a loader that is already elsewhere.
    first.load_state_dict(state)
    assert before + batches(first) == whole


@given(lengths=many_lengths, before=budgets, after=budgets, stop=st.integers(0, 20))
def test_resume_with_another_budget_goes_on_at_the_same_sequence(lengths, before, after, stop):
    def loader(budget):
        return MiniBatchLoader(in_memory(numbered(lengths)), max_length=6, epochs=2, **budget)

    def sequences(made):
        return [sequence for batch in made for sequence in batch]

    first, second = loader(before), loader(after)
    head = batches(first, stop)
    second.load_state_dict(first.state_dict())
    assert sequences(head) + sequences(batches(second)) == sequences(batches(loader(before)))


def test_more_epochs_on_resume():
    tokens = in_memory(numbered([4] * 5))
    first = MiniBatchLoader(tokens, max_length=6, batch_sequences=2, epochs=1)
    head = batches(first)
    second = MiniBatchLoader(tokens, max_length=6, batch_sequences=2, epochs=2)
    second.load_state_dict(first.state_dict())
    assert head + batches(second) == batches(MiniBatchLoader(tokens, max_length=6, batch_sequences=2, epochs=2))


def test_other_data_or_settings_are_named():
    tokens = in_memory(numbered([4, 5, 6]))
    base = {"max_length": 6, "batch_sequences": 2}
    state = MiniBatchLoader(tokens, **base).state_dict()
    cases = [
        (in_memory(numbered([4, 5, 7])), {}, "corpus was '.*' and is '.*'"),
        (tokens.hold_out(1)[0], {}, r"documents was '3 .*' and is '2 .*'"),
        (tokens, {"max_length": 5}, r"max_length was 6 and is 5\. Use the files, tokenizer and data settings"),
        (tokens, {"overlong": "truncate"}, "overlong was 'split' and is 'truncate'"),
        (tokens, {"seed": 1}, "seed was 0 and is 1"),
        (tokens, {"shuffle": False}, "shuffle was True and is False"),
    ]
    for other, changes, message in cases:
        loader = MiniBatchLoader(other, **{**base, **changes})
        with pytest.raises(LoaderStateError, match=message):
            loader.load_state_dict(state)
        assert (loader.epoch, loader.position) == (0, 0)


def test_states_that_are_none():
    loader = MiniBatchLoader(in_memory(numbered([4, 5, 6])), max_length=6, batch_sequences=2)
    good = loader.state_dict()
    for bad in (
        {},
        {**good, "position": "1"},
        {**good, "position": 3},
        {**good, "position": -1},
        {**good, "epoch": -1},
        {**good, "epoch": True},
        {**good, "fingerprint": None},
        {**good, "format": 99},
    ):
        with pytest.raises(LoaderStateError, match="cannot resume"):
            loader.load_state_dict(bad)


def test_options_that_make_no_sense():
    tokens = in_memory(numbered([4]))
    for options, message in (
        ({}, "one of batch_tokens and batch_sequences"),
        ({"batch_tokens": 1, "batch_sequences": 1}, "one of batch_tokens and batch_sequences"),
        ({"batch_tokens": 0}, "batch_tokens 0 is too small"),
        ({"batch_sequences": 0}, "batch_sequences 0 is too small"),
        ({"batch_sequences": 1, "epochs": 0}, "epochs 0 is too small"),
        ({"batch_sequences": 1, "seed": -1}, "seed -1 is too small"),
        ({"batch_sequences": 1, "vocab_size": 0}, "vocab_size 0 is too small"),
        ({"batch_sequences": 1, "max_length": 1}, "max_length 1 is too small"),
        ({"batch_sequences": 1, "overlong": "splt"}, "did you mean 'split'"),
    ):
        with pytest.raises(LoaderOptionError, match=message):
            MiniBatchLoader(tokens, **{"max_length": 4, **options})
    with pytest.raises(NoSequencesError, match="none of 2 documents"):
        MiniBatchLoader(in_memory([[1], []]), max_length=4, batch_sequences=1)


def test_ids_outside_of_the_vocabulary_are_named():
    loader = MiniBatchLoader(
        in_memory([[1, 2, 3], [4, 5, 6, 9], [7, 8]]), max_length=9, batch_sequences=2, shuffle=False, vocab_size=9
    )
    with pytest.raises(TokenIdError, match=r"sequence 1 .*position 3: 'input_ids' is 9, but the vocabulary has 9 rows"):
        next(loader)
    assert loader.position == 0


# ------------------------------------------------------------------------------------------------------ many processes
SCRIPT = """
import sys
from pathlib import Path
from fxpar.data import MiniBatchLoader, open_corpus, prepare, train_tokenizer
corpus = open_corpus("python-stdlib", glob="json/*.py")
tokenizer = train_tokenizer(corpus, 400, cache_dir=sys.argv[1])
tokens = prepare(corpus, tokenizer, cache_dir=sys.argv[1])
training, validation = tokens.hold_out(2)
loader = MiniBatchLoader(training, batch_tokens=2000, max_length=1000, epochs=2)
print([[s.tolist() for s in batch] for batch in loader])
print(loader.state_dict(), validation.identity, tokens.folder.name)
"""


@pytest.mark.nightly  # ranks compare their batches in every step
def test_every_process_sees_the_same(tmp_path):
    """Nothing depends on the seed of `hash`, and each process here trains its own tokenizer."""
    runs = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / seed)]
        runs.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    first, second = (run.communicate(timeout=120)[0] for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert len(first) > 10_000
    assert first == second


# ------------------------------------------------------------------------------------------------------------- lengths
@given(lengths=st.lists(st.integers(0, 10**6), min_size=1))
def test_histogram_adds_up(lengths):
    made = LengthHistogram.of(lengths)
    assert (made.count, made.tokens, made.longest) == (len(lengths), sum(lengths), max(lengths))
    assert sum(one.sequences for one in made.bins) == made.count
    assert sum(one.tokens for one in made.bins) == made.tokens
    assert made.bins[0].sequences
    assert made.bins[-1].sequences
    for one in made.bins:
        assert one.sequences == sum(one.low <= length <= one.high for length in lengths)
        assert one.high & (one.high - 1) == 0
    for share, length in made.quantiles.items():
        assert sum(one <= length for one in lengths) >= share * len(lengths)
        assert sum(one < length for one in lengths) < max(share * len(lengths), 1)


def test_histogram_in_words():
    made = LengthHistogram.of([3, 4, 4, 600])
    lines = str(made).splitlines()
    assert list(made.distribution()) == lines[1:]  # for who has said how many there are
    assert lines[0] == "4 sequences, 611 tokens"
    assert lines[1] == "tokens per sequence: mean 153, 50% <= 4, 90% <= 600, 99% <= 600, longest 600"
    assert lines[2].split() == ["3", "..", "4", "75.0%", "of", "sequences", "1.8%", "of", "tokens", "#" * 30]
    assert LengthHistogram.of([]).bins == ()
