"""The Dynamo backend: an untouched training loop on every rank gives the losses and weights of one device."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch._dynamo  # isort: skip
from fxpar.dynamo import BackendOptions, backend
from fxpar.errors import BackendOptionError, FxparWarning, StrategySyntaxError, WorldSizeError
from fxpar.ir.strategy import Strategy
from fxpar.models.llama import Llama, LlamaOptions
from fxpar.runtime.forked import run_forked
from tests import warm  # noqa: F401
from tests.captured import Norms
from tests.repeat import thinned

pytestmark = pytest.mark.compiler
# Imports what compiling needs: here once, and not in every forked rank (seconds each).
torch.compiler.list_backends()


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model: Any, strategy: str = "dp1", *, dynamic: bool | None = True, **options: Any) -> Any:
    return torch.compile(model, backend=backend, options={"strategy": strategy, **options}, dynamic=dynamic)


class Net(nn.Module):
    """Rows in, classes out; widths that divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(6, 11), nn.LayerNorm(11), nn.Linear(11, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(F.gelu(self.into(x))))


# -------------------------------------------------------------------------------------------------- a training loop
def llama() -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaOptions(layers=1, dim=16, heads=4, kv_heads=2, ffn=24, vocab=31, tied=True)).double()


def batch(step: int, replica: int) -> dict[str, Tensor]:
    """Another length in every step and for every replica."""
    length = 7 + 3 * step + 2 * replica
    generator = torch.Generator().manual_seed(10 * step + replica)
    ids = torch.randint(31, (2, length), generator=generator)
    positions = torch.arange(length).expand(2, length).clone()
    return {"input_ids": ids, "position_ids": positions, "labels": ids.roll(-1, 1)}


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["input_ids"], batch["position_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def train(strategy: str, rank: int, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """The loop as written for one device."""
    replica = Strategy.parse(strategy).mesh.coordinate(rank).get("dp", 0)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    parallel, losses = compiled(model, strategy), []
    for step in range(steps):
        loss = loss_of(parallel, batch(step, replica))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def reference(replicas: int, steps: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for step in range(steps):
        found = [loss_of(model, batch(step, replica)) for replica in range(replicas)]
        (sum(found) / replicas).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([float(loss.detach()) for loss in found])
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", thinned(["tp2+sp", "cp2", "dp2", "dp2.tp2"], ["cp2"]))
def test_training_loop(strategy):
    parsed = Strategy.parse(strategy)
    losses, weights = reference(parsed.degree("dp"), 3)
    for rank, (found, ends) in enumerate(run_forked(parsed.world, lambda rank: train(strategy, rank, 3))):
        replica = parsed.mesh.coordinate(rank).get("dp", 0)
        for have, want in zip(found, losses, strict=True):
            assert abs(have - want[replica]) <= 1e-10 * want[replica]
        for name, end in ends.items():
            assert float((end - weights[name]).abs().max() / weights[name].abs().max()) <= 1e-10


SEVERAL = {11: "dp2", 40: "tp2"}


def train_several(rank: int) -> tuple[list[float], dict[str, Tensor]]:
    """Steps of up to 11 tokens feed a batch per rank, longer ones the same batch."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    parallel = torch.compile(model, backend=backend, options={"strategies": SEVERAL}, dynamic=True)
    losses = []
    for one in (batch(0, rank), batch(3, 0), batch(2, 0), batch(3, 0)):
        loss = loss_of(parallel, one)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with pytest.raises(Exception, match="none takes 41 tokens; the last limit is 40"):
        loss_of(parallel, batch(10, 2))
    with pytest.raises(Exception, match=r"ranks come to different strategies by their tokens \(0: dp2, 1: tp2\)"):
        loss_of(parallel, batch(1, rank))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.slow
def test_each_call_runs_under_the_strategy_for_its_length():
    """dp2 for the first step, tp2 for the others: weights are those of one device, with the mean over replicas."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    wanted = []
    for batches in ([batch(0, 0), batch(0, 1)], [batch(3, 0)], [batch(2, 0)], [batch(3, 0)]):
        found = [loss_of(model, one) for one in batches]
        (sum(found) / len(found)).backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append([float(loss.detach()) for loss in found] * (2 // len(found)))
    for rank, (losses, ends) in enumerate(run_forked(2, train_several)):
        for have, want in zip(losses, wanted, strict=True):
            assert abs(have - want[rank]) <= 1e-10 * want[rank]
        for name, p in model.named_parameters():
            weight = p.detach()
            assert float((ends[name] - weight).abs().max() / weight.abs().max()) <= 1e-10


# ----------------------------------------------------------------------------------- what Dynamo makes of a program
def same_as_eager(model: nn.Module, program: Any, *inputs: Tensor, strategy: str = "dp1") -> None:
    """Output and gradients of `program` compiled equal those of itself on a copy of the model."""
    other = copy.deepcopy(model)
    expected = program(other, *inputs)
    expected.sum().backward()
    found = compiled(lambda *args: program(model, *args), strategy)(*inputs)
    found.sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12, msg=name)


def count_compilations(model: nn.Module, *inputs: Tensor, dynamic: bool | None) -> int:
    graphs = []

    def counting(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        graphs.append(gm)
        return backend(gm, example_inputs, **kwargs)

    parallel = torch.compile(model, backend=counting, options={"strategy": "dp1"}, dynamic=dynamic)
    for x in inputs:
        torch.testing.assert_close(parallel(x), model(x), rtol=1e-10, atol=1e-12)
    return len(graphs)


def rows(count: int) -> Tensor:
    return torch.randn(count, 6, dtype=torch.float64)


def test_lengths():
    """By default a second length is a second graph and a third one none; with dynamic=True one graph is enough."""
    assert count_compilations(Net().double(), rows(5), rows(9), rows(13), dynamic=None) == 2
    torch.compiler.reset()
    assert count_compilations(Net().double(), rows(5), rows(9), rows(13), dynamic=True) == 1


@pytest.mark.parametrize("related", [False, True])
def test_sizes_in_the_program(related):
    """Integers of the program that are sizes of tensors follow these; others are fixed in what is captured.

    A program that holds only for some sizes is captured for each.
    """

    def program(model: nn.Module, x: Tensor, other: Tensor, factor: int = 3) -> Tensor:
        part = other[: x.shape[0]] if related else other
        return model(x) * x.shape[0] + part.sum() * factor / other.shape[0]

    model = Net().double()
    if not related:
        same_as_eager(model, program, rows(5), rows(7))
    parallel = compiled(lambda *args: program(model, *args))
    if related:
        with pytest.warns(FxparWarning, match="captured again"):
            parallel(rows(5), rows(7), 3)
    for n, factor in ((5, 3), (8, 3), (9, 4), (5, 3)):
        x, other = rows(n), rows(n + 2)
        torch.testing.assert_close(parallel(x, other, factor), program(model, x, other, factor), rtol=1e-10, atol=1e-12)


def test_graph_breaks():
    """The second graph gets activations that require a gradient; one in between has no parameters."""

    def program(model: nn.Module, x: Tensor) -> Tensor:
        h = model.norm(model.into(x))
        torch._dynamo.graph_break()
        h = h.sin() + h.cos()
        torch._dynamo.graph_break()
        return model.out(h)

    same_as_eager(Net().double(), program, rows(5))


def test_numbers_that_change():
    """A float of the program is not the one of the first call for ever."""
    model = Net().double()
    parallel = compiled(lambda x, scale: model(x) * scale)
    for scale in (0.5, 0.25, 0.125):
        x = rows(4)
        torch.testing.assert_close(parallel(x, scale), model(x) * scale, rtol=1e-10, atol=1e-12)


def test_no_grad_and_eval():
    model = nn.Sequential(Net(), nn.Dropout(0.5)).double()
    parallel, x = compiled(model), rows(5)
    assert parallel(x).requires_grad
    with torch.no_grad():
        assert not parallel(x).requires_grad
    model.eval()
    torch.testing.assert_close(parallel(x), model(x), rtol=1e-10, atol=1e-12)


def test_dropout():
    """New masks in every call, the same again for the same seed, whatever torch's generator does."""
    model = nn.Sequential(Net(), nn.Dropout(0.5)).double()
    x = rows(5)
    with torch.no_grad():
        first = [compiled(model, seed=seed) for seed in (1, 1, 2)]
        found = []
        for parallel in first:
            torch.compiler.reset()
            torch.manual_seed(len(found))
            found.append([parallel(x), parallel(x)])
    assert not torch.equal(found[0][0], found[0][1])
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[2][0])


def test_each_replica_drops_by_itself():
    """The same rows on both ranks: without dropout equal results."""
    kept = run_forked(2, lambda rank: compiled(nn.Dropout(0.5), "dp2")(torch.ones(64)) > 0)
    assert not torch.equal(kept[0], kept[1])


def test_running_statistics():
    model = Norms().double()
    same_as_eager(model, lambda model, x: model(x), rows(5))
    other = Norms().double()
    other.load_state_dict(model.state_dict())
    x = rows(6)
    compiled(model)(x)
    other(x)
    for (name, found), expected in zip(model.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)


def test_weights_that_changed_before_the_backward():
    model = Net().double()
    loss = compiled(model)(rows(5)).sum()
    with torch.no_grad():
        model.out.weight.add_(1.0)
    with pytest.raises(Exception, match="weights have changed"):
        loss.backward()


def test_overrides_by_name():
    """Parameters keep their names."""
    text = {"out.weight": "R@tp", "into.*": "S(0)@tp"}
    model = Net().double()
    parallel = compiled(model, overrides=text)
    parallel(rows(4))
    parallel = compiled(Net().double(), overrides={"nothing.*": "R@tp"})
    torch.compiler.reset()
    with pytest.raises(Exception, match="matches no parameter"):
        parallel(rows(4))


# ------------------------------------------------------------------------------------------------- options and errors
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (None, BackendOptionError, "'strategy': it is missing"),
        ({"strateg": "dp2"}, BackendOptionError, r"did you mean 'strategy'\? Write"),
        ({"strategy": 2}, BackendOptionError, "it is 2, not a text"),
        ({"strategy": "dp2.xp2"}, StrategySyntaxError, "xp2"),
        ({"strategy": "dp2+zero3"}, BackendOptionError, "nothing for ZeRO"),
        ({"strategy": "dp1", "strategies": {8: "dp1"}}, BackendOptionError, "'strategies': strategy is given as well"),
        ({"strategies": "dp1"}, BackendOptionError, "not a mapping from tokens"),
        ({"strategies": {}}, BackendOptionError, "not a mapping from tokens"),
        ({"strategies": {"8": "dp1"}}, BackendOptionError, "'8' is not a number of tokens"),
        ({"strategies": {0: "dp1"}}, BackendOptionError, "0 is not a number of tokens"),
        ({"strategies": {8: 3}}, BackendOptionError, "'strategies': it is 3, not a text.*{1024: "),
        ({"strategies": {8: "dp1", 16: "dp2+zero2"}}, BackendOptionError, "'strategies': .*nothing for ZeRO"),
        ({"strategy": "dp1", "seed": "a"}, BackendOptionError, "not an integer"),
        ({"strategy": "dp1", "compile": "fast"}, BackendOptionError, "'fast', not one of eager, inductor"),
    ],
)
def test_options(options, error, words):
    with pytest.raises(error, match=words):
        BackendOptions.parse(options)


@pytest.mark.parametrize(("tokens", "number"), [(1, 0), (8, 0), (9, 1), (16, 1)])
def test_the_first_strategy_that_takes_the_tokens(tokens, number):
    assert BackendOptions.parse({"strategies": {16: "tp2", 8: "dp2"}}).number_for(tokens) == number


def test_rows_without_tokens_are_no_reason_to_choose():
    parallel = torch.compile(Net(), backend=backend, options={"strategies": {8: "dp1", 16: "dp1"}}, dynamic=True)
    with pytest.raises(Exception, match="has no dim of tokens to choose by"):
        parallel(torch.randn(4, 6))


def test_no_process_group():
    with pytest.raises(Exception, match="init_process_group") as caught:
        compiled(Net(), "dp2")(torch.randn(4, 6))
    assert "BackendOptionError" in str(caught.value)


def wrong_world(rank: int) -> str:
    try:
        compiled(Net(), "dp4")(torch.randn(4, 6))
    except Exception as error:
        return str(error)
    return ""


def test_wrong_world():
    for found in run_forked(2, wrong_world):
        assert WorldSizeError.__name__ in found
        assert "needs 4 ranks" in found


def test_modes_are_refused():
    with pytest.raises(BackendOptionError, match="modes are inductor's"):
        backend(torch.fx.symbolic_trace(Net()), [], options={"strategy": "dp1"}, mode="max-autotune")


def fixed_sizes(rank: int) -> list[str]:
    import warnings

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        compiled(Net(), "cp2", dynamic=False)(torch.randn(4, 6))
    return [str(w.message) for w in seen if issubclass(w.category, FxparWarning)]


def test_fixed_sizes_leave_nothing_to_cut():
    for found in run_forked(2, fixed_sizes):
        assert any("dynamic=True" in text for text in found)


def test_found_by_name(tmp_path):
    """torch finds the backend through the entry point that pyproject.toml declares."""
    root = Path(__file__).resolve().parent.parent
    with open(root / "pyproject.toml", "rb") as file:
        points = tomllib.load(file)["project"]["entry-points"]["torch_dynamo_backends"]
    installed = tmp_path / "fxpar-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: fxpar\nVersion: 0\n")
    lines = "".join(f"{name} = {target}\n" for name, target in points.items())
    (installed / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{lines}")
    program = """
import torch
model = torch.nn.Linear(4, 3)
parallel = torch.compile(model, backend="fxpar", options={"strategy": "dp1"})
x = torch.randn(2, 4)
assert torch.equal(parallel(x), model(x))
assert "Plain" in type(parallel(x).grad_fn).__name__
"""
    path = os.pathsep.join([str(tmp_path), str(root)])
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": path}, timeout=300)
