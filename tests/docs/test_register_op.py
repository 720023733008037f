"""What a package says of its op in one call of `register_op` counts where documents share a row, where low precision
computes, and where graph files are read.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpar
from fxpar.annotate.driver import annotate_and_search
from fxpar.batching.documents import mark_documents
from fxpar.errors import GraphFormatError, OpContractError, OpExistsError, PackingError
from fxpar.flow import padding_hazard
from fxpar.flow.statements import own_document, per_token, tokens_before
from fxpar.flow.value import Flow
from fxpar.graph_files import vocabulary
from fxpar.ir.exec_graph import compile_graph
from fxpar.losses import IGNORE_INDEX, cross_entropy_sum, next_token_labels
from fxpar.ops.traits import DECLARED, OpTraits
from fxpar.passes.pack_documents import pack_documents
from fxpar.precision import Precision, with_precision
from fxpar.rules.table import TABLE, register_op
from fxpar.rules.validate import trials, validate_op
from tests.docs.extras import PACKAGE

LENGTHS = (7, 1, 5)
WIDE, LOW = torch.float32, torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def extras() -> Iterator[None]:
    sys.path.append(str(PACKAGE))
    importlib.import_module("fxpar_extras.ops")
    yield
    sys.path.remove(str(PACKAGE))


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr("fxpar.rules.table.TABLE", dict(TABLE))
    monkeypatch.setattr("fxpar.ops.traits.DECLARED", dict(DECLARED))


def mean() -> Any:
    return torch.ops.extras.document_mean.default


def declare(op: Any, **said: Any) -> None:
    """Nothing else is declared of the op."""
    fxpar.ops.traits.DECLARED[op] = OpTraits(**said)


Layer = Callable[["Net", Tensor, Tensor], Tensor]


class Net(nn.Module):
    """One layer on embedded tokens [1, T, 6], residual."""

    def __init__(self, layer: Layer, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = layer
        self.table, self.head = nn.Embedding(11, 6, dtype=dtype), nn.Linear(6, 11, bias=False, dtype=dtype)
        self.norm, self.weight = nn.LayerNorm(6, dtype=dtype), nn.Parameter(torch.randn(6, 6, dtype=dtype))

    def forward(self, input_ids: Tensor, document_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        return self.head(x + self.layer(self, x, document_ids))


def averages(net: Net, x: Tensor, document_ids: Tensor) -> Tensor:
    return torch.ops.extras.document_mean(x.sin(), document_ids).tanh()


def averages_all(net: Net, x: Tensor, document_ids: Tensor) -> Tensor:
    return torch.ops.extras.document_mean(x, torch.zeros(*x.shape[:2], dtype=torch.int64))


def products(net: Net, x: Tensor, document_ids: Tensor) -> Tensor:
    return torch.ops.extras.relu2(x, net.weight)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy_sum(model(batch["input_ids"], batch["document_ids"]), batch["labels"])


def documents() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(11, (1, length), generator=generator)
        found.append(
            {"input_ids": ids, "labels": next_token_labels(ids), "document_ids": torch.full((1, length), number)}
        )
    return found


def packed_row() -> dict[str, Tensor]:
    """All documents, and padding of 3 tokens as one more."""
    padding = {"input_ids": 0, "labels": IGNORE_INDEX, "document_ids": len(LENGTHS)}
    return {
        key: torch.cat([*(d[key] for d in documents()), torch.full((1, 3), value)], 1) for key, value in padding.items()
    }


def captured(layer: Layer, dtype: torch.dtype = torch.float64) -> tuple[Net, fxpar.LogicalGraph]:
    model = Net(layer, dtype)
    return model, fxpar.capture(model, loss_of, documents()[0])


# ------------------------------------------------------------------------------------------------------------ the op
def test_the_rule_and_the_gradient_are_right():
    x, ids = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True), torch.tensor([[1, 1, 2, 2, 2, 9]] * 2)
    assert torch.autograd.gradcheck(lambda x: torch.ops.extras.document_mean(x, ids), (x,))
    assert validate_op(mean(), (x.detach(), ids), degree=2) == []
    assert len(trials(mean(), (x.detach(), ids), sections=())) == 2


def test_it_agrees_with_one_device():
    model, logical = captured(averages)
    batches = [packed_row()]
    found = fxpar.check(logical, ["tp2", "dp2.tp2+sp", "cp2"], dict(model.named_parameters()), {}, batches)
    assert [max(one.loss_rel_err, one.grad_max_rel_err) < 1e-10 for one in found] == [True] * 3


# --------------------------------------------------------------------------------------------------------- documents
def gradients(model: Net, loss: Tensor) -> list[Tensor]:
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [loss.detach(), *(g if g is not None else torch.zeros(()) for g in grads)]


def test_a_packed_row_is_its_documents_alone():
    model, logical = captured(averages)
    packed = pack_documents(logical)
    assert packed.packing is not None
    assert packed.packing.padding_hazard is None
    tensors = {**dict(model.named_parameters()), **packed.constants, **mark_documents(packed.inputs, packed_row())}
    tensors |= {"scale": torch.ones((), dtype=torch.float64), "seed": torch.tensor(0)}
    with torch.no_grad():
        values = compile_graph(packed.gm.graph)(*(tensors[info.fqn] for info in packed.inputs))
    got = {out.fqn: value for out, value in zip(packed.outputs, values, strict=True)}
    alone = [gradients(model, loss_of(model, document)) for document in documents()]
    names = ["loss", *(name for name, _ in model.named_parameters())]
    for name, *terms in zip(names, *alone, strict=True):
        if name in got:
            torch.testing.assert_close(got[name], sum(terms), rtol=1e-10, atol=1e-10)
    assert {"loss", "table.weight", "head.weight"} <= set(got)


@pytest.mark.parametrize(
    ("layer", "flow", "why"),
    [
        (averages, None, "uses the numbers of documents"),
        (averages, lambda call: None, "uses the numbers of documents"),
        (averages, tokens_before, "lets tokens see those of other documents"),
        (averages_all, own_document, "is not told the documents"),
        (averages_all, None, "mixes tokens"),
    ],
)
def test_what_mixes_documents_is_refused_by_name(layer, flow, why):
    declare(mean(), flow=flow)
    _, logical = captured(layer)
    with pytest.raises(PackingError, match=rf"extras.document_mean.* at .*test_register_op.py.* {why}"):
        pack_documents(logical)


@pytest.mark.parametrize(
    ("layer", "flow", "pads"),
    [
        (averages, own_document, True),
        (averages_all, own_document, False),
        (averages_all, None, False),
        (averages_all, tokens_before, True),
    ],
)
def test_padding_at_the_end(layer, flow, pads):
    declare(mean(), flow=flow)
    assert (padding_hazard(captured(layer)[1]) is None) == pads


@pytest.mark.parametrize(("flow", "packs"), [(per_token, True), (None, False)])
def test_an_op_without_a_rule_may_treat_each_token_by_itself(flow, packs):
    op = torch.ops.extras.relu2.default
    del fxpar.rules.table.TABLE[op]
    declare(op, flow=flow)
    _, logical = captured(products)
    if packs:
        assert pack_documents(logical).packing is not None
    else:
        with pytest.raises(PackingError, match=r"extras.relu2.*mixes tokens"):
            pack_documents(logical)


@pytest.mark.parametrize("made", [3, Flow, (Flow(), Flow())])
def test_a_statement_that_states_nothing(made):
    declare(mean(), flow=lambda call: made)
    _, logical = captured(averages)
    with pytest.raises(OpContractError, match=r"op extras.document_mean.default: its flow statement returned"):
        pack_documents(logical)


def test_a_statement_that_raises():
    declare(mean(), flow=lambda call: 1 / 0)
    _, logical = captured(averages)
    with pytest.raises(OpContractError, match=r"op extras.document_mean.default: its flow= raised ZeroDivisionError"):
        pack_documents(logical)


# --------------------------------------------------------------------------------------------------------- precision
def computes(layer: Layer, precision: str, name: str = "document_mean") -> torch.dtype:
    """The dtype of what the op reads and returns in the forward."""
    _, logical = captured(layer, WIDE)
    graph = with_precision(logical, Precision.parse(precision)).gm.graph
    nodes = [n for n in graph.nodes if name in str(n.target) and not n.meta.get("backward")]
    (found,) = {m.dtype for n in nodes for m in (n.meta["tensor"], n.args[0].meta["tensor"])}
    return found


@pytest.mark.parametrize(
    ("word", "precision", "dtype"),
    [
        (None, "bf16", LOW),
        ("low", "bf16", LOW),
        ("fp32", "bf16", WIDE),
        ("fp32", "bf16+low(norms|softmax|loss)", WIDE),
        ("norm", "bf16", WIDE),
        ("norm", "bf16+low(norms)", LOW),
        ("softmax", "bf16+low(norms)", WIDE),
        ("softmax", "bf16+low(softmax)", LOW),
        ("loss", "bf16", WIDE),
        ("loss", "bf16+low(loss)", LOW),
    ],
)
def test_it_computes_in_what_it_says(word, precision, dtype):
    declare(mean(), computes=word)
    assert computes(averages, precision) == dtype


def test_the_package_says_fp32():
    assert computes(averages, "bf16") == WIDE


@pytest.mark.parametrize(("word", "dtype"), [("moves", WIDE), ("low", LOW)])
def test_what_moves_takes_the_dtype_of_its_readers(word, dtype):
    declare(mean(), computes=word)
    assert computes(lambda net, x, ids: net.norm(torch.ops.extras.document_mean(x, ids)), "bf16") == dtype


class Gate(nn.Module):
    """A reciprocal root and a product: no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.extras.relu2(x * (x.square() + 1).rsqrt(), self.weight)


@pytest.mark.parametrize(("flops", "dtype"), [(lambda operands, results: 1, LOW), (None, WIDE)])
def test_an_op_that_counts_operations_is_a_product(flops, dtype):
    for op in (torch.ops.extras.relu2.default, torch.ops.extras.relu2_backward.default):
        declare(op, flops=flops)
    model = Net(lambda net, x, ids: net.gate(x), WIDE)
    model.gate = Gate()
    logical = fxpar.capture(model, loss_of, documents()[0])
    low = with_precision(logical, Precision.parse("bf16")).gm.graph
    (root,) = low.find_nodes(op="call_function", target=torch.ops.aten.rsqrt.default)
    assert root.meta["tensor"].dtype == dtype


class FewKeys(nn.Module):
    """Keys and values of one head, each made by a product of the package; queries of four."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.q = nn.Linear(6, 8), nn.Linear(8, 32)
        self.k, self.v = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x).tanh()
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = (torch.ops.extras.relu2(x, w)[:, None] for w in (self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def test_what_makes_keys_begins_at_a_product():
    logical = fxpar.capture(FewKeys(), lambda m, b: m(b["x"]).square().sum(), {"x": torch.randn(1, 5, 6)})
    graph, (search,) = annotate_and_search(logical, fxpar.Strategy.parse("tp4"))
    params = {
        info.fqn
        for node, info in zip(graph.placeholders, graph.inputs, strict=True)
        if info.kind == "param" and search.problem.class_of[node] in search.problem.narrow
    }
    assert params == {"k", "v"}


# ------------------------------------------------------------------------------------------------------------ errors
@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"rule": 3}, "rule=3 is not a function"),
        ({"rule": lambda view: [], "partials": "sum"}, "partials='sum' is not a function"),
        ({"partials": lambda view: []}, "partials= needs rule="),
        ({"flops": 12}, "flops=12 is not a function"),
        ({"flow": "documents"}, "flow='documents' is not a function"),
        ({"precision": "fp23"}, "precision='fp23' is none of low, fp32, .*did you mean 'fp32'"),
    ],
)
def test_what_cannot_be_said_of_an_op(said, why):
    with pytest.raises(OpContractError, match=rf"op aten.bernoulli.p: {why}"):
        register_op(torch.ops.aten.bernoulli.p, **said)
    assert torch.ops.aten.bernoulli.p not in fxpar.rules.table.TABLE


def test_what_is_left_out_stays():
    op = torch.ops.aten.bernoulli.p
    register_op(op, precision="norm", flow=per_token)
    with pytest.raises(OpExistsError, match=r"bernoulli.p is registered already.*replace=True"):
        register_op(op, precision="fp32")
    register_op(op, precision="fp32", replace=True)
    assert fxpar.ops.traits.declared(op) == OpTraits(flow=per_token, computes="fp32")


def test_graph_files_may_hold_an_op_without_a_rule(monkeypatch):
    monkeypatch.setattr(vocabulary, "TABLE", {})
    assert vocabulary.find_target("extras.document_mean.default") is mean()
    monkeypatch.setattr(vocabulary, "DECLARED", {})
    with pytest.raises(GraphFormatError, match="not registered"):
        vocabulary.find_target("extras.document_mean.default")
