"""`fxpar check`: capture once, run every strategy, compare, print a table."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from fxpar.checking import CheckResult, check
from fxpar.checking.batches import check_rows_add_up, check_values, unread_keys
from fxpar.checking.eager import EagerComparison, compare_with_eager
from fxpar.cli.check_file import check_file
from fxpar.cli.commands import CheckRequest
from fxpar.cli.console import describe, print_table, stderr_console, stdout_console, working
from fxpar.cli.request import (
    as_computed,
    capture_model,
    check_output,
    collected_warnings,
    in_precision,
    load_model,
    named_once,
    parse_precision,
    write_json,
)
from fxpar.cli.source import strategies_of
from fxpar.errors import CheckedRanksError, WeightsNotFiniteError
from fxpar.ir.columns import human_bytes
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.printer import without_folders
from fxpar.ir.strategy import Strategy
from fxpar.models import LoadedModel


@dataclass(frozen=True)
class Column:
    """One column of the table. Where the terminal is too narrow for all, those of the greatest `rank` are left out
    first, and those of rank 0 never; `least` columns are enough for one whose words may go on in the next line.
    """

    title: str
    cell: Callable[[CheckResult], str]
    rank: int = 0
    right: bool = False
    least: int | None = None

    def columns(self, results: Sequence[CheckResult]) -> int:
        """How wide it has to be."""
        widest = max(len(text) for text in [self.title, *map(self.cell, results)])
        return widest if self.least is None else min(widest, self.least)


_NOTHING = 1e-30  # relative: no dtype resolves it, and its digits say nothing


def _error(value: float) -> str:
    if value == float("inf"):
        return "-"
    if value < _NOTHING:
        return "0" if value == 0 else f"< {_NOTHING:.0e}"
    return f"{value:.1e}"


COLUMNS = (
    Column("strategy", lambda r: r.strategy),
    Column("ranks", lambda r: str(r.world), 1, right=True),
    Column("result", lambda r: "ok" if r.ok else ("error" if r.error else "MISS")),
    Column("loss err", lambda r: _error(r.loss_rel_err), right=True),
    Column("grad err", lambda r: _error(r.grad_max_rel_err), right=True),
    Column("collectives", lambda r: ", ".join(f"{n} {kind}" for kind, n in r.collectives.items()) or "-", 3, least=30),
    Column("sent", lambda r: human_bytes(r.collective_bytes), 2, right=True),
    Column("nodes", lambda r: str(r.nodes), 4, right=True),
    Column("worst gradient", lambda r: r.worst_param or "-", 5),
)


MOST_RANKS = 1024  # threads of one process
_DOCUMENTS = {"in rows": "documents packed in rows", "alone": "each document runs alone"}


def run_check(request: CheckRequest) -> bool:
    """Do it; whether all strategies agree with the single device.

    Raises FxparError for what concerns all strategies: bad words, a model that cannot be loaded or captured. What
    concerns one strategy is a result of that strategy.
    """
    source = request.source
    strategies, notes = named_once(strategies_of(source, request.strategy_texts, request.takes_rounds))
    for strategy in strategies:
        if strategy.world > MOST_RANKS:
            raise CheckedRanksError(str(strategy), strategy.world, MOST_RANKS)
    precision = parse_precision(source.precision)
    check_output(request.json)
    console = stderr_console() if request.json == "-" else stdout_console()
    if source.is_file:
        return _run_file(console, request, strategies, notes)
    with working() as status, collected_warnings(notes):
        status.update(f"loading {source.model}")
        model = load_model(source.model, source.options, source.dtype, source.tokens, device="cpu", seed=request.seed)
        check_numbers(source.model, model)
        status.update(f"capturing {source.model}")
        logical = capture_model(model)
        status.update("comparing the captured graph with the model")
        check_values(logical, [model.example_batch, *model.batches])
        eager = compare_with_eager(logical, model.model, model.loss_fn, model.example_batch)
        unread = unread_keys(logical, model.example_batch)
        if eager is not None and eager.factor == 1.0:
            check_rows_add_up(model.model, model.loss_fn, model.example_batch, unread)
        if unread:
            notes.append(f"nothing reads {', '.join(map(repr, unread))} of the batch")
        logical = in_precision(logical, precision)
        results = []
        for strategy in strategies:
            status.update(f"checking {strategy}")
            results.append(check_one(logical, model, strategy, request))
    show(console, model, logical, results, notes, eager)
    write_json(request.json, report(request, model, results, eager))
    return all(result.ok for result in results) and (eager is None or equals_model(eager, request))


def _run_file(console: Console, request: CheckRequest, strategies: list[Strategy], notes: list[str]) -> bool:
    """The same for a graph file, which has no model to compare the captured graph with."""
    with working(f"checking {request.source.model}"), collected_warnings(notes):
        logical, results = check_file(
            request.source, strategies, tolerance=request.tolerance, compile=request.compile, seed=request.seed
        )
    _show_results(console, results, notes)
    found = {
        "model": logical.name,
        "file": request.source.model,
        "eager": None,
        "results": [r.to_json() for r in results],
    }
    write_json(request.json, found)
    return all(result.ok for result in results)


def check_numbers(spec: str, model: LoadedModel) -> None:
    """Weights that are no numbers agree with nothing, and disagree with nothing. Raises WeightsNotFiniteError."""
    bad = [fqn for fqn, value in model.params().items() if not bool(value.isfinite().all())]
    if bad:
        raise WeightsNotFiniteError(spec, bad)


def equals_model(eager: EagerComparison, request: CheckRequest) -> bool:
    """Whether the captured graph computes what the model does, but for the rounding of other kernels.

    Looser than the comparison of strategies: the model's float32 islands are rounded in its own order here.
    """
    limit = 5e-2 if request.source.dtype in ("bfloat16", "float16") else 1e-4
    return max(eager.loss_rel_err, eager.grad_max_rel_err) <= limit


def check_one(logical: LogicalGraph, model: LoadedModel, strategy: Strategy, request: CheckRequest) -> CheckResult:
    """The result of one strategy; one that cannot be lowered or run gets its error."""
    try:
        (result,) = check(
            logical,
            [strategy],
            as_computed(logical, model.params()),
            model.buffers(),
            model.batches,
            scale=model.scale(),
            tolerance=request.tolerance,
            compile=request.compile,
            packed=True if request.packed else None,
            padded=request.padded,
        )
        return result
    except Exception as error:  # whatever it is, the other strategies still run
        if request.debug:
            traceback.print_exception(error)
        return failed(strategy, logical, describe(error))


def failed(strategy: Strategy, logical: LogicalGraph, error: str) -> CheckResult:
    """The result of a strategy that never ran."""
    return CheckResult(
        strategy=str(strategy),
        world=strategy.world,
        ok=False,
        loss_rel_err=float("inf"),
        grad_max_rel_err=float("inf"),
        worst_param="",
        collectives={},
        collective_bytes=0,
        capture_cpu_s=round(logical.timings.get("capture_cpu_s", 0.0), 3),
        annotate_cpu_s=0.0,
        lower_cpu_s=0.0,
        nodes=0,
        error=error,
    )


def report(
    request: CheckRequest, model: LoadedModel, results: Sequence[CheckResult], eager: EagerComparison | None
) -> dict[str, Any]:
    """The JSON document."""
    return {
        "model": request.source.model,
        "dtype": request.source.dtype,
        "tokens": [max(value.shape[-1] for value in batch.values()) for batch in model.batches],
        "eager": asdict(eager) if eager else None,
        "results": [result.to_json() for result in results],
    }


def show(
    console: Console,
    model: LoadedModel,
    logical: LogicalGraph,
    results: Sequence[CheckResult],
    notes: Sequence[str],
    eager: EagerComparison | None,
) -> None:
    """The table; below it what was noted, and what went wrong."""
    count = sum(p.numel() for p in model.params().values())
    seconds = logical.timings.get("capture_cpu_s", 0.0)
    console.print(
        f"{model.name}: {count:,} parameters, captured as {len(logical.gm.graph.nodes)} nodes in {seconds:.1f} CPU s",
        markup=False,
    )
    if eager is not None:
        console.print(
            f"captured graph against the model itself: loss {_error(eager.loss_rel_err)}, gradients "
            f"{_error(eager.grad_max_rel_err)}{f' ({eager.worst_param})' if eager.grad_max_rel_err else ''}",
            markup=False,
        )
    else:
        console.print("captured graph against the model itself: not compared, as the model uses dropout", markup=False)
    _show_results(console, results, notes)


def _show_results(console: Console, results: Sequence[CheckResult], notes: Sequence[str]) -> None:
    """Whether documents share rows, the table of the strategies, what was noted of each, and the verdict."""
    for found in dict.fromkeys(result.documents for result in results if result.documents):
        console.print(_DOCUMENTS[found], markup=False)
    shown = fitting(results, console.width) if console.is_terminal else list(COLUMNS)
    if console.is_terminal and _columns(shown, results) <= console.width:
        console.print(_rich_table(shown, results))
    else:
        right = [i for i, column in enumerate(shown) if column.right]
        rows = [[column.cell(result) for column in shown] for result in results]
        print_table(console, [column.title for column in shown], rows, right)
    said = list(notes)
    for result in results:
        for note in result.notes:
            if note not in said:
                console.print(f"note ({result.strategy}): {without_folders(note)}", markup=False)
                said.append(note)
        if not result.ok:
            where = result.worst_param or "the loss"
            worst = max(result.loss_rel_err, result.grad_max_rel_err)
            why = result.error or (
                f"the largest error is in {where}"
                if math.isfinite(worst)
                else f"{where} is not a number (NaN or infinite)"
            )
            console.print(f"{result.strategy}: {why}", markup=False, style="red")
    for note in notes:
        console.print(f"note: {without_folders(note)}", markup=False)
    good = sum(result.ok for result in results)
    verdict = f"{good} of {len(results)} strategies agree with the single device"
    console.print(verdict, style="green" if good == len(results) else "bold red")


def fitting(results: Sequence[CheckResult], width: int) -> list[Column]:
    """The columns of the table that `width` has room for without a break inside a word."""
    shown = list(COLUMNS)
    while _columns(shown, results) > width and any(c.rank for c in shown):
        shown.remove(max(shown, key=lambda column: column.rank))
    return shown


def _columns(shown: Sequence[Column], results: Sequence[CheckResult]) -> int:
    """How wide the table is."""
    return sum(column.columns(results) + 2 for column in shown) - 2


def _rich_table(shown: Sequence[Column], results: Sequence[CheckResult]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in shown:
        table.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
    for result in results:
        style = None if result.ok else "red"
        table.add_row(*(column.cell(result).replace("[", r"\[") for column in shown), style=style)
    return table
