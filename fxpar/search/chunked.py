"""In how many chunks a loss over the vocabulary should run, from what a rank holds over a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxpar.chunks import loss_span
from fxpar.ir.strategy import Strategy
from fxpar.ir.strategy_text import MOST_CHUNKS
from fxpar.memory import KINDS, Moment
from fxpar.search.known import KnownModel, Said
from fxpar.search.price import Candidate
from fxpar.search.pricing import SetPricer
from fxpar.search.space import without_stages

GAIN = 0.1  # of what a micro-batch takes: what twice as many chunks must save
_BACKWARD, _RESULT = KINDS.index("backward"), KINDS.index("result")


@dataclass
class ChunkSearch:
    """What `useful_chunks` says of strategies whose loss is whole, once for all that differ in stages alone: for as
    many tokens as there is memory for without stages, or one sequence of the `longest`.
    """

    known: KnownModel
    pricer: SetPricer
    longest: int
    said: Said
    _found: dict[Strategy, int] = field(default_factory=dict, init=False)

    def chunks(self, strategy: Strategy) -> int:
        flat = strategy if strategy.pipeline_size == 1 else without_stages(strategy)
        if flat not in self._found:
            one = self.known.candidate(flat, self.said)
            budget = None if one is None else self.pricer.budgets(one, [self.longest])[0]
            self._found[flat] = 1 if one is None else useful_chunks(one, budget or self.longest)
        return self._found[flat]


def useful_chunks(one: Candidate, tokens: int) -> int:
    """The largest power of two that saves GAIN beside half as many chunks, for micro-batches of so many tokens: with it
    the logits are no longer the peak, or hardly. `one` has no stages, and its loss is whole. Nothing is lowered.

    While there are logits, what is held is as large as a chunk of it, but for gradients of parameters, for what was
    there in front of the logits, and for the gradient of the hidden states that they leave.
    """
    program = one.programs[0]
    moments = [moment for moment in one.over_time(program, tokens)[0].series.moments if moment.node is not None]
    span = loss_span([moment.node for moment in moments if moment.node is not None], program.dims)
    if span is None:
        return 1
    first, last = span
    before, inside, behind = moments[:first], moments[first : last + 1], moments[last + 1 :]
    whole = sum(_values_bytes(moment) for moment in before[-1:]) + sum(moment.sums[_BACKWARD] for moment in behind[:1])
    elsewhere = max((moment.total_bytes for moment in (*before, *behind)), default=0)

    def peak(chunks: int) -> float:
        in_chunks = max(m.sums[_RESULT] + whole + max(_values_bytes(m) - whole, 0) / chunks for m in inside)
        return max(in_chunks, elsewhere)

    chunks, beside = 1, one.memory(tokens).step_bytes - peak(1)
    while chunks < MOST_CHUNKS and peak(chunks) - peak(2 * chunks) >= GAIN * (beside + peak(chunks)):
        chunks *= 2
    return chunks


def _values_bytes(moment: Moment) -> int:
    """Of all but gradients of parameters."""
    return moment.total_bytes - moment.sums[_RESULT]
