"""What a layer of each MetaOp takes on how many devices: the best layout for each number, priced from programs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from fxpar.cost.calls import node_costs
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.polynomial import Polynomial, base_rows, token_dim
from fxpar.errors import FitsNoDevicesError, FxparError
from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import run_sizes
from fxpar.ir.node_meta import fqn_of
from fxpar.ir.pipeline_graph import PipelineGraph, TeamsGraph
from fxpar.ir.strategy import of_degrees
from fxpar.lowering import lower
from fxpar.tasks.contract import Contracted, TaskStep
from fxpar.tasks.held import Held
from fxpar.tasks.layers import around
from fxpar.waves.work import MetaOp, TaskGraph

_MS = 1000


@dataclass(frozen=True)
class Timed:
    """A time of a layer, and the strategy that takes it."""

    ms: float
    strategy: str


@dataclass(frozen=True)
class Layout:
    """A strategy for a whole task, with as many `replicas`, and the ms of each of its MetaOps under it, in order.
    `held` is what one replica holds.
    """

    width: int
    replicas: int
    strategy: str
    ms: tuple[float, ...]
    held: Held


_FEW = 8  # devices, of which a tower may take what another one leaves


def widths_of(devices: int) -> list[int]:
    """Numbers of devices that MetaOps may run on: powers of two, and all; of few devices also what these leave."""
    powers = {2**i for i in range(devices.bit_length()) if 2**i <= devices}
    left = {devices - one for one in powers if one < devices} if devices <= _FEW else set()
    return sorted(powers | left | {devices})


def task_graph(
    tasks: Mapping[str, TaskStep], found: Sequence[Contracted], cluster: ClusterSpec, devices: int
) -> tuple[TaskGraph, list[dict[int, Timed]], dict[str, list[Layout]]]:
    """(what `fxpar.waves` plans with, by MetaOp the best strategy for each number of devices, all layouts of tasks).

    Raises FitsNoDevicesError for a task that no strategy can run.
    """
    times: dict[int, dict[int, Timed]] = {}
    layouts: dict[str, list[Layout]] = {}
    for name, step in tasks.items():
        mine = [i for i, one in enumerate(found) if one.task == name]
        layouts[name] = _all_layouts(name, step, [found[i] for i in mine], cluster, devices)
        for place, i in enumerate(mine):
            times[i] = _best(layouts[name], place, found[i].layers)
    metaops = tuple(
        MetaOp(
            one.chain.metaop,
            one.layers,
            {width: timed.ms for width, timed in times[i].items()},
            one.output_bytes,
            one.state_bytes,
            one.saved_bytes,
            one.weights,
            one.gradient_bytes,
        )
        for i, one in enumerate(found)
    )
    edges = tuple((metaops[a].name, metaops[i].name) for i, one in enumerate(found) for a in one.reads)
    return TaskGraph(metaops, edges), [times[i] for i in range(len(found))], layouts


def _best(layouts: Sequence[Layout], metaop: int, layers: int) -> dict[int, Timed]:
    """For each number of devices the least time of a layer of the MetaOp at this place."""
    best: dict[int, Timed] = {}
    for one in layouts:
        ms = one.ms[metaop] / layers
        if one.width not in best or ms < best[one.width].ms:
            best[one.width] = Timed(ms, one.strategy)
    return best


def _all_layouts(
    task: str, step: TaskStep, found: Sequence[Contracted], cluster: ClusterSpec, devices: int
) -> list[Layout]:
    """Those that can run the task. Raises FitsNoDevicesError if there is none."""
    layouts: list[Layout] = []
    refused: dict[str, str] = {}
    shares = shares_of(step, found)
    for cut in _layouts(cluster, devices):
        alone = of_degrees(1, 1, *cut)
        try:
            program = lower(step.logical, alone, for_store=True, verified=False)
        except FxparError as error:  # this model cannot be cut so
            refused[str(alone)] = str(error)
            continue
        assert not isinstance(program, PipelineGraph | TeamsGraph)
        if program.padding_hazard and any(dim.example % program.divisors.get(dim.name, 1) for dim in program.dims):
            refused[str(alone)] = "the sizes of its example do not divide"
            continue
        costs, held = costs_of(program, shares, len(found), cluster), Held.of(program, step.tokens)
        for width in widths_of(devices):
            replicas, left = divmod(width, alone.world)
            if left or not 1 <= replicas <= step.batches:
                continue
            batches = math.ceil(step.batches / replicas)
            ms = tuple(_MS * _seconds(step, program, cost, batches) for cost in costs)
            layouts.append(Layout(width, replicas, str(of_degrees(replicas, 1, *cut)), ms, held))
    if not layouts:
        why = "; ".join(f"{name}: {text}" for name, text in list(refused.items())[:2])
        raise FitsNoDevicesError(task, f"it runs under no strategy. {why}", "Change its example or its loss")
    return layouts


def _layouts(cluster: ClusterSpec, devices: int) -> Iterator[tuple[int, int]]:
    """One replica on up to so many devices: degrees in which tokens or rows are cut, and weights (within a node)."""
    for weights in widths_of(min(devices, cluster.devices_per_node)):
        if weights & (weights - 1) and weights != devices:
            continue  # heads and widths are seldom multiples of it
        for tokens in widths_of(devices // weights):
            yield tokens, weights


Shares = dict[str, dict[int, Fraction]]  # by module, how much of what is in it which MetaOps have


def shares_of(step: TaskStep, found: Sequence[Contracted]) -> Shares:
    """All of a layer is its MetaOp's. Of a module in which several have calls each has as much as it takes in the
    captured graph, of what is in no known one as much as in all.
    """
    seconds: dict[str, dict[int, Fraction]] = {"": {}}
    layers: Shares = {}
    for i, one in enumerate(found):
        layers |= {module: {i: Fraction(1)} for layer in one.part.layers for module in layer}
        for node in (*one.part.before, *one.part.behind):
            mine = seconds.setdefault(fqn_of(node), {})
            mine[i] = mine.get(i, Fraction(0)) + step.forward.seconds[node]
    if not any(seconds[""].values()):
        seconds[""] = {
            i: sum((step.forward.seconds[n] for n in one.part.all_calls), Fraction(0)) for i, one in enumerate(found)
        }
    shares = {}
    for fqn, mine in seconds.items():
        total = sum(mine.values())
        shares[fqn] = {i: one / total if total else Fraction(1, len(mine)) for i, one in mine.items()}
    return shares | layers


def costs_of(program: Program, shares: Shares, count: int, cluster: ClusterSpec) -> list[Polynomial]:
    """By MetaOp, seconds of all its layers in one micro-batch, forward and backward."""
    totals: dict[str, Polynomial] = defaultdict(Polynomial)
    for cost in node_costs(program, cluster):
        totals[cost.fqn] += cost.exposed
    found = [Polynomial() for _ in range(count)]
    for fqn, total in totals.items():
        known = next(one for one in reversed(around(fqn)) if one in shares)
        for i, share in shares[known].items():
            found[i] += total * share
    return found


def _seconds(step: TaskStep, program: Program, cost: Polynomial, batches: int) -> float:
    """Of so many batches on a replica: packed in one row where the graph allows it, else one after the other."""
    sizes, token = run_sizes(program), token_dim(program)
    length = sizes[token.name] if token else 0
    rows = math.prod(max(1, sizes[dim.name] // base_rows(program, dim)) for dim in program.dims if dim is not token)
    if step.logical.packing is not None:
        return float(cost.over([length] * batches)) * rows
    return float(cost.at(length)) * rows * batches
