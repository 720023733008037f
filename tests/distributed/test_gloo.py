"""The programs on real processes: gloo collectives, several micro-batches of different length, pickled on the way."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxpar import losses
from fxpar.checking.eager import relative_error
from fxpar.lowering import lower
from fxpar.runtime import bind, pad
from fxpar.runtime.forked import run_forked
from fxpar.runtime.micro import local_batch
from fxpar.tracer import capture
from fxpar.transport import ProcessGroups
from tests.repeat import thinned


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def attended(self, x):
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(width, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = x + self.attended(self.norm(x))
        return x + self.down(F.gelu(self.up(x)))


class Attention(Block):
    """Without norm and feed-forward, which compile for as long again."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        del self.norm, self.up, self.down

    def forward(self, x):
        return x + self.attended(x)


class Projected(nn.Module):
    """One product, of which each rank has a part: the compiler writes few kernels."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down_proj(torch.tanh(self.up_proj(x)))


class Model(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.emb = nn.Embedding(37, 16)
        self.blocks = nn.ModuleList([block(16, 4)])
        self.head = nn.Linear(16, 37, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_sum(model, batch):
    return losses.cross_entropy_sum(model(batch["input_ids"]), batch["labels"])


def make_batch(length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, 37, (1, length + 1), generator=generator)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


@pytest.fixture(scope="module")
def logical(model):
    return capture(model, loss_sum, make_batch(12))


def eager(model, batches) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = sum(loss_sum(model, batch) for batch in batches)
    names, params = zip(*model.named_parameters(), strict=True)
    return loss.detach(), dict(zip(names, torch.autograd.grad(loss, params), strict=True))


@pytest.mark.parametrize("strategies", [("dp2", "tp2+sp", "cp2"), ("dp2.tp2+zero1", "dp2.tp2+sp+zero3")])
def test_equals_eager_on_gloo_ranks(model, logical, strategies):
    programs = [lower(logical, strategy) for strategy in strategies]
    blobs = [pickle.dumps(program) for program in programs]
    batches = [make_batch(length) for length in (11, 8, 13)]
    loss, grads = eager(model, batches)
    whole = {name: p.detach() for name, p in model.named_parameters()}

    def run(rank: int, blob: bytes) -> tuple[float, float]:
        mine = pickle.loads(blob)
        mesh = mine.strategy.mesh
        bound = bind(mine, rank, ProcessGroups().names(mesh, mine.axes()))
        places = zip(mine.inputs, mine.stored_inputs, strict=True)
        bound.prepare({i.fqn: s.dist.take(whole[i.fqn], rank) for i, s in places if i.kind == "param"}, {})
        replicas = mine.strategy.degree("dp")
        plan = [batches[r::replicas] for r in range(replicas)]
        own = plan[mesh.coordinate(rank).get("dp", 0)]
        idle = max(map(len, plan)) - len(own) if mine.strategy.zero >= 2 else 0
        for turn, batch in enumerate(own + own[:1] * idle):
            bound.run(local_batch(mine, pad(mine, batch), rank), 1.0, idle=turn >= len(own))
        result = bound.finish()
        worst = max(
            relative_error(result["grads"][o.fqn], s.dist.take(grads[o.fqn], rank), grads[o.fqn])
            for o, s in zip(mine.outputs, mine.stored_outputs, strict=True)
            if o.kind == "grad"
        )
        return relative_error(result["loss"], loss), worst

    for errors in run_forked(programs[0].strategy.world, lambda rank: [run(rank, blob) for blob in blobs]):
        for strategy, (loss_error, grad_error) in zip(strategies, errors, strict=True):
            assert loss_error <= 1e-12, strategy
            assert grad_error <= 1e-10, strategy


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("block", thinned([Projected, Attention, Block], [Projected]))
def test_inductor_computes_the_same_and_serves_new_lengths(block):
    """On the first rank, as compiling takes most of a minute; the other rank meets it in the collectives."""
    torch.manual_seed(0)
    model = Model(block).double()
    program = lower(capture(model, loss_sum, make_batch(12)), "tp2")
    whole = {name: p.detach() for name, p in model.named_parameters()}

    def work(rank: int) -> float:
        places = zip(program.inputs, program.stored_inputs, strict=True)
        local = {i.fqn: s.dist.take(whole[i.fqn], rank) for i, s in places if i.kind == "param"}
        groups = ProcessGroups().names(program.strategy.mesh, program.axes())
        worst = 0.0
        bounds = [bind(program, rank, groups, compile=how) for how in ("eager" if rank else "inductor", "eager")]
        torch.compiler.set_stance("default")
        for i, length in enumerate((12, 7, 19)):
            if i == 1:
                torch.compiler.set_stance("fail_on_recompile")
            results = []
            for bound in bounds:
                bound.prepare(local, {})
                bound.run(make_batch(length), 1.0)
                results.append(bound.finish())
            compiled, plain = results
            worst = max(worst, relative_error(compiled["loss"], plain["loss"]))
            for fqn, grad in plain["grads"].items():
                worst = max(worst, relative_error(compiled["grads"][fqn], grad))
        return worst

    assert max(run_forked(2, work, timeout_s=400)) <= 1e-10
