"""What the rules of a strategy do: which modules each is of, and what moves between modules of different roles."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from fxpar.explain.document import Document
from fxpar.explain.traffic import CollectiveTraffic
from fxpar.ir.exec_graph import Program
from fxpar.ir.strategy import Strategy


def rules_document(program: Program, found: Sequence[CollectiveTraffic]) -> Document:
    """{"rules": [...], "borders": [...]}; nothing without rules. Stages that differ have their own."""
    own = bool(program.strategy.by_stage)
    parts = [
        (part, [each for each in found if each.stage == index or not own])
        for index, part in enumerate(program.placed if own else (program,))
        if part.strategy.rules
    ]
    if not parts:
        return {}
    return {
        "rules": [_rule(part, index) for part, _ in parts for index in range(len(part.strategy.rules))],
        "borders": sorted(
            (row for part, mine in parts for row in _borders(part.strategy, mine)), key=lambda row: -row["wire_bytes"]
        ),
    }


def _rule(program: Program, index: int) -> Document:
    """How many modules a rule matches, and of how many parameters it has the last word."""
    strategy, rule = program.strategy, program.strategy.rules[index]
    params = [info for info in program.inputs if info.kind == "param"]
    names = [name.split(".") for info in params for name in (info.fqn, *info.aliases)]
    modules = {".".join(parts[:end]) for parts in names for end in range(1, len(parts))}
    owners = [info.fqn.rpartition(".")[0] for info in params]
    decides = sum(any(strategy.rule_of(owner, what) == index for what in rule.says) for owner in owners)
    return {"rule": str(rule), "modules": sum(map(rule.matches, modules)), "params": decides}


def _borders(strategy: Strategy, found: Sequence[CollectiveTraffic]) -> list[Document]:
    """Activations that move from modules of one role to modules of another. What the modules would send in any
    neighbourhood is part of it: tp under sp gathers its tokens whoever made them.
    """
    rows: dict[tuple[int | None, int | None], list[CollectiveTraffic]] = defaultdict(list)
    for each in found:
        ends = strategy.rule_of(each.module), strategy.rule_of(each.reader)
        if each.what == "activations" and ends[0] != ends[1]:
            rows[ends].append(each)
    return [
        {
            "from": _named(strategy, made),
            "to": _named(strategy, read),
            "collectives": [
                {"kind": kind, "axis": axis, "calls": calls}
                for (kind, axis), calls in Counter((e.comm.kind, e.comm.axis) for e in group).items()
            ],
            "wire_bytes": round(sum(each.wire_bytes for each in group)),
        }
        for (made, read), group in rows.items()
    ]


def _named(strategy: Strategy, rule: int | None) -> str:
    return "the rest" if rule is None else strategy.rules[rule].glob


__all__ = ["rules_document"]
