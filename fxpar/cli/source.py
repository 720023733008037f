"""From MODEL on the command line to a graph: captured and lowered, from the cache, or out of a graph file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fxpar.cli.cache import CaptureCache, model_files, recorded
from fxpar.cli.options import GraphSource
from fxpar.cli.request import capture_model, in_precision, load_model, parse_precision, parse_strategies
from fxpar.cli.rows import Rows
from fxpar.errors import (
    GraphFileError,
    ModelFunctionError,
    OneTeamError,
    StageIndexError,
    StageNeedsStrategyError,
)
from fxpar.graph_files import Origin, SavedGraph, kind_of, load_graph, load_origin
from fxpar.ir.columns import human_bytes
from fxpar.ir.graph import AnnotatedGraph, LogicalGraph
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.ir.teams import lowered_for, teams_apart

if TYPE_CHECKING:  # what loads, captures and lowers is imported when the cache has nothing
    import torch
    from torch import Tensor

    from fxpar.cost.cluster import ClusterSpec
    from fxpar.models import LoadedModel
    from fxpar.switch import ParamLayout
    from fxpar.switch.terms import GradientPlacement

T = TypeVar("T")


def strategies_of(source: GraphSource, texts: Sequence[str], rounds: bool = False) -> list[Strategy]:
    """Parsed, with the overrides of this source. Raises as `parse_strategies` does."""
    return parse_strategies(texts, source.overrides, source.world, rounds)


def apart(strategies: Iterable[Strategy]) -> list[Strategy]:
    """Those of `teams_apart` of each, from rank 0, for what looks at one graph at a time; each text once."""
    return list({str(one): replace(one, offset=0) for each in strategies for one in teams_apart(each)}.values())


def check_one_team(command: str, strategies: Iterable[Strategy]) -> None:
    """Raises OneTeamError for strategies side by side."""
    for strategy in strategies:
        if strategy.teams:
            names = [str(lowered_for(strategy, number)) for number in range(len(strategy.teams))]
            raise OneTeamError(command, str(strategy), names)


def is_function(source: GraphSource) -> bool:
    """Whether MODEL is a function of the user's, which brings its own batches."""
    return ":" in source.model and _prefix(source.model) is None


def storage_dtype(source: GraphSource) -> torch.dtype | None:
    """What ranks store parameters in, if another than the graph's. Raises DtypeError."""
    if source.storage is None:
        return None
    from fxpar.precision.precision import parse_dtype

    return parse_dtype(source.storage)


def read_logical(source: GraphSource) -> LogicalGraph:
    """The logical graph, in the precision that was asked for.

    Raises GraphFileError (a file that holds another graph), the errors of loading and of `fxpar.capture`.
    """
    precision = parse_precision(source.precision)
    if not source.is_file:
        return in_precision(_captured(source), precision)
    graph = read_file(source)
    if not isinstance(graph, LogicalGraph):
        raise _wrong_kind(source.model, graph, "a logical graph", "without --strategy")
    return in_precision(graph, precision)


def read_rows(source: GraphSource) -> LogicalGraph:
    """The graph that is lowered: of rows of several documents, where they are proved to stay apart, as in training.

    Raises as `read_logical` does.
    """
    from fxpar.passes.pack_documents import packed_if_proved

    return packed_if_proved(read_logical(source))[0]


def rows_once(source: GraphSource) -> Rows:
    """`read_rows` for all strategies of a command that the cache lacks."""
    return Rows(lambda: read_rows(source))


def read_lowered(
    source: GraphSource, strategy: Strategy | None, rows: Rows | None = None, cluster: ClusterSpec | None = None
) -> TrainGraph:
    """What the ranks run under `strategy`; None is for a graph file that holds just that. A file of a graph on its way
    through the passes goes through those that are left. `rows`: `rows_once(source)` of several calls; `cluster` as in
    `fxpar.lower`.

    Raises StageNeedsStrategyError, GraphFileError (a file of another strategy), the errors of `read_logical` and
    `fxpar.lower`.
    """
    if source.is_file:
        graph = read_file(source)
        if not isinstance(graph, LogicalGraph):
            check_placed(source, graph, strategy)
            if isinstance(graph, TrainGraph):
                return graph
            from fxpar.lowering import finish

            return finish(graph)
    if strategy is None:
        raise StageNeedsStrategyError("exec")

    def build() -> TrainGraph:
        return (rows or rows_once(source)).lower(strategy, storage=storage_dtype(source), cluster=cluster)

    what = {"kind": "exec", **placed_words(source, strategy), **on_cluster(cluster)}
    return from_cache(source, what, build, strategy)


def on_cluster(cluster: ClusterSpec | None) -> dict[str, object]:
    """What an answer depends on where one is given, for `from_cache`."""
    return {} if cluster is None else {"cluster": cluster.to_json()}


def read_for_store(
    source: GraphSource,
    strategy: Strategy,
    sizes: Mapping[str, int] | None = None,
    rows: Rows | None = None,
) -> TrainGraph:
    """What the ranks run in training, where a weight store keeps the parameters. `sizes` as in `fxpar.lower`, `rows` as
    for `read_lowered`.

    Raises as `read_lowered` does, and GraphFileError for a file of any other than a logical graph.
    """

    def build() -> TrainGraph:
        return (rows or rows_once(source)).lower(strategy, for_store=True, sizes=sizes)

    return from_cache(source, {"kind": "for store", "sizes": sizes, **placed_words(source, strategy)}, build, strategy)


@dataclass(frozen=True)
class Layouts:
    """How a program takes its parameters, and how its gradients leave it."""

    params: ParamLayout
    gradients: Mapping[str, tuple[GradientPlacement, ...]]


def read_layouts(source: GraphSource, strategies: Sequence[Strategy]) -> list[Layouts]:
    """Those of the programs of `read_for_store`. Nothing is lowered further than that.

    Raises as `read_for_store` does.
    """
    from fxpar.switch.layout import ParamLayout, PlacedParam, layout_of
    from fxpar.switch.terms import GradientPlacement, gradient_placements

    rows = rows_once(source)

    def read(strategy: Strategy) -> Layouts:
        def build() -> tuple[Any, ...]:
            from fxpar.lowering import outline

            found = outline(rows(), strategy)
            layout, gradients = layout_of(found), gradient_placements(found)
            return (
                layout.world,
                {fqn: (p.shape, p.dtype, p.copies) for fqn, p in layout.params.items()},
                {fqn: tuple((g.shape, g.dist, g.dtype) for g in terms) for fqn, terms in gradients.items()},
            )

        what = {"kind": "layout", **placed_words(source, strategy)}
        world, params, gradients = from_cache(source, what, build, strategy)
        return Layouts(
            ParamLayout(str(strategy), world, {fqn: PlacedParam(*fields) for fqn, fields in params.items()}),
            {fqn: tuple(GradientPlacement(*fields) for fields in terms) for fqn, terms in gradients.items()},
        )

    return [read(strategy) for strategy in strategies]


def read_origin(source: GraphSource, graph: SavedGraph) -> Origin | None:
    """What a graph of this source can be checked against. Raises what loading and capture raise."""
    if source.is_file:
        found = load_origin(source.model)
        logical = load_graph(source.model)
        if found is None or isinstance(graph, LogicalGraph) or not isinstance(logical, LogicalGraph):
            return found
        return Origin(logical, found.batches)
    batches = from_cache(source, {"kind": "batches"}, lambda: _batches(_with_values(source)))
    return Origin(None if isinstance(graph, LogicalGraph) else read_logical(source), batches)


def read_annotated(source: GraphSource, strategy: Strategy | None) -> AnnotatedGraph:
    """The graph with placements. Raises as `read_lowered` does, and NotYetError for pipeline stages."""
    if source.is_file:
        graph = read_file(source)
        if isinstance(graph, AnnotatedGraph):
            check_placed(source, graph, strategy)
            return graph
        if not isinstance(graph, LogicalGraph):
            raise _wrong_kind(source.model, graph, "an annotated graph", "with --strategy and --stage annotated")
    if strategy is None:
        raise StageNeedsStrategyError("annotated")

    def build() -> AnnotatedGraph:
        from fxpar.annotate import annotate

        return annotate(read_rows(source), strategy)

    return from_cache(source, {"kind": "annotated", **placed_words(source, strategy)}, build, strategy)


def read_graph(source: GraphSource, stage: str | None, strategy: Strategy | None) -> SavedGraph:
    """The graph at a stage; without one that of the file, else "exec" with a strategy and "logical" without."""
    if stage is None:
        if source.is_file:
            graph = read_file(source)
            if not isinstance(graph, LogicalGraph):
                check_placed(source, graph, strategy)
                return graph
        stage = "logical" if strategy is None else "exec"
    if stage == "logical":
        return read_logical(source)
    return read_annotated(source, strategy) if stage == "annotated" else read_lowered(source, strategy)


def read_file(source: GraphSource) -> SavedGraph:
    """The graph of a file, as it is. Raises GraphFileError, also for options that only a model has."""
    graph = load_graph(source.model)
    given = {"--dtype": source.dtype != GraphSource.dtype, "--tokens": source.tokens, "--set": source.options}
    _refuse(source.model, "its graph is already captured", given)
    return graph


def check_placed(source: GraphSource, graph: AnnotatedGraph | TrainGraph, strategy: Strategy | None) -> None:
    """Raises GraphFileError where a graph with placements is wanted otherwise than it is."""
    given = {
        "--precision": source.precision,
        "--storage": source.storage,
        "--override": source.overrides,
        "--world": source.world not in (None, graph.strategy.world),
    }
    _refuse(source.model, f"its graph is already placed, under {graph.strategy}", given)
    if strategy is not None and strategy != graph.strategy:
        why = f"it holds a graph under {graph.strategy}, not {strategy}"
        do = "Leave --strategy out, or dump the model without a strategy and name one here"
        raise GraphFileError(source.model, why, do)


def check_stage(strategy: Strategy, index: int) -> None:
    """Raises StageIndexError for a pipeline stage that the strategy has not."""
    if strategy.pipeline_size == 1 or index >= strategy.stages:
        raise StageIndexError(index, str(strategy), strategy.stages)


def _refuse(path: str, why: str, given: Mapping[str, object]) -> None:
    for option, value in given.items():
        if value:
            raise GraphFileError(path, f"{option} comes too late: {why}", f"Dump the model again with {option}")


def load_meta(source: GraphSource) -> LoadedModel:
    """The model on the meta device: nothing is allocated. Raises what `fxpar.models.load` raises."""
    return load_model(source.model, source.options, source.dtype, source.tokens, device="meta")


def _with_values(source: GraphSource) -> LoadedModel:
    """The model with batches to check with: on the meta device if they have values there, else on the CPU.

    Raises ModelFunctionError if the memory of this machine does not hold the model.
    """
    model = load_meta(source)
    if model.has_values:
        return model
    nbytes = sum(value.nbytes for value in model.model.state_dict().values())
    if nbytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        why = f"its batches are on the default device, so their values are known only if its {human_bytes(nbytes)} "
        raise ModelFunctionError(source.model, f"{why}of weights are made too. Make the batches with device='cpu'")
    return load_model(source.model, source.options, source.dtype, source.tokens, device="cpu")


def from_cache(
    source: GraphSource, what: Mapping[str, Any], build: Callable[[], T], *strategies: Strategy, answer: bool = False
) -> T:
    """What `build` makes of the model, if it is not in the cache. `what` says what it is, as JSON values. With `answer`
    it is JSON values itself, and comes back as JSON has it.

    A build that captures has to call `note_files` (`read_logical` does), else it is made again each time. What is made
    of a graph file, or under `strategies` with roles of other packages, whose code may change, is not kept.
    """
    if not source.cache or source.is_file or any(strategy.roles for strategy in strategies):
        return json.loads(json.dumps(build())) if answer else build()
    cache = CaptureCache.of_user(_words(source))
    read, write = (cache.read_answer, cache.write_answer) if answer else (cache.read, cache.write)
    capture = cache.find()
    if capture is not None:
        value = read(capture, what)
        if value is not None:
            return value
    value, texts = recorded(build)
    capture = cache.find()
    if capture is not None:
        write(capture, what, value, texts)
    return json.loads(json.dumps(value)) if answer else value


def note_files(source: GraphSource, model: LoadedModel) -> None:
    """Tell the cache what the model that was just captured comes from, and its batches."""
    if source.cache:
        cache = CaptureCache.of_user(_words(source))
        capture = cache.note(model_files(model, source.model))
        if model.has_values:
            cache.write(capture, {"kind": "batches"}, _batches(model))


def _captured(source: GraphSource) -> LogicalGraph:
    def build() -> LogicalGraph:
        model = load_meta(source)
        graph = capture_model(model)
        note_files(source, model)
        return graph

    _import_model(source)
    return from_cache(source, {"kind": "logical"}, build)


def _import_model(source: GraphSource) -> None:
    """Import what a user's function or a loader of another package stands in: it may register ops and rules that the
    lowering needs.
    """
    prefix = _prefix(source.model)
    if prefix not in (None, "hf"):
        from fxpar.models.loaders import loader_of

        loader_of(prefix)
    if is_function(source):
        from fxpar.models.user_function import find_function

        place, _, name = source.model.rpartition(":")
        with redirect_stdout(sys.stderr):
            find_function(source.model, place, name)


def _prefix(model: str) -> str | None:
    """The prefix of a MODEL that a loader takes; loaders are imported only for one that may be another package's."""
    if ":" not in model:
        return None
    if model.startswith("hf:"):
        return "hf"
    from fxpar.models.loaders import prefix_of

    return prefix_of(model)


def _batches(model: LoadedModel) -> tuple[dict[str, Tensor], ...]:
    return tuple({name: value.cpu() for name, value in batch.items()} for batch in model.batches)


def _words(source: GraphSource) -> dict[str, Any]:
    """What names the capture, as JSON."""
    words: dict[str, Any] = {
        "model": source.model,
        "dtype": source.dtype,
        "tokens": source.tokens,
        "options": list(source.options),
    }
    if is_function(source) or "/" in source.model or source.model.startswith(("hf:.", "hf:~")):
        words["folder"] = str(Path.cwd())  # decides what a path or the name of a package means
    return words


def placed_words(source: GraphSource, strategy: Strategy) -> dict[str, Any]:
    """What decides how a capture is placed and lowered, as JSON."""
    return {**strategy.to_json(), "precision": source.precision, "storage": source.storage}


def _wrong_kind(path: str, graph: SavedGraph, wanted: str, how: str) -> GraphFileError:
    return GraphFileError(path, f"it holds the {kind_of(graph)} graph, and this needs {wanted}", f"Dump it {how}")
