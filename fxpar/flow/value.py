"""What a value of a row of tokens has to do with the same value of each document alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import fx

from fxpar.ir.dist_config import Shard

Kind = Literal["same", "number", "sum", "row"]


@dataclass(frozen=True)
class Flow:
    """How a value of a row relates to the values of its documents, each run alone.

    A row is documents one behind the other; padding is a last document that nobody asks about. `kind` is one of

        same     the part that belongs to a document is what the document alone has
        number   like "same", but numbers that tell the documents of the row apart: only whether two are equal counts
        sum      the sum of what the documents alone have
        row      neither is known: some of it depends on what else is in the row

    and `dims` are the dims that walk the tokens: none (the value does not depend on the row), one (a value per token)
    or two (a value per pair of tokens; only pairs within a document count). `inside`: a pair of tokens of different
    documents has zero; `infinite`: it may have what zero times it is not zero, as the logarithm of zero. `everywhere`
    is the number that all elements are, `padded` the number of padded tokens (of a sum: what padding adds), None if it
    is not known. `origin` is the node that made a value of the row, `why` says what it does.
    """

    kind: Kind = "same"
    dims: tuple[Shard, ...] = ()
    inside: bool = False
    infinite: bool = False
    everywhere: float | None = None
    padded: float | None = None
    origin: fx.Node | None = None
    why: str = ""

    @property
    def constant(self) -> bool:
        """Whether it is the same in every row."""
        return self.kind == "same" and not self.dims

    def pairs(self, a: Shard, b: Shard) -> bool:
        """Whether these are the two token dims."""
        return len(self.dims) == 2 and set(self.dims) == {a, b}


CONSTANT = Flow()


def row(origin: fx.Node, why: str) -> Flow:
    """A value of the row, made by `origin`."""
    return Flow("row", origin=origin, why=why)
