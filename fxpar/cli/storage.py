"""`fxpar dump --after share_weights`: where the weights of several strategies lie in the buffers of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxpar.cli.commands import DumpRequest
from fxpar.cli.console import show_notes, working
from fxpar.cli.request import check_output, collected_warnings, same_ranks, to_json, write_output
from fxpar.cli.source import rows_once, strategies_of
from fxpar.errors import DumpOptionError, NoModuleError, UnknownRankError, nearest
from fxpar.ir.columns import columns, human_bytes
from fxpar.ir.dtype_names import short_dtype
from fxpar.ir.exec_graph import Program
from fxpar.ir.pass_names import SHARING
from fxpar.ir.printer import matches
from fxpar.lowering import outline
from fxpar.passes.share_weights import BufferView, SharedStorage, ShareWeights


def dump_storage(request: DumpRequest) -> None:
    """Do it. Raises what `outline` raises, UnequalWorldsError, UnknownRankError, DumpOptionError, NoModuleError."""
    if request.form in ("dot", "graph"):
        raise DumpOptionError(f"--after {SHARING}", "is no graph", "Write text or --format json")
    if request.pipeline_stage is not None or request.schedule:
        raise DumpOptionError(f"--after {SHARING}", "has no stages", "Leave out --stage and --schedule")
    strategies = strategies_of(request.source, request.strategy_texts)
    world, rank = same_ranks(strategies), request.rank or 0
    if rank >= world:
        raise UnknownRankError(rank, str(strategies[0]), world)
    check_output(request.target)
    notes: list[str] = []
    rows = rows_once(request.source)
    with working() as status, collected_warnings(notes):
        status.update(f"placing the parameters of {request.source.model}")
        programs: dict[str, Program] = {str(strategy): outline(rows(), strategy) for strategy in strategies}
    storage = ShareWeights().lay_out(programs, rank)
    shown = {
        name: {fqn: view for fqn, view in views.items() if matches(fqn, request.fqn)}
        for name, views in storage.views.items()
    }
    if request.fqn is not None and not any(shown.values()):
        known = {fqn for views in storage.views.values() for fqn in views}
        raise NoModuleError(request.fqn, nearest(request.fqn, known))
    show_notes(notes)
    if request.form == "json":
        write_output(request.target, to_json(_document(request.source.model, rank, storage, shown)))
        return
    lines = [f"{request.source.model}, rank {rank}: one storage behind {', '.join(programs)}", *_buffers(storage)]
    if not request.brief:
        lines += ["", *_lines(shown)]
    write_output(request.target, "\n".join([*lines, ""]))


def _buffers(storage: SharedStorage) -> list[str]:
    lines = [
        f"  {pool} {short_dtype(dtype)}[{count}], {human_bytes(count * dtype.itemsize)}"
        for (pool, dtype), count in storage.numel.items()
    ]
    alone = sum(storage.strategy_bytes(name) for name in storage.views)
    return [*lines, f"  {human_bytes(alone)} if each strategy had weights of its own"]


def _lines(shown: Mapping[str, Mapping[str, BufferView]]) -> list[str]:
    rows = [("strategy", "parameter", "on this rank", "in the buffer", "stride")]
    for name, views in shown.items():
        for fqn, view in views.items():
            piece = f"{short_dtype(view.dtype)}[{', '.join(map(str, view.shape))}]"
            rows.append((name, fqn, piece, f"{view.pool}[{view.offset}]", str(view.stride)))
    return columns(rows)


def _document(
    model: str, rank: int, storage: SharedStorage, shown: Mapping[str, Mapping[str, BufferView]]
) -> dict[str, Any]:
    """As JSON; sizes, offsets and strides in elements."""
    return {
        "model": model,
        "rank": rank,
        "resident": list(storage.resident),
        "nbytes": storage.nbytes,
        "buffers": [
            {"pool": pool, "dtype": short_dtype(dtype), "numel": count}
            for (pool, dtype), count in storage.numel.items()
        ],
        "views": {
            name: {fqn: {**vars(view), "dtype": short_dtype(view.dtype)} for fqn, view in views.items()}
            for name, views in shown.items()
        },
    }
