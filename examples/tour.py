"""What fxpar does, on a laptop: capture a Llama once, lower it to three strategies, check them."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from fxpar.checking import check
from fxpar.errors import MissingPackageError
from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import LogicalGraph
from fxpar.lowering import lower
from fxpar.models import LoadedModel, load
from fxpar.tracer import capture

STRATEGIES = ("dp2.tp2+sp", "cp2.tp2", "dp4+zero3")
console = Console(highlight=False, emoji=False)


def load_llama() -> LoadedModel:
    """A two-layer Llama of transformers, float64; without transformers fxpar's own."""
    try:
        return load("hf:llama", dtype="float64")
    except MissingPackageError:
        return load("llama", dtype="float64")


def show_capture(model: LoadedModel, graph: LogicalGraph) -> None:
    """What the logical graph holds."""
    nodes = [node for node in graph.gm.graph.nodes if node.op == "call_function"]
    backward = sum(bool(node.meta.get("backward")) for node in nodes)
    own = sorted({str(n.target).split(".")[1] for n in nodes if str(n.target).startswith("fxpar.")})
    lengths = ", ".join(str(batch["input_ids"].shape[1]) for batch in model.batches)
    console.rule("1. capture: the unmodified model, once")
    console.print(f"model        {model.name}, {sum(p.numel() for p in model.params().values()):,} parameters")
    console.print(f"graph        {len(nodes) - backward} forward and {backward} backward nodes")
    console.print(f"dynamic dim  {', '.join(d.name for d in graph.dims)} (the check runs lengths {lengths})")
    console.print(f"own ops      {', '.join(own)}; the rest is ATen")
    console.print(f"time         {graph.timings['capture_cpu_s']:.1f} CPU s, no process group, no GPU\n")


def layer_of(fqn: str) -> str | None:
    """`layers.0` of a module inside of a repeated block."""
    match = re.search(r"(?:^|\.)(\w+\.\d+)(?:\.|$)", fqn)
    return match[1] if match else None


def show_lowered(programs: Sequence[Program]) -> None:
    """Collectives in one layer (the second, as the first also gets what comes before it) and in the whole step."""
    console.rule("2. lower: one program per strategy")
    table = Table(box=None, header_style="bold", padding=(0, 2, 1, 0))
    for title in ("strategy", "collectives in a layer", "in the whole step", "kB per rank"):
        table.add_column(title, justify="right" if title.startswith("kB") else "left")
    for program in programs:
        calls = program.communications()
        layers = [layer_of(c.fqn) for c in calls]
        last = max(filter(None, layers), default=None)
        inside = Counter(f"{c.kind} on {c.axis}" for c, layer in zip(calls, layers, strict=True) if layer == last)
        words = [f"{count} {what}" for what, count in inside.items()]
        total = [f"{count} {kind}" for kind, count in program.collectives().items()]
        kilobytes = f"{program.collective_bytes() / 1000:,.0f}"
        table.add_row(str(program.strategy), "\n".join(words) or "none", "\n".join(total), kilobytes)
    console.print(table)
    program = programs[0]
    console.print(f"[bold]how the parameters of a layer lie under {program.strategy}[/bold] (sizes cut by @axis)")
    for info, stored in zip(program.inputs, program.stored_inputs, strict=True):
        if info.kind == "param" and (layer_of(info.fqn) or "").endswith(".0"):
            console.print(f"  {info.fqn:50} {stored.dist.describe(stored.meta.shape)}", markup=False)
    console.print()


def show_check(model: LoadedModel, graph: LogicalGraph) -> bool:
    """Every rank of every strategy in this process, against a single device."""
    console.rule("3. check: all ranks in this process against one device")
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("strategy", "ranks", "result", "loss error", "gradient error", "largest in"):
        table.add_column(title)
    results = check(graph, STRATEGIES, model.params(), model.buffers(), model.batches, scale=model.scale())
    for r in results:
        verdict = "[green]ok[/green]" if r.ok else "[red]MISS[/red]"
        errors = (f"{r.loss_rel_err:.1e}", f"{r.grad_max_rel_err:.1e}", ".".join(r.worst_param.split(".")[-3:]))
        table.add_row(r.strategy, str(r.world), verdict, *errors)
    console.print(table)
    return all(r.ok for r in results)


def main() -> None:
    begun = time.perf_counter()
    model = load_llama()
    graph = capture(model.model, model.loss_fn, model.example_batch, name=model.name)
    show_capture(model, graph)
    show_lowered([lower(graph, strategy) for strategy in STRATEGIES])
    ok = show_check(model, graph)
    console.print(f"\n{time.perf_counter() - begun:.0f} s. More: fxpar dump llama -s tp2 --brief")
    raise SystemExit(not ok)


if __name__ == "__main__":
    main()
