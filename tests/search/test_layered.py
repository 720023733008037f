"""The search against all plans of small spaces, its bound, and what it says where nothing fits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.errors import NothingFitsError
from fxpar.search import layered
from fxpar.search.galvatron import GalvatronCost
from fxpar.search.layered import LayeredCost, LayeredPlan, Space, search
from tests.repeat import examples
from tests.search.profiles import made_up

MB = 2**20


class Spaces:
    """A cost model of spaces that are given, with Galvatron's pipeline."""

    def __init__(self, *spaces: Space) -> None:
        self.given = spaces

    def spaces(self, micro_batches: int | None) -> Sequence[Space]:
        return self.given

    def reserved_mb(self, memory_mb: int) -> int:
        return 0

    step_s = GalvatronCost.step_s
    floor_s = GalvatronCost.floor_s
    hidden_s = GalvatronCost.hidden_s


def staged(space: Space, chosen: Sequence[int]) -> list[Sequence[int]]:
    """The layers of each stage."""
    return [chosen[a:b] for a, b in itertools.pairwise([0, *itertools.accumulate(space.layers)])]


def every_plan(space: Space, usable_mb: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Per layer its strategy, and that of the ends: all that fit."""
    for chosen in itertools.product(range(len(space.strategies)), repeat=sum(space.layers)):
        used = [sum(space.layer_mb[i][one] for one in stage) for i, stage in enumerate(staged(space, chosen))]
        for end, beside in enumerate(space.ends_mb):
            if max(np.array(used) + beside) <= usable_mb:
                yield chosen, end


def seconds(space: Space, chosen: Sequence[int], end: int) -> float:
    """By the formula as it is written down: a sum and a maximum at a time."""
    c, count, stages = space.micro_batches, len(space.layers), staged(space, chosen)
    crossed = [
        sum(space.border_s[space.layouts[a], space.layouts[b]] for a, b in itertools.pairwise(s)) for s in stages
    ]
    plain = [sum(space.layer_s[one] for one in stage) + crossed[i] for i, stage in enumerate(stages)]
    synced = [plain[i] + sum(space.exposed_s[one] for one in stage) for i, stage in enumerate(stages)]
    whole = [plain[i] + space.ends_s[end][i] for i in range(count)]
    step = sum(whole) + (c - 1) * whole[-1]
    step = max(step, max(min(count - 1, c - 1) * whole[0], sum(whole[1:])) + whole[0] * max(0, c + 1 - count))
    return step + max(0.0, *(synced[i] - sum(whole[: i + 1]) for i in range(count)))


@st.composite
def small_spaces(draw: st.DrawFn, most_stages: int = 2) -> Space:
    """At most four layers, on at most `most_stages` stages."""
    stages = draw(st.sampled_from([one for one in (1, 2, 4) if one <= most_stages]))
    layers = tuple(draw(st.integers(1, 4 // stages)) for _ in range(stages))
    n, m = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    time = st.one_of(st.integers(0, 6).map(float), st.floats(0, 6, allow_subnormal=False))

    def times(*shape: int) -> np.ndarray:
        return np.array([draw(time) for _ in range(int(np.prod(shape)))]).reshape(shape)

    def mb(*shape: int) -> np.ndarray:
        return np.array([draw(st.integers(0, 12)) for _ in range(int(np.prod(shape)))]).reshape(shape)

    kinds = draw(st.integers(1, 2))
    border = times(kinds, kinds) * draw(st.sampled_from([0.0, 0.0, 0.3]))
    return Space(
        micro_batches=draw(st.sampled_from([one for one in (1, 2, 4, 8) if one >= stages])),
        layers=layers,
        strategies=tuple(f"layer{i}" for i in range(n)),
        layer_s=times(n) + 0.01,
        exposed_s=times(n),
        layer_mb=mb(stages, n),
        ends=tuple(f"end{i}" for i in range(m)),
        ends_s=times(m, stages),
        ends_mb=mb(m, stages),
        alike=tuple((i, i % m) for i in range(n)),
        layouts=np.array([draw(st.integers(0, kinds - 1)) for _ in range(n)]),
        border_s=border,
    )


def check_against_all(
    cost: LayeredCost, memory_mb: int, exact: bool = True, micro_batches: int | None = None
) -> LayeredPlan | None:
    """No plan is faster than what is found, or than the lower bound; and where none fits, none is found."""
    spaces = cost.spaces(micro_batches)
    best = min((seconds(space, *one) for space in spaces for one in every_plan(space, memory_mb)), default=None)
    if best is None:
        with pytest.raises(NothingFitsError):
            search(cost, memory_mb * MB, micro_batches=micro_batches)
        return None
    found = search(cost, memory_mb * MB, micro_batches=micro_batches)
    if exact:
        assert (found.predicted_s, found.lower_bound_s) == pytest.approx((best, best), rel=1e-9)
    assert found.lower_bound_s <= best * (1 + 1e-9)
    assert found.predicted_s >= best * (1 - 1e-9)
    assert max(found.memory_bytes) <= memory_mb * MB
    assert 0 <= found.pruned <= found.evaluated + sum(len(space.ends) for space in spaces)
    return found


@settings(max_examples=examples(25))
@given(space=small_spaces(), memory_mb=st.integers(4, 80))
def test_equals_brute_force(space, memory_mb):
    """And the plan takes the time and memory that it says, in its own order of layers."""
    found = check_against_all(Spaces(space), memory_mb)
    if found is not None:
        chosen, end = [space.strategies.index(one) for one in found.strategies], space.ends.index(found.ends)
        assert seconds(space, chosen, end) == pytest.approx(found.predicted_s, rel=1e-9)
        assert found.division == space.layers
        used = [sum(space.layer_mb[i][one] for one in stage) for i, stage in enumerate(staged(space, chosen))]
        assert [one // MB for one in found.memory_bytes] == list(np.array(used) + space.ends_mb[end])


@settings(max_examples=examples(15))
@given(space=small_spaces(most_stages=4), memory_mb=st.integers(4, 80))
def test_four_stages_are_bounded(space, memory_mb):
    """The formula may call a plan faster for a slower stage in the middle: then the lower bound is below it."""
    check_against_all(Spaces(space), memory_mb, exact=not space.exposed_s.any())


@settings(max_examples=examples(10))
@given(spaces=st.lists(small_spaces(), min_size=2, max_size=3), memory_mb=st.integers(4, 80))
def test_several_spaces(spaces, memory_mb):
    check_against_all(Spaces(*spaces), memory_mb)


@settings(max_examples=examples(10))
@given(space=small_spaces(), memory_mb=st.integers(4, 80))
def test_what_does_not_find_room_is_told(space, memory_mb):
    """Fronts that are cut off: the plan may not be the best, and the lower bound still holds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layered, "_MOST_POINTS", 1)
        check_against_all(Spaces(space), memory_mb, exact=False)


@settings(max_examples=examples(25))
@given(data=st.data())
def test_galvatrons_cost_equals_brute_force(data):
    """Random profiles, at most four layers and four devices. One strategy for all is never better."""
    devices, layers = data.draw(st.sampled_from([(1, 4), (2, 1), (2, 3), (2, 4), (4, 2), (4, 3)]))
    profiles = made_up(lambda low, high: data.draw(st.floats(low, high)))
    batch, c = data.draw(st.sampled_from([(4, 1), (4, 2), (4, 4), (8, 2), (4, None)]))
    most = 4 if devices == 2 else 2
    cost = GalvatronCost(profiles, devices, batch, 64, layers, 1024, most, borders=data.draw(st.booleans()))
    memory_mb = data.draw(st.integers(1050, 2200))
    found = check_against_all(cost, memory_mb, micro_batches=c)
    try:
        uniform = search(cost, memory_mb * MB, True, c)
    except NothingFitsError:
        return
    assert found is not None
    assert found.predicted_s <= uniform.predicted_s
    assert len(set(uniform.strategies)) == 1


# ------------------------------------------------------------------------------------------------------ single answers
def one_space(**changes: object) -> Space:
    """Two strategies: fast and large, slow and small."""
    return dataclasses.replace(
        Space(
            micro_batches=2,
            layers=(3,),
            strategies=("fast", "small"),
            layer_s=np.array([1.0, 2.0]),
            exposed_s=np.array([0.0, 0.0]),
            layer_mb=np.array([[10, 4]]),
            ends=("ends",),
            ends_s=np.array([[0.5]]),
            ends_mb=np.array([[2]]),
            alike=((0, 0), (1, 0)),
            layouts=np.array([0, 1]),
            border_s=np.zeros((2, 2)),
        ),
        **changes,
    )


def test_as_many_fast_layers_as_fit():
    found = search(Spaces(one_space()), 26 * MB)
    assert found.strategies == ("fast", "fast", "small")
    assert found.predicted_s == found.lower_bound_s == 2 * 4.5
    assert found.memory_bytes == (26 * MB,)
    assert (found.gap, found.division, found.micro_batches, found.ends) == (0.0, (3,), 2, "ends")


def test_one_strategy_for_all():
    found = search(Spaces(one_space()), 26 * MB, uniform=True)
    assert found.strategies == ("small",) * 3
    assert (found.predicted_s, found.lower_bound_s, found.evaluated, found.pruned) == (13.0, 13.0, 2, 1)


def test_a_border_that_costs_more_than_it_saves():
    """One border for two fast layers pays, and for one alone it does not."""
    space = one_space(border_s=np.array([[0.0, 1.5], [1.5, 0.0]]))
    assert search(Spaces(space), 26 * MB).predicted_s == 2 * 6.0
    assert set(search(Spaces(space), 20 * MB).strategies) == {"small"}


def test_layers_of_one_layout_stand_together():
    space = one_space(layers=(4,), border_s=np.array([[0.0, 0.25], [0.25, 0.0]]))
    found = search(Spaces(space), 30 * MB)
    assert found.strategies in {("fast", "fast", "small", "small"), ("small", "small", "fast", "fast")}
    assert found.predicted_s == 2 * 6.75


def test_the_order_of_layers_is_that_of_the_cheaper_border():
    """From small to fast it costs a quarter of a second, and two the other way."""
    space = one_space(border_s=np.array([[0.0, 2.0], [0.25, 0.0]]))
    found = search(Spaces(space), 26 * MB)
    assert (found.strategies, found.predicted_s) == (("small", "fast", "fast"), 2 * 4.75)


def test_what_fits_beside_some_of_the_ends_does_not_beside_all():
    """The fast layer is as large as all room beside the larger of them."""
    space = one_space(
        layers=(1,),
        layer_s=np.array([1.25, 3.25]),
        exposed_s=np.array([3.25, 3.0]),
        layer_mb=np.array([[11, 1]]),
        ends=("large", "slow"),
        ends_s=np.array([[0.0], [3.0]]),
        ends_mb=np.array([[8], [4]]),
        alike=((0, 0), (1, 1)),
        layouts=np.array([0, 0]),
    )
    assert search(Spaces(space), 19 * MB).strategies == ("fast",)
    found = search(Spaces(space), 18 * MB)
    assert (found.strategies, found.ends, found.predicted_s) == (("fast",), "slow", 8.75)


def test_a_front_that_is_cut_off_lowers_the_bound(monkeypatch):
    """With room for one point the fastest layers are kept, whose sync costs more than it saves: 26.75 s are missed."""
    space = one_space(
        layers=(2,),
        layer_s=np.array([4.25, 6.0]),
        exposed_s=np.array([4.0, 0.0]),
        layer_mb=np.array([[8, 2]]),
        ends_s=np.array([[2.25]]),
        layouts=np.array([0, 0]),
    )
    assert search(Spaces(space), 52 * MB).predicted_s == 26.75
    monkeypatch.setattr(layered, "_MOST_POINTS", 1)
    found = search(Spaces(space), 52 * MB)
    assert found.lower_bound_s < 26.75 < found.predicted_s
    assert found.gap > 0


def test_a_plan_that_is_called_faster_for_a_slower_stage_lowers_the_bound():
    """The slow strategy on the second of four stages would hide a second of the third's sync, and is not looked at."""
    only = np.full((4, 4), 99)  # of four strategies each stage has room for one, and the second for two
    only[0, 0] = only[1, 2] = only[1, 3] = only[2, 1] = only[3, 2] = 1
    space = one_space(
        micro_batches=4,
        layers=(1, 1, 1, 1),
        strategies=("first", "synced", "quick", "slow"),
        layer_s=np.array([5.0, 0.0, 0.0, 1.0]),
        exposed_s=np.array([0.0, 9.0, 0.0, 0.0]),
        layer_mb=only,
        ends_s=np.zeros((1, 4)),
        ends_mb=np.zeros((1, 4), np.int64),
        alike=(),
        layouts=np.zeros(4, np.int64),
    )
    found = search(Spaces(space), 10 * MB)
    assert found.strategies == ("first", "quick", "synced", "quick")
    assert found.predicted_s == 24 == seconds(space, [0, 2, 1, 2], 0)
    assert found.lower_bound_s == 20 < 23 == seconds(space, [0, 3, 1, 2], 0)


def test_nothing_fits():
    """The message says what would."""
    with pytest.raises(
        NothingFitsError, match=r"into 0\.01 GB .* The smallest is small in 2 micro-batches with 0\.01 GB"
    ):
        search(Spaces(one_space()), 13 * MB)
    assert search(Spaces(one_space()), 14 * MB).strategies == ("small",) * 3
