"""Packing is exact where it is said to be possible, and refused, by name of the op, where it is not."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.batching.documents import mark_documents
from fxpar.errors import PackingError
from fxpar.flow import padding_hazard
from fxpar.ir.exec_graph import compile_graph
from fxpar.ir.graph import LogicalGraph
from fxpar.losses import IGNORE_INDEX, mse_sum
from fxpar.passes.pack_documents import pack_documents
from fxpar.tracer import capture
from tests.flow.layers import HARMFUL, HARMLESS, LENGTHS, Net, alone, documents, loss_of, sites
from tests.repeat import examples, thinned

PADDING = 3


@functools.cache
def captured(*names: str) -> tuple[Net, LogicalGraph]:
    layers = [HARMLESS[name] if name in HARMLESS else HARMFUL[name].layer for name in names]
    model = Net(layers)
    return model, capture(model, loss_of, documents()[0])


def packed_row(padding: int = PADDING) -> dict[str, torch.Tensor]:
    """All documents in one row, and padding as one more."""
    found = documents()
    ids = torch.cat([d["input_ids"] for d in found] + [torch.zeros(1, padding, dtype=torch.int64)], 1)
    labels = torch.cat([d["labels"] for d in found] + [torch.full((1, padding), IGNORE_INDEX)], 1)
    numbers = torch.repeat_interleave(torch.arange(len(LENGTHS) + 1), torch.tensor([*LENGTHS, padding]))[None]
    return {"input_ids": ids, "labels": labels, "document_ids": numbers}


def run(graph: LogicalGraph, model: Net, row: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Loss and gradients of a row, in the order of the model's parameters."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **graph.constants}
    tensors |= mark_documents(graph.inputs, row)
    tensors |= {"scale": torch.ones((), dtype=torch.float64), "seed": torch.tensor(0)}
    with torch.no_grad():
        values = compile_graph(graph.gm.graph)(*(tensors[info.fqn] for info in graph.inputs))
    found = {out.fqn: value for out, value in zip(graph.outputs, values, strict=True)}
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    return [found["loss"], *(found.get(name, zero) for name, zero in zeros.items())]


def distance(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max().clamp(1e-3)) for a, b in zip(found, truth, strict=True))


# Nightly: others of an op's kind are on every run, and go the same way through the analysis.
RARELY = {"mask_by_columns_first", "amax over tokens", "vector norm", "prod", "sort of tokens", "last token", "roll"}
RARELY |= {"mean", "variance", "log softmax over tokens", "ones @ x", "linear attention by pairs"}


def often(names: Iterable[str]) -> list:
    return thinned(names, [name for name in names if name not in RARELY])


@pytest.mark.parametrize("name", often(HARMLESS))
def test_a_packed_row_is_its_documents_alone(name):
    model, logical = captured(name)
    packed = pack_documents(logical)
    assert packed.packing is not None
    assert packed.packing.padding_hazard is None
    assert distance(run(packed, model, packed_row()), alone(model)) < 1e-10


@pytest.mark.parametrize("name", often(HARMFUL))
def test_what_mixes_tokens_is_named(name):
    model, logical = captured(name)
    with pytest.raises(PackingError, match=rf"{HARMFUL[name].op}.* at .*layers\.py:\d+"):
        pack_documents(logical)
    if HARMFUL[name].shows:
        forced = pack_documents(logical, force=True)
        assert not distance(run(forced, model, packed_row(0)), alone(model)) < 1e-6


def test_sites():
    """What is rewritten, by kind of layer."""
    found = {name: sites(captured(name)[1]) for name in ("causal", "mask_of_a_buffer", "counted_positions")}
    assert found == {
        "causal": ["documents"],
        "mask_of_a_buffer": ["softmax", "table"],
        "counted_positions": ["count"],
    }


@given(st.lists(st.sampled_from([*HARMLESS] * 3 + [*HARMFUL]), min_size=2, max_size=3, unique=True))
@settings(max_examples=examples(4), deadline=None)
def test_a_stack_of_layers(names):
    model, logical = captured(*names)
    if any(name in HARMFUL for name in names):
        with pytest.raises(PackingError):
            pack_documents(logical)
    else:
        assert distance(run(pack_documents(logical), model, packed_row()), alone(model)) < 1e-10


# ----------------------------------------------------------------------------------------------------- padding
PADS_AS_IT_IS = {"causal", "table_of_positions", "shifted_table", "looked_up_positions", "counted_positions"}
PADS_AS_IT_IS |= {"counted_ones", "buffer_by_position", "gathered", "rotary", "per_token"}
SEES_ONLY_WHAT_IS_BEFORE = {"running sum", "token before", "convolution", "first token"}
SEES_ONLY_WHAT_IS_BEFORE |= {"linear attention by pairs", "table along its columns", "tokens as indices"}


@pytest.mark.parametrize("name", often([*HARMLESS, *HARMFUL]))
def test_padding_of_one_sequence(name):
    """Where no hazard is seen, padding changes nothing; where padding changes something, a hazard is seen."""
    model, logical = captured(name)
    document = documents()[0]
    padded = {
        "input_ids": torch.nn.functional.pad(document["input_ids"], (0, PADDING)),
        "labels": torch.nn.functional.pad(document["labels"], (0, PADDING), value=IGNORE_INDEX),
    }
    gap = distance(run(logical, model, padded), run(logical, model, document))
    if padding_hazard(logical) is None:
        assert gap < 1e-10
    if name in PADS_AS_IT_IS:
        assert padding_hazard(logical) is None
    elif name in HARMFUL and name not in SEES_ONLY_WHAT_IS_BEFORE:
        assert padding_hazard(logical) is not None


class Counted(torch.nn.Module):
    """Scales tokens by a running sum of the numbers of their documents."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(11, 4)

    def forward(self, input_ids: torch.Tensor, document_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids) * document_ids.cumsum(1)[..., None]


def test_numbers_of_documents_may_only_be_compared():
    batch = {**documents()[0], "document_ids": torch.ones(1, LENGTHS[0], dtype=torch.int64)}
    logical = capture(Counted(), lambda m, b: m(b["input_ids"], b["document_ids"]).sum(), batch)
    with pytest.raises(PackingError, match=r"cumsum.* uses the numbers of documents"):
        pack_documents(logical)


def _extra(kind: str, net: Net, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    size = logits.logsumexp(-1).square()
    return {
        "of all tokens": size.sum(),
        "of labelled tokens": (size * (labels != IGNORE_INDEX)).sum(),
        "masked": size.masked_fill(labels == IGNORE_INDEX, 0.0).sum() * 0.1,
        "of the weights": net.a.square().sum(),
        "distance to what is nothing at padding": mse_sum(logits[..., 0], (labels != IGNORE_INDEX).double()),
        "of sums that move": torch.stack(torch.stack((size.sum(), size.sum() * 3)).flip(0).unbind(0)).repeat(2).sum(),
        "a sum for each token": size.sum().expand(labels.shape[1]).sum(),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "packs", "pads"),
    [
        ("of all tokens", True, False),
        ("of labelled tokens", True, True),
        ("masked", True, True),
        ("of the weights", False, False),
        ("of sums that move", True, False),
        ("a sum for each token", False, False),
        ("distance to what is nothing at padding", True, False),
    ],
)
def test_terms_of_the_loss(kind, packs, pads):
    """A term of all tokens packs, but counts padding; one of the weights counts once per row."""
    model = Net([HARMLESS["table_of_positions"]], functools.partial(_extra, kind))
    logical = capture(model, loss_of, documents()[0])
    if not packs:
        with pytest.raises(PackingError, match=r"gives a loss that is not a sum|more than a sum"):
            pack_documents(logical)
        return
    packed = pack_documents(logical)
    assert packed.packing is not None
    assert (packed.packing.padding_hazard is None) == pads
    assert distance(run(packed, model, packed_row(PADDING if pads else 0)), alone(model)) < 1e-10
    if not pads:
        assert re.search(r"test_pack_documents\.py:.*padding included", str(packed.packing.padding_hazard))
        assert not distance(run(packed, model, packed_row()), alone(model)) < 1e-6
