"""Plans of waves checked by plain code that shares none with the planner, and tiny cases to try all orders of."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from fxpar.cost.cluster import ClusterSpec
from fxpar.waves import MetaOp, TaskGraph, WavePlan

CLOSE = 1e-6


def nodes(devices: int, per_node: int = 8, intra: float = 200.0, inter: float = 6.25) -> ClusterSpec:
    """For so many devices; of one node no more than these."""
    per_node = min(per_node, devices)
    return ClusterSpec(-(-devices // per_node), per_node, intra, inter, 0.0)


def metaop(name: str, layers: int, work: float = 8.0, fixed: float = 0.4, widest: int = 8, **more: object) -> MetaOp:
    """A layer takes fixed + work / n ms on n = 1, 2, 4, ... devices."""
    widths = [2**power for power in range(widest.bit_length()) if 2**power <= widest]
    return MetaOp(name, layers, {n: fixed + work / n for n in widths}, **more)  # type: ignore[arg-type]


def without_transfers(graph: TaskGraph) -> TaskGraph:
    """Nor reductions."""
    silent = (replace(one, output_bytes=0, gradient_bytes=0) for one in graph.metaops)
    return TaskGraph(tuple(silent), graph.edges)


def check_plan(plan: WavePlan, memory_bytes: float = math.inf) -> None:
    """All layers once and in order, each forward behind what it reads and each backward behind its readers', no device
    twice at a time, every run as long as its layers and what it receives take, memory; and the bound.
    """
    graph = plan.graph
    runs = {(run.piece, run.backward): run for run in plan.step.runs}
    assert sorted(runs) == [(at, way) for at in range(len(plan.pieces)) for way in (False, True)]
    by_metaop = defaultdict(list)
    for at, piece in enumerate(plan.pieces):
        by_metaop[graph.metaops[piece.metaop].name].append(at)
        assert len(set(piece.devices)) == len(piece.devices)
        assert all(0 <= device < plan.devices for device in piece.devices)
    for one in graph.metaops:
        layers = [list(range(plan.pieces[at].first, plan.pieces[at].last)) for at in by_metaop[one.name]]
        assert list(itertools.chain(*layers)) == list(range(one.layers)), one.name
    after = {(a, b) for places in by_metaop.values() for a, b in itertools.pairwise(places)}
    after |= {(by_metaop[a][-1], by_metaop[b][0]) for a, b in graph.edges}
    for a, b in after:
        assert runs[a, False].end_ms <= runs[b, False].start_ms + CLOSE
        assert runs[b, True].end_ms <= runs[a, True].start_ms + CLOSE
    for at, piece in enumerate(plan.pieces):
        assert runs[at, False].end_ms <= runs[at, True].start_ms + CLOSE
        layer_ms = graph.metaops[piece.metaop].layer_ms[len(piece.devices)]
        for way, share in ((False, 1 / 3), (True, 2 / 3)):
            run = runs[at, way]
            assert math.isclose(run.end_ms - run.begin_ms, piece.layers * layer_ms * share, rel_tol=1e-9)
            mine = [(b, a) for a, b in after if b == at] if not way else [(a, b) for a, b in after if a == at]
            assert run.begin_ms - run.start_ms >= max(_least_ms(plan, *pair, way) for pair in [*mine, (at, at)]) - CLOSE
    _check_devices(plan, runs, memory_bytes)
    wave_of = {at: number for number, members in enumerate(plan.waves) for at in members}
    assert sorted(wave_of) == list(range(len(plan.pieces)))
    for a, b in itertools.permutations(wave_of, 2):
        if {*plan.pieces[a].devices} & {*plan.pieces[b].devices} and runs[a, False].start_ms < runs[b, False].start_ms:
            assert wave_of[a] < wave_of[b]
    assert all(wave_of[a] < wave_of[b] for a, b in after)
    for members in plan.waves:
        standing = [device for at in members for device in plan.pieces[at].devices]
        assert len(set(standing)) == len(standing)
    _check_reductions(plan, runs)
    assert plan.bound_ms <= plan.ms + CLOSE


def _least_ms(plan: WavePlan, to: int, source: int, backward: bool) -> float:
    """What the worst device of `to` must receive at least of rows that it does not have, were all links fast ones."""
    into, out = plan.pieces[to].devices, plan.pieces[source].devices
    owner = plan.pieces[to] if backward else plan.pieces[source]
    size = plan.graph.metaops[owner.metaop].output_bytes
    if to == source or not size:
        return 0.0
    worst = 0.0
    for place, device in enumerate(into):
        here = 0.0
        if device in out:
            q = out.index(device)
            low, high = max(place / len(into), q / len(out)), min((place + 1) / len(into), (q + 1) / len(out))
            here = max(0.0, high - low)
        worst = max(worst, (1 / len(into) - here) * size)
    return worst / plan.cluster.intra_gb_per_s * 1e-6


def _check_devices(plan: WavePlan, runs: dict, memory_bytes: float) -> None:
    """No device does two things at a time, nor holds more than it can."""
    for device in range(plan.devices):
        mine = [(run, plan.pieces[run.piece]) for run in runs.values() if device in plan.pieces[run.piece].devices]
        spans = sorted((run.start_ms, run.end_ms) for run, _ in mine)
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert end <= start + CLOSE
        states = {
            (
                plan.graph.metaops[piece.metaop].weights or plan.graph.metaops[piece.metaop].name,
                layer,
            ): plan.graph.metaops[piece.metaop].state_bytes
            for _, piece in mine
            for layer in range(piece.first, piece.last)
        }
        most = 0.0
        for moment in [run.start_ms for run, _ in mine if not run.backward]:
            saved = 0.0
            for run, piece in mine:
                if not run.backward and run.start_ms <= moment + CLOSE < runs[run.piece, True].end_ms:
                    saved += piece.layers * plan.graph.metaops[piece.metaop].saved_bytes / len(piece.devices)
            most = max(most, saved)
        peak = sum(states.values()) + most
        assert math.isclose(peak, plan.step.peak_bytes[device], rel_tol=1e-9, abs_tol=1e-6)
        assert peak <= memory_bytes


def _check_reductions(plan: WavePlan, runs: dict) -> None:
    """Whoever holds a layer adds up its gradients with all others that do, once, behind the last backward of it."""
    held, nbytes = defaultdict(set), {}
    for piece in plan.pieces:
        one = plan.graph.metaops[piece.metaop]
        for layer in range(piece.first, piece.last):
            held[one.parameters, layer] |= {*piece.devices}
            nbytes[one.parameters] = one.state_bytes / 8 if one.gradient_bytes is None else one.gradient_bytes
    wanted = {key for key, devices in held.items() if len(devices) > 1 and nbytes[key[0]]}
    found = [(one.weights, layer) for one in plan.step.reductions for layer in range(one.first, one.last)]
    assert sorted(found) == sorted(wanted)
    for one in plan.step.reductions:
        assert all(held[one.weights, layer] == {*one.devices} for layer in range(one.first, one.last))
        least = 2 * (1 - 1 / len(one.devices)) * nbytes[one.weights] / plan.cluster.intra_gb_per_s * 1e-6
        assert one.end_ms - one.start_ms >= (one.last - one.first) * least - CLOSE
        first = [
            runs[at, True].end_ms
            for at, piece in enumerate(plan.pieces)
            if plan.graph.metaops[piece.metaop].parameters == one.weights and piece.first == one.first < piece.last
        ]
        assert one.end_ms >= max(first, default=0.0) - CLOSE
    for device in range(plan.devices):
        spans = sorted((one.start_ms, one.end_ms) for one in plan.step.reductions if device in one.devices)
        assert all(end <= start + CLOSE for (_, end), (start, _) in itertools.pairwise(spans))
    assert plan.ms == max(one.end_ms for one in (*plan.step.runs, *plan.step.reductions))


def least_ms(graph: TaskGraph, devices: int) -> float:
    """The shortest time of all plans without transfers, each layer on devices of its own choice: by trying all."""
    best = math.inf

    def go(now: float, running: tuple[tuple[float, int, int], ...], left: tuple[int, ...]) -> None:
        """`running`: (end, MetaOp, width); layers begin at `now` or when the next one ends."""
        nonlocal best
        if now >= best:
            return
        if not any(left):
            best = min(best, max((end for end, _, _ in running), default=now))
            return
        busy = {m for _, m, _ in running}
        free = devices - sum(width for _, _, width in running)
        for started in _subsets(graph, left, busy, free):
            ahead = running + tuple((now + graph.metaops[m].layer_ms[width], m, width) for m, width in started)
            if not ahead:
                continue
            after = tuple(count - sum(m == i for m, _ in started) for i, count in enumerate(left))
            end = min(one for one, _, _ in ahead)
            if not any(after):
                best = min(best, max(one for one, _, _ in ahead))
            else:
                go(end, tuple(one for one in ahead if one[0] > end + 1e-12), after)

    go(0.0, (), tuple(one.layers for one in graph.metaops))
    return best


def _subsets(
    graph: TaskGraph, left: tuple[int, ...], busy: set[int], free: int
) -> Iterator[tuple[tuple[int, int], ...]]:
    """All ways to begin layers of MetaOps that can run, none included."""
    names = [one.name for one in graph.metaops]
    waits = {names.index(b) for a, b in graph.edges if left[names.index(a)] or names.index(a) in busy}
    able = [m for m, count in enumerate(left) if count and m not in busy and m not in waits]
    choices = [[(m, 0), *((m, n) for n in graph.metaops[m].layer_ms if n <= free)] for m in able]
    for chosen in itertools.product(*choices):
        if sum(width for _, width in chosen) <= free:
            yield tuple(one for one in chosen if one[1])
