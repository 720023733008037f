"""In how many chunks a loss over the vocabulary should run, from what a rank holds over a micro-batch."""

from __future__ import annotations

from fxpar.chunks import loss_span
from fxpar.ir.strategy_text import MOST_CHUNKS
from fxpar.memory import KINDS, Moment
from fxpar.search.price import Candidate

GAIN = 0.05  # of what a micro-batch takes: what twice as many chunks must save
_RESULT = KINDS.index("result")


def useful_chunks(one: Candidate, tokens: int) -> int:
    """The largest power of two that saves GAIN beside half as many chunks, for micro-batches of so many tokens: with it
    the logits are no longer the peak, or hardly. `one` has no stages, and its loss is whole. Nothing is lowered.

    While there are logits, all that is held beyond what was there in front of them is as large as its chunk of tokens,
    but gradients.
    """
    program = one.programs[0]
    moments = [moment for moment in one.over_time(program, tokens)[0].series.moments if moment.node is not None]
    span = loss_span([moment.node for moment in moments if moment.node is not None], program.dims)
    if span is None:
        return 1
    first, last = span
    base = _values_bytes(moments[first - 1]) if first else 0
    inside = moments[first : last + 1]
    elsewhere = max((moment.total_bytes for moment in (*moments[:first], *moments[last + 1 :])), default=0)

    def peak(chunks: int) -> float:
        in_chunks = max(m.sums[_RESULT] + base + max(_values_bytes(m) - base, 0) / chunks for m in inside)
        return max(in_chunks, elsewhere)

    chunks, beside = 1, one.memory(tokens).step_bytes - peak(1)
    while chunks < MOST_CHUNKS and peak(chunks) - peak(2 * chunks) >= GAIN * (beside + peak(chunks)):
        chunks *= 2
    return chunks


def _values_bytes(moment: Moment) -> int:
    """Of all but gradients of parameters."""
    return moment.total_bytes - moment.sums[_RESULT]
