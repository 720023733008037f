"""What the parts of one running capture share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

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
    says in words what else the mean divides by.
    """

    node: fx.Node
    total: Tensor
    what: str
    divisor: Callable[[], int | torch.SymInt | str]
    line: str | None


@dataclass(frozen=True)
class MaskRule:
    """What a dense attention mask means. Documents are [B or 1, S] ids; a chunk of tokens is like a document."""

    causal: bool
    window: int = 0
    chunk: int = 0
    documents: Tensor | None = None
    positions: Tensor | None = None  # within the documents, [B or 1, S]


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
    masks: list[tuple[Tensor, MaskRule]] = field(default_factory=list)
    documents: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def unsupported(self, what: str, instead: str) -> UnsupportedOpError:
        """The error for something that the running module does, with its FQN and line."""
        return UnsupportedOpError(what, instead, self.provenance.fqn, user_line())

    def mask_rule(self, mask: Tensor) -> MaskRule | None:
        """What a mask means, if it is one that was made by rule and has not been changed since."""
        return next((rule for known, rule in self.masks if known is mask), None)

    def add_mean(
        self, result: Tensor, total: Tensor, what: str, divisor: Callable[[], int | torch.SymInt | str]
    ) -> Tensor:
        """Remember that `result` is a mean whose sum is `total` (see `Mean`); returns `result`."""
        node = node_of(result)
        if node is not None:
            self.means.append(Mean(node, total, what, divisor, user_line()))
        return result


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
