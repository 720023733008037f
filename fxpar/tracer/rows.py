"""Does a loss depend on how many rows the batch has? A step is captured of one row of tokens, where a mean over rows,
or a division by `labels.shape[0]`, is a number of Python that the graph does not show.

So where a factor of the loss is the number of rows, by chance or not, the loss is traced once more, forward only, on
one row more: what has become the new number of rows was no chance.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from fxpar.ir.graph import TOKEN_NUMBERS
from fxpar.ir.node_meta import source_of
from fxpar.losses import with_metrics
from fxpar.torch_api.symbolic import hint
from fxpar.torch_api.tracing import constants_of_trace, node_of
from fxpar.tracer.context import CaptureContext, Mean
from fxpar.tracer.counts import DIVISIONS, SCALINGS, is_whole, out_of_place
from fxpar.tracer.dynamic import DynamicDims
from fxpar.tracer.loss import counted_rows, warn_of_scale
from fxpar.tracer.means import Place, behind_loss
from fxpar.tracer.provenance import Provenance
from fxpar.tracer.signature import make_signature, make_world
from fxpar.tracer.step import TracedStep

aten = torch.ops.aten
_SAME = {aten.lift_fresh_copy.default, aten.scalar_tensor.default, aten._to_copy.default, aten.detach.default}


@dataclass(frozen=True)
class Factor:
    """A number of Python that the loss is divided by: by what ("a mean over rows"), and the user's line."""

    what: str
    line: str | None
    divisor: float
    full: bool = False  # a mean over everything, which is told of where it is undone unless that is one number

    def is_for(self, rows: int) -> bool:
        return math.isclose(self.divisor, rows, rel_tol=1e-12)


@dataclass(kw_only=True)
class StepOfRows(TracedStep):
    """A step that also says what its loss is divided by, and whether its rows are what counts."""

    factors: list[Factor] = field(default_factory=list)
    counts_rows: bool = False

    def call(self, context: CaptureContext) -> object:
        found = super().call(context)
        loss, _ = with_metrics(found)
        node = node_of(loss) if isinstance(loss, Tensor) else None
        self.factors = [] if node is None else _factors(node, context)
        self.counts_rows = counted_rows(context) is not None
        return found


class _OnlyCalled(StepOfRows):
    def results(self, context: CaptureContext, values: Sequence[Tensor]) -> list[Tensor]:
        self.call(context)
        return []


def tell_of_rows(step: StepOfRows, batch: Mapping[str, Tensor], dims: DynamicDims) -> None:
    """Warn if the loss of a captured step is divided by how many rows of tokens its batch had."""
    rows = _rows(batch, dims)
    of_labels = "labels" in batch and batch["labels"].numel() == rows  # then its valid tokens are its rows
    if rows is None or of_labels or step.counts_rows:
        return
    if not any(factor.is_for(rows) for factor in step.factors):
        return
    more = [found.is_for(rows + 1) for found in _on(rows, rows + 1, step, batch, dims)]
    if len(more) != len(step.factors):  # a loop over rows: another number of factors
        more = [any(more)] * len(step.factors)
    told = {
        f.line: f
        for f, also in zip(step.factors, more, strict=True)
        if also and f.is_for(rows) and not (f.full and rows > 1)
    }
    for factor in told.values():
        where = f" at {factor.line}" if factor.line else ""
        warn_of_scale(
            f"{'is' if factor.full else 'has'} {factor.what}{where}",
            f"the rows of the batch, of the example {rows}",
        )


def _rows(batch: Mapping[str, Tensor], dims: DynamicDims) -> int | None:
    """How many rows of tokens [B, T] there are, if that is a fixed number and T is not."""
    for key, value in batch.items():
        if value.dim() == 2 and is_whole(value) and value.dtype != torch.bool:
            return value.shape[0] if set(dims.names.get(key, ())) == {1} else None
    return None


def _on(rows: int, others: int, step: StepOfRows, batch: Mapping[str, Tensor], dims: DynamicDims) -> list[Factor]:
    """The factors of the loss for another number of rows; none if the model does not run on such a batch."""
    changed = {
        key: torch.empty((others, *value.shape[1:]), dtype=value.dtype, device="meta")
        if value.dim() and value.shape[0] == rows and 0 not in dims.names.get(key, ())
        else value
        for key, value in batch.items()
        if key != TOKEN_NUMBERS
    }
    world = make_world()
    again = _OnlyCalled(
        model=step.model,
        signature=make_signature(step.model, changed, world, dims),
        world=world,
        provenance=Provenance(step.model),
        device=step.device,
        loss_fn=step.loss_fn,
        batch=step.batch,
    )
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        again.trace()
        return again.factors
    return []


def _factors(loss: fx.Node, context: CaptureContext) -> list[Factor]:
    """In the order of the walk that looks for means."""
    means = {mean.node: mean for mean in context.means}
    return [f for place in behind_loss(loss) if (f := _factor(place, means.get(place.node))) is not None]


def _factor(place: Place, mean: Mean | None) -> Factor | None:
    node, op = place.node, out_of_place(place.node.target)
    if mean is not None:
        divisor = mean.divisor()
        total = node_of(mean.total)
        assert total is not None
        of_one = all(n.meta["val"].dim() == 0 for n in total.all_input_nodes if isinstance(n.meta["val"], Tensor))
        return None if isinstance(divisor, str) or of_one else Factor(mean.what, mean.line, hint(divisor), True)
    if op is aten.mean.dim:
        value: Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
        sizes = [hint(value.shape[d]) for d in node.args[1] or range(value.dim())]  # type: ignore[union-attr]
        return Factor("a mean", source_of(node), math.prod(sizes))
    if op not in SCALINGS:
        return None
    number = _number(node.args[1]) if len(node.args) > 1 else None
    if number is None:
        return None
    divides = (op in DIVISIONS) != place.divides
    number = number if divides else 1 / number if number else math.inf
    return Factor("a division" if op in DIVISIONS else "a factor", source_of(node), number)


def _number(operand: object) -> float | None:
    """A number of Python, also as a tensor of one element (`torch.tensor(rows)`)."""
    if isinstance(operand, (int, float)):
        return operand
    if not isinstance(operand, fx.Node):
        return None
    if operand.op == "get_attr":
        value = constants_of_trace().get(str(operand.target))
        return float(value) if value is not None and value.numel() == 1 and not value.is_meta else None
    if operand.target in _SAME and operand.args:
        return _number(operand.args[0])
    filled = operand.target is aten.full.default and not operand.args[0]
    return _number(operand.args[1]) if filled else None
