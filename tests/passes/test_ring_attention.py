"""Attention over a ring as steps: what travels, in what order, and what is refused."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxpar import losses
from fxpar.checking import check
from fxpar.errors import RingOfBinsError, VerifyError
from fxpar.graph_files import load_graph, save_graph
from fxpar.ir.exec_graph import ExecGraph, collective_kind
from fxpar.ir.strategy import Strategy
from fxpar.lowering import default_passes, lower
from fxpar.ops.traits import ATTENTION
from fxpar.passes.pack_documents import pack_documents
from tests.captured import Captured, llama, take, tokens

own, wait = torch.ops.fxpar, torch.ops._c10d_functional.wait_tensor.default


@functools.cache
def program(strategy: str) -> ExecGraph:
    found = lower(pack_documents(llama().graph), strategy)
    assert isinstance(found, ExecGraph)
    return found


def shifts(strategy: str, backward: bool) -> list:
    return [c for c in program(strategy).communications() if (c.kind, c.backward) == ("shift", backward)]


@pytest.mark.parametrize(("strategy", "ring", "tokens"), [("ring4", 4, 4), ("cp2.ring2", 2, 4), ("dp2.ring2", 2, 2)])
def test_keys_and_values_travel_and_nothing_else(strategy: str, ring: int, tokens: int) -> None:
    """Forward K - 1 times, backward as often with as many bytes of gradients; query heads do not count."""
    dims = program(strategy).dims[0].symbol
    B, kv_heads, E = 2, 2, 8
    kv_heads //= 2 if strategy.startswith("cp2") else 1
    T = 8 * tokens
    one = B * (T // ring) * kv_heads * 2 * E * 8
    forward, backward = (sum(c.wire_bytes(ring, {dims: T}) for c in shifts(strategy, side)) for side in (False, True))
    assert (forward, backward) == ((ring - 1) * one, 2 * (ring - 1) * one)


def test_a_transfer_starts_before_the_step_during_which_it_runs() -> None:
    nodes = list(program("ring4").body.graph.nodes)
    at = {node: i for i, node in enumerate(nodes)}
    for op, count in ((own.attention_block.default, 3), (own.attention_block_backward.default, 3)):
        steps = [n for n in nodes if n.target is op]
        for here, following in itertools.pairwise(steps):
            sent = [n for n in nodes if collective_kind(n) == "shift" and at[n] < at[here] < at[next(iter(n.users))]]
            assert sent, f"nothing travels during {here}"
            assert at[following] > at[next(iter(sent[0].users))]
        assert len(steps) == count + 1


def test_no_attention_is_left() -> None:
    assert not [n for n in program("ring4").body.graph.nodes if n.target in ATTENTION]


def without_rings() -> list:
    return [step for step in default_passes() if step.name != "ring_attention"]


def test_a_ladder_without_the_pass() -> None:
    """It would attend to the rank's own keys alone."""
    with pytest.raises(VerifyError, match="'lower_collectives' needs steps in place of attention over a ring"):
        lower(llama().graph, "ring2", passes=without_rings())
    lower(llama().graph, "cp2", passes=without_rings())


@pytest.mark.parametrize("strategy", ["rows2.ring2", "tp4[*.attention: rows4; *.ffn: ring4]", "ring2 > rows2"])
def test_no_bins_beside_a_ring(strategy: str) -> None:
    with pytest.raises(RingOfBinsError, match="no document crosses a bin"):
        lower(llama().graph, strategy)


def test_text_and_json() -> None:
    for text in ("ring4", "dp2.ring4", "cp2.ring4", "tp2+sp[*.attention: ring2]"):
        strategy = Strategy.parse(text)
        assert str(strategy) == text
        assert Strategy.from_json(strategy.to_json()) == strategy


@pytest.fixture(scope="module")
def few_heads() -> Captured:
    """One key-value head: Ulysses would stop at one rank, or do the work twice."""
    return llama(kv_heads=1)


RINGS = ("ring3", "cp2.ring2", "tp2.ring2+sp", "tp4+sp[*.attention: ring2.tp2]", "tp2.ring2[*.attention: ring4]")


@pytest.mark.parametrize("strategy", RINGS)
def test_gradients_are_those_of_one_device(few_heads: Captured, strategy: str) -> None:
    """Lengths that no degree divides, two rows without documents."""
    result = few_heads.check(strategy)
    assert result.ok, result


class Attends(nn.Module):
    """A layer of attention of another kind, between an embedding and a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embedding, self.qkv, self.head = nn.Embedding(31, 16), nn.Linear(16, 48), nn.Linear(16, 31)
        if kind == "sinks":
            self.sinks = nn.Parameter(torch.randn(4))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        places = position_ids[0]
        if self.kind == "alibi":
            apart = (places[None, :] - places[:, None]).to(x.dtype)
            slopes = 0.5 ** torch.arange(1, 5, dtype=x.dtype)
            mask = torch.where(apart > 0, float("-inf"), apart * slopes[:, None, None])[None]
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        elif self.kind == "sinks":
            y, _ = own.attention(q, k, v, None, None, True, 0, 0.5, 0.0, self.sinks[None, :, None])
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.kind != "both sides")
        y = y.transpose(1, 2).flatten(2)
        if self.kind == "counted":
            y = y + torch.ones_like(input_ids).cumsum(1)[..., None].to(x.dtype) / 100
        return self.head(x + y)


@functools.cache
def attends(kind: str) -> Captured:
    return take(Attends(kind), losses.causal_lm, tokens(31, 12, 7, 21, rows=1))


@pytest.mark.parametrize(
    ("kind", "travels", "why"),
    [
        ("alibi", False, "some attention is not over the ring"),
        ("both sides", True, ""),
        ("counted", True, "goes by the places of tokens in the row"),
        ("causal", True, ""),
        ("sinks", True, ""),
    ],
)
def test_attention_of_every_kind(kind: str, travels: bool, why: str) -> None:
    """Keys travel where no mask says who sees whom; tokens stay in order where an op goes by their places."""
    captured = attends(kind)
    packed = pack_documents(captured.graph)
    found = lower(packed, "ring3")
    assert ("shift" in found.collectives()) == travels
    assert (found.spread == 1) == bool(why)
    assert not why or why in found.notes[-1]
    (result,) = check(captured.graph, ["ring3"], captured.params, captured.buffers, captured.batches)
    assert (result.ok, result.documents) == (True, "in rows"), result


@pytest.mark.parametrize("strategy", ["tp2.cp2", "tp2.ring2+sp", "rows2", "pp1.dp2"])
def test_sinks_are_cut_as_heads_are(strategy: str) -> None:
    result = attends("sinks").check(strategy)
    assert result.ok, result


def test_steps_are_of_their_module() -> None:
    nodes: list[fx.Node] = [n for n in program("ring4").body.graph.nodes if collective_kind(n) == "shift"]
    assert {n.meta["fqn"] for n in nodes} == {"layers.0.attention"}


def test_a_graph_file(tmp_path: Path) -> None:
    """With the places of ranks as tokens, and the ranks that a row is spread over."""
    save_graph(tmp_path / "ring.fxpar", program("ring4"))
    found = load_graph(tmp_path / "ring.fxpar")
    assert isinstance(found, ExecGraph)
    assert (found.fingerprint(), found.spread) == (program("ring4").fingerprint(), 4)
