"""What runs when, on paper: lanes that do one thing after the other, each as soon as what it needs is there."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from fxpar.errors import ScheduleDeadlockError

T = TypeVar("T", bound=Hashable)
Interval = tuple[float, float]  # start and end


def run_lanes(
    title: str,
    lanes: Mapping[str, Sequence[T]],
    took: Callable[[T], float],
    needs: Callable[[T], Iterable[tuple[T, float]]],
) -> dict[T, Interval]:
    """Start and end of everything in the `lanes`, by their names, all of which begin at 0.

    Of each (need, lag) of an action the need must have ended so long before the action begins; with a lag below zero
    it may begin that much before the need ends. All times are in the unit of `took`.

    Raises ScheduleDeadlockError, with the `title`, if lanes wait for each other.
    """
    spans: dict[T, Interval] = {}
    left = {name: deque(actions) for name, actions in lanes.items()}
    free = dict.fromkeys(lanes, 0.0)
    waiting: dict[T, list[str]] = defaultdict(list)  # for an action: lanes
    ready = deque(lanes)
    while ready:
        name = ready.popleft()
        mine = left[name]
        while mine:
            start = free[name]
            for need, lag in needs(mine[0]):
                if need not in spans:
                    waiting[need].append(name)
                    break
                start = max(start, spans[need][1] + lag)
            else:
                action = mine.popleft()
                spans[action] = start, start + took(action)
                free[name] = spans[action][1]
                ready.extend(waiting.pop(action, ()))
                continue
            break
    if any(left.values()):
        raise ScheduleDeadlockError(title, "deadlock: " + "; ".join(_stuck(left, needs, spans)))
    return spans


def _stuck(
    left: Mapping[str, deque[T]], needs: Callable[[T], Iterable[tuple[T, float]]], spans: Mapping[T, Interval]
) -> Iterable[str]:
    for name, mine in left.items():
        if mine:
            missing = next(need for need, _ in needs(mine[0]) if need not in spans)
            yield f"{name} waits at {mine[0]} for {missing}"


__all__ = ["Interval", "run_lanes"]
