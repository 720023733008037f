"""Train a small model on forked gloo ranks with `parallelize`, and the same on one device by plain autograd."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import fxpar
from fxpar import losses
from fxpar.cost.group import kept_cost
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.teams import formations
from fxpar.lowering import lower
from fxpar.models import load
from fxpar.models.builtin import packed_lm_loss
from fxpar.passes.pack_documents import packed_if_proved
from fxpar.precision import with_precision
from fxpar.runtime.compiling import as_precision, compile_strategies
from fxpar.runtime.forked import run_forked
from fxpar.runtime.options import cluster_here
from fxpar.runtime.task import CompiledModel
from tests import warm  # noqa: F401

T = TypeVar("T")
LENGTHS = (5, 60, 33, 17, 130, 8, 90, 12, 45, 2, 1)
STRATEGIES = {16: "dp4", 64: "dp2.tp2+sp", 512: "cp2.tp2"}


@functools.cache
def _captured(make: Callable[[], nn.Module]) -> LogicalGraph:
    _assert_once(f"capture {getattr(make, '__name__', make)}")
    return compile_strategies(make(), {512: "dp1"}, packed_lm_loss).logical


@functools.cache
def _rows(make: Callable[[], nn.Module]) -> LogicalGraph:
    return packed_if_proved(_captured(make))[0]


@functools.cache
def _lowered(make: Callable[[], nn.Module], strategy: str, precision: str | None) -> TrainGraph:
    _assert_once(f"lower {getattr(make, '__name__', make)} for {strategy}")
    how = as_precision(precision)
    dtypes = {"accumulate": how.accumulate_dtype, "reduce": how.reduce_dtype}
    program = lower(with_precision(_rows(make), how), strategy, for_store=True, **dtypes)
    kept_cost(program, cluster_here(None, program.strategy.world, torch.device("cpu")))  # so that no rank has to
    return program


def _assert_once(what: str) -> None:
    assert multiprocessing.parent_process() is None, f"every rank would {what}: `precompile` it before they are forked"


def compiled(
    make: Callable[[], nn.Module],
    strategies: Iterable[str] = tuple(STRATEGIES.values()),
    precision: str | None = None,
) -> CompiledModel:
    """What `compile_strategies` makes, captured once for a `make` and lowered once for each strategy."""
    names = [str(one) for text in strategies for one in formations(text)]
    programs = {name: _lowered(make, name, precision) for name in names}
    return CompiledModel(_captured(make), programs, {}, as_precision(precision), _rows(make).packing)


def parallel(make: Callable[[], nn.Module], **options: Any) -> Any:
    """`parallelize(make(), ...)`; call `precompile` with the same arguments in the parent first to save time."""
    options = {"strategies": STRATEGIES, "merge": False, "monitor": False, **options}
    if "compiled" not in options:
        options["compiled"] = compiled(make, options["strategies"].values())
    return fxpar.parallelize(make(), loss=packed_lm_loss, **options)


def precompile(make: Callable[[], nn.Module] | None = None, strategies: dict[int, str] | None = None) -> None:
    """Compile in this process, so that forked ranks need not."""
    compiled(make or make_llama, (strategies or STRATEGIES).values())


def sequences(seed: int, lengths: Sequence[int] = LENGTHS, vocab: int = 131) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator) for n in lengths]


def make_llama(dtype: torch.dtype = torch.float64, **options: str) -> nn.Module:
    return load("llama", dtype=dtype, seed=1, options=options).model


def shallow() -> nn.Module:
    """One layer, where another one would show nothing more."""
    return make_llama(layers="1")


class Small(nn.Module):
    """Its tokens do not meet: for tests of what happens to weights, whatever lies between them."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.turns = nn.Embedding(131, 16), nn.Parameter(torch.rand(16))
        self.up_proj, self.down_proj = nn.Linear(16, width), nn.Linear(width, 16, bias=False)
        self.head = nn.Linear(16, 131, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) + torch.sin(position_ids[..., None] * self.turns)
        return self.head(x + self.down_proj(torch.tanh(self.up_proj(x))))


def small() -> nn.Module:
    """A fifth of the nodes of `shallow`."""
    return Small().double()


class Stack(nn.Module):
    """Four layers like that of `Small`, for stages: two share a weight, and so do the embedding and the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.layers = nn.Embedding(131, 16), nn.ModuleList(Residual() for _ in range(4))
        self.head = nn.Linear(16, 131, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[2].down_proj.weight = self.layers[0].down_proj.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) + torch.sin(position_ids)[..., None]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(16, 24), nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(torch.tanh(self.up_proj(x)))


def stacked() -> nn.Module:
    return Stack().double()


def adamw(model: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **kwargs})


def one_device(
    model: nn.Module, batches: Sequence[list[Tensor]], clip: float | None = 1.0, **kwargs: Any
) -> dict[str, Any]:
    """Sequence after sequence, the mean over all labels; the truth. `kwargs` are the optimizer's."""
    optimizer, found = adamw(model, **kwargs), []
    for batch in batches:
        count, total = sum(len(ids) - 1 for ids in batch), 0.0
        for ids in batch:
            if len(ids) < 2:
                continue
            row = {"input_ids": ids[None], "labels": losses.next_token_labels(ids[None])}
            row["position_ids"] = torch.arange(len(ids), device=ids.device)[None]
            loss = losses.causal_lm(model, row) / count
            loss.backward()
            total += loss.item()
        found.append(total)
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": found, "grads": grads, "params": {name: p.detach() for name, p in model.named_parameters()}}


@dataclass(frozen=True)
class Case:
    """Mini-batches, and how to train on them; `options` are those of `parallelize`, `watch(model)` returns what
    hears of each step.
    """

    batches: Sequence[list[Tensor]]
    options: dict[str, Any] = field(default_factory=dict)
    make: Callable[[], nn.Module] = make_llama
    optimizer: dict[str, Any] = field(default_factory=dict)
    watch: Callable[[Any], Callable[[Any], object]] = lambda model: lambda report: None

    def run(self) -> dict[str, Any]:
        """Train on this rank."""
        model = parallel(self.make, **self.options)
        opt, found, reports, grads = adamw(model, **self.optimizer), [], [], {}
        watch = self.watch(model)
        for turn, batch in enumerate(self.batches, 1):
            report = model.train_step(batch)
            found.append(report.loss)
            reports.append(report)
            if turn == len(self.batches):
                grads = {n: p.grad.full_tensor().clone() for n, p in model.named_parameters() if p.grad is not None}
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            watch(report)
        params = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
        return {"losses": found, "grads": grads, "params": params, "reports": reports}

    def one_device(self) -> dict[str, Any]:
        """The truth."""
        return one_device(self.make(), self.batches, **self.optimizer)


@dataclass(frozen=True)
class World:
    """A forked world that the tests of a module share. It runs all cases, one after the other, when a test asks for the
    results of one: ranks import and cache a lot the first time, which costs more than most cases.
    """

    ranks: int
    prepare: Callable[[], None]
    cases: dict[str, Callable[[int], Any]] = field(default_factory=dict)

    def case(self, work: Callable[[int], T]) -> Callable[[], list[T]]:
        """Let `work(rank)` be a case; what it becomes gives the results by rank."""
        self.cases[work.__name__] = work
        return lambda: [results[work.__name__] for results in self.results]

    @property
    def results(self) -> list[dict[str, Any]]:
        """By rank and name. What failed once is not tried again: each test of the file fails with the same error."""
        if isinstance(self._ended, Exception):
            raise self._ended
        return self._ended

    @functools.cached_property
    def _ended(self) -> list[dict[str, Any]] | Exception:
        try:
            self.prepare()
            return run_forked(self.ranks, self._run_all, timeout_s=900)
        except Exception as error:
            return error

    def _run_all(self, rank: int) -> dict[str, Any]:
        return {name: named(name, functools.partial(work, rank)) for name, work in self.cases.items()}


def hot(cases: Mapping[str, Case], world: int = 4) -> dict[str, dict[str, Any]]:
    """All cases with several strategies, one after the other in one world: forked ranks import and cache a lot the
    first time. Results of rank 0 by name, after all ranks were found to agree.
    """
    for case in cases.values():
        precompile(case.make, case.options.get("strategies"))
    results = run_forked(
        world, lambda rank: {name: named(name, case.run) for name, case in cases.items()}, timeout_s=900
    )
    return agreed(results)


def agreed(results: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Of the results of cases by rank those of rank 0, if those of the others are the same."""
    for other in results[1:]:
        for name, first in results[0].items():
            assert other[name]["losses"] == first["losses"], name
            params = other[name]["params"]
            assert all(torch.equal(params[fqn], value) for fqn, value in first["params"].items()), name
    return results[0]


def named(name: str, work: Callable[[], T]) -> T:
    """Run a case; its errors say which one it was."""
    try:
        return work()
    except BaseException as error:
        error.add_note(f"in the case {name!r}")
        raise


def largest_error(have: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Largest |a - b| / max |b| over tensors."""
    assert have.keys() == want.keys()
    return max(float((have[n].to(w.dtype) - w).abs().max() / w.abs().max().clamp_min(1e-30)) for n, w in want.items())


def loss_error(have: Sequence[float], want: Sequence[float]) -> float:
    assert len(have) == len(want)
    return max(abs(a - b) / abs(b) for a, b in zip(have, want, strict=True))
