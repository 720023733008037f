"""The search for stages that differ, against every choice there is."""

from __future__ import annotations

import itertools
import random

import pytest

from fxpar.schedule import schedule
from fxpar.search.cutting import ChosenStage, StageOption, StagesProblem, best_stages, step_s
from tests.repeat import examples

SEEDS = 20, 500  # by day, and in the nightly run


def drawn(seed: int) -> StagesProblem:
    """Up to four layers on up to four ranks: options of all widths, with up to three kinds of layers and borders."""
    rng = random.Random(seed)
    stages = rng.randint(1, 4)
    ranks, layers = rng.randint(stages, 4), rng.randint(stages, 4)
    options = []
    for _ in range(rng.randint(1, 4)):
        kinds, width = rng.randint(1, 3), rng.randint(1, ranks - stages + 1)
        # Who recomputes takes longer and holds less; the first places hold more micro-batches.
        slower = [1.0, rng.uniform(1.0, 1.5), rng.uniform(1.0, 1.5)][:kinds]
        smaller = [1.0, rng.uniform(0.3, 1.0), rng.uniform(0.3, 1.0)][:kinds]
        each = rng.uniform(0.5, 1.5) / width
        held = rng.randint(10, 60)
        options.append(
            StageOption(
                ranks=width,
                ends_s=tuple(rng.uniform(0.0, 0.5) for _ in range(stages)),
                layer_s=tuple(tuple(each * one for one in slower) for _ in range(stages)),
                ends_bytes=tuple(rng.randint(0, 30) for _ in range(stages)),
                layer_bytes=tuple(tuple(int(held * one * (stages - p)) for one in smaller) for p in range(stages)),
                sync_s=tuple(rng.uniform(0.0, 0.5) for _ in range(stages)),
                layer_sync_s=tuple(rng.uniform(0.0, 0.5) for _ in range(kinds)),
                border_s=tuple(tuple(rng.choice((0.0, 0.3, 1.5)) for _ in range(kinds)) for _ in range(kinds)),
            )
        )
    return StagesProblem(stages, layers, ranks, rng.randint(1, 6), rng.randint(50, 400), tuple(options))


def nbytes(option: StageOption, place: int, counts: tuple[int, ...]) -> int:
    """What the ends and the layers of each kind take on a stage."""
    return option.ends_bytes[place] + sum(n * one for n, one in zip(counts, option.layer_bytes[place], strict=True))


def every_pipeline(problem: StagesProblem):
    """Each with its seconds: every layer's kind, every option, every cut. Layers of a kind follow each other, and a
    border is added wherever two differ.
    """
    plan = schedule("1f1b", problem.stages, problem.micro_batches)
    for cuts in itertools.combinations(range(1, problem.layers), problem.stages - 1):
        sizes = [b - a for a, b in itertools.pairwise((0, *cuts, problem.layers))]
        for chosen in itertools.product(range(len(problem.options)), repeat=problem.stages):
            options = [problem.options[one] for one in chosen]
            if sum(one.ranks for one in options) != problem.ranks:
                continue
            layers = [
                itertools.combinations_with_replacement(range(o.kinds), n) for o, n in zip(options, sizes, strict=True)
            ]
            for kinds in itertools.product(*layers):
                counts = [tuple(k.count(i) for i in range(o.kinds)) for o, k in zip(options, kinds, strict=True)]
                mine = list(enumerate(zip(options, counts, strict=True)))
                if all(nbytes(one, place, n) <= problem.room_bytes for place, (one, n) in mine):
                    seconds = [
                        one.ends_s[place]
                        + sum(one.layer_s[place][kind] for kind in run)
                        + sum(one.border_s[a][b] for a, b in itertools.pairwise(run) if a != b)
                        for place, (one, run) in enumerate(zip(options, kinds, strict=True))
                    ]
                    sync = [one.sync(place, n) for place, (one, n) in mine]
                    yield step_s(plan, seconds, sync)


def check(seed: int) -> bool:
    """Whether there is a pipeline at all."""
    problem = drawn(seed)
    found, best = best_stages(problem), min(every_pipeline(problem), default=None)
    if best is None:
        assert not found.best
        return False
    assert found.best[0].seconds == pytest.approx(best, rel=1e-12)
    assert found.lower_bound_s == pytest.approx(best, rel=1e-9)  # nothing was dropped
    return True


def test_as_fast_as_the_best_of_all():
    count = examples(SEEDS[0])
    assert sum(map(check, range(count))) > count / 4


@pytest.mark.nightly
def test_as_fast_as_the_best_of_all_often():
    assert sum(map(check, range(SEEDS[1]))) > SEEDS[1] / 4


def uniform(stages: int, bytes_of_layer: tuple[int, ...]) -> StageOption:
    """Recomputing takes a third more."""
    seconds = (1.0, 4 / 3)[: len(bytes_of_layer)]
    held = tuple(tuple(one * (stages - place) for one in bytes_of_layer) for place in range(stages))
    return StageOption(1, (0.0,) * stages, (seconds,) * stages, (0,) * stages, held)


def test_where_memory_is_short_the_first_stages_recompute_more():
    """They hold more micro-batches; a layer is cut off before all of them recompute."""
    problem = StagesProblem(2, 8, 2, 8, 60, (uniform(2, (10, 4)),))
    (best,) = best_stages(problem).best
    first, second = best.stages
    assert first.counts[1] > 0
    assert second.counts[1] == 0
    assert sum(first.counts) <= sum(second.counts)


def test_a_stage_that_has_more_to_do_gets_more_ranks():
    """The head takes as long as six layers."""
    narrow = StageOption(1, (0.0, 6.0), ((1.0,), (1.0,)), (0, 0), ((0,), (0,)))
    wide = StageOption(3, (0.0, 2.0), ((1 / 3,), (1 / 3,)), (0, 0), ((0,), (0,)))
    middle = StageOption(2, (0.0, 3.0), ((1 / 2,), (1 / 2,)), (0, 0), ((0,), (0,)))
    problem = StagesProblem(2, 4, 4, 4, 0, (narrow, middle, wide))
    (best,) = best_stages(problem).best
    assert [one.option for one in best.stages] == [0, 2]


def test_only_what_undercuts_is_found_and_the_bound_says_so():
    problem = StagesProblem(2, 8, 2, 8, 1000, (uniform(2, (10,)),))
    (best,) = best_stages(problem).best
    assert best.stages == (ChosenStage(0, (4,)), ChosenStage(0, (4,)))
    none = best_stages(problem, below_s=best.seconds)
    assert none.best == ()
    assert none.lower_bound_s == best.seconds


def test_deep_models_take_milliseconds():
    """60 layers in four stages; what was dropped is told by the bound."""
    problem = StagesProblem(4, 60, 4, 8, 1200, (uniform(4, (10, 4)),))
    found = best_stages(problem, keep=3)
    assert len(found.best) == 3
    assert found.lower_bound_s <= found.best[0].seconds
    assert 1 - found.lower_bound_s / found.best[0].seconds < 0.05


def test_a_slower_layer_is_kept_where_its_border_is_cheap():
    """Room for one layer that does not recompute: from the faster kind of these there is a dear border."""
    borders = ((0.0, 0.0, 10.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    option = StageOption(1, (0.0,), ((1.0, 1.1, 5.0),), (0,), ((10, 10, 0),), border_s=borders)
    (best,) = best_stages(StagesProblem(1, 2, 1, 1, 10, (option,))).best
    assert best.stages == (ChosenStage(0, (0, 1, 1)),)
    assert best.seconds == pytest.approx(6.1)
