"""One call of an op with the flows of its operands: what a statement about an op is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import sympy
from torch import fx

from fxpar.flow.value import Flow
from fxpar.ir.graph import Size, TensorMeta
from fxpar.ir.node_meta import is_size, size_of, tensor_metas
from fxpar.rules.option import OpView

Question = Literal["documents", "padding"]
"""May several documents share a row; may a row be padded at its end?"""

Site = Literal["documents", "positions", "count", "softmax", "table"]
"""What a node becomes so that it stays within documents: an op told the documents; positions within them; a count
within them; a softmax over them; rows of a table by position.
"""


@dataclass(frozen=True)
class FlowCall:
    """`flows` are those of the tensor operands, `shapes` their sizes. `trained`: operand 0 depends on a
    parameter. `keys` are those of the batch.
    """

    node: fx.Node
    view: OpView
    flows: tuple[Flow, ...]
    shapes: tuple[tuple[Size, ...], ...]
    question: Question
    token: sympy.Symbol
    sites: dict[fx.Node, Site]
    trained: bool
    keys: Mapping[fx.Node, str]

    @property
    def packs(self) -> bool:
        """Whether the question is that of documents."""
        return self.question == "documents"

    @property
    def meta(self) -> TensorMeta:
        """Of the first result."""
        return tensor_metas(self.node)[0]  # type: ignore[return-value]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument as it stands in the graph, an integer node as its expression."""
        args = self.node.args
        value = args[position] if position < len(args) else self.node.kwargs.get(name, default)
        return size_of(value) if isinstance(value, fx.Node) and is_size(value) else value

    def at(self, site: Site) -> None:
        """Under the question of documents the node is rewritten, as its site says."""
        if self.packs:
            self.sites[self.node] = site

    def is_token(self, operand: int, dim: int) -> bool:
        """Whether a dim of an operand is as long as there are tokens."""
        return self.shapes[operand][dim] == self.token

    def depends(self, value: Any) -> bool:
        """Whether a size or an argument depends on the number of tokens."""
        return self.token in getattr(value, "free_symbols", ())
