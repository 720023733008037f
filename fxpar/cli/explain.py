"""`fxpar explain`: why a tensor is sharded the way it is, and what the alternatives would cost."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence

from fxpar.cli.commands import ExplainRequest
from fxpar.cli.console import stdout_console, working
from fxpar.cli.options import GraphSource
from fxpar.cli.request import check_output, collected_warnings, write_json
from fxpar.cli.source import (
    check_one_team,
    check_placed,
    check_stage,
    from_cache,
    on_cluster,
    placed_words,
    read_file,
    read_lowered,
    read_origin,
    read_rows,
    strategies_of,
)
from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import StageNeedsStrategyError, SubjectStageError, UnknownSubjectError
from fxpar.explain.document import (
    PRICES,
    Document,
    collective_document,
    heading,
    moves_document,
    noted,
    passes_document,
    stored_document,
    subject_document,
)
from fxpar.explain.subject import Placed, Subject, find, placed, vocabulary
from fxpar.explain.summary import summary_document
from fxpar.explain.traffic import CollectiveTraffic, casts, traffic
from fxpar.graph_files import SavedGraph
from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import AnnotatedGraph, LogicalGraph
from fxpar.ir.strategy import Strategy
from fxpar.ir.teams import teams_apart
from fxpar.passes.pack_documents import packed_if_proved

_COLLECTIVE = re.compile(r"%?(?:\w+\.)?(?:all_reduce|all_gather|reduce_scatter|all_to_all|shift)_\d+")
NO_LOGICAL = "the file holds no logical graph, so alternatives and prices cannot be computed"


def run_explain(request: ExplainRequest) -> None:
    """Do it. Raises FxparError."""
    strategies = strategies_of(request.source, request.strategy_texts)
    check_output(request.json)
    notes: list[str] = []
    with working() as status, collected_warnings(notes):
        status.update(f"reading {request.source.model}")
        cluster = None if request.cluster is None else ClusterSpec.from_file(request.cluster)
        strategy = strategies[0] if strategies else None
        if strategy is None or not strategy.teams:
            documents = [_answer(request, strategy, cluster)]
        else:
            documents = [_answer(request, team, cluster) | {"teams": of} for team, of in teams_apart(strategy).items()]
    whole = documents[0] if strategy is None or not strategy.teams else {**strategy.to_json(), "teams": documents}
    if write_json(request.json, whole):
        from fxpar.cli.explain_show import show

        for number, document in enumerate(documents):
            if number:
                stdout_console().print()
            show(stdout_console(), document, top=request.top)


def _answer(request: ExplainRequest, strategy: Strategy | None, cluster: ClusterSpec | None) -> Document:
    graphs = _Graphs(request.source, strategy, cluster)
    asked = {"subject": request.subject, "stage": request.stage, "passes": request.passes, **on_cluster(cluster)}
    what = {"kind": "explanation", **asked, **placed_words(request.source, graphs.strategy)}
    build = functools.partial(explained, request, graphs)
    return from_cache(request.source, what, build, graphs.strategy, answer=True)


class _Graphs:
    """What MODEL gives, read when it is asked for."""

    def __init__(self, source: GraphSource, strategy: Strategy | None, cluster: ClusterSpec | None) -> None:
        self.source, self.cluster = source, cluster
        self.file: SavedGraph | None = read_file(source) if source.is_file else None
        if isinstance(self.file, AnnotatedGraph | Program):
            check_placed(source, self.file, strategy)
            strategy = self.file.strategy
        if strategy is None:
            raise StageNeedsStrategyError("explained")
        check_one_team("fxpar explain", [strategy])  # a file's
        if cluster is not None:
            cluster.require(strategy.world)
        self.strategy = strategy

    @property
    def name(self) -> str:
        """The model's."""
        return self.source.model if self.file is None else self.file.name

    @functools.cached_property
    def logical(self) -> LogicalGraph | None:
        if self.file is None or isinstance(self.file, LogicalGraph):
            return read_rows(self.source)
        origin = read_origin(self.source, self.file)
        return None if origin is None or origin.logical is None else packed_if_proved(origin.logical)[0]

    @functools.cached_property
    def program(self) -> Program:
        """The lowered graph: that of the file, with the passes that it has not yet been through."""
        if isinstance(self.file, Program):
            return self.file
        return read_lowered(self.source, self.strategy, cluster=self.cluster)

    @functools.cached_property
    def traffic(self) -> tuple[CollectiveTraffic, ...]:
        return traffic(self.program)

    def placed(self, stage: int | None, param: str = "") -> Iterator[Placed]:
        """The annotated graph; of a pipeline that of each stage, or of `stage`, or of those that have `param`."""
        from fxpar.annotate.driver import annotate_and_search
        from fxpar.lowering.driver import check_strategy

        if self.logical is None:
            if isinstance(self.file, AnnotatedGraph):
                yield placed(self.file, ())
            return
        check_strategy(self.logical, self.strategy)
        if self.strategy.pipeline_size == 1:
            yield placed(*annotate_and_search(self.logical, self.strategy))
            return
        from fxpar.lowering.pipeline import cut, strategy_of_stage

        staged = cut(self.logical, self.strategy)
        has = {s.index for s in staged.stages for i in s.params() if param in (i.fqn, *i.aliases)}
        for part in staged.stages:
            if part.index == stage or (stage is None and part.index in (has or range(self.strategy.stages))):
                yield placed(*annotate_and_search(part, strategy_of_stage(part, self.strategy)), part.index)


def explained(request: ExplainRequest, graphs: _Graphs) -> Document:
    """The whole answer. Raises UnknownSubjectError, SubjectStageError, StageIndexError."""
    strategy = graphs.strategy
    if request.stage is not None:
        check_stage(strategy, request.stage)
    if request.subject is None:
        return _summary(graphs)
    answers, head = _answers(request, request.subject, graphs)
    missing = {} if graphs.logical else {"missing": NO_LOGICAL}
    return {**head, "asked": request.subject, "prices": PRICES, **missing, "answers": answers}


def _summary(graphs: _Graphs) -> Document:
    program, strategy = graphs.program, graphs.strategy
    stages = range(strategy.stages) if strategy.stages > 1 else ()
    head = heading(graphs.name, strategy, program.dims, stages)
    return head | summary_document(program, graphs.traffic)


def _answers(request: ExplainRequest, text: str, graphs: _Graphs) -> tuple[list[Document], Document]:
    if _COLLECTIVE.fullmatch(text):
        found = [t for t in graphs.traffic if t.name == text.removeprefix("%") and request.stage in (None, t.stage)]
        if len(found) > 1:
            raise SubjectStageError(text, [t.stage for t in found if t.stage is not None])
        if found:
            return [_collective(graphs, found[0])], _heading_of(graphs)
    known = list(graphs.placed(request.stage, text))
    subjects = [(each, subject) for each in known if (subject := find(each, text))]
    if not subjects:
        if graphs.logical is None and (stored := _stored_only(graphs, text)):
            return stored, _heading_of(graphs)
        raise UnknownSubjectError(text, request.source.model, _words(graphs, known))
    if len(subjects) > 1 and any(subject.kind == "node" for _, subject in subjects):
        raise SubjectStageError(text, [each.stage for each, _ in subjects if each.stage is not None])
    answers = []
    for each, subject in subjects:
        answers.append(subject_document(each, subject))
        if request.passes:
            answers[-1]["passes"] = _passes(graphs, _params_of(each, subject))
    head = heading(graphs.name, graphs.strategy, known[0].graph.dims)
    return answers, head | noted(note for each in known for note in each.graph.notes)


def _heading_of(graphs: _Graphs) -> Document:
    return heading(graphs.name, graphs.strategy, graphs.program.dims) | noted(graphs.program.notes)


def _words(graphs: _Graphs, known: Sequence[Placed]) -> Iterator[str]:
    for each in known:
        yield from vocabulary(each)
    if not known or "traffic" in vars(graphs):
        yield from (t.name for t in graphs.traffic)
    if graphs.logical is None:
        yield from (info.fqn for info, _ in graphs.program.params())


def _collective(graphs: _Graphs, found: CollectiveTraffic) -> Document:
    """The collective, and the reshard that it comes from, where it moves an activation."""
    document = collective_document(found)
    if found.what != "activations" and not found.value:
        return document
    for known in graphs.placed(found.stage):
        moved = [m for m in known.moves if m.value.name == found.value]
        same = [m for m in moved if any(s.axis == found.comm.axis for s in m.steps)]
        ours = [m for m in same if {u.name for u in (*m.users, *m.behind)} & set(found.users)] or same
        document["comes_from"] = moves_document(known, ours[:1])
    return document


def _params_of(known: Placed, subject: Subject) -> list[str]:
    """The parameters of a subject, one of each kind."""
    nodes = [n for n in subject.nodes if n in known.inputs and known.inputs[n].kind == "param"]
    kinds = {n.meta.get("class", n.name): known.inputs[n].fqn for n in reversed(nodes)}
    return [fqn for fqn in reversed(list(kinds.values()))]


def _passes(graphs: _Graphs, fqns: Sequence[str]) -> list[Document]:
    program = graphs.program
    cast = casts(program)
    found = []
    for fqn in fqns:
        stored = stored_document(program, fqn)
        found.append({**(stored or {"name": fqn}), "added": passes_document(graphs.traffic, cast.get(fqn, ()), fqn)})
    return found


def _stored_only(graphs: _Graphs, text: str) -> list[Document]:
    """What a lowered graph alone says of a parameter."""
    if stored_document(graphs.program, text) is None:
        return []
    return [{"kind": "stored", "passes": _passes(graphs, [text])}]


__all__ = ["ExplainRequest", "explained", "run_explain"]
