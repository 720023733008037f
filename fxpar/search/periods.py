"""Periods of layers by the names of their modules: `model.layers.4.mlp` is in the third period of two layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fxpar.ir.fqn import block_of

PERIODS = 3  # of a model that stands for deeper and shallower ones
FIRST, MIDDLE, LAST = range(PERIODS)


@dataclass(frozen=True)
class Periods:
    """Of the layers in list `layers` (`model.layers`), `period` of them each."""

    layers: str
    period: int

    @classmethod
    def of(cls, params: Iterable[str], period: int) -> Periods | None:
        """From the FQNs of all parameters; None where numbered modules are in several lists, or not in PERIODS."""
        blocks = {block_of(fqn) for fqn in params} - {""}
        lists = {block.rpartition(".")[0] for block in blocks}
        numbers = {int(block.rpartition(".")[2]) for block in blocks}
        if len(lists) != 1 or numbers != set(range(PERIODS * period)):
            return None
        return cls(lists.pop(), period)

    def place(self, fqn: str) -> int | None:
        """The number of the period; None outside of the layers."""
        name, _, number = block_of(fqn).rpartition(".")
        return int(number) // self.period if number and name == self.layers else None

    def moved(self, fqn: str, periods: int) -> str:
        """The name so many periods further on; outside of the layers as it is."""
        if self.place(fqn) is None:
            return fqn
        block = block_of(fqn)
        number = int(block.rpartition(".")[2]) + periods * self.period
        return f"{self.layers}.{number}{fqn.removeprefix(block)}"


__all__ = ["FIRST", "LAST", "MIDDLE", "PERIODS", "Periods"]
