"""Who uses which ranks for what: the modules of a model in as few lines as its strategy has differences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxpar.ir.axes import USES
from fxpar.ir.exec_graph import Program
from fxpar.ir.fqn import numbers_in, starred, with_numbers
from fxpar.ir.module_rules import SHARES, share_flag
from fxpar.ir.strategy import Strategy


@dataclass(frozen=True)
class ModuleRoles:
    """What `count` modules do: `roles` is, for each atom of the strategy, the axis that it is for (`tp+sp` where it
    cuts tokens between products, too), `zero` the ZeRO level, `saves` the flags of what is recomputed and of what
    waits on the host, "" for nothing.
    """

    modules: str  # `layers.{0-7}.attention`
    count: int
    roles: tuple[str, ...]
    zero: int
    saves: str


def module_roles(program: Program) -> tuple[ModuleRoles, ...]:
    """Of all modules with parameters, in the order of the model: the outermost ones in which all do the same, those of
    repeated layers together. "" is the whole model.
    """
    owners = list(dict.fromkeys(i.fqn.rpartition(".")[0] for i in program.inputs if i.kind == "param"))
    does = {owner: _does(program.strategy, owner) for owner in owners}
    within: dict[str, set[_Does]] = defaultdict(set)
    for owner in owners:
        for module in _around(owner):
            within[module].add(does[owner])
    found: dict[tuple[str, _Does], dict[str, None]] = {}
    for owner in owners:
        outermost = next(module for module in _around(owner) if module == owner or len(within[module]) == 1)
        found.setdefault((starred(outermost), does[owner]), {})[outermost] = None
    return tuple(ModuleRoles(_named(list(names)), len(names), *one) for (_, one), names in found.items())


_Does = tuple[tuple[str, ...], int, str]


def _does(strategy: Strategy, module: str) -> _Does:
    rule, remat = strategy.rule_of(module), strategy.remat_of(module)
    roles = tuple(_role(strategy, atom, rule) for atom in strategy.atoms)
    shares = {flag: strategy.share_of(flag, strategy.rule_of(module, flag)) for flag in SHARES}
    chunks = strategy.chunks_of(module, "ep_chunks")
    saves = [str(remat)] * (remat is not None) + [share_flag(flag, share) for flag, share in shares.items() if share]
    saves += [f"ep_chunks({chunks})"] * (chunks > 1)
    return roles, strategy.zero_of(f"{module}."), "+".join(saves)


def _role(strategy: Strategy, atom: str, rule: int | None) -> str:
    axis = strategy.axis_in(atom, rule)
    return f"{axis}+sp" if USES[axis] == "weights" and strategy.cuts_tokens_in(atom, rule) else axis


def _around(module: str) -> Iterable[str]:
    """The module and all that hold it, the root first."""
    parts = module.split(".")
    return (".".join(parts[:end]) for end in range(len(parts) + 1)) if module else ("",)


def _named(names: Sequence[str]) -> str:
    """`layers.{0-7,9}.ffn` for modules whose names differ in one number; else their pattern."""
    numbers = [numbers_in(name) for name in names]
    varying = [place for place, found in enumerate(zip(*numbers, strict=True)) if len(set(found)) > 1]
    if not varying:
        return names[0]
    if len(varying) > 1:
        return starred(names[0])
    runs: list[list[int]] = []
    for number in sorted(int(found[varying[0]]) for found in numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return with_numbers(names[0], [f"{{{text}}}" if i == varying[0] else one for i, one in enumerate(numbers[0])])


__all__ = ["ModuleRoles", "module_roles"]
