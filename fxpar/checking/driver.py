"""Check strategies: run every rank in this process and compare loss and every gradient with a single device.

The single device runs the captured graph, which is what the model does to one sequence, on each document of each
micro-batch alone; the sum is the truth. The ranks get rows of several documents, padded as they need it. Each
data-parallel replica gets micro-batches of its own, of a different length where the model has a token dim.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.batching.documents import cut_in_documents, mark_documents, split_documents
from fxpar.checking.batches import check_length
from fxpar.checking.compare import compared, summed
from fxpar.checking.terms import squares, summed_terms
from fxpar.checking.widen import wide_tensor, widen
from fxpar.errors import FxparError, LossyProgramError, NothingToCheckError
from fxpar.flow import with_packing
from fxpar.ir.copies import copy_graph
from fxpar.ir.exec_graph import compile_graph, make_tensors_on
from fxpar.ir.graph import TOKENS, LogicalGraph
from fxpar.ir.node_meta import tensor_metas
from fxpar.ir.pipeline_graph import TeamsGraph, TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import check_captured, lower
from fxpar.passes.compress_dispatch import without_loss
from fxpar.passes.pack_documents import packed_if_proved
from fxpar.runtime.binding import bind_here
from fxpar.runtime.channels import Channels, ThreadChannels, ThreadWorld
from fxpar.runtime.forked import run_forked
from fxpar.runtime.micro import MicroRun, as_one_sequence
from fxpar.runtime.padding import pad
from fxpar.runtime.runner import Backend
from fxpar.runtime.teams import BoundTeam
from fxpar.torch_api.threaded import run_threads
from fxpar.transport.groups import ProcessGroups

Batch = Mapping[str, Tensor]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-2}


@dataclass(frozen=True)
class CheckResult:
    """One strategy's verdict; relative errors are max |a - b| / max |b| of a tensor, over all ranks.

    `documents` is "in rows" where they shared rows, "alone" where each was a micro-batch, empty without tokens.
    """

    strategy: str
    world: int
    ok: bool
    loss_rel_err: float
    grad_max_rel_err: float
    worst_param: str
    collectives: dict[str, int]
    collective_bytes: int
    capture_cpu_s: float
    annotate_cpu_s: float
    lower_cpu_s: float
    nodes: int
    run_wall_s: float = 0.0
    error: str = ""
    documents: str = ""
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check(
    logical: LogicalGraph,
    strategies: Sequence[Strategy | str | TrainGraph],
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    batches: Sequence[Batch],
    *,
    scale: float = 1.0,
    tolerance: float | None = None,
    compile: Backend = "eager",
    packed: bool | None = None,
    padded: bool = False,
) -> list[CheckResult]:
    """Check each strategy, or each program that `lower` made of `logical` already.

    A batch is a row whose documents are marked by `document_ids` [1, T], or by positions that restart; an unmarked one
    is cut in two where documents may share a row. They share one if that is proved to be harmless, else each is a
    micro-batch of its own. `packed=True` packs without a proof, `padded=True` pads although the model would see it.

    Replica r of dp runs batches r, r + dp, ... (their number is rounded up by reuse). `params` and `buffers` are whole
    tensors by FQN; `scale` multiplies the summed loss. The tolerance depends on the parameters' narrowest dtype: 1e-10
    for float64 (float32 islands of the model are widened, see `fxpar.checking.widen`), 1e-5 for float32, 3e-2 for
    narrower ones, where a gradient of a single number is compared with the root of its squared terms
    (`fxpar.checking.terms`). Nothing of a program is widened, and the narrowest dtype in the graph counts.

    A strategy with `lsh(...)` is wrong on purpose. Its verdict is that of the same passes with lsh(1); a note says how
    far it is off itself. Raises LossyProgramError for a program of one, NothingToCheckError if the loss and all
    gradients of one device are 0.
    """
    check_captured(logical)
    if compile == "inductor":
        torch.set_num_threads(1)  # ranks are forked, and a forked process has no thread pool
    floats = [t.dtype for t in params.values() if t.is_floating_point()]
    dtype = min(floats, key=lambda d: d.itemsize, default=torch.float32)
    ready = any(isinstance(each, TrainGraph) for each in strategies)
    if ready:
        dtype = min([dtype, *_dtypes(logical)], key=lambda d: d.itemsize)
    limit = TOLERANCE.get(dtype, 1e-5) if tolerance is None else tolerance
    if dtype == torch.float64 and not ready:
        logical = widen(logical)
        buffers = {fqn: wide_tensor(value) for fqn, value in buffers.items()}
        params = {fqn: wide_tensor(value) for fqn, value in params.items()}
        batches = [{key: wide_tensor(value) for key, value in batch.items()} for batch in batches]
    batches = [as_one_sequence(logical.inputs, batch, i) for i, batch in enumerate(batches)]
    rows, unpacked = (logical, "") if packed is False else packed_if_proved(logical, force=bool(packed))
    unpacked = unpacked if _has_tokens(logical) else ""
    if rows.packing is not None and not ready:
        batches = [cut_in_documents(logical.inputs, row) for row in batches]
    oracle = _Oracle(logical, params, buffers, scale, low=dtype.itemsize < 4)
    setting = _Setting(rows, params, buffers, batches, oracle, scale, compile, unpacked)
    parsed = (Strategy.parse(each) if isinstance(each, str) else each for each in strategies)
    return [_check_any(setting, strategy, limit, padded) for strategy in parsed]


def _dtypes(logical: LogicalGraph) -> set[torch.dtype]:
    """Floating-point dtypes in which the graph computes."""
    metas = (m for node in logical.gm.graph.nodes for m in tensor_metas(node))
    return {m.dtype for m in metas if m is not None and m.dtype.is_floating_point}


class _Oracle:
    """The captured graph on one device, document by document; buffers go from one to the next of a replica. `terms` are
    the parameters of a single number (with `low` dtypes): behind the results of the graph come the squared terms of
    their gradients.
    """

    def __init__(self, logical: LogicalGraph, params: Batch, buffers: Batch, scale: float, *, low: bool) -> None:
        self._logical, self._params, self._buffers, self._scale = logical, params, buffers, scale
        self._device = next((p.device for p in params.values()), torch.device("cpu"))
        new: dict[fx.Node, fx.Node] = {}
        graph = copy_graph(logical.gm.graph, new)
        terms = summed_terms(logical) if low else {}
        self.terms = [*terms]
        self._counts = [len(nodes) for nodes in terms.values()]
        self._results = len(logical.outputs)
        output = graph.output_node()
        output.args = ((*output.args[0], *(new[node] for nodes in terms.values() for node in nodes)),)  # type: ignore
        make_tensors_on(graph, self._device)
        self._module = compile_graph(graph)
        self._constants = {name: value.to(self._device) for name, value in logical.constants.items()}
        self._writes = [(i, o.fqn) for i, o in enumerate(logical.outputs) if o.kind == "buffer"]
        self._known: dict[tuple[int, int, int], list[Tensor]] = {}

    def replica(self, indices: list[int], batches: Sequence[Batch]) -> list[list[Tensor]]:
        """Results of one replica's micro-batches in turn; kept for other strategies where no buffer is written."""
        buffers = dict(self._buffers)
        results = []
        for index in indices:
            for turn, document in enumerate(self._documents(batches[index % len(batches)])):
                key = (index, len(batches), turn)  # one row is as many documents under any strategy
                values = self._known.get(key)
                if values is None:
                    values = self._run(index, document, buffers)
                    if not self._writes:
                        self._known[key] = values
                buffers.update({fqn: values[i] for i, fqn in self._writes})
                results.append(values)
        return results

    def _documents(self, row: Batch) -> list[dict[str, Tensor]]:
        """What the graph is run on: the documents of a row, or the row for a graph whose rows are packed already."""
        inputs = self._logical.inputs
        return split_documents(inputs, row) if self._logical.packing is None else [mark_documents(inputs, row)]

    def _run(self, index: int, batch: Batch, buffers: Batch) -> list[Tensor]:
        sources = {"param": self._params, "buffer": buffers, "constant": self._constants, "batch": batch}
        values = []
        for info in self._logical.inputs:
            if info.kind == "scale":
                values.append(torch.tensor(self._scale, dtype=info.meta.dtype, device=self._device))
            elif info.kind == "seed":
                values.append(torch.tensor(index, device=self._device))
            else:
                values.append(sources[info.kind][info.fqn])
        with torch.no_grad():
            try:
                found = list(self._module(*values))
            except RuntimeError as error:
                check_length(self._logical, batch, error)
                raise
        results, terms = found[: self._results], iter(found[self._results :])
        return [*results, *(squares([next(terms) for _ in range(count)]) for count in self._counts)]


def assign(strategy: Strategy, count: int) -> list[list[int]]:
    """Micro-batches of each dp replica: round robin over at least one each."""
    replicas = strategy.replicas
    total = max(count, replicas)
    return [[i for i in range(total) if i % replicas == r] for r in range(replicas)]


@dataclass(frozen=True)
class _Setting:
    """What all strategies are checked with; `rows` is the graph that is lowered."""

    rows: LogicalGraph
    params: Batch
    buffers: Batch
    batches: Sequence[Batch]
    oracle: _Oracle
    scale: float
    compile: Backend
    unpacked: str


def _has_tokens(logical: LogicalGraph) -> bool:
    return any(dim.name == TOKENS for dim in logical.dims)


def _takes_rows(program: TrainGraph) -> bool:
    """Whether a program takes marks of documents."""
    keys = {info.fqn for info in program.inputs if info.kind == "batch"}
    return bool(keys & {"document_ids", "document_positions", "position_ids", "positions"})


def _micro_batches(program: TrainGraph, batches: Sequence[Batch], rows: bool) -> list[dict[str, Tensor]]:
    """Rows with their documents marked, or each document by itself."""
    if rows:
        return [mark_documents(program.inputs, row) for row in batches]
    return [document for row in batches for document in split_documents(program.inputs, row)]


def _check_any(setting: _Setting, strategy: Strategy | TrainGraph, limit: float, padded: bool) -> CheckResult:
    """The verdict on a strategy; on a lossy one, that without loss."""
    given = strategy.strategy if isinstance(strategy, TrainGraph) else strategy
    without = without_loss(given)
    if without == given:
        return _check_one(setting, strategy, limit, padded)
    if isinstance(strategy, TrainGraph):
        raise LossyProgramError(str(given), str(without))
    lossy, exact = (_check_one(setting, one, limit, padded) for one in (given, without))
    off = f"loss by {lossy.loss_rel_err:.1e}, gradients by up to {lossy.grad_max_rel_err:.1e} ({lossy.worst_param})"
    notes = [f"lossy: compared as {without}; as it is, it is off: {off}", *lossy.notes]
    verdict = {name: getattr(exact, name) for name in ("loss_rel_err", "grad_max_rel_err", "worst_param")}
    return replace(lossy, **verdict, ok=exact.ok and not lossy.error, error=lossy.error or exact.error, notes=notes)


def _check_one(setting: _Setting, strategy: Strategy | TrainGraph, limit: float, padded: bool) -> CheckResult:
    program = strategy if isinstance(strategy, TrainGraph) else lower(setting.rows, strategy)
    if padded:
        program = _with_hazard(program, None)
    elif program.padding_hazard:
        program = _with_hazard(program, with_packing(program.padding_hazard, setting.unpacked))
    strategy = program.strategy
    in_rows = not setting.unpacked and _takes_rows(program)
    micro_batches = _micro_batches(program, setting.batches, in_rows)
    plan = assign(strategy, len(micro_batches))
    results = [values for mine in plan for values in setting.oracle.replica(mine, micro_batches)]
    expected = summed(results, setting.rows, setting.oracle.terms)
    if not any(value.any() for value in expected.values()):
        raise NothingToCheckError
    begun, error = time.perf_counter(), ""
    try:
        ranks = run_world(program, setting.params, setting.buffers, micro_batches, plan, setting.scale, setting.compile)
        loss_error, errors = compared(program, ranks, expected)
    except FxparError as problem:
        loss_error, errors, error = float("inf"), {"": float("inf")}, str(problem)
    worst = max(errors, key=errors.__getitem__) if errors else ""
    grad_error = errors.get(worst, 0.0)
    return CheckResult(
        strategy=str(strategy),
        world=strategy.world,
        ok=loss_error <= limit and grad_error <= limit,
        loss_rel_err=loss_error,
        grad_max_rel_err=grad_error,
        worst_param=worst,
        collectives=program.collectives(),
        collective_bytes=program.collective_bytes(),
        capture_cpu_s=round(program.timings.get("capture_cpu_s", 0.0), 3),
        annotate_cpu_s=round(program.timings.get("annotate_cpu_s", 0.0), 3),
        lower_cpu_s=round(program.timings.get("lower_cpu_s", 0.0), 3),
        nodes=program.node_count,
        run_wall_s=round(time.perf_counter() - begun, 3),
        error=error,
        documents="" if not _has_tokens(setting.rows) else "in rows" if in_rows else "alone",
        notes=[*program.notes, *_notes_of_rows(program, setting, error)],
    )


def _notes_of_rows(program: TrainGraph, setting: _Setting, error: str) -> list[str]:
    """That each sequence is alone, and which lengths a run takes, unless an error already says so."""
    alone = [f"each document runs alone, since {setting.unpacked}"] if setting.unpacked else []
    multiple = program.divisors.get(TOKENS, 1)
    if program.padding_hazard is None or multiple == 1 or error:
        return alone
    return [*alone, f"only lengths that are multiples of {multiple} run, since {program.padding_hazard}"]


def _with_hazard(program: TrainGraph, hazard: str | None) -> TrainGraph:
    """A program, and those of its teams, with another reason not to pad."""
    if isinstance(program, TeamsGraph):
        program = replace(program, teams=tuple(replace(team, padding_hazard=hazard) for team in program.teams))
    return replace(program, padding_hazard=hazard)


def run_world(
    program: TrainGraph,
    params: Batch,
    buffers: Batch,
    batches: Sequence[Batch],
    plan: list[list[int]],
    scale: float,
    compile: Backend = "eager",
) -> list[dict[str, Any]]:
    """All ranks of a program as threads; `plan[replica]` lists its micro-batches. Results by rank (local tensors)."""
    strategy = program.strategy
    fingerprint = program.fingerprint()
    threads = None if compile == "inductor" else ThreadWorld()

    def work(rank: int) -> dict[str, Any]:
        channels = None if threads is None else ThreadChannels(threads, rank)
        with nullcontext() if threads is None else threads.ends_with_this():
            return run(rank, channels)

    def run(rank: int, channels: Channels | None) -> dict[str, Any]:
        bound = bind_here(program, ProcessGroups(), compile=compile, channels=channels)
        bound.prepare(local_params(program, params, rank), buffers)
        own, beside = bound.program, [plan[i] for i in bound.replicas]
        mine = plan[bound.replica]
        # ZeRO-2 and 3 talk to the other replicas inside the body, so all run the same number of micro-batches: a
        # replica that has none left repeats one at scale 0, which adds exact zeros.
        idle = max(map(len, beside)) - len(mine) if own.strategy.most_zero >= 2 else 0
        bound.run_all(
            [
                MicroRun(partial(pad, own, batches[index % len(batches)]), scale, index, turn >= len(mine))
                for turn, index in enumerate(mine + mine[:1] * idle)
            ]
        )
        found = bound.finish()
        summed_up = bound.total({"loss": found["loss"]}) if isinstance(bound, BoundTeam) else {}
        return {**found, **summed_up, "fingerprint": fingerprint}

    if compile == "inductor":
        return run_forked(strategy.world, work, timeout_s=1200.0)  # the compiler is not for several threads at once
    return run_threads(strategy.world, work)


def local_params(program: TrainGraph, params: Batch, rank: int) -> dict[str, Tensor]:
    """What a rank stores of whole parameters."""
    return {
        info.fqn: stored.dist.take(params[info.fqn], rank)
        for part in program.storing
        if rank in part.mesh
        for info, stored in zip(part.inputs, part.stored_inputs, strict=True)
        if info.kind == "param"
    }
