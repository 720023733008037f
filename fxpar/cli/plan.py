"""`fxpar plan`: the strategies that train a model fastest on a cluster, from shapes only."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console

from fxpar.cli.console import human_bytes, human_seconds, print_table, show_notes, stdout_console, working
from fxpar.cli.plan_commands import PlanRequest
from fxpar.cli.plan_galvatron import GalvatronRequest, imported_plan, run_import_galvatron, run_plan_galvatron
from fxpar.cli.plan_sizes import show_sizes, sizes_json
from fxpar.cli.plan_verify import (
    VerifyJob,
    check_verify,
    kind_here,
    other_devices,
    show_verified,
    verified,
    verified_json,
)
from fxpar.cli.request import cluster_name, collected_warnings, write_json, write_output
from fxpar.cli.shallow import Shallow, order_lines, sent_lines, set_json
from fxpar.cost.cluster import ClusterSpec, usual_cluster
from fxpar.errors import PlanOptionError
from fxpar.ir.collector import collector_of_new
from fxpar.search.batch_size import MOST_PER_DEVICE, RatedSize, rated_sizes, sizes, smallest_near
from fxpar.search.chosen import of_ranks, planned_for, problem_of
from fxpar.search.galvatron_plan import as_plan
from fxpar.search.layouts import list_of
from fxpar.search.lengths import mini_batches, read_lengths
from fxpar.search.plan_file import Plan
from fxpar.search.pricing import PricedGroup, PricedSet
from fxpar.search.problem import Found, Problem
from fxpar.search.proposals import WORTH
from fxpar.search.rounds import Rounds
from fxpar.search.verify import VerifiedPlan, order_of

ROUNDS = "the plan of rounds"
BAR = 24  # columns of the longest bar
FEW_RUNS = 0.05  # of the micro-batches: so many more or less are not worth a word
LOOKS = 200  # for garbage among what is new; a search for one size of mini-batches takes fewer


def run_plan(request: PlanRequest) -> None:
    """Do it. Raises FxparError."""
    if request.imported is not None:
        run_import_galvatron(request.imported, request.ranks, request.json)
        if request.output is not None:
            _write_imported(request, request.imported, request.output)
    elif request.cost == "galvatron":
        run_plan_galvatron(_galvatron(request))
    else:
        with collector_of_new(LOOKS):
            _run(request)


def _write_imported(request: PlanRequest, path: str, output: str) -> None:
    """A plan of Galvatron's as one of fxpar's, for a model. Raises PlanOptionError for a model with other layers."""
    plan, source = imported_plan(path, request.ranks), request.source
    with working() as status, collected_warnings([]):
        status.update(f"capturing {source.model}")
        model = Shallow(source)
        params = list(model.rows(model.depth.samples(1)[0]).params())
    lists = {list_of(info.fqn) for info in params} - {""}
    if len(lists) != 1:
        found = f"lists of modules: {', '.join(sorted(lists)) or 'none'}"
        raise PlanOptionError("MODEL", source.model, f"its layers are not in one list, which the plan needs ({found})")
    (layers,) = lists
    count = model.depth.layers
    if count != len(plan.layers):
        why = f"it has {count} layers, and {path} is for {len(plan.layers)}"
        raise PlanOptionError("MODEL", source.model, f"{why}. Give it as many with --set")
    written = as_plan(plan, layers, request.seq_len or 1, source.model, source.options)
    write_output(output, written.to_toml([f"from {path}", f"train with it: fxpar train run.toml --plan {output}"]))
    stdout_console().print(f"the plan is in {output}", markup=False)


def _galvatron(request: PlanRequest) -> GalvatronRequest:
    return GalvatronRequest(
        request.profiles or "",
        request.devices or 1,
        request.batch or 1,
        request.seq_len or 1,
        request.memory or "",
        request.uniform,
        request.micro_batches,
        layers=request.layers,
        hidden=request.hidden,
        json=request.json,
    )


def _run(request: PlanRequest) -> None:
    lengths = read_lengths(request.lengths or "", request.seed, request.tokenizer)
    cluster = _cluster(request)
    if request.verify is not None:
        check_verify(request.verify, cluster.world, request.source.is_file, request.cluster)
    memory = request.memory_bytes or cluster.sustained.memory_bytes
    tried = _sizes(request, cluster, int(lengths.max()))
    with working() as status, collected_warnings([]):
        status.update(f"capturing {request.source.model}")
        model = Shallow(request.source)
        model.require_sequences(int(lengths.max()), "a plan is", request.tokenizer)
        if request.verify is not None:
            model.require_tokens_alone("--verify", request.verify)
        problem_of_size = functools.partial(_problem, request, model, cluster, lengths, memory)
        rated = rated_sizes(tried, problem_of_size, model.lower, model.outlines, status.update)
        taken = smallest_near(rated)
        problem, found, tokens = taken.problem, taken.found, taken.tokens_per_step
        planned = planned_for(request.source.model, request.source.options, tokens, problem, model.rows)
        routes = model.routes(name for one in found.plans for name in one.strategies)
        notes = model.notes(name for one in found.plans for name in (one.usual or one).strategies)
        names, sets = _choices(found, request.verify)
        runs, elsewhere = list[VerifiedPlan](), list[str]()
        if request.verify is not None:
            status.update(f"running {len(sets)} plans on {cluster.world} ranks")
            runs = verified(_job(request, problem, found, [planned.plan(found, one) for one in sets]))
            elsewhere = other_devices(request.cluster, cluster.world)
    fastest = order_of([run.measured_s for run in runs])[0] if runs else 0
    if request.output is not None:
        said = [*remarks(found, request.output, sets[fastest], request.cluster), *_measured(runs, fastest), *elsewhere]
        write_output(request.output, planned.plan(found, sets[fastest]).to_toml(said))
    notes += elsewhere
    show_notes(notes)
    more = {"notes": notes, "routes": routes} | ({"verified": verified_json(runs)} if runs else {})
    if write_json(request.json, document(found, tokens) | sizes_json(rated) | more):
        console = stdout_console()
        _show(console, request, taken)
        for line in routes:
            console.print(line, markup=False)
        if request.tokens_per_step is None:
            show_sizes(console, rated, taken)
        if runs:
            show_verified(console, runs, names, request.cluster)
        if request.output is not None:
            how = ", the fastest as measured," if runs else ""
            console.print(f"{names[fastest]}{how} is in {request.output}", markup=False)


def _choices(found: Found, most: int | None) -> tuple[list[str], list[PricedSet]]:
    """What plans are called, and their sets, best first: at most so many, and rounds of teams where these take less."""
    sets = list(found.plans[:most])
    names = [f"plan {number}" for number in range(1, len(sets) + 1)]
    return ([ROUNDS, *names], [found.best, *sets]) if found.rounds_win else (names, sets)


def _sizes(request: PlanRequest, cluster: ClusterSpec, longest: int) -> tuple[int, ...]:
    """Tokens of the mini-batches to plan for. Raises PlanOptionError."""
    if request.tokens_per_step is not None:
        return (request.tokens_per_step,)
    return sizes(longest, request.max_tokens_per_step or max(MOST_PER_DEVICE * cluster.world, longest))


def _problem(
    request: PlanRequest, model: Shallow, cluster: ClusterSpec, lengths: np.ndarray, memory: int | None, tokens: int
) -> Problem:
    """For mini-batches of so many tokens."""
    batches = mini_batches(lengths, tokens, request.samples, request.seed)
    problem = problem_of(model.rows, model.depth, cluster, batches, int(lengths.max()), memory, request.rings)
    return replace(
        problem,
        max_strategies=request.max_strategies,
        overlap=request.overlap or (request.verify is not None and kind_here(cluster.world) == "cpu"),
        keep=max(request.best, request.verify or 0),
        rules=request.rules,
        teams=request.teams,
        rounds=request.rounds,
    )


def _job(request: PlanRequest, problem: Problem, found: Found, plans: Sequence[Plan]) -> VerifyJob:
    source = request.source
    return VerifyJob(
        model=source.model,
        options=tuple(source.options),
        dtype=source.dtype,
        precision=source.precision,
        plans=tuple(plan.to_toml() for plan in plans),
        batches=problem.batches,
        cluster=problem.cluster.to_json(),
        optimizer_s=found.plans[0].optimizer_s,
    )


def _measured(runs: Sequence[VerifiedPlan], fastest: int) -> list[str]:
    return [f"measured: {human_seconds(runs[fastest].measured_s)} per mini-batch"] if runs else []


def _cluster(request: PlanRequest) -> ClusterSpec:
    """Raises ClusterError."""
    world = request.source.world
    if request.cluster is None and request.verify is not None:
        return usual_cluster(world or 1, world or 1, kind_here(world or 1))
    if request.cluster is None:
        return of_ranks(usual_cluster(world or 1), world or 1)
    cluster = ClusterSpec.from_file(request.cluster)
    if world is not None:
        cluster = of_ranks(cluster, world)
    return cluster


def remarks(found: Found, path: str, plan: PricedSet, cluster: str | None) -> list[str]:
    """Comments of a plan file: what a plan is predicted to win, and how to train with it, priced for the same cluster
    (a file or a name; None: usual devices).
    """
    static = found.best_static
    speedup = static.predicted_s / plan.predicted_s
    faster = f"predicted: {speedup:.2f} times as fast as the best single strategy, {static.strategies[0]}"
    alone = f"predicted: no set of strategies is faster than {static.strategies[0]} alone"
    if found.plans[0].predicted_s < plan.predicted_s:  # another one was measured fastest
        alone = f"predicted: plan 1 is {plan.predicted_s / found.plans[0].predicted_s:.2f} times as fast as this one"
    use = f"train with it: fxpar train run.toml --plan {shlex.quote(path)}"
    if cluster is not None:
        use += f" --set {shlex.quote(f'engine.cluster={cluster}')}"
    slower = f"predicted: {1 / speedup:.2f} times as long as {static.strategies[0]}, the best single strategy"
    said = alone if plan.strategies == static.strategies else faster if speedup >= 1 else slower
    return [said, use]


def document(found: Found, tokens_per_step: int) -> dict[str, Any]:
    """What `--json` writes."""
    return {
        "tokens_per_step": tokens_per_step,
        "plans": [set_json(plan) | {"lower_bound_s": found.lower_bound_s} for plan in found.plans],
        "best_static": {"strategy": found.best_static.strategies[0], "predicted_s": found.best_static.predicted_s},
        "speedup": found.speedup,
        "without_rules_s": found.uniform_s,
        "without_rules_lower_bound_s": found.uniform_bound_s,
        "search_cpu_s": found.search_cpu_s,
        "evaluated": found.evaluated,
        "pruned": found.pruned,
        "planned_sets": found.planned_sets,
        "refused": found.refused,
        "rounds": found.rounds and _rounds_json(found, found.rounds),
    }


def _rounds_json(found: Found, rounds: Rounds) -> dict[str, Any]:
    """`speedup` is over the best set."""
    speedup = found.plans[0].predicted_s / rounds.priced.predicted_s
    return set_json(rounds.priced) | rounds.to_json() | {"better": found.rounds_win, "speedup": speedup}


def _show(console: Console, request: PlanRequest, taken: RatedSize) -> None:
    problem, found, asked = taken.problem, taken.found, taken.tokens_per_step
    best, tokens = found.plans[0], problem.mean_tokens
    whole = f" (the mean: as many whole sequences as fit into {asked:,})" if round(tokens) != asked else ""
    if any(sum(batch) > asked for batch in problem.batches):
        whole = f" (the mean: as many whole sequences as fit into {asked:,}, or one that is longer)"
    console.print(
        f"{request.source.model} on {problem.cluster.world} devices, {tokens:,.0f} tokens per mini-batch{whole}, "
        f"longest sequence {problem.longest:,}; predicted for "
        f"{_devices(request)} ({problem.cluster.sustained})",
        markup=False,
    )
    for number, plan in enumerate(found.plans, 1):
        slower = (
            ""
            if number == 1
            else f", {plan.predicted_s / best.predicted_s - 1:.1%} slower, because {why_slower(plan, best)}"
        )
        console.print(f"\nplan {number}: {human_seconds(plan.predicted_s)} per mini-batch{slower}", markup=False)
        _print_groups(console, plan, tokens)
        if plan.simulated_s < (1 - WORTH) * plan.predicted_s:
            how = "all stages counted as the slowest: as they differ, its schedule is simulated at"
            console.print(f"{how} {human_seconds(plan.simulated_s)} per mini-batch", markup=False)
    console.print(f"\n{static_line(found)}", markup=False)
    if request.rounds:
        console.print(_rounds(found), markup=False)
    if problem.rules:
        console.print(_won(found, problem.depth.whole), markup=False)
        console.print(
            f"no set without rules takes less than {human_seconds(found.uniform_bound_s)} "
            f"(gap {found.uniform_gap:.1%})",
            markup=False,
        )
    console.print(
        f"no set takes less than {human_seconds(found.lower_bound_s)} (gap {found.gap:.1%}); "
        f"{found.evaluated} strategies priced, {found.pruned} pruned, {len(found.refused)} refused, "
        f"{found.planned_sets} sets planned in {found.search_cpu_s:.1f} CPU s",
        markup=False,
    )
    whose: dict[str, list[str]] = {}
    for name, why in found.refused.items():
        whose.setdefault(why, []).append(name)
    for why, names in whose.items():
        console.print(f"refused: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}: {why}", markup=False)


def static_line(found: Found) -> str:
    """How the best set compares with the best single strategy. Teams are one strategy of a set, and none of these."""
    static, best = found.best_static, found.plans[0]
    same = best.strategies == static.strategies
    gain = "plan 1 is just that" if same else f"plan 1 is {found.speedup:.2f} times as fast"
    return f"best single strategy: {static.strategies[0]}, {human_seconds(static.predicted_s)}; {gain}"


def _rounds(found: Found) -> str:
    """What to write for the longest sequences, and whether that is faster than the best set."""
    one = found.rounds
    if one is None:
        return "rounds of teams: no strategy with one replica on all devices holds the longest sequence"
    took, ratio = human_seconds(one.priced.predicted_s), one.priced.predicted_s / found.plans[0].predicted_s
    than = f"{1 - ratio:.1%} less than plan 1" if found.rounds_win else f"{ratio - 1:.1%} more than plan 1"
    text = f'{one.limit} = "{one.text}", token budget {one.token_budget:,}'
    return f"rounds of teams: {text}: {took} per mini-batch, {than}"


def _won(found: Found, whole: bool) -> str:
    """What rules per module win, for a model that is always lowered `whole` or not."""
    if whole:
        return "rules per module: none tried; they are for built-in and hf:TYPE models, whose depth is an option"
    if not found.ruled:
        return "rules per module: there are none to try for these strategies"
    if found.won < WORTH:
        return f"rules per module: {found.ruled} tried, none wins {WORTH:.1%}"
    return (
        f"rules per module: {found.ruled} tried; plan 1 takes {found.won:.1%} less than the best set without, "
        f"{human_seconds(found.uniform_s)}"
    )


def _devices(request: PlanRequest) -> str:
    """What it is predicted for. Where no cluster is described, with `--verify` it is what the plans run on."""
    here = request.cluster is None and request.verify and kind_here(request.source.world or 1) == "cpu"
    return "usual CPUs" if here else cluster_name(request.cluster)


def _print_groups(console: Console, plan: PricedSet, tokens: float) -> None:
    longest = max(group.seconds for group in plan.groups)
    rows = [
        (
            f"up to {group.limit:,}",
            group.strategy,
            f"{group.token_budget:,}",
            f"{group.tokens / tokens:.1%}",
            human_seconds(group.seconds),
            human_bytes(plan.memory_bytes[group.strategy]),
            "#" * round(BAR * group.seconds / longest) if longest else "",
        )
        for group in plan.groups
    ]
    rows.append(("borders", "", "", "", human_seconds(plan.exposed_s), "", ""))
    rows.append(("optimizer", "", "", "", human_seconds(plan.optimizer_s), "", ""))
    titles = ("lengths", "strategy", "token budget", "tokens", "seconds", "memory", "")
    print_table(console, titles, rows, right=(0, 2, 3, 4, 5))
    for line in (*sent_lines(plan), *order_lines(plan)):
        console.print(line, markup=False)


def why_slower(plan: PricedSet, best: PricedSet) -> str:
    """Where a plan loses most against the best one."""

    def more_s(one: Callable[[PricedGroup], float]) -> float:
        return sum(map(one, plan.groups)) - sum(map(one, best.groups))

    moved = "switches" if plan.switch_s - best.switch_s > plan.reduce_s - best.reduce_s else "reductions"
    parts = {
        f"its micro-batches take longer{_other_rows(plan, best)}": more_s(lambda group: group.busy_s),
        "its ranks wait longer, in bubbles and for slower replicas": more_s(lambda group: group.seconds - group.busy_s),
        f"it waits longer for {moved}": plan.exposed_s - best.exposed_s,
    }
    return max(parts, key=lambda name: parts[name])


def _some(count: float) -> str:
    """A mean number: 2.5 must not read as 2."""
    return f"{count:,.1f}".removesuffix(".0")


def _other_rows(plan: PricedSet, best: PricedSet) -> str:
    """How many micro-batches of all replicas a mini-batch has in the mean, and how long, if that differs."""
    counts = [sum(group.micro_batches for group in one.groups) for one in (plan, best)]
    if max(counts) < (1 + FEW_RUNS) * min(counts):
        return ""
    mine, others = (
        f"{_some(count)} of {sum(group.tokens for group in one.groups) / count:,.0f}"
        for count, one in zip(counts, (plan, best), strict=True)
    )
    return f" ({mine} tokens, not {others})"
