"""The loader draws what torchtitan's own data-parallel ranks would draw, and either goes on from the other's state."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torchtitan.hf_datasets.text_datasets import (
    ChatDataLoader,
    HFDataSource,
    HuggingFaceTextDataLoader,
    InterleavedHuggingFaceTextDataLoader,
)

from fxpar.errors import DataDrawError, DataRanksError, UnsupportedRecipeError
from fxpar.losses import IGNORE_INDEX
from fxpar.recipes import torchtitan_api as titan
from fxpar.recipes.debug import CHAT
from fxpar.recipes.documents import Documents, split_rows
from fxpar.recipes.loader import LengthGroupedDataLoader
from fxpar.runtime.forked import run_forked

SEQ_LEN = 24
ROWS = 2  # of one batch of the recipe's loader
COUNT = 12  # documents
KINDS = ("text", "interleaved", "chat")

Batch = tuple[dict[str, Tensor], Tensor]


class Bytes(titan.BaseTokenizer):
    """A token per byte."""

    def __init__(self) -> None:
        super().__init__()
        self.eos_id = 256
        self.set_chat_template(CHAT)

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        return [256] * add_bos + list(text.encode()) + [256] * add_eos

    def decode(self, tokens: list[int]) -> str:
        return bytes(t for t in tokens if t < 256).decode()

    def get_vocab_size(self) -> int:
        return 257


def texts(count: int, seed: int) -> Dataset:
    lengths = torch.randint(1, 60, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Dataset.from_dict({"text": [chr(97 + i % 26) * n for i, n in enumerate(lengths)]})


def messages(sample: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": sample["q"]}, {"role": "assistant", "content": sample["a"]}]


@pytest.fixture
def inner(request: pytest.FixtureRequest, tmp_path, monkeypatch: pytest.MonkeyPatch):
    """The settings of one of torchtitan's loaders, endless, over a few dozen documents."""
    return configured(request.param, tmp_path, monkeypatch)


def configured(kind: str, tmp_path, monkeypatch, *, infinite: bool = True, count: int = COUNT) -> Any:
    monkeypatch.setattr(titan.text_datasets, "DATASETS", dict(titan.text_datasets.DATASETS))
    for seed in (0, 1):
        titan.add_dataset(f"Made_{seed}", lambda path, seed=seed: texts(count, seed), lambda sample: sample["text"])
    if kind == "text":
        return HuggingFaceTextDataLoader.Config(dataset="Made_0", infinite=infinite)
    if kind == "interleaved":
        sources = [HFDataSource(dataset=f"Made_{i}", infinite=infinite, weight=i + 1) for i in (0, 1)]
        return InterleavedHuggingFaceTextDataLoader.Config(sources=sources)
    file = tmp_path / "chats.json"
    file.write_text("\n".join(json.dumps({"q": "?" * (1 + i % 3), "a": "!" * (i % 7)}) for i in range(count)))
    return ChatDataLoader.Config(
        dataset_path="json",
        load_dataset_kwargs={"data_files": str(file), "split": "train", "cache_dir": str(tmp_path / "cache")},
        sample_processor=messages,
        infinite=infinite,
    )


def seq_len_of(inner: Any) -> int:
    return 70 if isinstance(inner, ChatDataLoader.Config) else SEQ_LEN  # longer chats than a row are dropped


def ours(inner: Any, data_ranks: int, turns: int, tokenizer: Any = None) -> LengthGroupedDataLoader:
    config = LengthGroupedDataLoader.Config(inner=inner, rows=ROWS, data_ranks=data_ranks)
    return config.build(
        dp_world_size=1,
        dp_rank=0,
        tokenizer=tokenizer or Bytes(),
        seq_len=seq_len_of(inner),
        local_batch_size=ROWS * data_ranks * turns,
    )


def stock(inner: Any, data_ranks: int) -> list[Any]:
    return [
        inner.build(
            dp_world_size=data_ranks,
            dp_rank=rank,
            tokenizer=Bytes(),
            seq_len=seq_len_of(inner),
            local_batch_size=ROWS,
        )
        for rank in range(data_ranks)
    ]


def stock_steps(loaders: list[Any], turns: int) -> Iterator[Batch]:
    """What torchtitan's ranks take in a step: `turns` batches of each, accumulated."""
    sources = [iter(loader) for loader in loaders]
    while True:
        taken = [next(source) for _ in range(turns) for source in sources]
        yield (
            {key: torch.cat([inputs[key] for inputs, _ in taken]) for key in taken[0][0]},
            torch.cat([labels for _, labels in taken]),
        )


def merged_state(loaders: list[Any]) -> dict[str, Any]:
    """As distributed checkpoints hold the states of several ranks: each under a key of its own."""
    return {key: value for loader in loaders for key, value in loader.state_dict().items()}


def assert_same(found: list[tuple[dict[str, Documents], Tensor]], expected: list[Batch]) -> None:
    """The documents of the rows, and what torchtitan counts in labels."""
    assert len(found) == len(expected)
    for (inputs, counted), (expected_inputs, labels) in zip(found, expected, strict=True):
        documents = split_rows(expected_inputs, labels)
        assert as_lists(inputs["documents"]) == as_lists(documents)
        assert (counted.numel(), int((counted != IGNORE_INDEX).sum())) == (labels.numel(), documents.valid_tokens)


def as_lists(documents: Documents) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of each."""
    return [(one["input_ids"].tolist(), one["labels"].tolist()) for one in documents.sequences()]


SETTINGS = pytest.mark.parametrize(("data_ranks", "turns"), [(1, 1), (1, 3), (2, 1), (2, 2)])
EACH_KIND = pytest.mark.parametrize("inner", KINDS, indirect=True)


@SETTINGS
@EACH_KIND
def test_rows_and_state_are_those_of_torchtitans_ranks(inner, data_ranks, turns):
    mine, theirs = ours(inner, data_ranks, turns), stock(inner, data_ranks)
    mine_steps, their_steps = iter(mine), stock_steps(theirs, turns)
    for _ in range(8):  # more than once through the data
        (found,) = islice(mine_steps, 1)
        (expected,) = islice(their_steps, 1)
        assert found[1].shape == (ROWS * data_ranks * turns * seq_len_of(inner),)
        assert_same([found], [expected])
        assert mine.state_dict() == merged_state(theirs)
    assert mine.state_dict().keys() == {"world_size", *(f"dp_rank_{rank}" for rank in range(data_ranks))}


@SETTINGS
@EACH_KIND
def test_resume(inner, data_ranks, turns):
    """From ours to ours, from ours to torchtitan's, from torchtitan's to ours: the same rows go on."""
    first, theirs = ours(inner, data_ranks, turns), stock(inner, data_ranks)
    steps, their_steps = iter(first), stock_steps(theirs, turns)
    list(islice(steps, 3))
    list(islice(their_steps, 3))
    state, their_state = first.state_dict(), merged_state(theirs)
    rest = list(islice(their_steps, 4))

    second, third, fourth = ours(inner, data_ranks, turns), ours(inner, data_ranks, turns), stock(inner, data_ranks)
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert_same(list(islice(iter(second), 4)), rest)
    third.load_state_dict(their_state)
    assert_same(list(islice(iter(third), 4)), rest)
    for loader in fourth:
        loader.load_state_dict(state)
    assert_same(list(islice(steps, 4)), list(islice(stock_steps(fourth, turns), 4)))


@pytest.mark.parametrize(("saved", "now"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("inner", ["text"], indirect=True)
def test_the_state_of_another_number_of_ranks_names_the_flags(inner, saved, now):
    state = ours(inner, saved, 1).state_dict()
    with pytest.raises(DataRanksError) as error:
        ours(inner, now, 1).load_state_dict(state)
    assert f"{saved} data-parallel rank(s)" in str(error.value)
    assert f"draws as {now}." in str(error.value)
    assert f"--fxpar.data-ranks {saved}" in str(error.value)
    assert "--checkpoint.exclude-from-loading dataloader" in str(error.value)


@pytest.mark.parametrize("inner", ["text"], indirect=True)
def test_no_state_begins_anew(inner):
    loader = ours(inner, 2, 1)
    loader.load_state_dict({})
    assert_same(list(islice(iter(loader), 2)), list(islice(stock_steps(stock(inner, 2), 1), 2)))


@pytest.mark.parametrize("inner", ["text"], indirect=True)
def test_rows_that_no_number_of_batches_makes(inner):
    config = LengthGroupedDataLoader.Config(inner=inner, rows=2, data_ranks=3)
    with pytest.raises(UnsupportedRecipeError) as error:
        config.build(dp_world_size=1, dp_rank=0, tokenizer=Bytes(), seq_len=8, local_batch_size=8)
    assert str(error.value) == (
        "recipe option training.global_batch_size: 8 rows are not a multiple of training.local_batch_size (2) times "
        "fxpar.data_ranks (3). Set it to a multiple of 6"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_finite_data_ends(kind, tmp_path, monkeypatch):
    """Whole mini-batches only, each as torchtitan would draw it."""
    inner = configured(kind, tmp_path, monkeypatch, infinite=False, count=17)
    found = list(ours(inner, 1, 2))
    batches = list(stock(inner, 1)[0])
    assert 2 <= len(found) == len(batches) // 2
    assert_same(found, list(islice(stock_steps(stock(inner, 1), 2), len(found))))


@pytest.mark.parametrize("inner", ["text"], indirect=True)
def test_documents_are_found_in_the_rows(inner):
    """The text as the engine sees it: each byte is predicted once."""
    (batch, counted) = next(iter(ours(inner, 1, 6)))
    documents = batch["documents"].sequences()
    assert all(int(d["input_ids"][0]) == 256 or len(d["input_ids"]) <= SEQ_LEN for d in documents)
    tokens = torch.cat([d["labels"] for d in documents])
    expected = [t for text in texts(COUNT, 0)["text"] for t in (*text.encode(), 256)]
    assert tokens.tolist() == expected[: len(tokens)]
    assert len(tokens) == counted.numel()


@pytest.mark.parametrize("inner", ["chat"], indirect=True)
def test_chats_keep_their_prompts_and_lose_their_padding(inner):
    (batch, counted) = next(iter(ours(inner, 1, 2)))
    documents = batch["documents"].sequences()
    for document in documents:
        text = Bytes().decode(document["input_ids"].tolist())
        assert text.startswith("user: ?")
        answers = [int(t) for t in document["labels"] if t >= 0]
        assert Bytes().decode(answers).strip("!") == ""
        assert answers[-1] == 256
    assert len(documents) > 4  # several in a row
    assert sum(len(d["input_ids"]) for d in documents) < counted.numel()


# ----------------------------------------------------------------------------------------------------- ranks of a node
class Counting(Bytes):
    """Knows how many texts it has encoded."""

    def __init__(self) -> None:
        super().__init__()
        self.texts = 0

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        self.texts += 1
        return super().encode(text, add_bos, add_eos)


def drawn_on_ranks(inner: Any, data_ranks: int, nodes: list[str]) -> list[dict[str, Any]]:
    """Three steps, a state, and three more by a second loader that goes on from it: of each rank, on these nodes."""

    def work(rank: int) -> dict[str, Any]:
        os.environ["GROUP_RANK"] = nodes[rank]
        tokenizer = Counting()
        first, second = (ours(inner, data_ranks, 2, tokenizer) for _ in range(2))
        items = list(islice(iter(first), 3))
        texts, state = tokenizer.texts, first.state_dict()
        second.load_state_dict(state)
        items += islice(iter(second), 3)
        return {"texts": texts, "state": state, "built": len(first.loaders.mine), "items": items}

    return run_forked(len(nodes), work)


@pytest.mark.parametrize(
    ("data_ranks", "nodes", "built"),
    [(1, "aa", [1, 0]), (2, "aa", [1, 1]), (3, "aa", [2, 1]), (1, "aabb", [1, 0, 1, 0]), (1, "ab", [1, 1])],
)
@pytest.mark.parametrize("inner", ["text"], indirect=True)
def test_one_rank_of_a_node_draws_for_all(inner, data_ranks, nodes, built):
    theirs = stock(inner, data_ranks)
    steps = stock_steps(theirs, 2)
    expected = list(islice(steps, 3))
    state = merged_state(theirs)
    expected += islice(steps, 3)
    found = drawn_on_ranks(inner, data_ranks, list(nodes))
    assert [one["built"] for one in found] == built
    for one in found:
        assert_same(one["items"], expected)
        assert one["state"] == state
        assert (one["texts"] > 0) == (one["built"] > 0)


@pytest.mark.parametrize("inner", ["text"], indirect=True)
def test_tokens_are_not_copied_to_the_device(inner):
    """torchtitan copies the tensors of a batch: a byte per place, not three numbers of 8 bytes."""
    (inputs, counted) = next(iter(ours(inner, 1, 1)))
    copied = [value for value in (*inputs.values(), counted) if isinstance(value, Tensor)]
    assert sum(value.nbytes for value in copied) == ROWS * SEQ_LEN


class Broken(Bytes):
    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        raise RuntimeError("this text has no tokens")


@pytest.mark.parametrize("inner", ["text"], indirect=True)
def test_a_loader_that_fails_fails_on_all_ranks(inner):
    """The first rank with its own error, the other one says which rank it was."""

    def work(rank: int) -> str:
        with pytest.raises((RuntimeError, DataDrawError), match="this text has no tokens") as error:
            next(iter(ours(inner, 1, 1, Broken())))
        return f"{error.typename}: {error.value}"

    first, second = run_forked(2, work)
    assert first == "RuntimeError: this text has no tokens"
    assert second == (
        "DataDrawError: rank 0, which draws the data of this node, has failed: RuntimeError: this text has no tokens. "
        "Its own log says where"
    )


@pytest.mark.parametrize("inner", ["text"], indirect=True)
def test_a_loader_that_cannot_be_built_fails_on_all_ranks(inner):
    inner.dataset = "none_such"

    def work(rank: int) -> str:
        with pytest.raises((ValueError, DataDrawError), match="none_such is not supported") as error:
            ours(inner, 1, 1)
        return error.typename

    assert run_forked(2, work) == ["ValueError", "DataDrawError"]
