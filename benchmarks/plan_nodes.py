"""A set that `fxpar plan` chooses for two nodes, against single strategies, in whole steps on the emulated network.

Called by `two_nodes.py --plan`; with `rounds` also rounds that each mini-batch chooses for itself. The small Llama of
borders.py, mini-batches of published lengths (`commoncrawl` or `github`, up to 32,768 tokens there, a sixteenth of that
here; `rounds` has those of Wikipedia). A device holds as much as the leanest strategy of dp, tp and pp alone, HotSPa's
space, needs for the longest sequence. All ways take turns on the same mini-batches.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from borders import LLAMA, TINY, _pace, llama
from emulated import RANKS_PER_NODE, WORLD

import fxpar
from fxpar.cost.cluster import ClusterSpec, usual_cluster
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.strategy import Strategy
from fxpar.ir.teams import formations
from fxpar.models import load
from fxpar.runtime.auto import read_rows
from fxpar.runtime.engine import Replanned
from fxpar.search.chosen import lowering, planned_for, problem_of, searched
from fxpar.search.lengths import mini_batches, read_lengths
from fxpar.search.plan_file import Plan, parse_plan
from fxpar.search.price import Candidate, Depth, candidate, optimizer_s
from fxpar.search.pricing import PricedSet, SetPricer

NODES = WORLD // RANKS_PER_NODE
HOTSPAS = ("dp4", "dp2.tp2+sp", "tp4+sp", "dp2.pp2", "pp2.tp2+sp", "pp4")
PUBLISHED_LONGEST, SCALE, TINY_SCALE = 32_768, 16, 512
TOKENS, TINY_TOKENS = 16_384, 512  # of a mini-batch
ROUNDS, PLANNED = "rounds", "planned set"
HOTSPA, ALONE = "best of dp, tp, pp alone", "best strategy alone"
# How many times as fast as these the first way is to be.
TARGETS = {
    "commoncrawl": {HOTSPA: 2.0, ALONE: 1.0},
    "github": {HOTSPA: 1.5, ALONE: 1.0},
    "rounds": {HOTSPA: 2.2, PLANNED: 1.15},
}
TARGET_ERROR = 0.15


def cluster_of(mbit: float) -> ClusterSpec:
    """Two nodes of this machine's kind, whose links to each other are as slow as asked."""
    speed = mbit / 8e3
    usual = usual_cluster(WORLD, RANKS_PER_NODE, "cpu")
    return replace(
        usual, intra_gb_per_s=1.0, inter_gb_per_s=speed, node_gb_per_s=speed, latency_us=200, device=usual.sustained
    )


def lengths_of(name: str, tiny: bool) -> np.ndarray:
    """[N] tokens."""
    source = "wikipedia" if name == "rounds" else name
    return (read_lengths(f"{source}:{PUBLISHED_LONGEST}") // (TINY_SCALE if tiny else SCALE)).clip(8, None)


def choose(name: str, mbit: float, tiny: bool = False, samples: int = 8, rules: bool = False) -> dict[str, str]:
    """Plans as TOML by what they are, with `rules` as `fxpar plan --rules` finds them; without ranks."""
    options, cluster = (TINY if tiny else LLAMA), cluster_of(mbit)

    @functools.cache
    def rows(layers: int) -> LogicalGraph:
        return read_rows(load("llama", options={**options, "layers": str(layers)}).model, fxpar.losses.causal_lm)

    lengths = lengths_of(name, tiny)
    tokens, longest = TINY_TOKENS if tiny else TOKENS, int(lengths.max())
    batches = mini_batches(lengths, tokens, samples)
    depth = Depth(int(options["layers"]))
    lower, outlines = lowering(rows)
    problem = problem_of(rows, depth, cluster, batches, longest, None)
    mine = [text for text in HOTSPAS if Strategy.parse(text).stages <= depth.layers]
    alone = [candidate(lower, Strategy.parse(text), cluster, depth, problem.anchors) for text in mine]
    memory = min(one.memory(longest).peak_bytes for one in alone) * 102 // 100
    memory *= 1 + (tiny and name == ROUNDS)  # a tiny model is mostly weights, which two sizes of team have twice
    problem = replace(problem, memory_bytes=memory, overlap=True, rounds=name == "rounds", rules=rules)
    found = searched(problem, rows)
    pricer = SetPricer(cluster, depth, outlines, batches, memory, packed=problem.packed, overlap=True)
    hotspas = _best_alone(alone, longest, replace(pricer, optimizer_s=optimizer_s(alone[0], cluster)))
    planned = planned_for("llama", (), tokens, problem, rows)
    sets = {PLANNED: found.plans[0], HOTSPA: hotspas, ALONE: found.best_static}
    plans = {what: planned.plan(found, one) for what, one in sets.items()}
    if name == "rounds":
        assert found.rounds is not None, "no strategy holds the longest sequence on all ranks"
        plans = {ROUNDS: planned.plan(found, found.rounds.priced), **plans}
    bound = _nothing_sent_s(alone, batches)
    return {what: replace(plan, lower_bound_s=bound).to_toml() for what, plan in plans.items()}


def _nothing_sent_s(candidates: list[Candidate], batches: Sequence[Sequence[int]]) -> float:
    """Seconds of a mini-batch whose tokens are evenly shared out among replicas that send nothing: no way takes less,
    however much a device holds.
    """
    cost = next(one.group_cost for one in candidates if one.strategy.replicas == WORLD)
    return sum(cost.sequence_s(n) for lengths in batches for n in lengths) / WORLD / len(batches)


def _best_alone(candidates: list[Candidate], longest: int, pricer: SetPricer) -> PricedSet:
    priced = [pricer.price([(longest, one)], settle=True) for one in candidates]
    return min((one for one in priced if one is not None), key=lambda one: one.predicted_s)


def measure(
    plans: Mapping[str, str], name: str, mbit: float, steps: int, paced: bool, tiny: bool = False
) -> dict[str, dict[str, float]]:
    """On one rank: mean wall seconds of a step by plan, and those that its mini-batches are predicted to take."""
    options = TINY if tiny else LLAMA
    drawn = mini_batches(lengths_of(name, tiny), TINY_TOKENS if tiny else TOKENS, steps + 1, seed=1)
    generator = torch.Generator().manual_seed(0)
    batches = [[torch.randint(0, int(options["vocab"]), (n,), generator=generator) for n in one] for one in drawn]
    read = {what: parse_plan(text, what) for what, text in plans.items()}
    compiled = fxpar.compile_strategies(llama(tiny), _numbered(read), fxpar.losses.causal_lm)
    models = {what: _parallel(plan, compiled, mbit, tiny) for what, plan in read.items()}
    for model in models.values():
        _run_every_group(model, batches[0])  # so that each has run before it is paced
        if paced:
            _pace(model)
    found: dict[str, dict[str, list[float]]] = {what: {"measured_s": [], "predicted_s": []} for what in plans}
    for turn, batch in enumerate(batches):
        for what, model in models.items():
            dist.barrier()
            begun = time.perf_counter()
            model.train_step(batch)
            dist.barrier()
            if turn:
                found[what]["measured_s"].append(time.perf_counter() - begun)
                found[what]["predicted_s"].append(model.plan(batch).predicted_s)
    return {what: {key: statistics.mean(values) for key, values in one.items()} for what, one in found.items()}


def _numbered(plans: Mapping[str, Plan]) -> dict[int, str]:
    """All strategies, so that each is lowered once; the limits say nothing."""
    every = {group.strategy: None for plan in plans.values() for group in plan.groups}
    return {number + 1: text for number, text in enumerate(every)}


def _parallel(plan: Plan, compiled: Any, mbit: float, tiny: bool) -> Any:
    # In the same order on all ranks: of two orders of groups that cost the same the first is taken.
    names = dict.fromkeys(str(one) for group in plan.groups for one in formations(group.strategy))
    mine = replace(compiled, programs={name: compiled.programs[name] for name in names})
    return fxpar.parallelize(
        llama(tiny), plan=plan, loss=fxpar.losses.causal_lm, compiled=mine, cluster=cluster_of(mbit), monitor=False
    )


def _run_every_group(model: Any, batch: list[torch.Tensor]) -> None:
    """Each as if it were the only one that is worth its time, with a sequence as long as its limit."""
    engine = model.fxpar_session.engine
    limits = [group.limit for group in engine.opened]
    for number, limit in enumerate(limits):
        engine.replan(Replanned(tuple(limits), tuple(1.0 if n == number else 1e6 for n in range(len(limits)))))
        model.train_step([*(one for one in batch if len(one) <= limit), batch[0].new_zeros(limit)])
    engine.replan(Replanned.of(engine.opened))


def show(found: Mapping[str, Mapping[str, float]], plans: Mapping[str, str], name: str, mbit: float) -> bool:
    """Print a line per plan; are all targets met?"""
    print(f"{name} lengths, 2 nodes x 2 gloo ranks, {mbit:.0f} Mbit/s between the nodes")
    print(f"{'':26}{'measured':>9}{'predicted':>10}  strategies")
    for what, one in found.items():
        plan = parse_plan(plans[what], what)
        text = ", ".join(f"<={group.limit} {group.strategy}" for group in plan.groups)
        print(f"{what:26}{one['measured_s']:8.3f} s{one['predicted_s']:8.3f} s  {text}")
    first, good = next(iter(found.values())), True
    for what, target in TARGETS[name].items():
        gain, expected = (found[what][key] / first[key] for key in ("measured_s", "predicted_s"))
        error = expected / gain - 1
        print(f"{gain:.2f} times as fast as the {what} (target >= {target:g}), predicted {expected:.2f} ({error:+.1%})")
        good &= gain >= target and (what != HOTSPA or abs(error) <= TARGET_ERROR)
    read = {what: parse_plan(text, what) for what, text in plans.items()}
    bound = next(iter(read.values())).lower_bound_s
    most = ", ".join(f"{read[what].predicted_s / bound:.2f} times as fast as the {what}" for what in TARGETS[name])
    print(
        f"on the mini-batches of the search, tokens shared out evenly among ranks that send nothing take {bound:.3f} s,"
    )
    print(f"so no way is more than {most}")
    print(f"the gain over the {HOTSPA} is to be predicted within {TARGET_ERROR:.0%}")
    return good
