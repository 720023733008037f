"""A cut must hold for every batch: no part of a tensor whose size depends on the number of tokens is cut by numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar.ir.dist_config import Shard
from fxpar.lowering import lower_forward
from fxpar.rules.option import OpView, TensorRef
from fxpar.rules.table import options
from fxpar.runtime.plain import PlainRunner
from fxpar.tracer import capture_forward
from tests.forwards import error, local_params, on_ranks

aten = torch.ops.aten
WIDTH, VOCAB, LENGTH = 16, 53, 12


class Net(nn.Module):
    """Tokens, `mix`, a feed-forward layer that tensor parallelism cuts, a head."""

    def __init__(self, mix: Callable[[Net, Tensor], Tensor], rows: int) -> None:
        super().__init__()
        self.mix = mix
        self.embedding, self.table = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(rows, WIDTH))
        self.up, self.down, self.head = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.mix(self, self.embedding(input_ids))
        return self.head(x + self.down(F.gelu(self.up(x))))


def halves(net: Net, x: Tensor) -> Tensor:
    middle = x.shape[1] // 2
    return torch.cat([x[:, middle:], x[:, :middle]], 1)


MIXES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "rows of a table": lambda net, x: x + net.table[: x.shape[1]],
    "later rows": lambda net, x: x + net.table[2 : x.shape[1] + 2],
    "first tokens": lambda net, x: x + x[:, :4].mean(1, keepdim=True),
    "prefix": lambda net, x: torch.cat([net.table[None, :4], x], 1).tanh()[:, 4:],
    "first tokens at the end": lambda net, x: torch.cat([x[:, 4:], x[:, :4]], 1),
    "halves": halves,
    "twice": lambda net, x: torch.cat([x, x], 1).tanh()[:, x.shape[1] :] * x,
}


@pytest.mark.parametrize("strategy", ["tp2+sp", "cp2"])
@pytest.mark.parametrize(
    ("name", "rows"), [*((name, 64) for name in MIXES), ("rows of a table", 8192), ("later rows", 8192)]
)
def test_forwards_alone(name, rows, strategy):
    """More rows and fewer than what stands for the number of tokens while placements are found."""
    torch.manual_seed(0)
    net = Net(MIXES[name], rows).double()
    with torch.no_grad():
        graph = capture_forward(net, (), {"input_ids": torch.zeros(1, 9, dtype=torch.int64)}, gradients=False)
        batch = {"input_ids": torch.randint(VOCAB, (1, LENGTH))}
        want = net(**batch)
    program, params = lower_forward(graph, strategy), dict(net.named_parameters())

    @torch.no_grad()
    def work(runner: PlainRunner, rank: int, replica: int) -> Tensor:
        return runner(local_params(program, params, rank), {}, (), batch, seed=0, on_gradients=lambda found: None)

    assert all(error({"": found}, {"": want}) <= 1e-10 for found in on_ranks(program, work))


@pytest.mark.parametrize(("dynamic", "cut"), [(((), ()), True), (((1,), ()), False)])
def test_unequal_sections_are_of_one_size(dynamic, cut):
    """The first 4 of 2,018: sections if that is the size, none if it stands for a number of tokens."""
    view = OpView(aten.slice.Tensor, (TensorRef(0), 1, 0, 4), (), ((1, 2018),), ((1, 4),), dynamic)
    found = options(view, 2, [((True, 0), Shard(1))])
    assert any(option.outputs == (Shard(1),) for option in found) == cut
