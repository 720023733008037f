"""Packed rows: boundaries, labels, positions; what counts as a valid token; errors that name the sequence."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.batching import GroupCost, MicroBatch, length_groups, plan_batch
from fxpar.batching.collate import are_inputs_again, check_keys, check_present, check_sequences, collate, valid_tokens
from fxpar.errors import BatchKeyError, MiniBatchError, NoValidTokenError, SequenceError, UnmarkedDocumentsError
from fxpar.ir.graph import TensorMeta
from fxpar.losses import IGNORE_INDEX
from tests.repeat import examples

KEYS = ("input_ids", "labels", "position_ids", "document_ids")
X = IGNORE_INDEX


def micro(*sequences: int) -> MicroBatch:
    return MicroBatch(sequences, 0)


def test_three_sequences_in_the_order_of_packing():
    sequences = [torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([5, 6], dtype=torch.int32)]
    row = collate(sequences, micro(2, 0, 1), KEYS)
    assert row["input_ids"].tolist() == [[5, 6, 1, 2, 3, 4]]
    assert row["labels"].tolist() == [[6, X, 2, 3, X, X]]
    assert row["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0]]
    assert row["document_ids"].tolist() == [[1, 1, 2, 2, 2, 3]]
    assert all(value.dtype == torch.int64 for value in row.values())
    assert collate(sequences, micro(2, 1), ["is_token", "positions"])["is_token"].tolist() == [[1, 1, 1]]
    given = {"input_ids": torch.tensor([7, 8]), "is_token": torch.tensor([1, 0])}
    assert collate([given], micro(0), ["is_token"])["is_token"].tolist() == [[1, 0]]


def test_only_what_is_asked_for():
    sequences = [torch.tensor([1, 2])]
    assert set(collate(sequences, micro(0), {"input_ids", "labels"})) == {"input_ids", "labels"}
    assert set(collate(sequences, micro(0), ["tokens", "positions"])) == {"tokens", "positions"}


def test_own_labels_are_used_as_they_are():
    sequences = [
        {"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([X, 9, 8])},
        torch.tensor([4, 5]),
    ]
    row = collate(sequences, micro(0, 1), KEYS)
    assert row["labels"].tolist() == [[X, 9, 8, 5, X]]
    assert valid_tokens(sequences) == 3


def test_other_keys_are_joined():
    sequences = [
        {"input_ids": torch.tensor([1, 2]), "weight": torch.tensor([0.5, 1.0])},
        {"input_ids": torch.tensor([3]), "weight": torch.tensor([2.0])},
    ]
    row = collate(sequences, micro(0, 1), ("input_ids", "position_ids", "weight"))
    assert row["weight"].tolist() == [[0.5, 1.0, 2.0]]


def test_names_of_other_frameworks():
    sequences = [{"tokens": torch.tensor([1, 2]), "targets": torch.tensor([2, 7])}]
    row = collate(sequences, micro(0), ("tokens", "targets", "positions"))
    assert {k: v.tolist() for k, v in row.items()} == {"tokens": [[1, 2]], "targets": [[2, 7]], "positions": [[0, 1]]}


@pytest.mark.parametrize("marker", ["position_ids", "document_ids"])
def test_sequences_of_several_documents(marker):
    own = {"position_ids": [0, 1, 0, 1, 2], "document_ids": [7, 7, 3, 3, 3]}[marker]
    packed = {"input_ids": torch.tensor([1, 2, 3, 4, 5]), marker: torch.tensor(own)}
    sequences = [torch.tensor([8, 9]), packed, torch.tensor([6])]
    row = collate(sequences, micro(0, 1, 2), KEYS)
    assert row["labels"].tolist() == [[9, X, 2, X, 4, 5, X, X]]
    assert row["position_ids"].tolist() == [[0, 1, 0, 1, 0, 1, 2, 0]]
    ids = row["document_ids"][0]
    same = (ids[:, None] == ids).int().tolist()
    assert same == [[int(a == b) for b in (0, 0, 1, 1, 2, 2, 2, 3)] for a in (0, 0, 1, 1, 2, 2, 2, 3)]
    assert valid_tokens(sequences) == 4


# ------------------------------------------------------------------------------------------ hazards H3, H4, H5
@given(st.lists(st.integers(1, 30), min_size=1, max_size=25), st.sampled_from(["dp4", "dp4+zero2", "dp2.tp2", "cp4"]))
@settings(max_examples=examples(25))
def test_a_plan_neither_loses_nor_mixes_tokens(lengths, strategy):
    """H3: positions and documents restart with every sequence. H4: no token is lost or made up, whatever the plan.

    H5: labels that count add up to the whole mini-batch's, so one scale weighs each token alike.
    """
    starts = torch.tensor([0, *lengths]).cumsum(0)
    sequences = [torch.arange(int(a), int(b)) for a, b in itertools.pairwise(starts)]  # every token once
    groups = length_groups({10: "dp4", 30: strategy}, world=4)
    plan = plan_batch(lengths, groups, [GroupCost(1e-3, 1e-6, 1e-8)] * 2, lambda order, run_s: 0.0)
    micros = [m for group in plan.groups for m in group.micro_batches()]
    rows = [collate(sequences, m, KEYS) for m in micros]
    tokens = torch.cat([row["input_ids"][0] for row in rows])
    assert tokens.sort().values.tolist() == list(range(sum(lengths)))
    for row in rows:
        ids, labels, positions, documents = (row[key][0] for key in KEYS)
        owner = torch.searchsorted(starts, ids, right=True) - 1
        assert torch.equal(positions, ids - starts[owner])
        assert torch.equal(documents[:, None] == documents, owner[:, None] == owner)
        is_last = ids == starts[owner + 1] - 1
        assert torch.equal(labels, torch.where(is_last, IGNORE_INDEX, ids + 1))
    valid = sum(int((row["labels"] != IGNORE_INDEX).sum()) for row in rows)
    assert valid == sum(lengths) - len(lengths)
    if valid:
        assert valid_tokens(sequences) == valid


def test_unmarked_documents_are_not_packed():
    sequences = [torch.tensor([1, 2]), torch.tensor([3, 4])]
    with pytest.raises(UnmarkedDocumentsError, match=r"attend to each other.*do not pack"):
        collate(sequences, micro(0, 1), ("input_ids", "labels"))
    assert collate(sequences, micro(1), ("input_ids", "labels"))["input_ids"].tolist() == [[3, 4]]


# ---------------------------------------------------------------------------------------------------- counting
def test_valid_tokens():
    assert valid_tokens([torch.tensor([1, 2, 3]), torch.tensor([1])]) == 2
    masked = {"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([X, X])}
    assert valid_tokens([masked, torch.tensor([1, 2])]) == 1


@pytest.mark.parametrize(
    "sequences",
    [
        [],
        [torch.tensor([1]), torch.tensor([2])],
        [{"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([X, X])}],
    ],
)
def test_no_valid_token(sequences):
    with pytest.raises(NoValidTokenError, match=f"none of the {len(sequences)} sequences"):
        valid_tokens(sequences)


LONG = torch.arange(20)
ONE_WORD = torch.full((20,), 5)


@pytest.mark.parametrize(
    ("sequences", "again"),
    [
        ([{"input_ids": LONG, "labels": LONG}], True),
        ([{"tokens": LONG, "targets": LONG.where(LONG > 3, X)}, {"input_ids": LONG, "labels": LONG}], True),
        ([{"input_ids": LONG, "labels": LONG}, LONG], False),  # those of the second are made
        ([{"input_ids": LONG, "labels": LONG.where(LONG != 7, 3)}], False),
        ([{"input_ids": LONG, "labels": LONG + 1}], False),
        ([{"input_ids": LONG[:9], "labels": LONG[:9]}], False),  # a few may be so by chance
        ([{"input_ids": ONE_WORD, "labels": ONE_WORD}], False),  # each next token is the same
    ],
)
def test_labels_that_nobody_has_shifted_are_told_from_others(sequences, again):
    assert are_inputs_again(sequences) == again


def test_lengths():
    assert check_sequences([torch.tensor([1, 2]), {"input_ids": torch.tensor([3])}]) == (2, 1)


# ------------------------------------------------------------------------------------------------------ errors
IDS = torch.tensor([1, 2, 3])
BAD = {
    "is empty": torch.tensor([], dtype=torch.int64),
    r"shape \[1, 3\]; it needs one dim": IDS[None],
    r"shape \[\]; it needs one dim": IDS[0],
    "float32; it needs integers.* a model without tokens is a task, .* or trained by": IDS.float(),
    "bool; it needs integers": IDS.bool(),
    "is a list": [1, 2, 3],
    r"has no 'input_ids' \(or 'tokens'\).* a model without tokens is a task, .* or trained by": {"labels": IDS},
    "'labels' as a list": {"input_ids": IDS, "labels": [1, 2, 3]},
    r"'labels' of shape \[2\] for 3 tokens": {"input_ids": IDS, "labels": IDS[:2]},
    r"'weight' of shape \[4\] for 3 tokens": {"input_ids": IDS, "weight": torch.ones(4)},
    r"'weight' of shape \[\] for 3 tokens": {"input_ids": IDS, "weight": torch.tensor(1.0)},
    "'labels' of torch.float32": {"input_ids": IDS, "labels": IDS.float()},
    "'position_ids' that start at 1": {"input_ids": IDS, "position_ids": IDS},
    "'input_ids' twice": {"input_ids": IDS, "tokens": IDS},
}


@pytest.mark.parametrize(("why", "bad"), BAD.items(), ids=list(BAD))
def test_bad_sequence_is_named(why, bad):
    for use in (check_sequences, valid_tokens, lambda given: collate(given, micro(1, 0), KEYS)):
        with pytest.raises(SequenceError, match=f"sequence 1 .*{why}"):
            use([IDS, bad])


def test_a_key_that_a_sequence_lacks():
    sequences = [{"input_ids": IDS, "weight": torch.ones(3)}, IDS]
    with pytest.raises(BatchKeyError, match=r"'weight', which sequence 1 .* has 'input_ids'"):
        collate(sequences, micro(0, 1), ("input_ids", "position_ids", "weight"))
    with pytest.raises(BatchKeyError, match="takes no sequences of tokens: train it by calls"):
        check_present([IDS], ["images"])
    with pytest.raises(BatchKeyError, match="as a mapping with 'images' of its length"):
        check_present([IDS], ["images", "tokens"])
    with pytest.raises(BatchKeyError, match="'bias', which sequence 0"):
        collate(sequences, micro(0, 1), ("input_ids", "position_ids", "bias"))


READ = {
    "tokens": TensorMeta((1, 9), torch.int64),
    "labels": TensorMeta((1, 9), torch.int64),
    "weight": TensorMeta((1, 9), torch.float32),
    "place": TensorMeta((1, 9, 2), torch.int64),
}


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"weight": None}, BatchKeyError, "'weight', which sequence 1"),
        ({"weight": torch.ones(3, 1)}, SequenceError, r"sequence 1 .*'weight' of shape \[3, 1\]; .* reads \[T\]"),
        ({"weight": torch.ones(3).cfloat()}, SequenceError, "'weight' of torch.complex64; .* reads torch.float32"),
        ({"weight": torch.ones(3).double()}, None, ""),
        ({"weight": torch.ones(3, dtype=torch.bool)}, None, ""),
        ({"place": torch.ones(3, dtype=torch.int64)}, SequenceError, r"'place' of shape \[3\]; .* reads \[T, 2\]"),
        ({"place": torch.ones(3, 3, dtype=torch.int64)}, SequenceError, r"of shape \[3, 3\]; .* reads \[T, 2\]"),
        ({"place": torch.ones(3, 2)}, SequenceError, "'place' of torch.float32; .* reads torch.int64"),
    ],
)
def test_what_a_step_reads_is_there_in_its_form(change, error, said):
    good = {"input_ids": IDS, "weight": torch.ones(3), "place": torch.ones(3, 2, dtype=torch.int32)}
    bad = {key: value for key, value in {**good, **change}.items() if value is not None}
    if error is None:
        check_keys([good, bad], READ)
        return
    with pytest.raises(error, match=said):
        check_keys([good, bad], READ)


def test_positions_that_jump_must_say_which_documents_there_are():
    reads = {**{"tokens": READ["tokens"]}, "position_ids": TensorMeta((1, 9), torch.int64)}
    jumping = {"input_ids": IDS, "positions": torch.tensor([0, 1, 7])}
    with pytest.raises(SequenceError, match=r"sequence 1 .*go from 1 to 7 at token 2: .*Mark them by 'document"):
        check_keys([IDS, jumping], reads)
    check_keys([{**jumping, "document_ids": torch.tensor([1, 1, 1])}], reads)
    check_keys([{**jumping, "positions": torch.tensor([0, 1, 0])}], reads)


W = torch.tensor
IDS_W = {"input_ids": IDS, "w": IDS}
UNHELD = {
    "int64 of int32": (W([1, 2**32 + 1, 0]), torch.int32, r"'w' with 4294967297 at \[1\]; .* reads torch.int32, which"),
    "int64 of int8": (W([0, 0, -129]), torch.int8, r"-129 at \[2\]"),
    "other signs": (W([5, 200, 0], dtype=torch.uint8), torch.int8, r"200 at \[1\]"),
    "no sign": (W([5, -1, 0]), torch.uint8, r"-1 at \[1\]"),
    "no sign, as wide": (W([5, -1, 0]), torch.uint64, r"-1 at \[1\]"),
    "half of uint64": (W([5, 2**63, 0], dtype=torch.uint64), torch.int64, r"9223372036854775808 at \[1\]"),
    "too long for float32": (W([2**24, 2**24 + 1, 0]), torch.float32, r"16777217 at \[1\]"),
    "beyond float16": (W([70000, 1, 0]), torch.float16, r"70000 at \[0\]"),
    "infinite": (W([1.0, -1e300, 0.0], dtype=torch.float64), torch.float32, r"-1e\+300 at \[1\]"),
    "infinite in half": (W([1.0, 7e4, 0.0]), torch.float16, r"70000.0 at \[1\]"),
}
HELD = {
    "narrow": (W([1, -(2**31), 2**31 - 1]), torch.int32),
    "unsigned": (W([1, 255, 0]), torch.uint8),
    "wide unsigned": (W([1, 65535, 0], dtype=torch.uint16), torch.int32),
    "rounded": (W([0.1, 1e-300, 3.0], dtype=torch.float64), torch.float32),
    "no number": (W([math.inf, math.nan, -math.inf], dtype=torch.float64), torch.float16),
    "exact": (W([2**24, 7, -(2**24)]), torch.float32),
    "of a mask": (W([True, False, True]), torch.int8),
    "complex": (W([1, 2, 3]), torch.complex64),
}


@pytest.mark.parametrize("case", UNHELD)
def test_a_value_that_the_captured_dtype_cannot_hold(case):
    value, dtype, said = UNHELD[case]
    sequences = [IDS_W, {"input_ids": IDS, "w": value}]
    with pytest.raises(SequenceError, match=f"sequence 1 .*{said}"):
        check_keys(sequences, {"tokens": READ["tokens"], "w": TensorMeta((1, 9), dtype)})


@pytest.mark.parametrize("case", HELD)
def test_values_that_it_holds(case):
    value, dtype = HELD[case]
    check_keys([{"input_ids": IDS, "w": value}], {"tokens": READ["tokens"], "w": TensorMeta((1, 9), dtype)})


def test_ids_and_labels_fit_as_well():
    narrow = {"tokens": TensorMeta((1, 9), torch.int32), "labels": TensorMeta((1, 9), torch.int8)}
    check_keys([IDS, {"tokens": IDS, "labels": IDS}], narrow)
    for sequence in (IDS + 2**31, {"tokens": IDS + 2**31}, {"input_ids": IDS, "labels": IDS + 127}):
        with pytest.raises(SequenceError, match="which cannot hold it"):
            check_keys([sequence], narrow)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32])
def test_a_label_is_not_taken_for_minus_100(dtype):
    """With bytes torch compares -100 as 156."""
    label = torch.iinfo(dtype).max + 1 - 100
    assert valid_tokens([{"input_ids": IDS, "labels": torch.full((3,), label).to(dtype)}]) == 3


def test_ids_of_files_of_tokens():
    """Two bytes without a sign are usual; torch can hardly compute with them."""
    given = {"input_ids": IDS, "labels": IDS, "position_ids": W([0, 1, 0]), "document_ids": W([1, 1, 2])}
    short = {key: value.to(torch.uint16) for key, value in given.items()}
    assert check_sequences([short]) == check_sequences([given])
    assert valid_tokens([short]) == valid_tokens([given])
    for key, value in collate([given], micro(0), KEYS).items():
        assert torch.equal(collate([short], micro(0), KEYS)[key], value), key


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("input_ids", IDS.to("meta"), "'input_ids' on the meta device"),
        ("w", torch.ones(3).to_sparse(), "'w' of layout torch.sparse_coo; give a dense tensor"),
    ],
)
def test_tensors_without_values_of_their_own(key, value, said):
    with pytest.raises(SequenceError, match=f"sequence 0 .*{said}"):
        check_sequences([{"input_ids": IDS, key: value}])


def test_a_bare_tensor_has_no_keys():
    check_present([IDS], ("tokens", "labels", "document_positions"))
    with pytest.raises(BatchKeyError, match=r"'weight', which sequence 0 .* has 'input_ids'"):
        check_present([IDS], ("weight",))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            torch.zeros(2, 5, dtype=torch.int64),
            r"is a Tensor.*list\(batch\) are the rows of this one, .*\[2, 5\]",
        ),
        ({"input_ids": torch.zeros(1, 5)}, r"is a dict.*one sequence alone is \[sequence\]"),
        (torch.zeros(30, dtype=torch.int64), r"is a Tensor\. Give a list .*; one sequence alone is \[sequence\]$"),
        ((torch.arange(3) for _ in range(2)), "is a generator"),
        (None, "is a NoneType"),
        (np.zeros((2, 5)), r"is an ndarray\. Give a list .*list\(batch\) are the rows of this one"),
    ],
)
def test_what_is_no_list_of_sequences(given, said):
    with pytest.raises(MiniBatchError, match=said):
        check_sequences(given)


def test_a_list_of_numbers_is_no_sequence():
    with pytest.raises(SequenceError, match="sequence 0 of the mini-batch is a list"):
        check_sequences([[1, 2, 3]])


class _OnGpu(torch.Tensor):
    device = torch.device("cuda", 0)


def test_sequences_on_two_devices():
    tokens = torch.arange(3)
    with pytest.raises(SequenceError, match=r"sequence 1 .*'input_ids' on cpu, those before it on cuda:0"):
        check_sequences([tokens.as_subclass(_OnGpu), tokens])
    assert check_sequences([{"input_ids": tokens.as_subclass(_OnGpu), "labels": tokens}]) == (3,)  # by column
