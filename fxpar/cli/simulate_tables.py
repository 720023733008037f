"""Published tables that `fxpar simulate` reproduces, from shapes only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from rich.console import Console

from fxpar.cli.console import human_bytes, human_seconds, print_table, stdout_console, working
from fxpar.cli.options import GraphSource
from fxpar.cli.request import collected_warnings, write_json
from fxpar.cli.shallow import Shallow
from fxpar.cli.simulate_commands import SimulateRequest
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.group_cost import GroupCost
from fxpar.ir.strategy import Strategy
from fxpar.search.chosen import MAX_STRATEGIES
from fxpar.search.driver import find_plan_of
from fxpar.search.known import KnownModel
from fxpar.search.lengths import mini_batches, read_lengths
from fxpar.search.price import candidate
from fxpar.search.pricing import SetPricer
from fxpar.search.problem import Problem
from fxpar.search.published import (
    A800,
    A800_COLLECTIVES,
    EDGES,
    H20,
    H20_COLLECTIVES,
    HSPMD_LENGTHS,
    HSPMD_S,
    HSPMD_SETS,
    HSPMD_TOKENS,
    LAYERS_32B,
    LAYOUTS,
    MODEL_32B,
    OTHERS_S,
    SPEEDUPS,
    STATIC,
    STATIC_S,
    TOTALS,
)
from fxpar.search.published_plans import Alone, hotspa_case
from fxpar.search.simulate import Named, Simulated, simulate
from fxpar.search.simulate_groups import Dataset, chain_s, formations, mean_s, pair, table_3
from fxpar.search.simulate_switches import figure_8, layouts_32b
from fxpar.search.space import shapes
from fxpar.search.switching import ModelSwitches
from fxpar.switch import ParamLayout

NETWORK = (
    f"4 x 8 A800, from data sheets: NVLink {A800.intra_gb_per_s:g} GB/s and an adapter of {A800.inter_gb_per_s:g} GB/s "
    "per device and direction (an assumption: the paper does not tell), all links at once, "
    f"{A800.latency_us:g} µs per message of the busiest device"
)
PRICES = (
    f"programs: {A800.sustained}, collectives {A800_COLLECTIVES.intra_gb_per_s:g} GB/s inside a node and "
    f"{A800_COLLECTIVES.inter_gb_per_s:g} GB/s over whole nodes, fitted to Hydraulis' times of "
    "micro-batches, not to HotSPa"
)
ROWS = (
    "tokens per mini-batch are the one free number of a dataset, fitted to its static row, whose seconds also give the "
    "shares of the bands; rows as long as a band's upper length, in groups at least 4K; switches in HotSPa's order "
    "without packing, allocation and barriers"
)
PAIR_COMBINATIONS, PAIR_BATCHES = ("C1", "C2"), 24  # of HotSPa's artifact
PAIR_NETWORK = (
    f"NVLink {H20.intra_gb_per_s:g} GB/s; compute and collectives sustain the shares of their data sheets that they do "
    f"on A800s, with the same adapters of {H20.inter_gb_per_s:g} GB/s (an assumption: the paper does not tell)"
)
PAIR_ROWS = (
    f"lengths {HSPMD_LENGTHS}; which of its sets HotSPa ran, and which layout Megatron-LM, is not published: C1 and C2 "
    f"of its artifact, and {STATIC} in rows of 32K; rows of groups as long as their upper length"
)
FORMATION_ROWS = (
    "HSPMD's strategies by the longest sequence of a mini-batch, B up to 16K and A beyond (the paper does not tell "
    "where it changes); documents packed without padding, each attends to itself alone, and a micro-batch has as many "
    "tokens per device as the widest pipeline has with one of full length; weights come from home and gradients go "
    "there in every mini-batch"
)
CHOSEN_REMAT = "remat(selective|redo_comm)"  # what Megatron-LM does under sequence parallelism
CHOSEN_BATCHES, CHOSEN_TRIES = 3, 12  # mini-batches and sets that are planned for `chosen`
CHOSEN_STRATEGIES = 2  # of a set, where all shapes are searched


def run_table(request: SimulateRequest) -> None:
    """Do it. Raises FxparError."""
    tables = {
        "hotspa-fig8": (_figure_8, _show_figure_8),
        "hotspa-table3": (_table_3, _show_table_3),
        "hspmd-pair": (_pair, _show_pair),
        "hspmd": (_hspmd, _show_hspmd),
    }
    make, show = tables[request.table or ""]
    with working() as status, collected_warnings([]):
        status.update(f"pricing {request.table}")
        data = make()
    if write_json(request.json, data):
        show(stdout_console(), data)


def model_32b(dtype: str = "float32", precision: str | None = None) -> Shallow:
    """HotSPa's model of 32B parameters."""
    options = tuple(f"{key}={value}" for key, value in MODEL_32B.items())
    return Shallow(GraphSource("llama", dtype=dtype, precision=precision, options=(*options, f"layers={LAYERS_32B}")))


def _figure_8() -> dict[str, Any]:
    found = figure_8(layouts_32b(model_32b("bfloat16").outlines))
    return {"network": NETWORK, "switches": [one.to_json() for one in found]}


def _show_figure_8(console: Console, data: dict[str, Any]) -> None:
    titles = ("switch", "of", "planner", "inside nodes", "between nodes", "published", "fused", "not fused")
    rows = []
    for one in data["switches"]:
        published = one.get("published_gb", {}).get("inter_node")
        rows.append(
            (
                f"{one['source']} > {one['target']}",
                one["what"],
                one["planner"],
                human_bytes(one["intra_node_bytes"]),
                human_bytes(one["inter_node_bytes"]),
                "" if published is None else f"{published} GB",
                human_seconds(one["fused_s"]),
                human_seconds(one["unfused_s"]),
            )
        )
    print_table(console, titles, rows, right=(3, 4, 5, 6, 7))
    console.print(f"times: {data['network']}. The slides' seconds are not published as text.", markup=False)


def _costs(model: Shallow, cluster: ClusterSpec) -> dict[str, GroupCost]:
    """Of a micro-batch, by layout."""
    anchors = (256, 2 * max(EDGES))
    return {
        name: candidate(model.lower, Strategy.parse(text), cluster, model.depth, anchors).cost
        for name, text in LAYOUTS.items()
    }


def _wire(model: Shallow) -> dict[str, ParamLayout]:
    """What switches move, by layout."""
    return {name: one.with_dtype(torch.bfloat16) for name, one in layouts_32b(model.outlines).items()}


def _table_3() -> dict[str, Any]:
    model = model_32b(precision="bf16")
    costs = _costs(model, A800_COLLECTIVES)
    datasets = [Dataset(name, seconds, costs) for name, seconds in STATIC_S.items()]
    groups, totals = table_3(datasets, chain_s(_wire(model), A800))
    column = {one.name: number for number, one in enumerate(datasets)}
    return {
        "network": NETWORK,
        "prices": PRICES,
        "assumptions": ROWS,
        "tokens_per_mini_batch": {one.name: one.tokens for one in datasets},
        "shares": {
            one.name: dict(zip((b.name for b in one.bands), one.shares.tolist(), strict=True)) for one in datasets
        },
        "groups": [
            vars(one) | {"speedup": one.speedup, "published": SPEEDUPS[one.band, one.layout][column[one.dataset]]}
            for one in groups
        ],
        "totals": [
            vars(one)
            | {
                "speedup": one.speedup,
                "published": TOTALS[one.combination][column[one.dataset]],
                "published_others_s": OTHERS_S[one.combination],
            }
            for one in totals
        ],
        "chosen": _chosen(datasets, model),
    }


def _pair() -> dict[str, Any]:
    model = model_32b(precision="bf16")
    drawn = [np.array(one) for one in mini_batches(read_lengths(HSPMD_LENGTHS), HSPMD_TOKENS, PAIR_BATCHES)]
    seconds = {name: one for name, one in chain_s(_wire(model), H20).items() if name in PAIR_COMBINATIONS}
    published = {"static_s": HSPMD_S["Megatron"], "hot_s": HSPMD_S["HotSPa"]}
    ratio = published["static_s"] / published["hot_s"]
    return {
        "network": f"{H20.nodes} x 8 H20, {PAIR_NETWORK}",
        "assumptions": PAIR_ROWS,
        "tokens_per_mini_batch": HSPMD_TOKENS,
        "published": published | {"speedup": ratio},
        "totals": [
            vars(one) | {"speedup": one.speedup} for one in pair(_costs(model, H20_COLLECTIVES), drawn, seconds)
        ],
    }


def _show_pair(console: Console, data: dict[str, Any]) -> None:
    published = data["published"]
    rows = [("published", "HotSPa", *_pair_figures(published["static_s"], published["hot_s"]), "")]
    for one in data["totals"]:
        seconds = one["groups_s"] + one["switches_s"]
        off = f"{one['speedup'] / published['speedup'] - 1:+.1%}"
        rows.append(("predicted", one["combination"], *_pair_figures(one["static_s"], seconds), off))
    print_table(console, ("", "groups", STATIC, "hot", "ratio", "off by"), rows, right=(2, 3, 4, 5))
    for key in ("network", "assumptions"):
        console.print(data[key], markup=False)


def _hspmd() -> dict[str, Any]:
    """HSPMD's strategies on the mini-batches of `_pair`, and its gain over HotSPa's sets as these are predicted."""
    model, pair_data = model_32b(precision="bf16"), _pair()
    drawn = [np.array(one) for one in mini_batches(read_lengths(HSPMD_LENGTHS), HSPMD_TOKENS, PAIR_BATCHES)]
    known = KnownModel(model.lower, model.outlines, H20_COLLECTIVES, model.depth, (256, 2 * max(EDGES)))
    switches = ModelSwitches(H20, model.depth, model.outlines)
    prices = {}
    for limit, (name, text) in HSPMD_SETS.items():
        one = known.named(Strategy.parse(text))
        weights_s = switches.of_set({one.name: one}, (), guess=False).predicted_s(one.name, ())
        prices[limit] = (name, one.strategy, one.cost, weights_s + one.reduce_s)
    found = formations(prices, drawn)
    total = sum(one.mini_batches * (one.runs_s + one.borders_s) for one in found) / len(drawn)
    published = {"HotSPa_s": HSPMD_S["HotSPa"], "HSPMD_s": HSPMD_S["HSPMD"]}
    ratio = HSPMD_S["HotSPa"] / HSPMD_S["HSPMD"]
    hot = {one["combination"]: one["groups_s"] + one["switches_s"] for one in pair_data["totals"]}
    few = formations(prices, drawn[:CHOSEN_BATCHES])
    few_s = sum(one.mini_batches * (one.runs_s + one.borders_s) for one in few) / CHOSEN_BATCHES
    return {
        "network": pair_data["network"],
        "assumptions": f"{pair_data['assumptions']}; {FORMATION_ROWS}",
        "tokens_per_mini_batch": HSPMD_TOKENS,
        "published": published | {"speedup": ratio},
        "formations": [vars(one) for one in found],
        "predicted_s": total,
        "totals": [{"combination": name, "hot_s": s, "speedup": s / total} for name, s in hot.items()],
        "chosen": _planned_32b(known, switches, drawn) | {"HSPMD_s": few_s},
    }


def _planned_32b(known: KnownModel, switches: ModelSwitches, drawn: Sequence[np.ndarray]) -> dict[str, Any]:
    """What `fxpar plan --teams` finds for a few of the mini-batches, with the memory of the devices, and its bound."""
    batches = tuple(tuple(lengths.tolist()) for lengths in drawn[:CHOSEN_BATCHES])
    memory = H20.sustained.memory_bytes or 0
    every = tuple(shapes(H20.world, H20.devices_per_node, known.depth.most_stages))
    problem = Problem(every, H20, batches, max(EDGES), memory, CHOSEN_STRATEGIES, known.depth, teams=True)
    inside = KnownModel(
        known.lower, known.outlines, known.cluster, known.depth, problem.anchors, other_switches=switches
    )
    found = find_plan_of(problem, inside)
    best = found.plans[0]
    return {
        "groups": [{"limit": g.limit, "strategy": g.strategy, "seconds": g.seconds} for g in best.groups],
        "predicted_s": best.predicted_s,
        "lower_bound_s": found.lower_bound_s,
        "mini_batches": len(batches),
    }


def _show_hspmd(console: Console, data: dict[str, Any]) -> None:
    rows = [
        (
            one["name"],
            one["strategy"],
            f"up to {one['limit']:,}",
            str(one["mini_batches"]),
            human_seconds(one["runs_s"]),
            human_seconds(one["borders_s"]),
        )
        for one in data["formations"]
    ]
    print_table(
        console, ("", "strategy", "longest", "mini-batches", "runs", "weights, gradients"), rows, right=(3, 4, 5)
    )
    published = data["published"]
    rows = [("published", "HotSPa", *_pair_figures(published["HotSPa_s"], published["HSPMD_s"]), "")]
    for one in data["totals"]:
        off = f"{one['speedup'] / published['speedup'] - 1:+.1%}"
        rows.append(("predicted", one["combination"], *_pair_figures(one["hot_s"], data["predicted_s"]), off))
    print_table(console, ("", "groups", "HotSPa", "HSPMD", "ratio", "off by"), rows, right=(2, 3, 4, 5))
    chosen = data["chosen"]
    console.print(
        f"fxpar would take {_groups(chosen['groups'])}: {human_seconds(chosen['predicted_s'])} for "
        f"{chosen['mini_batches']} of the mini-batches, HSPMD's {human_seconds(chosen['HSPMD_s'])}; no set that was "
        "looked at takes less than "
        f"{human_seconds(chosen['lower_bound_s'])}",
        markup=False,
    )
    for key in ("network", "assumptions"):
        console.print(data[key], markup=False)


def _pair_figures(static_s: float, hot_s: float) -> tuple[str, str, str]:
    return human_seconds(static_s), human_seconds(hot_s), f"{static_s / hot_s:.2f}"


def _chosen(datasets: Sequence[Dataset], model: Shallow) -> list[dict[str, Any]]:
    """What fxpar would pick of all strategies for a few mini-batches of each dataset, and of HotSPa's layouts alone."""
    memory = A800.sustained.memory_bytes or 0
    every = tuple(shapes(A800.world, A800.devices_per_node, model.depth.most_stages))
    switches = ModelSwitches(A800, model.depth, model.outlines)
    found = []
    for one in datasets:
        drawn = one.sample[:CHOSEN_BATCHES]
        batches = tuple(tuple(lengths.tolist()) for lengths in drawn)
        problem = Problem(every, A800, batches, max(EDGES), memory, MAX_STRATEGIES, model.depth)
        lower, outlines, anchors = model.lower, model.outlines, problem.anchors
        known = KnownModel(lower, outlines, A800_COLLECTIVES, model.depth, anchors, other_switches=switches)
        published = Alone("in the rows of Table 3", STATIC, sum(mean_s(one.costs, drawn, band) for band in one.bands))
        case = hotspa_case(problem, known, Strategy.parse(LAYOUTS[STATIC]), published)
        found.append(
            {
                "dataset": one.name,
                "mini_batches": CHOSEN_BATCHES,
                "groups": [{"limit": g.limit, "strategy": g.strategy, "seconds": g.seconds} for g in case.groups],
                "predicted_s": case.predicted_s,
                "lower_bound_s": case.lower_bound_s,
                "search_cpu_s": case.search_cpu_s,
                "speedup": case.speedup(published),
                "alone": [vars(each) | {"speedup": case.speedup(each)} for each in case.alone],
                "of_layouts": _of_layouts(problem, model),
            }
        )
    return found


def _of_layouts(problem: Problem, model: Shallow) -> dict[str, Any]:
    """What fxpar would pick of HotSPa's layouts, in rows as long as memory holds, as the static layout has them too;
    with recomputation, as the static layout holds no row of 32K without by fxpar's count.
    """
    pricer = SetPricer(A800, model.depth, model.outlines, problem.batches, problem.memory_bytes)
    texts = {name: f"{text}+{CHOSEN_REMAT}" for name, text in LAYOUTS.items()}
    named = [Named(Strategy.parse(text)) for text in texts.values()]
    found: Simulated = simulate(named, max(EDGES), model.lower, pricer, A800_COLLECTIVES, CHOSEN_TRIES)
    names = {str(Strategy.parse(text)): name for name, text in texts.items()}
    static = found.statics[str(Strategy.parse(texts[STATIC]))]
    return {
        "groups": [{"limit": g.limit, "layout": names[g.strategy], "seconds": g.seconds} for g in found.plan.groups],
        "predicted_s": found.plan.predicted_s,
        "static_s": static.predicted_s,
        "speedup": static.predicted_s / found.plan.predicted_s,
        "best_static": None if found.best_static is None else names[found.best_static.strategies[0]],
    }


def _show_chosen(console: Console, chosen: Sequence[dict[str, Any]]) -> None:
    rows = []
    for one in chosen:
        rows.append((one["dataset"], "fxpar plan", _groups(one["groups"]), human_seconds(one["predicted_s"]), ""))
        for each in one["alone"]:
            figures = human_seconds(each["predicted_s"]), f"{each['speedup']:.2f}"
            rows.append((one["dataset"], each["what"], each["strategy"], *figures))
        rows.append((one["dataset"], "no set takes less", "", human_seconds(one["lower_bound_s"]), ""))
    print_table(console, ("dataset", "", "strategies", "seconds", "speed-up of the plan"), rows, right=(3, 4))
    for one in chosen:
        of_layouts = one["of_layouts"]
        groups = ", ".join(f"{g['layout']} up to {g['limit']:,}" for g in of_layouts["groups"])
        console.print(
            f"{one['dataset']}: of these layouts fxpar would take {groups}: {of_layouts['speedup']:.2f} times {STATIC}",
            markup=False,
        )


def _groups(groups: Sequence[dict[str, Any]]) -> str:
    """Strategies, each with the longest sequence that it runs."""
    return ", ".join(f"{g['strategy']} up to {g['limit']:,}" for g in groups)


def _show_table_3(console: Console, data: dict[str, Any]) -> None:
    rows = [
        (
            one["dataset"],
            one["band"],
            one["layout"],
            human_seconds(one["seconds"]),
            f"{one['speedup']:.2f}",
            f"{one['published']:.2f}",
            f"{one['speedup'] / one['published'] - 1:+.1%}",
        )
        for one in data["groups"]
    ]
    for one in data["totals"]:
        seconds = human_seconds(one["groups_s"] + one["switches_s"])
        off = f"{one['speedup'] / one['published'] - 1:+.1%}"
        figures = f"{one['speedup']:.2f}", f"{one['published']:.2f}", off
        rows.append((one["dataset"], "all", one["combination"], seconds, *figures))
    titles = ("dataset", "band", "dp.tp.pp", "seconds", "speed-up", "published", "off by")
    print_table(console, titles, rows, right=(3, 4, 5, 6))
    _show_chosen(console, data["chosen"])
    for name, tokens in data["tokens_per_mini_batch"].items():
        console.print(f"{name}: {tokens:,} tokens per mini-batch (fitted)", markup=False)
    for key in ("network", "prices", "assumptions"):
        console.print(data[key], markup=False)
