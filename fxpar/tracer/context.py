"""What the parts of one running capture share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.errors import UnsupportedOpError
from fxpar.torch_api.symbolic import FakeWorld
from fxpar.torch_api.tracing import node_of
from fxpar.tracer.provenance import Provenance, user_line


@dataclass
class Mean:
    """A mean that the program took over everything, and the sum it could have taken instead.

    `node` is the mean as it was taken: the tensor may be written to since. `divisor` counts the numbers averaged, or
    says in words what else the mean divides by. `by_labels`: of those numbers, by the labels that are not -100.
    """

    node: fx.Node
    total: Tensor
    what: str
    divisor: Callable[[], int | torch.SymInt | str]
    line: str | None
    by_labels: bool


@dataclass(frozen=True)
class MaskRule:
    """What a dense attention mask means. Documents are [B or 1, S] ids; a chunk of tokens is like a document.

    `keys` [B or 1, S] says which tokens are seen at all. It is no document: tokens that nobody sees (padding) see the
    others, and a loss that counts them is the model's business.
    """

    causal: bool
    window: int = 0
    chunk: int = 0
    documents: Tensor | None = None
    positions: Tensor | None = None  # within the documents, [B or 1, S]
    keys: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """What the meaning is made of, as values of the program."""
        return [t for t in (self.documents, self.positions, self.keys) if t is not None]

    def hidden_keys(self) -> Tensor | None:
        """The bool mask [B or 1, 1, 1, S] of `keys`, which an attention is given beside the rule."""
        return None if self.keys is None else self.keys[:, None, None, :]


@dataclass
class CaptureContext:
    """State of one trace. `batch` holds the traced batch tensors, `seed` the graph's seed input, `token_numbers`
    [1, T] or [T] what dropout counts tokens by.
    """

    world: FakeWorld
    provenance: Provenance
    batch: Mapping[str, Tensor]
    seed: Tensor
    device: torch.device
    token_numbers: Tensor | None = None
    means: list[Mean] = field(default_factory=list)
    masks: list[tuple[Tensor, list[int], MaskRule]] = field(default_factory=list)  # with the versions of all tensors
    documents: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    restarting: set[str] = field(default_factory=set)  # keys of the batch whose zeros begin documents
    gradient_hooks: list[str] = field(default_factory=list)  # where the model puts them on activations

    def unsupported(self, what: str, instead: str) -> UnsupportedOpError:
        """The error for something that the running module does, with its FQN and line."""
        return UnsupportedOpError(what, instead, self.provenance.fqn, user_line())

    def add_mask(self, mask: Tensor, rule: MaskRule) -> None:
        """Remember what a mask means as it is now, and what it was made of."""
        self.masks.append((mask, _versions(mask, rule), rule))

    def mask_rule(self, mask: Tensor) -> MaskRule | None:
        """What a mask means, if it is one that was made by rule and neither it nor what the rule was made of has been
        written to since.
        """
        found = (rule for known, versions, rule in self.masks if known is mask and versions == _versions(mask, rule))
        return next(found, None)

    def add_mean(
        self,
        result: Tensor,
        total: Tensor,
        what: str,
        divisor: Callable[[], int | torch.SymInt | str],
        *,
        by_labels: bool = False,
    ) -> Tensor:
        """Remember that `result` is a mean whose sum is `total` (see `Mean`); returns `result`."""
        node = node_of(result)
        if node is not None:
            self.means.append(Mean(node, total, what, divisor, user_line(), by_labels))
        return result


def _versions(mask: Tensor, rule: MaskRule) -> list[int]:
    return [tensor._version for tensor in (mask, *rule.tensors())]


_CURRENT: ContextVar[CaptureContext | None] = ContextVar("fxpar_capture", default=None)


def current() -> CaptureContext | None:
    """The capture that is running; None outside of one."""
    return _CURRENT.get()


@contextmanager
def running(context: CaptureContext) -> Iterator[CaptureContext]:
    """Make `context` the current one."""
    token = _CURRENT.set(context)
    try:
        yield context
    finally:
        _CURRENT.reset(token)


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute inside the block and put the old one back after."""
    missing = object()
    old = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if old is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, old)
