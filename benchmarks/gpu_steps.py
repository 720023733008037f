"""Steps of one GPU: what `gpu_single.py` compares in step, experts and offload."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from turns import accept, apart, in_turns

from fxpar.ir.exec_graph import ExecGraph
from fxpar.lowering import lower
from fxpar.models import LoadedModel, load
from fxpar.runtime.bound import bind
from fxpar.runtime.runner import Backend
from fxpar.tracer import capture

SIZES = {"layers": "16", "dim": "2048", "heads": "32", "kv_heads": "8", "ffn": "8192", "vocab": "32000"}
TINY = {"layers": "2", "dim": "64", "heads": "4", "kv_heads": "2", "ffn": "176", "vocab": "500"}
TOLERANCE = 0.05  # of bf16 gradients, relative in the 2-norm
Row = dict[str, Any]
Batch = Mapping[str, Tensor]
Step = Callable[[], tuple[float, dict[str, Tensor]]]  # a micro-batch's loss and gradients


@dataclass(frozen=True)
class Settings:
    """`steps` per round and way."""

    device: torch.device
    tiny: bool
    steps: int
    rounds: int

    @property
    def model(self) -> dict[str, str]:
        return TINY if self.tiny else SIZES

    def to(self, batch: Batch) -> dict[str, Tensor]:
        return {key: value.to(self.device) for key, value in batch.items()}


def off(step: Step, expected: tuple[float, dict[str, Tensor]]) -> float:
    """The worst relative difference of a gradient, or of the loss."""
    loss, grads = step()
    wanted, references = expected
    return max([abs(loss / wanted - 1), *(apart(grads[name], one) for name, one in references.items())])


def wide_step(loaded: LoadedModel, batch: Batch, scale: float) -> Step:
    """Eager torch in fp32, from the same weights: what rounding to bf16 is measured by."""
    return torch_step(replace(loaded, model=copy.deepcopy(loaded.model).float()), batch, scale=scale)


def compare(ways: Mapping[str, Step], wide: Step) -> dict[str, float]:
    """How far each way is off fp32. None may be further off than the first one, eager torch or fxpar, by half."""
    loss, grads = wide()
    expected = loss, {name: grad.clone() for name, grad in grads.items()}
    found: dict[str, float] = {}
    for name, step in ways.items():
        limit = max(TOLERANCE, 1.5 * next(iter(found.values()))) if found else float("inf")
        found[name] = accept(name, off(step, expected), limit)
    return found


# ---------------------------------------------------------------------------------------------------------- step
def fxpar_step(loaded: LoadedModel, batch: Batch, scale: float, compile: Backend, strategy: str = "dp1") -> Step:
    """The lowered graph of one rank."""
    program = lower(capture(loaded.model, loaded.loss_fn, batch), strategy)
    assert isinstance(program, ExecGraph)
    bound = bind(program, 0, {}, compile=compile)
    params, buffers = loaded.params(), loaded.buffers()

    def step() -> tuple[float, dict[str, Tensor]]:
        bound.prepare(params, buffers)
        bound.run(batch, scale)
        found = bound.finish()
        return float(found["loss"]), found["grads"]

    return step


def torch_step(loaded: LoadedModel, *batches: Batch, scale: float, compiled: bool = False) -> Step:
    """What a careful user writes: one micro-batch after the other."""
    model: nn.Module = loaded.model

    def forward(given: Batch) -> Tensor:
        return loaded.loss_fn(model, given) * scale

    run: Any = torch.compile(forward) if compiled else forward

    def step() -> tuple[float, dict[str, Tensor]]:
        model.zero_grad()
        losses = []
        for batch in batches:
            loss = run(batch)
            loss.backward()
            losses.append(loss.detach())
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()  # else they lie beside what other ways allocate
        return float(sum(losses)), grads

    return step


def load_llama(settings: Settings, dtype: torch.dtype, tokens: int) -> LoadedModel:
    device = str(settings.device)
    return load("llama", noise=False, options=settings.model, dtype=dtype, device=device, tokens=(tokens,))


def compare_steps(settings: Settings) -> list[Row]:
    """Targets: fxpar with inductor takes at most 1.0 of the time of torch.compile and 1.02 of its memory."""
    loaded = load_llama(settings, torch.bfloat16, 64 if settings.tiny else 8192)
    batch, scale = settings.to(loaded.example_batch), loaded.scale()
    ways = {"torch": torch_step(loaded, batch, scale=scale), "fxpar": fxpar_step(loaded, batch, scale, "eager")}
    if not settings.tiny:
        ways["torch.compile"] = torch_step(loaded, batch, scale=scale, compiled=True)
        ways["fxpar, inductor"] = fxpar_step(loaded, batch, scale, "inductor")
    return _beside_torch(ways, wide_step(loaded, batch, scale), settings)


def _beside_torch(ways: Mapping[str, Step], wide: Step, settings: Settings) -> list[Row]:
    """The first way, and "torch.compile" where there is one, are what the others are compared with."""
    errors = compare(ways, wide)
    found = in_turns(ways, settings.steps, settings.rounds, settings.device)
    first = next(iter(found.values()))
    return [
        {
            "way": name,
            "ms": ms,
            "of the first": ms / first[0],
            "of torch.compile": ms / found["torch.compile"][0] if "torch.compile" in found else None,
            "peak MB": peak,
            "off fp32": errors[name],
        }
        for name, (ms, peak) in found.items()
    ]


# ------------------------------------------------------------------------------------------------------- experts
MIXTURE = {
    "num_hidden_layers": "4",
    "hidden_size": "1024",
    "intermediate_size": "2048",
    "num_local_experts": "16",
    "num_attention_heads": "16",
    "num_key_value_heads": "8",
    "head_dim": "64",
    "vocab_size": "32000",
    "max_position_embeddings": "8192",
}


def compare_experts(settings: Settings) -> list[Row]:
    """A row of 8,192 tokens, two of 16 experts each. In bf16 some tokens take other experts than in fp32: a tiny row,
    in which each one counts for much, is computed in fp32.
    """
    dtype = torch.float32 if settings.tiny else torch.bfloat16
    options: dict[str, str] = {} if settings.tiny else MIXTURE
    tokens, device = 64 if settings.tiny else 8192, str(settings.device)
    loaded = load("hf:mixtral", noise=False, options=options, dtype=dtype, device=device, tokens=(tokens,))
    batch, scale = settings.to(loaded.example_batch), loaded.scale()
    ways: dict[str, Step] = {}
    for name, compiled in (("eager", False), ("grouped_mm", False), ("grouped_mm", True)):
        if settings.tiny and name != "eager":
            continue
        model: Any = copy.deepcopy(loaded.model)
        model.set_experts_implementation(name)
        of = replace(loaded, model=model)
        ways["torch.compile" if compiled else f"torch, {name}"] = torch_step(of, batch, scale=scale, compiled=compiled)
    ways["fxpar"] = fxpar_step(loaded, batch, scale, "eager")
    if not settings.tiny:
        ways["fxpar, inductor"] = fxpar_step(loaded, batch, scale, "inductor")
    return _beside_torch(ways, wide_step(loaded, batch, scale), settings)


# ------------------------------------------------------------------------------------------------------- offload
def compare_offload(settings: Settings) -> list[Row]:
    """The Llama of `step` under fxpar, eager."""
    loaded = load_llama(settings, torch.bfloat16, 64 if settings.tiny else 8192)
    batch, scale = settings.to(loaded.example_batch), loaded.scale()
    strategies = ("dp1", "dp1+offload(0.25)", "dp1+offload(0.5)", "dp1+offload", "dp1+remat")
    ways = {strategy: fxpar_step(loaded, batch, scale, "eager", strategy) for strategy in strategies}
    return _beside_torch(ways, wide_step(loaded, batch, scale), settings)
