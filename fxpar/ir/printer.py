"""The stable text form of graphs: what `fxpar dump` prints and what expect-tests hold.

    %mm_3 : f64[T, 64@tp] = mm(%view_5, %t_3)   # attention.q_proj, model.py:41

One node per line: name, type, op, operands; after `#` the module (relative to the heading) and the user's source
line. A type reads as in `DistConfig.describe`: global sizes with the axes that cut them, then the axes on which it is
partial. A value that has no placement of its own (inside a collective) shows its local shape after `local`. Names count
up per op, so that they do not depend on how the graph was made. Nodes stand in program order under headings by repeated
block and direction; a block that equals an earlier one but for its names is folded into one line.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar.ir.dist_config import DistConfig
from fxpar.ir.dtype_names import short_dtype
from fxpar.ir.exec_graph import PlainGraph, Program, collective_kind
from fxpar.ir.fqn import block_of, starred
from fxpar.ir.graph import AnnotatedGraph, ForwardGraph, Input, LogicalGraph, TensorMeta, run_sizes
from fxpar.ir.node_meta import comm_of, dist_of, fqn_of, fused_count, is_backward, is_size, source_of, wanted_dists
from fxpar.ir.pipeline_graph import PipelineGraph, StageProgram, TeamsGraph
from fxpar.ir.printer_tables import (
    collective_list,
    collective_table,
    ranks_text,
    reshard_table,
    stage_list,
    tensor_operands_of,
)
from fxpar.ir.serialize import OpOverload

AnyGraph = LogicalGraph | AnnotatedGraph | Program

_NAME = re.compile(r"%[\w.]+")
_MANY = 16  # longer lists of operands are shortened when folding
_SHORT = 6  # fewer nodes than this do not interrupt a run
_END = 2**62  # slices to the end are written with a huge number


def format_graph(
    graph: AnyGraph,
    *,
    fold: bool = True,
    nodes: bool = True,
    stage: int | None = None,
    fqn: str | None = None,
    head: Sequence[str] = (),
) -> str:
    """The whole text: header (and the lines of `head`), parameters, nodes, collectives; without `nodes` those that
    communicate only. Of a pipeline what the stages are and send, then each stage, or `stage` alone; of teams side by
    side one after the other. With `fqn` parameters and nodes of the modules that match this glob. Ends with a newline.
    """
    if isinstance(graph, TeamsGraph):
        texts = ["\n".join([*header(graph), *head]) + "\n"]
        for number, team in enumerate(graph.teams):
            text = format_graph(team, fold=fold, nodes=nodes, stage=stage, fqn=fqn)
            texts.append(f"team {number} on {ranks_text(graph.mesh_of(number).ranks)}:\n{text}")
        return "\n".join(texts)
    sections = [[*header(graph), *head]]
    shown: list[AnyGraph] = [graph]
    if isinstance(graph, PipelineGraph):
        sections.append(stage_list(graph))
        shown = [s for s in graph.stages if stage in (None, s.index)]
    for each in shown:
        sections += [[f"stage {each.index}:"] if isinstance(each, StageProgram) else [], parameters(each, fqn)]
        for part in parts(each) if nodes else []:
            sections.append([f"{part.name}:", *(f"  {line}" for line in format_part(part, fold=fold, fqn=fqn))])
        if fqn is not None:
            continue
        if isinstance(each, AnnotatedGraph):
            sections.append(reshard_table(each))
        if isinstance(each, Program):
            sections += [[] if nodes else collective_list(each), collective_table(each, graph.inputs)]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


_STAGES = {
    ForwardGraph: "forward",
    LogicalGraph: "logical",
    AnnotatedGraph: "annotated",
    PlainGraph: "plain",
    PipelineGraph: "pipeline",
    TeamsGraph: "teams",
    Program: "exec",
}


def header(graph: AnyGraph) -> list[str]:
    """Model, strategy, mesh, dynamic dims with their divisors, notes."""
    stage = next(name for kind, name in _STAGES.items() if isinstance(graph, kind))
    lines = [f"fxpar {stage} graph of {graph.name}"]
    if not isinstance(graph, LogicalGraph):
        strategy, ranks = graph.strategy, graph.strategy.world
        axes = " x ".join(f"{axis}{degree}" for axis, degree in strategy.all_digits)
        teams = " + ".join(str(team.world) for team in strategy.teams)
        mesh = f"teams of {teams}" if teams else f"mesh {axes}, {ranks}"
        lines.append(f"strategy {strategy}: {mesh} rank{'s' * (ranks != 1)}")
        lines += [f"override {pattern}={placement}" for pattern, placement in graph.strategy.overrides]
    for dim in graph.dims:
        text, divisor = f"dim {dim.name}: {dim.example} in the example", graph.divisors.get(dim.name, 1)
        if divisor > 1:
            padded = isinstance(graph, LogicalGraph) or graph.padding_hazard is None
            text += (
                f", padded to a multiple of {divisor} when it runs" if padded else f"; it takes multiples of {divisor}"
            )
            text += f"; figures are for {run_sizes(graph)[dim.name]}" if dim.example % divisor else ""
        lines.append(text + (f", at most {dim.maximum}" if dim.maximum is not None else ""))
    if not isinstance(graph, LogicalGraph):
        lines += [f"note: {without_folders(note)}" for note in graph.notes]
    return lines


def matches(fqn: str, glob: str | None) -> bool:
    """Whether a module or parameter is one that the glob names, or inside of such a module."""
    return glob is None or fnmatch.fnmatchcase(fqn, glob) or fnmatch.fnmatchcase(fqn, f"{glob}.*")


def parameters(graph: AnyGraph, glob: str | None = None) -> list[str]:
    """How each parameter (that matches) is stored; those of repeated blocks that lie alike share a line."""
    rows: dict[tuple[str, str], int] = Counter()
    for i, info in enumerate(graph.inputs):
        if info.kind != "param" or not matches(info.fqn, glob):
            continue
        text = str(info.meta)
        if isinstance(graph, Program):
            stored = graph.stored_inputs[i]
            text = f"{stored.dist.describe(stored.meta.shape)}"
            if stored.local != stored.meta:
                text += f"   local {stored.local}"
        elif isinstance(graph, AnnotatedGraph):
            text = dist_of(graph.placeholders[i]).describe(info.meta.shape)
        name = starred(info.fqn)
        aliases = f" = {', '.join(info.aliases)}" if info.aliases else ""
        frozen = "" if info.requires_grad else "   frozen"
        rows[(name + aliases, text + frozen)] += 1
    width = max((len(name) for name, _ in rows), default=0)
    count = max((len(f"x{n}") for n in rows.values()), default=0)
    table = [f"  {name:{width}}  {f'x{n}':{count}}  {text}" for (name, text), n in rows.items()]
    return ["parameters:", *table] if table else []


@dataclass
class Run:
    """Consecutive nodes of one block and direction; `block` is "" outside of repeated blocks."""

    block: str
    backward: bool
    nodes: list[fx.Node] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.block or 'outside of blocks'}{', backward' if self.backward else ''}"


@dataclass(frozen=True)
class PrintedPart:
    """One fx graph with the names of its nodes; `inputs` are those that are not stored parameters."""

    name: str
    graph: fx.Graph
    names: dict[fx.Node, str]
    inputs: tuple[fx.Node, ...]


def parts(graph: AnyGraph) -> list[PrintedPart]:
    """The graphs to print, in order; an inputs' name is its FQN or batch key, or the name it has in an earlier part."""
    infos = graph.inputs
    if not isinstance(graph, Program):
        step = graph.gm.graph if isinstance(graph, LogicalGraph) else graph.graph
        known = {n: _input_name(i) for n, i in zip(graph.placeholders, infos, strict=True)}
        loose = tuple(n for n, i in zip(graph.placeholders, infos, strict=True) if i.kind != "param" and n.users)
        return [PrintedPart("step", step, stable_names(step, known), loose)]
    found: list[PrintedPart] = []
    results: dict[str, list[str]] = {"input": [_input_name(info) for info in infos]}
    stored = {info.fqn for info in infos if info.kind == "param"}
    for title, part in graph.parts.items():
        places = list(part.graph.find_nodes(op="placeholder"))
        known = {n: results[where][i] for n, (where, i) in zip(places, part.sources, strict=True)}
        names = stable_names(part.graph, known, prefix="" if title == "body" else f"{title}.")
        results[title] = [names[n] for n in part.results]
        loose = tuple(n for n in places if names[n] not in stored and n.users and "." not in names[n])
        if not part.is_empty:
            found.append(PrintedPart(title, part.graph, names, loose))
    return found


def _input_name(info: Input) -> str:
    return f"tangent_{info.fqn}" if info.kind == "tangent" else info.fqn


def format_part(part: PrintedPart, *, fold: bool = True, fqn: str | None = None) -> list[str]:
    """Lines for the inputs, the runs of nodes under headings, and the results; `fqn` keeps the nodes of modules
    that match.
    """
    name, whole = part.names, fqn is None
    lines = [f"%{name[n]} : {type_of(n)}" for n in part.inputs] if whole else []
    known: dict[tuple[str, ...], str] = {}
    for run in runs(part.graph):
        nodes = [n for n in run.nodes if matches(fqn_of(n), fqn)]
        body = [node_line(n, name, run.block, _MANY if fold else None) for n in nodes]
        if not body:
            continue
        key = (str(run.backward), *canonical(body, run.block))
        if fold and key in known:
            _add_fold(lines, run.title, known[key], len(body))
            continue
        known.setdefault(key, run.title)
        lines += [f"-- {run.title}", *body]
    (output,) = part.graph.find_nodes(op="output")
    if whole:
        lines.append(f"return {_joined([f'%{name[n]}' for n in output.args[0]], _MANY if fold else None)}")
    return lines


def runs(graph: fx.Graph) -> list[Run]:
    """The calls in order, cut where the block or the direction changes; a short interruption of a run is part of it."""
    found: list[Run] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        block, backward = block_of(fqn_of(node)), is_backward(node)
        if not found or found[-1].title != Run(block, backward).title:
            found.append(Run(block, backward))
        found[-1].nodes.append(node)
    merged: list[Run] = []
    for run, following in zip(found, [*found[1:], None], strict=True):
        last = merged[-1] if merged else None
        interrupts = following is not None and last is not None and following.title == last.title
        short = interrupts and len(run.nodes) < _SHORT and run.backward == last.backward
        if last is not None and (run.title == last.title or short):
            last.nodes += run.nodes
        else:
            merged.append(run)
    return merged


def canonical(lines: Sequence[str], block: str) -> Iterable[str]:
    """The lines with every name replaced by its order of appearance, and the block's own FQN left out."""
    seen: dict[str, str] = {}

    def rename(match: re.Match[str]) -> str:
        word = match[0]
        if block and word.startswith(f"%{block}."):
            return f"%{word[len(block) + 1 :]}"
        return seen.setdefault(word, f"%{len(seen)}")

    return (_NAME.sub(rename, line) for line in lines)


def _add_fold(lines: list[str], title: str, like: str, count: int) -> None:
    """Say that a run equals an earlier one; neighbours that do are counted on one line."""
    match = re.fullmatch(r"-- (.+?)(?: \.\. .+)?: as (.+) \((\d+) nodes(?:, x(\d+))?\)", lines[-1])
    if match and match[2] == like:
        lines[-1] = f"-- {match[1]} .. {title}: as {like} ({count} nodes, x{int(match[4] or 1) + 1})"
    else:
        lines.append(f"-- {title}: as {like} ({count} nodes)")


def stable_names(graph: fx.Graph, known: Mapping[fx.Node, str], prefix: str = "") -> dict[fx.Node, str]:
    """Inputs are called as in `known`, other nodes by op and a number that counts up per op."""
    names: dict[fx.Node, str] = {}
    counts: dict[str, int] = defaultdict(int)
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = known[node]
        elif node.op == "call_function":
            op = op_name(node)
            names[node] = f"{prefix}{op}_{counts[op]}"
            counts[op] += 1
    return names


def op_name(node: fx.Node) -> str:
    """`mm` for aten.mm.default, `all_gather` for the collective, `take` for a function of that name."""
    kind = collective_kind(node)
    if kind:
        return kind
    if isinstance(node.target, OpOverload):
        _, name, _ = str(node.target).split(".")
        return {"wait_tensor": "wait", "sym_size": "size"}.get(name, name)
    return getattr(node.target, "__name__", str(node.target))


def node_line(node: fx.Node, name: Mapping[fx.Node, str], block: str, most: int | None = None) -> str:
    """One node, without indentation; lists longer than `most` are shortened."""
    args = [_argument(a, name, most) for a in node.args]
    args += [f"{k}={_argument(v, name, most)}" for k, v in node.kwargs.items()]
    where = fqn_of(node)
    remarks = [where[len(block) :].lstrip(".") if f"{where}.".startswith(f"{block}.") else where]
    source = (source_of(node) or "").replace("\\", "/").rpartition("/")[2]  # nothing of the machine
    remarks += [source, _sent(node), *_reshards(node, name)]
    comment = ", ".join(filter(None, remarks))
    text = f"%{name[node]} : {type_of(node, most)} = {op_name(node)}({', '.join(args)})"
    return f"{text}   # {comment}" if comment else text


def type_of(node: fx.Node, most: int | None = None) -> str:
    """The placed type of a value; of each result for an op with several."""
    if is_size(node):
        return "int"
    tensor, dist = node.meta.get("tensor"), node.meta.get("dist")
    if isinstance(tensor, tuple):
        dists = dist if isinstance(dist, tuple) else (None,) * len(tensor)
        locals_ = node.meta.get("local") if isinstance(node.meta.get("local"), tuple) else (None,) * len(tensor)
        return f"({_joined([_type(*each) for each in zip(tensor, dists, locals_, strict=True)], most)})"
    return _type(tensor, dist, node.meta.get("local"))


def _type(tensor: TensorMeta | None, dist: DistConfig | None, local: TensorMeta | None) -> str:
    if tensor is None:
        return "none"
    if dist is not None:
        return dist.describe(tensor.shape) if dist.dtype else str(tensor)
    return f"local {local}" if local is not None else str(tensor)


def _joined(words: Sequence[str], most: int | None) -> str:
    """The words with commas; the middle of more than `most` is left out."""
    if most is not None and len(words) > most:
        words = [*words[:3], f"... {len(words) - 4} more ...", words[-1]]
    return ", ".join(words)


def _argument(value: Any, name: Mapping[fx.Node, str], most: int | None = None) -> str:
    if isinstance(value, fx.Node):
        return f"%{name[value]}"
    if isinstance(value, list | tuple):
        return f"[{_joined([_argument(v, name) for v in value], most)}]"
    if isinstance(value, torch.dtype):
        return short_dtype(value)
    if isinstance(value, int) and value >= _END:
        return "end"
    return str(value)


def _sent(node: fx.Node) -> str:
    """Local shape of what a collective sends (its axis is among the operands)."""
    if "comm" not in node.meta:
        return ""
    _, sent = comm_of(node)
    fused = fused_count(node)
    return f"sends {sent}" + (f" in {fused} tensors" if fused > 1 else "")


def _reshards(node: fx.Node, name: Mapping[fx.Node, str]) -> list[str]:
    """Operands that an annotated node wants to lie otherwise than they do."""
    found = []
    for operand, wanted in zip(tensor_operands_of(node), wanted_dists(node), strict=False):
        if operand.meta.get("dist") != wanted and isinstance(operand.meta.get("tensor"), TensorMeta):
            found.append(f"wants %{name[operand]} as {wanted.describe(operand.meta['tensor'].shape)}")
    return list(dict.fromkeys(found))


def without_folders(text: str) -> str:
    """The text with `file.py:12` in place of every `/somewhere/file.py:12`."""
    return re.sub(r"(?:[A-Za-z]:)?(?:[/\\][\w.@+-]+)+[/\\](?=[\w.-]+:\d+)", "", text)
