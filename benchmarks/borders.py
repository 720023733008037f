"""How much of switches and reductions a step waits for: groups that overlap against borders that block.

Called by `two_nodes.py --comm-share`. A small Llama, three strategies in every step, mini-batches of lengths like those
of encyclopedia articles (log-normal, median about 350 tokens). Both ways take turns in one run on the same sequences;
their losses and gradients must be equal bit by bit.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from emulated import RANKS_PER_NODE, sent_bytes

import fxpar
from fxpar.batching import GroupPlan
from fxpar.models import load
from fxpar.runtime.arrivals import Arrivals, order_of_gradients
from fxpar.runtime.mini_batch import GroupWork
from fxpar.runtime.report import GroupReport, StepReport
from fxpar.schedule.mini_batch import Flow, GroupAction, overlapped, simulate_mini_batch

STRATEGIES = {256: "dp4", 1024: "dp2.tp2+sp", 2048: "tp4+sp"}
LONGEST, SLOWEST = 2048, "tp4+sp"
LLAMA = {"layers": "4", "dim": "256", "heads": "8", "kv_heads": "8", "ffn": "704", "vocab": "4096"}
TINY = {"layers": "1", "dim": "32", "heads": "4", "kv_heads": "4", "ffn": "64", "vocab": "64"}
TOKENS, TINY_TOKENS = 8192, 2600  # of a mini-batch
KINDS = ("switch", "run", "reduce")


def mini_batch(seed: int, tokens: int, vocab: int) -> list[torch.Tensor]:
    """Lengths of every group are among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [200, 900, 1500]
    while sum(lengths) < tokens:
        lengths.append(int(torch.empty(1).log_normal_(5.85, 1.2, generator=generator).clamp(8, 2048)))
    return [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]


def parallel(strategies: Mapping[int, str], mbit: float, tiny: bool, **options: Any) -> Any:
    nodes = dist.get_world_size() // RANKS_PER_NODE
    speed = mbit / 8e3
    cluster = fxpar.ClusterSpec(nodes, RANKS_PER_NODE, 1.0, speed, 200, node_gb_per_s=speed)
    made = compiled(tuple(strategies.items()), tiny)
    return fxpar.parallelize(llama(tiny), strategies=strategies, compiled=made, cluster=cluster, merge=False, **options)


def llama(tiny: bool) -> torch.nn.Module:
    return load("llama", seed=1, options=TINY if tiny else LLAMA).model


@functools.cache
def compiled(strategies: tuple[tuple[int, str], ...], tiny: bool) -> Any:
    """Captured and lowered once per process."""
    return fxpar.compile_strategies(llama(tiny), dict(strategies), fxpar.losses.causal_lm)


def probe(tiny: bool = False) -> dict[str, float]:
    """Wall seconds of a step under the slowest strategy on a fast network, and the bytes that this node sends in it."""
    model = parallel({LONGEST: SLOWEST}, 1e5, tiny, overlap=False)
    batch = mini_batch(0, TINY_TOKENS if tiny else TOKENS, _vocab(tiny))
    model.train_step(batch)
    before, begun = sent_bytes(), time.perf_counter()
    model.train_step(batch)
    return {"wall_s": time.perf_counter() - begun, "bytes": sent_bytes() - before}


def measure(mbit: float, steps: int, paced: bool, tiny: bool = False, only: str | None = None) -> dict[str, float]:
    """Means over all ranks and steps, in seconds per step. `paced`: groups wait for their priced time; `only`: all
    sequences run under this strategy.
    """
    strategies = STRATEGIES if only is None else {LONGEST: only}
    order = _order(strategies, mbit, tiny)
    ways = {overlap: parallel(strategies, mbit, tiny, overlap=overlap, order=order) for overlap in (False, True)}
    batches = [mini_batch(seed, TINY_TOKENS if tiny else TOKENS, _vocab(tiny)) for seed in range(steps + 1)]
    found = {"blocking": 0.0, "overlapped": 0.0, "moving": 0.0, "exposed": 0.0, "simulated": 0.0}
    for number, batch in enumerate(batches):
        reports = {}
        for overlap, model in ways.items():
            dist.barrier()
            reports[overlap] = model.train_step(batch)
        _require_equal(ways, reports)
        if number == 0:
            if paced:
                for model in ways.values():
                    _pace(model)
            continue
        blocking, together = reports[False], reports[True]
        found["blocking"] += _seconds(blocking.groups)
        found["overlapped"] += _seconds(together.groups)
        found["moving"] += sum(group.switch_s + group.reduce_s for group in blocking.groups)
        found["exposed"] += sum(group.switch_s + group.reduce_s for group in together.groups)
        found["simulated"] += _simulated(blocking.groups, together.groups)
    sums = torch.tensor(list(found.values()), dtype=torch.float64)
    dist.all_reduce(sums)
    return dict(zip(found, (sums / dist.get_world_size() / steps).tolist(), strict=True))


def _order(strategies: Mapping[int, str], mbit: float, tiny: bool) -> list[str]:
    """What the engine chooses for groups that overlap."""
    report = parallel(strategies, mbit, tiny).train_step(mini_batch(0, TINY_TOKENS if tiny else TOKENS, _vocab(tiny)))
    return [group.strategy for group in report.groups]


def _vocab(tiny: bool) -> int:
    return int((TINY if tiny else LLAMA)["vocab"])


def _seconds(groups: Sequence[GroupReport]) -> float:
    return sum(group.wall_s for group in groups)


def _simulated(blocking: Sequence[GroupReport], together: Sequence[GroupReport]) -> float:
    """The overlapped list of actions with what the blocking step measured."""
    assert [group.strategy for group in blocking] == [group.strategy for group in together]
    seconds, flows = {}, {}
    for number, group in enumerate(blocking):
        flows[GroupAction("run", number)] = Flow.of_run(group.compute_s, group.micro_batches)
        for kind, took in zip(KINDS, (group.switch_s, group.compute_s, group.reduce_s), strict=True):
            seconds[GroupAction(kind, number)] = took
    return simulate_mini_batch(overlapped([False] * len(blocking)), seconds, flows).makespan_s


def _require_equal(ways: Mapping[bool, Any], reports: Mapping[bool, StepReport]) -> None:
    assert reports[False].loss == reports[True].loss
    for one, other in zip(ways[False].parameters(), ways[True].parameters(), strict=True):
        assert torch.equal(one.grad.to_local(), other.grad.to_local())
        one.grad = other.grad = None


class _Paced:
    """In place of a bound graph: what it gave last time, after the time that the plan predicts. In the forward of the
    first micro-batch it waits for the weights, one after the other; in the backward of the last one it makes gradients,
    one after the other.
    """

    def __init__(self, bound: Any, grads: Mapping[str, torch.Tensor], loss: torch.Tensor) -> None:
        self.program, self.rank, self.tells = bound.program, bound.rank, None
        self._result = {"loss": loss, "metrics": {}, "grads": grads, "buffers": {}, "experts": {}}
        self._made = [fqn for fqn in order_of_gradients(bound.program) if fqn in grads]

    def prepare(
        self,
        params: Mapping[str, torch.Tensor],
        buffers: object,
        arrivals: Arrivals | None = None,
        begun: object = None,
    ) -> None:
        self._weights, self._arrivals = list(params), arrivals

    def run_all(self, plan: GroupPlan, spans: object, made: Any) -> None:
        flow = Flow.of_run(plan.predicted_s, plan.slots)
        for fqn in self._weights:
            if self._arrivals is not None:
                self._arrivals.wait(fqn)
            time.sleep(flow.uses_s / len(self._weights))
        time.sleep(max(0.0, plan.predicted_s - flow.uses_s - flow.makes_s))
        for fqn in self._made:
            time.sleep(flow.makes_s / len(self._made))
            made({fqn: self._result["grads"][fqn]})

    def finish(self) -> Mapping[str, Any]:
        return self._result


def _pace(model: Any) -> None:
    """Let every group wait instead of computing."""
    engine = model._session().engine
    for name, bound in list(engine.bound.items()):
        bound.run_all([])
        result = bound.finish()
        engine.bound[name] = _Paced(bound, result["grads"], result["loss"])
    made = engine.works

    def paced(*given: Any) -> list[GroupWork]:
        return [
            GroupWork(one.spec, one.name, one.plan, one.lengths, lambda one=one: one.plan)  # type: ignore[arg-type]
            for one in made(*given)
        ]

    engine.works = paced
