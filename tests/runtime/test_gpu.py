"""What one GPU can show: training, strategies, precisions, compiled programs, predicted memory. On the CPU the same
tests run too, so that those for a GPU do not rot where there is none.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpar
from fxpar.checking import check
from fxpar.checkpoint import load_checkpoint, save_checkpoint
from fxpar.errors import AutocastError
from fxpar.models import load
from fxpar.models.builtin import packed_lm_loss
from fxpar.runtime.engine import Engine
from fxpar.runtime.runner import Runner
from fxpar.tracer import capture
from tests.runtime.hot import adamw, largest_error, loss_error, make_llama, one_device, sequences

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
on_both = pytest.mark.parametrize("device", ["cpu", GPU])
on_gpu = pytest.mark.parametrize("device", [GPU])
STRATEGIES = {16: "dp1+offload", 512: "dp1+remat"}
LENGTHS = (5, 60, 33, 17, 130, 8, 1)


@pytest.fixture
def world(device: str) -> Iterator[torch.device]:
    """A process group of this process alone, of the kind that a run has on the device."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    yield torch.device(device)
    dist.destroy_process_group()


def _on(device: torch.device, seed: int) -> list[Tensor]:
    return [ids.to(device) for ids in sequences(seed, LENGTHS)]


def _train(model: Any, batches: list[list[Tensor]]) -> dict[str, Any]:
    optimizer, found, grads = adamw(model), [], {}
    for batch in batches:
        found.append(model.train_step(batch).loss)
        # Of the first step: AdamW divides by the size of a gradient, which makes much of rounding.
        grads = grads or {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    params = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    return {"losses": found, "grads": grads, "params": params}


def _parallel(model: nn.Module, **options: Any) -> Any:
    options = {"strategies": STRATEGIES, "loss": packed_lm_loss, "merge": False, "monitor": False, **options}
    return fxpar.parallelize(model, **options)


def _llama(dtype: torch.dtype) -> nn.Module:
    return make_llama(dtype, layers="1")


def _differs(device: torch.device, dtype: torch.dtype, **options: Any) -> tuple[float, float]:
    """How far losses of two steps and gradients of the first are from those of one sequence at a time."""
    batches = [_on(device, seed) for seed in range(2)]
    have = _train(_parallel(_llama(dtype).to(device), **options), batches)
    want = one_device(_llama(dtype).to(device), batches)
    grads = one_device(_llama(dtype).to(device), batches[:1])["grads"]
    assert all(tensor.device.type == device.type for tensor in have["params"].values())
    return loss_error(have["losses"], want["losses"]), largest_error(have["grads"], grads)


@on_both
def test_training_equals_one_device(world):
    assert max(_differs(world, torch.float64)) < 1e-10


@on_gpu
@pytest.mark.parametrize(
    ("dtype", "options", "tolerance"),
    [
        (torch.float64, {"token_budget": {16: 16, 512: 512}}, 1e-10),
        (torch.float64, {"packed": False}, 1e-10),
        (torch.float32, {}, 1e-5),
    ],
    ids=["small micro-batches", "unpacked", "fp32"],
)
def test_training_in_other_ways(world, dtype, options, tolerance):
    assert max(_differs(world, dtype, **options)) < tolerance


@on_both
def test_sequences_may_lie_on_the_cpu(world):
    model = _parallel(_Reset().to(world))
    for run in (lambda given: model.evaluate(given), lambda given: model.train_step(given).loss):
        assert run(sequences(0, LENGTHS)) == run(_on(world, 0))


@on_both
def test_a_session_that_is_let_go_leaves_nothing(world):
    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(one), Runner | Engine) for one in gc.get_objects())

    before = alive()
    model = _parallel(_Reset().to(world))
    model.train_step(_on(world, 0))
    model.evaluate(_on(world, 1))
    assert alive() > before
    del model
    assert alive() == before


@on_both
def test_autocast_around_a_step(world):
    """Its casts are in the graph if it was on at the capture; else it would change nothing, and nobody would know."""
    batch, casts = _on(world, 0), torch.autocast(world.type, torch.bfloat16)
    plain = _parallel(_llama(torch.float32).to(world))
    with casts:
        model = _parallel(_llama(torch.float32).to(world))
        inside = model.train_step(batch).loss
        with pytest.raises(AutocastError, match="but was captured with no casts"):
            plain.train_step(batch)
    assert inside == pytest.approx(plain.train_step(batch).loss, rel=5e-2)
    assert inside != plain.train_step(batch).loss
    with casts:
        model = _parallel(_Island().to(world))
        inside = model.train_step(batch).loss
    assert model.train_step(batch).loss == inside


@on_gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_training_in_half_precision(world, precision):
    assert _differs(world, torch.float32, precision=precision)[0] < 5e-2


@on_both
def test_a_checkpoint_goes_on_where_it_was(world, tmp_path):
    batches = [_on(world, seed) for seed in range(3)]
    model = _parallel(_Reset().to(world))
    optimizer = adamw(model)

    def step(model: Any, optimizer: torch.optim.Optimizer, batch: list[Tensor]) -> float:
        loss = model.train_step(batch).loss
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step(model, optimizer, batches[0])
    saved = save_checkpoint(tmp_path, 1, model, optimizer, {})
    want = [step(model, optimizer, batch) for batch in batches[1:]]
    again = _parallel(_Reset().to(world))
    its = adamw(again)
    load_checkpoint(saved, again, its)
    assert [step(again, its, batch) for batch in batches[1:]] == want


@on_gpu
def test_parameters_of_a_model_on_the_meta_device_are_made_on_the_gpu(world):
    with torch.device("meta"):
        model = _Reset()
    parallel = _parallel(model)
    assert {p.device.type for p in parallel.parameters()} == {"cuda"}
    assert parallel.train_step(_on(world, 0)).loss > 0


class _Island(nn.Module):
    """A product that keeps out of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(131, 16), nn.Linear(16, 131)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden)


class _Reset(nn.Module):
    """Modules that say how their parameters are made."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(131, 16), nn.Linear(16, 131)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids))


# ----------------------------------------------------------------------------- all ranks as threads, on one device
def _check(device: torch.device, dtype: torch.dtype, model: str = "llama") -> Callable[..., Any]:
    loaded = load(model, dtype=dtype, seed=1, options={"layers": "2"} if model == "llama" else {})
    logical = capture(loaded.model, loaded.loss_fn, loaded.example_batch)
    params, buffers = ({k: v.to(device) for k, v in of.items()} for of in (loaded.params(), loaded.buffers()))
    batches = [{k: v.to(device) for k, v in batch.items()} for batch in loaded.batches]
    return lambda *names: check(logical, names, params, buffers, batches, scale=loaded.scale())


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_strategies_on_ranks_that_share_a_gpu(device, dtype):
    names = ("dp2", "tp2", "tp2+sp", "cp2", "pp2", "dp2+zero3", "dp2.tp2+sp+remat", "cp2.tp2", "pp2.dp2+zb_h1")
    for result in _check(torch.device(device), dtype)(*names):
        assert result.ok, (result.strategy, result.grad_max_rel_err, result.error)


@on_gpu
@pytest.mark.parametrize(
    "names",
    [
        ("ring2", "cp2.ring2", "dp2.ring2+zero3"),
        ("dp1+offload", "dp2+zero3+offload(0.5)", "pp2+offload", "tp2+chunks(4)", "dp1+chunks(8)+remat"),
        ("tp2[*.ffn: cp2]", "tp2+sp[*.attention: rows2]", "tp2 > cp2", "dp2 | tp2+sp", "cp2 | dp1 | dp1"),
    ],
    ids=["rings", "memory", "modules, stages, teams"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_layouts_on_ranks_that_share_a_gpu(device, names, dtype):
    for result in _check(torch.device(device), dtype)(*names):
        assert result.ok, (result.strategy, result.grad_max_rel_err, result.error)


@on_gpu
@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("hf:mixtral", ("ep2", "dp2.ep2+zero3", "ep2.tp2+sp", "pp2.ep2", "ep2+lsh(1)")),
        ("hf:gpt_oss", ("tp2", "cp2", "ep2")),
        ("hf:deepseek_v3", ("dp2", "ep2")),
        ("hf:mamba2", ("dp2",)),
        ("hf:qwen3_next", ("dp2", "tp2")),
        ("hf:jamba", ("dp2", "ep2")),
        ("hf:lfm2", ("dp2", "tp2")),
    ],
)
def test_types_of_models_on_ranks_that_share_a_gpu(device, model, names):
    for dtype in (torch.float64, torch.float32):
        for result in _check(torch.device(device), dtype, model)(*names):
            assert result.ok, (dtype, result.strategy, result.grad_max_rel_err, result.error)


@on_gpu
@pytest.mark.parametrize("compile", ["eager", "inductor"])
def test_experts_train_in_bf16(world, compile):
    made = load("hf:mixtral", dtype=torch.float32, seed=1)
    batches = [_on(world, seed) for seed in range(2)]
    losses = {
        precision: _train(
            _parallel(
                load("hf:mixtral", dtype=torch.float32, seed=1).model.to(world),
                loss=made.loss_fn,
                precision=precision,
                compile=compile if precision else "eager",
            ),
            batches,
        )["losses"]
        for precision in (None, "bf16")
    }
    assert loss_error(losses["bf16"], losses[None]) < 5e-2


@on_both
def test_tasks(world):
    """Two tasks of one model: the sum of what each one gives alone."""
    batch = _on(world, 0)
    tasks = {"a": fxpar.Task(packed_lm_loss), "b": fxpar.Task(packed_lm_loss, weight=0.5)}
    model = fxpar.parallelize(_Reset().double().to(world), strategies=STRATEGIES, tasks=tasks, monitor=False)
    alone = _parallel(_Reset().double().to(world))
    alone.load_state_dict(model.state_dict())
    both, one = model.train_step({"a": batch, "b": batch}).loss, alone.train_step(batch).loss
    assert both == pytest.approx(1.5 * one, rel=1e-10)


@on_gpu
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_compiled_programs_equal_eager_ones(world, precision):
    batches = [_on(world, seed) for seed in range(2)]
    have, want = (
        _train(_parallel(_llama(torch.float32).to(world), precision=precision, compile=compile), batches)
        for compile in ("inductor", "eager")
    )
    tolerance = 5e-2 if precision else 1e-5
    assert loss_error(have["losses"], want["losses"]) < tolerance
    if precision is None:
        assert largest_error(have["grads"], want["grads"]) < tolerance


@on_gpu
@pytest.mark.parametrize("strategy", ["dp1", "dp1+remat"])
def test_a_step_takes_what_was_predicted_and_kernels_their_scratch(world, strategy):
    shape = {"layers": "4", "dim": "512", "heads": "8", "kv_heads": "8", "ffn": "2048", "vocab": "8192"}
    made = load("llama", dtype=torch.float32, options=shape).model.to(world)
    model = _parallel(made, strategies={4096: strategy}, precision="bf16", token_budget=4096)
    batch = [torch.arange(4096, device=world) % 8192] * 2
    model.train_step(batch)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model.train_step(batch)
    taken, predicted = torch.cuda.max_memory_allocated() - before, model.memory
    kept = predicted.activation_bytes + predicted.gradient_bytes + predicted.staging_bytes
    scratch = 4096 * 8192 * 4  # the logits in fp32, which the loss works on as a whole on a GPU
    assert kept < taken < kept + 1.1 * scratch
