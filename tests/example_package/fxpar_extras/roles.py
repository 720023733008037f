"""A role."""

from __future__ import annotations

from dataclasses import dataclass

from fxpar.annotate.policy import TensorAxis
from fxpar.annotate.problem import OpClass
from fxpar.ir.dist_config import R
from fxpar.rules.option import Option


@dataclass(frozen=True)
class SmallWhole(TensorAxis):
    """tp, but a weight of less than 3000 elements stays whole: cutting it saves less than a collective takes."""

    def sources(self, entry: OpClass) -> list[Option]:
        node = entry.nodes[0]
        small = node.meta["tensor"].numel({}) < 3000 if node.meta["kind"] == "param" else False
        return [Option((), (R,))] if small and node.name not in self.overrides else super().sources(entry)
