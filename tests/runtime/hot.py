"""Train a small model on forked gloo ranks with `parallelize`, and the same on one device by plain autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fxpar
from fxpar import losses
from fxpar.models import load
from fxpar.models.builtin import packed_lm_loss
from fxpar.runtime.forked import run_forked
from fxpar.runtime.options import Compiled, compile_strategies

# Loads what optimizers and DTensor import lazily: here once, and not in every forked rank (seconds each).
torch.compiler.list_backends()

LENGTHS = (5, 60, 33, 17, 130, 8, 90, 12, 45, 2, 1)
STRATEGIES = {16: "dp4", 64: "dp2.tp2+sp", 512: "cp2.tp2"}


@functools.cache
def _compiled(make: Callable[[], nn.Module], strategies: tuple) -> Compiled:
    return compile_strategies(make(), dict(strategies), packed_lm_loss)


def parallel(make: Callable[[], nn.Module], **options: Any) -> Any:
    """`parallelize(make(), ...)`; call `precompile` with the same arguments in the parent first to save time."""
    options = {"strategies": STRATEGIES, "merge": False, "monitor": False, **options}
    compiled = _compiled(make, tuple(options["strategies"].items()))
    return fxpar.parallelize(make(), compiled=compiled, loss=packed_lm_loss, **options)


def precompile(make: Callable[[], nn.Module] | None = None, strategies: dict[int, str] | None = None) -> None:
    """Compile in this process, so that forked ranks need not."""
    _compiled(make or make_llama, tuple((strategies or STRATEGIES).items()))


def sequences(seed: int, lengths: Sequence[int] = LENGTHS, vocab: int = 131) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator) for n in lengths]


def make_llama(dtype: torch.dtype = torch.float64, **options: str) -> nn.Module:
    return load("llama", dtype=dtype, seed=1, options=options).model


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
            row["position_ids"] = torch.arange(len(ids))[None]
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


def hot(
    batches: Sequence[list[Tensor]],
    make: Callable[[], nn.Module] = make_llama,
    world: int = 4,
    clip: float | None = 1.0,
    optimizer: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The same with several strategies; results of rank 0, after all ranks were found to agree."""
    precompile(make, options.get("strategies", STRATEGIES))

    def work(rank: int) -> dict[str, Any]:
        model = parallel(make, **options)
        opt, found, reports = adamw(model, **(optimizer or {})), [], []
        for batch in batches:
            report = model.train_step(batch)
            found.append(report.loss)
            reports.append(report)
            grads = {n: p.grad.full_tensor().clone() for n, p in model.named_parameters() if p.grad is not None}
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            opt.zero_grad()
        params = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
        memory = model.memory
        return {"losses": found, "grads": grads, "params": params, "reports": reports, "memory": memory}

    results = run_forked(world, work)
    for other in results[1:]:
        assert other["losses"] == results[0]["losses"]
        assert all(torch.equal(other["params"][name], value) for name, value in results[0]["params"].items())
    return results[0]


def largest_error(have: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Largest |a - b| / max |b| over tensors."""
    assert have.keys() == want.keys()
    return max(float((have[n].to(w.dtype) - w).abs().max() / w.abs().max().clamp_min(1e-30)) for n, w in want.items())


def loss_error(have: Sequence[float], want: Sequence[float]) -> float:
    assert len(have) == len(want)
    return max(abs(a - b) / abs(b) for a, b in zip(have, want, strict=True))
