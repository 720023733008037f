"""`fxpar viz`: a page that shows a model under one or several strategies, or files for other viewers."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpar.cli.commands import VizRequest
from fxpar.cli.console import human_seconds, stdout_console, working
from fxpar.cli.request import check_output, collected_warnings, named_once, to_json, write_output
from fxpar.cli.source import (
    from_cache,
    placed_words,
    strategies_of,
)
from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import (
    OpenStdoutError,
    PlanFileError,
    PlanOptionError,
    SameOutputError,
)
from fxpar.ir.columns import human_bytes
from fxpar.ir.printer import without_folders
from fxpar.ir.teams import formations
from fxpar.search.plan_file import Plan, read_plan
from fxpar.viz.page import page_html

if TYPE_CHECKING:
    from fxpar.viz.viewed import Viewed


def run_viz(request: VizRequest) -> None:
    """Do it. Raises FxparError."""
    if request.open and request.target == "-":
        raise OpenStdoutError()
    if request.trace is not None and Path(request.trace).resolve() == Path(request.target).resolve():
        raise SameOutputError(request.target)
    for path in (request.target, request.trace):
        check_output(path)
    model = request.source.model
    request, plan = _planned(request)
    cluster = ClusterSpec.from_file(request.cluster) if request.cluster else None
    strategies = strategies_of(request.source, request.strategy_texts)
    notes = named_once(strategies)[1] if plan is None else _said(plan)
    with working() as status, collected_warnings(notes):

        def views() -> list[Viewed]:
            from fxpar.cli.viz_draw import parameters_of, views_of  # a page from the cache does without all that draws

            found = views_of(request, cluster, plan, status.update)
            if plan is not None:
                plan.check_module(model, parameters_of(found[0].graph), None)
            status.update("drawing")
            return found

        if request.form == "model-explorer" or request.trace is not None:
            written = _write(request, views(), notes)
        else:
            _write_document(request, _kept_document(request, cluster, plan, notes, views))
            written = [request.target]
    if request.target != "-":
        console = stdout_console()
        for path in written:
            console.print(f"{path}: {human_bytes(Path(path).stat().st_size)}", markup=False)
        for note in notes:
            console.print(f"note: {without_folders(note)}", markup=False)
    if request.open:
        _open(request, written)


def _planned(request: VizRequest) -> tuple[VizRequest, Plan | None]:
    """Where MODEL is a plan file: what to draw, and the plan. Raises PlanFileError, PlanOptionError."""
    source = request.source
    if not source.is_plan:
        return request, None
    from fxpar.models.loaders import is_function  # with the compiler, which a page from the cache does without

    plan = read_plan(source.model)
    for option, given in (("--set", source.options), ("--strategy", request.strategies)):
        if given:
            raise PlanOptionError(option, " ".join(given), f"{source.model} says it: edit the plan, or name its model")
    if is_function(plan.model) and not request.trust_plan:
        why = f"its model, {plan.model}, is a Python function, which would be imported and called"
        raise PlanFileError(source.model, why, "If you know the function, and who wrote the plan, add --trust-plan")
    plan.check(source.model, plan.model, plan.options, source.world)
    source = replace(source, model=plan.model, options=plan.options)
    named = dict.fromkeys(str(one) for group in plan.groups for one in formations(group.strategy))
    return replace(request, source=source, strategies=tuple(named)), plan


def _said(plan: Plan) -> list[str]:
    """What a plan says beside its strategies."""
    took = f", {human_seconds(plan.predicted_s)} predicted" if plan.predicted_s else ""
    lines = [f"planned for {plan.tokens_per_step:,} tokens per mini-batch{took}"]
    for group in plan.groups:
        took = f", {human_seconds(group.seconds)} of a mean mini-batch" if group.seconds else ""
        micro = f"micro-batches of up to {group.token_budget:,} tokens"
        lines.append(f"sequences of up to {group.limit:,} tokens: {group.strategy}, {micro}{took}")
    return lines


def _kept_document(
    request: VizRequest,
    cluster: ClusterSpec | None,
    plan: Plan | None,
    notes: Sequence[str],
    views: Callable[[], list[Viewed]],
) -> dict[str, Any]:
    """The page of `views()`, from the cache if it was drawn before."""
    source = request.source
    strategies = strategies_of(source, request.strategy_texts)
    what = {
        "kind": "page",
        "strategies": [placed_words(source, strategy) for strategy in strategies],
        "cluster": repr(cluster),
        "plan": repr(plan),
        "notes": list(notes),
        "tokens": request.tokens,
        "micro_batches": request.micro_batches,
        "tflops": request.tflops,
    }

    def build() -> dict[str, Any]:
        from fxpar.cli.viz_draw import document_of
        from fxpar.viz.timeline import inside_of

        found = views()
        return document_of(request, found, inside_of(found), notes)

    return from_cache(source, what, build, *strategies, answer=True)


def _write_document(request: VizRequest, document: dict[str, Any]) -> None:
    write_output(request.target, page_html(document) if request.form == "html" else to_json(document))


def _write(request: VizRequest, views: list[Viewed], notes: Sequence[str]) -> list[str]:
    """The files that were written, the one asked for first."""
    from fxpar.cli.viz_draw import document_of, write_graphs, write_trace
    from fxpar.viz.timeline import inside_of

    insides, written = inside_of(views), [request.target]
    if request.form == "model-explorer":
        written = write_graphs(request, views)
    else:
        _write_document(request, document_of(request, views, insides, notes))
    if request.trace is not None:
        write_trace(request.trace, views, insides)
        written.append(request.trace)
    return written


def _open(request: VizRequest, written: Sequence[str]) -> None:
    if request.form == "model-explorer":
        from fxpar.viz.model_explorer import open_model_explorer

        open_model_explorer(request.target, [path for path in written[1:] if path != request.trace])
    else:
        webbrowser.open(Path(request.target).resolve().as_uri())
