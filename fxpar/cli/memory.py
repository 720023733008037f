"""`fxpar memory`: what a strategy takes on a rank, from shapes only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from fxpar.cli.commands import MemoryRequest
from fxpar.cli.console import plain_table, print_table, stdout_console, working
from fxpar.cli.request import check_output, collected_warnings, named_once, write_json
from fxpar.cli.rows import Rows
from fxpar.cli.source import from_cache, placed_words, read_for_store, rows_once, strategies_of
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.polynomial import micro_batch_sizes
from fxpar.ir.columns import folded, human_bytes
from fxpar.ir.printer import without_folders
from fxpar.ir.strategy import Strategy
from fxpar.ir.teams import largest_team, ranks_of_replica
from fxpar.memory import Conditions, MemoryPrediction, StageMemory, predict_memory, steady_micro_batches
from fxpar.memory.prediction import prediction_of

_STAGE_TITLES = ("stage", "ranks", "from", "weights", "accumulators", "for backward", "messages", "peak", "rank")
_MEANT = {
    "stays": "weights, their gradients and the optimizer",
    "for backward": "activations kept until their backward, at most",
    "per token": "those of one micro-batch, by its tokens",
    "peak": "all that a rank holds at its fullest moment",
}
_LEAST = 16  # columns for text that goes on below a number


def run_memory(request: MemoryRequest) -> None:
    """Do it. Raises FxparError."""
    begun = time.process_time()
    strategies, tokens, notes = _asked(request)
    cluster = None if request.cluster is None else ClusterSpec.from_file(request.cluster)
    if cluster is not None:
        cluster.require(max(strategy.world for strategy in strategies))
    check_output(request.json)
    rows = rows_once(request.source)
    found: list[MemoryPrediction] = []
    with working() as status, collected_warnings(notes):
        for strategy, count in zip(strategies, tokens, strict=True):
            status.update(f"lowering {request.source.model} to {strategy}")
            prediction, said = _predicted(replace(request, tokens=count), strategy, cluster, rows)
            found.append(prediction)
            notes += said if len(strategies) == 1 else [f"{strategy}: {text}" for text in said]
    device = _device_bytes(request, cluster)
    documents = [_document(request, *each, device) for each in zip(strategies, found, strict=True)]
    document = documents[0] if len(found) == 1 else {"model": request.source.model, "strategies": documents}
    document["cpu_s"] = time.process_time() - begun
    if not write_json(request.json, document):
        return
    console = stdout_console()
    if len(found) > 1:
        _show_table(console, request.source.model, strategies, found, device, request.tokens)
        _show_notes(console, notes)
        return
    show(console, request.source.model, strategies[0].world, found[0], notes, request.tokens)
    if device is not None:
        console.print(f"it {_verdict(found[0], device)}: a device has {human_bytes(device)}", markup=False)


def _asked(request: MemoryRequest) -> tuple[list[Strategy], list[int | None], list[str]]:
    """The strategies, the tokens of a micro-batch of each, and notes. Formations of rounds have as many tokens per rank
    as the widest team, where they do not say how many themselves.
    """
    strategies, tokens = list[Strategy](), list[int | None]()
    for text in request.strategy_texts:
        found = strategies_of(request.source, [text], request.takes_rounds)
        largest = list(map(largest_team, found))
        ranks = ranks_of_replica(largest[0])
        for one in largest:
            per_rank = request.tokens and max(1, request.tokens * ranks_of_replica(one) // ranks)
            tokens.append(one.tokens or per_rank)
        strategies += found
    once = {(str(one), count): (one, count) for one, count in zip(strategies, tokens, strict=True)}
    return [one for one, _ in once.values()], [count for _, count in once.values()], named_once(strategies)[1]


def _predicted(
    request: MemoryRequest, strategy: Strategy, cluster: ClusterSpec | None, rows: Rows
) -> tuple[MemoryPrediction, tuple[str, ...]]:
    """The prediction, and what the lowering notes: kept, as a prediction runs the graph on the meta device."""
    count = request.micro_batches or steady_micro_batches(strategy)

    def build() -> tuple[dict[str, Any], tuple[str, ...]]:
        from fxpar.annotate.experts import balanced_routes  # with all that places tensors

        sizes = None if request.tokens is None else micro_batch_sizes(rows(), request.tokens)
        program = read_for_store(request.source, strategy, sizes, rows)
        conditions = Conditions(longest=request.longest)
        found = predict_memory(program, sizes, micro_batches=count, conditions=conditions, cluster=cluster)
        return asdict(found), (*program.notes, *balanced_routes(rows, [strategy]))

    asked = {"tokens": request.tokens, "longest": request.longest, "micro_batches": count, "cluster": repr(cluster)}
    what = {"kind": "memory", **asked, **placed_words(request.source, strategy)}
    fields, notes = from_cache(request.source, what, build, strategy)
    return prediction_of(fields), notes


def _device_bytes(request: MemoryRequest, cluster: ClusterSpec | None) -> int | None:
    """What a device holds: as the option says, else as the cluster does."""
    if request.device_bytes is not None or cluster is None:
        return request.device_bytes
    return cluster.sustained.memory_bytes


def _document(
    request: MemoryRequest, strategy: Strategy, found: MemoryPrediction, device: int | None
) -> dict[str, Any]:
    document = {"model": request.source.model, "world": strategy.world, **found.to_json()}
    return document if device is None else {**document, "fits": found.peak_bytes <= device, "device_bytes": device}


def _show_table(
    console: Console,
    model: str,
    strategies: list[Strategy],
    found: list[MemoryPrediction],
    device: int | None,
    tokens: int | None,
) -> None:
    """A line per strategy, of its fullest rank."""
    room = "" if device is None else f"; a device has {human_bytes(device)}"
    console.print(f"{model}{_sizes_text(found, tokens)}; the fullest rank of each strategy{room}:", markup=False)
    of_tokens = any(one.tokens for one in found)
    rows = [
        (
            str(strategy),
            str(strategy.world),
            human_bytes(one.state_bytes),
            human_bytes(one.body.saved_bytes),
            *([human_bytes(one.per_token_bytes)] if of_tokens else []),
            human_bytes(one.peak_bytes),
            "" if device is None else _verdict(one, device),
        )
        for strategy, one in zip(strategies, found, strict=True)
    ]
    titles = ("strategy", "ranks", "stays", "for backward", *["per token"] * of_tokens, "peak", "")
    print_table(console, titles, rows, right=range(1, len(titles) - 1))
    console.print()
    for title, meant in _MEANT.items():
        if title in titles:
            _print_folded(console, f"{title:14}{meant}", 14)


def _verdict(found: MemoryPrediction, device: int) -> str:
    return "fits" if found.peak_bytes <= device else "does not fit"


def _sizes_text(found: Sequence[MemoryPrediction], tokens: int | None) -> str:
    """`, T = 77, rounded up to 78`: what was asked for, and what figures are for; of several strategies also which of
    them need it. Empty without dynamic dims.
    """
    parts, first = [], found[0]
    asked = next((name for name in ("T", *first.sizes) if name in first.sizes), "")
    rows = first.tokens // first.sizes[asked] if first.tokens and asked else 1
    for name in first.sizes:
        padded: dict[int, list[str]] = {}
        for one in found:
            padded.setdefault(one.sizes[name], []).append(one.strategy)
        size = min(padded) if tokens is None or name != asked else tokens // rows
        padded.pop(size, None)
        alike = any(len(who) == len(found) for who in padded.values())
        by = {other: "" if alike else f" by {', '.join(who)}" for other, who in padded.items()}
        more = [f"to {other}{who}" for other, who in by.items() if other > size]
        fewer = [f"{other}{who}" for other, who in by.items() if other < size]
        parts.append(f", {name} = {size}" + (f", rounded up {' and '.join(more)}" if more else ""))
        parts += [f", in narrower teams {' and '.join(fewer)}"] * bool(fewer)
    return "".join(parts)


def show(
    console: Console, model: str, world: int, found: MemoryPrediction, notes: list[str], tokens: int | None = None
) -> None:
    """Print the sizes of the stages and of the fullest rank; `tokens` as asked for."""
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    console.print(f"{model} under {found.strategy}, {ranks}{_sizes_text([found], tokens)}", markup=False)
    if found.stages:
        console.print(f"{found.schedule}; each stage on one of its ranks, and all that the rank holds:", markup=False)
        _print_stages(console, [_stage_row(stage) for stage in found.stages])
        console.print("\nthe fullest rank:")
    rows = [(name, human_bytes(size), why) for name, size, why in found.rows()]
    lines = plain_table(("", "per rank", ""), rows, right=(1,)).splitlines()
    margin = lines[0].index("per rank") + len("per rank  ")
    for line in lines:
        _print_folded(console, line, margin)
    _show_notes(console, notes)


def _show_notes(console: Console, notes: list[str]) -> None:
    for note in dict.fromkeys(notes):
        console.print(f"note: {without_folders(note)}", markup=False)


def _print_stages(console: Console, rows: list[tuple[str, ...]]) -> None:
    """The table; on a terminal that is too narrow for it, the sizes of each stage below it."""
    table = plain_table(_STAGE_TITLES, rows, right=tuple(range(3, len(_STAGE_TITLES))))
    if not console.is_terminal or len(table.partition("\n")[0]) <= console.width:
        console.print(table, markup=False)
        return
    for stage, ranks, begins, *sizes in rows:
        console.print(f"stage {stage} on ranks {ranks}, from {begins}", markup=False)
        told = ", ".join(f"{name} {size}" for name, size in zip(_STAGE_TITLES[3:], sizes, strict=True))
        _print_folded(console, f"  {told}", 2)


def _print_folded(console: Console, line: str, margin: int) -> None:
    """One line; on a terminal that is too narrow for it, the rest below, after `margin` columns."""
    if console.is_terminal and console.width > margin + _LEAST:
        head, rest = line[:margin], line[margin:]
        line = "\n".join(folded(rest, console.width, head, " " * margin))
    console.print(line, markup=False, soft_wrap=True)


def _stage_row(stage: StageMemory) -> tuple[str, ...]:
    first, last = stage.ranks
    sizes = (
        stage.weight_bytes,
        stage.gradient_bytes,
        stage.saved_bytes,
        stage.received_bytes + stage.sent_bytes,
        stage.peak.total_bytes,
        stage.rank_peak_bytes,
    )
    cells = [human_bytes(size) for size in sizes]
    cells[2] = f"{stage.in_flight} x {cells[2]}"
    return (str(stage.stage), str(first) if first == last else f"{first}-{last}", stage.begins or "the start", *cells)
