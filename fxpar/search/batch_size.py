"""How many tokens a mini-batch should have: the fewest with which tokens per second are near the best.

Switches, reductions and the optimizer take as long for few tokens as for many, so a larger mini-batch never trains
fewer tokens per second, if sequences can be shared out: there is no best size, but one from which on little is gained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fxpar.errors import PlanOptionError
from fxpar.search.driver import find_plan_of
from fxpar.search.known import Said
from fxpar.search.price import Lower
from fxpar.search.problem import Found, Problem
from fxpar.search.switching import Outlines

WITHIN = 0.02  # of the best rate: what a smaller mini-batch may lose
SIZES = 6  # at most: each is half as large as the one before
MOST_PER_DEVICE = 1 << 14  # tokens of the largest mini-batch, unless it is said


@dataclass(frozen=True)
class RatedSize:
    """Mini-batches of `tokens_per_step` tokens and what was found for them. Sequences are whole, so that a mean
    mini-batch has some tokens less; the rate counts those.
    """

    tokens_per_step: int
    problem: Problem
    found: Found

    @property
    def tokens_per_s(self) -> float:
        """Of the best plan."""
        return self.problem.mean_tokens / self.found.best.predicted_s


def sizes(longest: int, most: int) -> tuple[int, ...]:
    """Sizes to try, the largest first: `most`, and half as many again and again, each with room for the longest
    sequence. Raises PlanOptionError if `most` has none.
    """
    if most < longest:
        why = f"the longest sequence has {longest} tokens; a mini-batch holds at least one of it"
        raise PlanOptionError("--max-tokens-per-step", most, why)
    halved = (most >> number for number in range(SIZES))
    return tuple(size for size in halved if size >= longest)


def rated_sizes(
    tried: Sequence[int],
    problem_of: Callable[[int], Problem],
    lower: Lower,
    outlines: Outlines,
    said: Said = lambda _: None,
) -> list[RatedSize]:
    """The best plans for mini-batches of these sizes, the largest first: strategies are lowered once, for all of them.
    It stops behind the first size that is not within WITHIN of the best rate: smaller ones lose more.

    Raises as `find_plan` does.
    """
    known, found = None, list[RatedSize]()
    for size in tried:
        problem = problem_of(size)
        known = known or problem.known(lower, outlines)
        said(f"mini-batches of {size:,} tokens")
        found.append(RatedSize(size, problem, find_plan_of(problem, known, said)))
        if not near(found[-1], found):
            break
    return found


def near(one: RatedSize, all_: Sequence[RatedSize]) -> bool:
    """Whether its rate is within WITHIN of the best."""
    return one.tokens_per_s >= (1 - WITHIN) * max(other.tokens_per_s for other in all_)


def smallest_near(found: Sequence[RatedSize]) -> RatedSize:
    """The one to take."""
    return min((one for one in found if near(one, found)), key=lambda one: one.tokens_per_step)
