"""`fxpar simulate`: what a named set of strategies takes, and published tables, from shapes only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rich.console import Console

from fxpar.cli.console import human_bytes, human_seconds, print_table, show_notes, stdout_console, working
from fxpar.cli.request import cluster_name, collected_warnings, same_ranks, write_json
from fxpar.cli.shallow import Shallow, sent_lines, set_json
from fxpar.cli.simulate_commands import SimulateRequest
from fxpar.cost.cluster import ClusterSpec, usual_cluster
from fxpar.ir.graph import DOCUMENTS
from fxpar.search.chosen import of_ranks
from fxpar.search.lengths import mini_batches, read_lengths
from fxpar.search.pricing import PricedSet, SetPricer
from fxpar.search.simulate import Named, Simulated, simulate


def run_simulate(request: SimulateRequest) -> None:
    """Do it. Raises FxparError."""
    if request.table is not None:
        from fxpar.cli.simulate_tables import run_table

        run_table(request)
        return
    named = [Named.parse(text) for text in request.named]
    lengths = read_lengths(request.lengths or "", request.seed, request.tokenizer)
    cluster = cluster_of(request, same_ranks([one.strategy for one in named]))
    source = replace(request.source, options=request.model_options)
    with working() as status, collected_warnings([]):
        status.update(f"capturing {source.model}")
        model = Shallow(source)
        model.require_sequences(int(lengths.max()), "a set is priced", request.tokenizer)
        pricer = SetPricer(
            cluster,
            model.depth,
            model.outlines,
            mini_batches(lengths, request.tokens_per_step or 1, request.samples, request.seed),
            request.memory_bytes or cluster.sustained.memory_bytes,
            packed=DOCUMENTS in model.inputs,
            overlap=request.overlap,
        )
        status.update(f"pricing {len(named)} strategies")
        found = simulate(named, int(lengths.max()), model.lower, pricer)
        routes, notes = model.routes(found.plan.strategies), model.notes(found.plan.strategies)
    show_notes(notes)
    if write_json(request.json, document(found) | {"notes": notes, "routes": routes}):
        _show(stdout_console(), request, found, pricer)
        for line in routes:
            stdout_console().print(line, markup=False)


def cluster_of(request: SimulateRequest, world: int) -> ClusterSpec:
    """As many nodes of the cluster as the strategies need. Raises ClusterError, WorldSizeError."""
    if request.cluster is None:
        return of_ranks(usual_cluster(world), world)
    return of_ranks(ClusterSpec.from_file(request.cluster), world)


def document(found: Simulated) -> dict[str, Any]:
    """What `--json` writes: keys as of a plan of `fxpar plan`."""
    best = found.best_static
    return {
        **set_json(found.plan),
        "best_static": None if best is None else {"strategy": best.strategies[0], "predicted_s": best.predicted_s},
        "static_s": {name: one.predicted_s for name, one in found.statics.items()},
        "speedup": found.speedup,
    }


def _moved(plan: PricedSet, pricer: SetPricer) -> Iterator[str]:
    """Of each group what its own sequences do elsewhere: the planner of mini-batches merges groups, and lets sequences
    ride in longer ones.
    """
    below = 0
    for group in plan.groups:
        own = sum(n for batch in pricer.batches for n in batch if below < n <= group.limit) / len(pricer.batches)
        if group.tokens < (1 - 1e-9) * own:
            yield (
                f"sequences of {below + 1:,} to {group.limit:,} tokens: {1 - group.tokens / own:.1%} of their tokens "
                "run in a group for longer ones, predicted to take less time there than with a switch of their own"
            )
        below = group.limit


def _show(console: Console, request: SimulateRequest, found: Simulated, pricer: SetPricer) -> None:
    plan = found.plan
    console.print(
        f"{request.source.model} on {pricer.cluster.world} devices, {pricer.mean_tokens:,.0f} tokens per mini-batch; "
        f"predicted for {cluster_name(request.cluster)} ({pricer.cluster.sustained})",
        markup=False,
    )
    rows = [
        (
            f"up to {group.limit:,}",
            group.strategy,
            f"{group.token_budget:,}",
            f"{group.tokens / pricer.mean_tokens:.1%}",
            human_seconds(group.seconds),
            human_bytes(plan.memory_bytes[group.strategy]),
        )
        for group in plan.groups
    ]
    parts = {"switches": plan.switch_s, "reductions": plan.reduce_s, "optimizer": plan.optimizer_s}
    rows += [(name, "", "", "", human_seconds(seconds), "") for name, seconds in parts.items()]
    rows.append(("mini-batch", "", "", "", human_seconds(plan.predicted_s), ""))
    titles = ("lengths", "strategy", "token budget", "tokens", "seconds", "memory")
    print_table(console, titles, rows, right=(0, 2, 3, 4, 5))
    for line in (*sent_lines(plan), *_moved(plan, pricer)):
        console.print(line, markup=False)
    names = [str(Named.parse(text).strategy) for text in request.named]
    unused = [name for name in names if name not in plan.strategies]
    if unused:
        console.print(f"without a use here: {', '.join(unused)}", markup=False)
    best = found.best_static
    if best is None:
        console.print("no strategy of the set holds all sequences alone", markup=False)
        return
    console.print(
        f"best of them alone: {best.strategies[0]}, {human_seconds(best.predicted_s)}; the set is {found.speedup:.2f} "
        "times as fast",
        markup=False,
    )
