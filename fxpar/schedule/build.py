"""`schedule(kind, ...)`: the known schedules, each a function from counts to the actions of one rank.

| kind               | source                                                                          |
|--------------------|---------------------------------------------------------------------------------|
| gpipe              | Huang et al., GPipe, 2019: all forwards, then all backwards                     |
| 1f1b               | Narayanan et al., PipeDream, 2019 (flushing variant): one forward, one backward |
| interleaved_1f1b   | Narayanan et al., Megatron-LM, 2021, section 2.2.2: several stages per rank     |
| zb_h1              | Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.1: W fills gaps    |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fxpar.errors import MicroBatchCountError, ScheduleOptionError, nearest
from fxpar.schedule.actions import Action, Part, Schedule

# (rank, ranks, micro-batches, stages per rank) -> actions of that rank
Maker = Callable[[int, int, int, int], Iterator[Action]]


def schedule(
    kind: str, stages: int, micro_batches: int, *, virtual: int = 1, places: Sequence[tuple[int, ...]] = ()
) -> Schedule:
    """The schedule of this kind for `stages` pipeline ranks and `micro_batches` micro-batches.

    With `virtual` > 1, for interleaved_1f1b only, each rank runs that many stages: stage s is on rank s % stages, and
    the model is cut into stages * virtual. Where stages share ranks, `places` are the pipeline ranks of each: then a
    micro-batch goes through all stages and back before the next one does (1f1b and zb_h1 only).

    Raises ScheduleOptionError; MicroBatchCountError where the micro-batches are no multiple of the ranks and must be
    (interleaved_1f1b). All other kinds take any number of micro-batches from 1 on.
    """
    if kind not in KINDS:
        raise ScheduleOptionError(f"there is no kind {kind!r}", f"Known are {', '.join(KINDS)}{nearest(kind, KINDS)}")
    for name, count in (("stages", stages), ("micro_batches", micro_batches), ("virtual", virtual)):
        if count < 1:
            raise ScheduleOptionError(f"{name} is {count}", "It must be 1 or more")
    if virtual > 1 and kind != "interleaved_1f1b":
        raise ScheduleOptionError(f"{kind!r} runs one stage per rank, not {virtual}", "Use 'interleaved_1f1b'")
    if kind == "interleaved_1f1b" and micro_batches % stages:
        raise MicroBatchCountError(kind, micro_batches, stages)
    if places:
        return _in_turn(kind, places, micro_batches)
    actions = tuple(tuple(KINDS[kind](rank, stages, micro_batches, virtual)) for rank in range(stages))
    return Schedule(kind, stages, micro_batches, actions, virtual)


def _in_turn(kind: str, places: Sequence[tuple[int, ...]], micro_batches: int) -> Schedule:
    """One order of all actions, in which each comes behind what it needs: every rank runs its own in that order, so the
    first one that is not done can always run.
    """
    if kind not in ("1f1b", "zb_h1"):
        raise ScheduleOptionError(f"{kind!r} runs no stages that share ranks", "Use '1f1b' or 'zb_h1'")
    forth, back = range(len(places)), range(len(places) - 1, -1, -1)
    halves: tuple[Part, ...] = ("I", "W") if kind == "zb_h1" else ("B",)
    turns: list[tuple[Part, range]] = [("F", forth), *((half, back) for half in halves)]
    order = [
        Action(part, stage, number) for number in range(micro_batches) for part, stages in turns for stage in stages
    ]
    ranks = 1 + max(max(mine) for mine in places)
    actions = tuple(tuple(one for one in order if rank in places[one.stage]) for rank in range(ranks))
    return Schedule(kind, ranks, micro_batches, actions, places=tuple(places))


def _gpipe(rank: int, ranks: int, micro_batches: int, virtual: int) -> Iterator[Action]:
    yield from (Action("F", rank, m) for m in range(micro_batches))
    yield from (Action("B", rank, m) for m in range(micro_batches))


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int, virtual: int) -> Iterator[Action]:
    forwards = [Action("F", rank, m) for m in range(micro_batches)]
    backwards = [Action("B", rank, m) for m in range(micro_batches)]
    yield from _alternate(forwards, backwards, ranks - rank - 1)


def _interleaved(rank: int, ranks: int, micro_batches: int, virtual: int) -> Iterator[Action]:
    """Micro-batches go in rounds of `ranks`: one round through the first chunk of all ranks, then the second, ..."""
    if virtual == 1:
        yield from _one_forward_one_backward(rank, ranks, micro_batches, 1)
        return
    order = [
        (chunk, base + m) for base in range(0, micro_batches, ranks) for chunk in range(virtual) for m in range(ranks)
    ]
    forwards = [Action("F", chunk * ranks + rank, m) for chunk, m in order]
    backwards = [Action("B", (virtual - 1 - chunk) * ranks + rank, m) for chunk, m in order]
    # Twice the distance to the last rank, as a forward must come back from there; and all chunks but the last once.
    yield from _alternate(forwards, backwards, 2 * (ranks - rank - 1) + (virtual - 1) * ranks)


def _zero_bubble(rank: int, ranks: int, micro_batches: int, virtual: int) -> Iterator[Action]:
    """1F1B with I in place of B. W comes `rank` micro-batches later, so that every rank keeps at most as many as rank 0
    does under 1F1B, and the last W run while the gradient of the last micro-batch is still on its way to rank 0.
    """
    forwards = [Action("F", rank, m) for m in range(micro_batches)]
    inputs = [Action("I", rank, m) for m in range(micro_batches)]
    weights = iter([Action("W", rank, m) for m in range(micro_batches)])
    for action in _alternate(forwards, inputs, ranks - rank - 1):
        yield action
        if action.part == "I" and action.micro_batch >= rank:
            yield next(weights)
    yield from weights


def _alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> Iterator[Action]:
    """`ahead` forwards, then one forward and one backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead :]


KINDS: dict[str, Maker] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved_1f1b": _interleaved,
    "zb_h1": _zero_bubble,
}
