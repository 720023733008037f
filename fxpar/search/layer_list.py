"""The list of a model's layers, and their kinds: which modules of a layer the rules of a strategy match."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fxpar.ir.module_rules import ModuleRule

Kind = tuple[frozenset[str], ...]  # by rule: the modules in the layer ("" itself) that its glob matches


@dataclass(frozen=True)
class Layers:
    """The list of a model's layers (`model.layers`): how many it has, the modules in a layer ("" itself) and those
    outside of the list; of these, those that run `behind` the layers.
    """

    name: str
    count: int
    inside: tuple[str, ...]
    outside: tuple[str, ...]
    behind: frozenset[str] = frozenset()

    @classmethod
    def of(cls, name: str, count: int, modules: Sequence[str]) -> Layers:
        """From the modules of a model in the order in which they run."""
        first = f"{name}.0"
        inside = tuple(sorted(m[len(first) + 1 :] for m in modules if m == first or m.startswith(f"{first}.")))
        outside = [m for m in modules if not m.startswith(f"{name}.")]
        behind = frozenset(m for m in outside if first in modules and modules.index(m) > modules.index(first))
        return cls(name, count, inside, tuple(sorted(outside)), behind)

    def module(self, number: int | str, inside: str) -> str:
        return f"{self.name}.{number}.{inside}".rstrip(".")

    def kinds(self, rules: Sequence[ModuleRule], numbers: Iterable[int] | None = None) -> tuple[Kind, ...]:
        """Of each layer, or of those with these numbers."""
        return tuple(
            tuple(frozenset(m for m in self.inside if rule.matches(self.module(i, m))) for rule in rules)
            for i in (range(self.count) if numbers is None else numbers)
        )

    def ends(self, stage: int, stages: int) -> tuple[str, ...]:
        """The modules outside of the list that a stage has: the first those before the layers, the last the rest."""
        first, last = stage == 0, stage == stages - 1
        return tuple(m for m in self.outside if (last if m in self.behind else first))

    def sampled(
        self, rules: Sequence[ModuleRule], kinds: Sequence[Kind], first: int = 0, outside: Sequence[str] | None = None
    ) -> tuple[ModuleRule, ...]:
        """The rules for a model whose layers, from number `first` on, are of these kinds, with modules `outside`."""
        found: dict[ModuleRule, None] = {}
        for index, rule in enumerate(rules):
            names = [m for m in (self.outside if outside is None else outside) if rule.matches(m)]
            by_module: dict[str, list[int]] = {}
            for number, kind in enumerate(kinds, first):
                for module in kind[index]:
                    by_module.setdefault(module, []).append(number)
            names += [self.module(numbered(numbers), m) for m, numbers in sorted(by_module.items())]
            found |= dict.fromkeys(replace(rule, glob=name) for name in names)
        return tuple(found)


def numbered(numbers: Sequence[int]) -> str:
    """`7`, `{0-7}` or `{0-2,8-10}`: ascending numbers as a glob says them."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return words[0] if len(numbers) == 1 else f"{{{','.join(words)}}}"
