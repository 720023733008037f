"""Layers that rules tell apart: priced from one layer of each kind, against the model lowered whole."""

from __future__ import annotations

import pytest

from fxpar.cost.cluster import usual_cluster
from fxpar.ir.module_rules import ModuleRule
from fxpar.ir.strategy import Strategy
from fxpar.search.kinds import MixedCandidate
from fxpar.search.known import KnownModel
from fxpar.search.layer_list import Layers, numbered
from fxpar.search.price import Candidate, Depth
from tests.repeat import thinned
from tests.search.shallow import shallow

LAYERS, STAGED = 4, 8
CLUSTER = usual_cluster(8)
LIST = Layers("layers", 6, ("", "attention", "attention.q_proj", "ffn"), ("embedding", "head", "norm"))


def priced(text: str, layers: int, whole: bool) -> Candidate:
    model = shallow("stack", layers)
    known = KnownModel(model.lower, model.outlines, CLUSTER, Depth(layers, whole=whole), (64, 512))
    found = known.candidate(Strategy.parse(text), lambda _: None)
    assert found is not None, known.refused
    return found


CASES = [
    # What the first layer computes again is more than what the others have saved, in the smallest model.
    ("dp2.tp4+sp+remat(selective|redo_comm)[layers.0: +remat]", LAYERS),
    ("dp8[layers.{0-1}: +remat]", LAYERS),
    ("dp2.tp4+sp+remat(selective|redo_comm)[layers.3: +remat(none)]", LAYERS),
    ("dp8[layers.{0-1}: +remat; layers.2: +remat(selective)]", LAYERS),
    ("dp2.tp4+sp[*.attention: cp2.tp2+sp; layers.{0-2}: +remat]", LAYERS),
    ("dp2.pp2.tp2+sp[layers.{0-2,4-6}: +remat]", STAGED),
    ("dp8[layers.{0-2}: +zero3]", LAYERS),
    ("dp4.tp2+sp[layers.{0-2}: cp2]", LAYERS),
    ("dp2.pp2.tp2+sp+cut(layers.5)", STAGED),
    ("dp2.pp2.tp2+sp+cut(layers.5)[layers.{0-3}: +remat]", STAGED),
    ("dp2.tp2+sp+cut(layers.5)[layers.{0-3}: +remat; *.ffn: cp2] > dp2.cp2+zero3", STAGED),
    ("cp3+cut(layers.5)+zero3 > dp1[layers.{6-7}: +remat]", STAGED),
]


@pytest.mark.parametrize(("text", "layers"), thinned(CASES, [CASES[0], CASES[-2]]))
def test_as_the_whole_model(text, layers):
    """Time, memory, and the way home of gradients."""
    few, whole = priced(text, layers, False), priced(text, layers, True)
    assert isinstance(few, MixedCandidate)
    assert not isinstance(whole, MixedCandidate)
    for name in ("per_token_s", "per_square_s"):
        assert getattr(few.cost, name) == pytest.approx(getattr(whole.cost, name), rel=1e-9)
    assert few.cost.fixed_s == pytest.approx(whole.cost.fixed_s, rel=0.02)  # buckets of collectives
    ours, theirs = few.memory(512), whole.memory(512)
    assert ours.step_bytes == pytest.approx(theirs.step_bytes, rel=1e-3)
    assert ours.weight_bytes == pytest.approx(theirs.weight_bytes, rel=1e-3)
    assert ours.peak_bytes == pytest.approx(theirs.peak_bytes, rel=0.02)
    assert few.reduce_s == pytest.approx(whole.reduce_s, rel=0.05)
    assert few.reduced.intra_node == pytest.approx(whole.reduced.intra_node, rel=0.02)
    assert [few.sent[0].inside.c0, few.sent[0].inside.c1] == pytest.approx(
        [whole.sent[0].inside.c0, whole.sent[0].inside.c1], rel=0.02
    )


def test_messages_of_a_deep_model_are_capped():
    found = priced(CASES[1][0], 2000, False).at(512)
    assert found.weight_bytes > 2000 * (128 << 10)
    assert found.staging_bytes == 64 << 20


def test_small_models_are_lowered_once_for_all_numbers_of_layers():
    model = shallow("stack", LAYERS)
    asked: list[tuple[str, int]] = []

    def lower(strategy: Strategy, layers: int):
        asked.append((str(strategy), layers))
        return model.lower(strategy, layers)

    known = KnownModel(lower, model.outlines, CLUSTER, Depth(LAYERS), (64, 512))
    found = [known.candidate(Strategy.parse(f"dp8[layers.{{0-{n}}}: +remat]"), lambda _: None) for n in (0, 1)]
    mixed = [one for one in asked if "[" in one[0]]
    assert mixed == [
        ("dp8[layers.0: +remat]", 2),
        ("dp8[layers.{0-1}: +remat]", 3),
        ("dp8[layers.0: +remat]", 3),
    ]
    few, more = (one.at(512).step_bytes for one in found if one is not None)
    assert more < few


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("dp8[layers.{0,2}: +zero3]", LAYERS),
        ("dp4.tp2+sp[layers.{0,2}: cp2]", LAYERS),
        ("dp4.pp2+cut(norm)[layers.{0-3}: +remat]", STAGED),
        ("dp4+cut(layers.4.ffn) > dp4", STAGED),
    ],
)
def test_what_small_models_cannot_stand_for_is_refused(text, layers):
    model = shallow("stack", layers)
    known = KnownModel(model.lower, model.outlines, CLUSTER, Depth(layers), (64, 512))
    assert known.candidate(Strategy.parse(text), lambda _: None) is None
    assert "is not supported yet" in known.refused[text]


def test_rules_for_all_layers_make_one_kind():
    rules = (ModuleRule("*.attention", (("cp", 2),)), ModuleRule("layers.{0-5}", zero=3), ModuleRule("head", zero=1))
    assert len(set(LIST.kinds(rules))) == 1


def test_rules_of_a_small_model():
    """What named some of the layers names those of the small model; the rest is as it was, module by module."""
    rules = (
        ModuleRule("layers.{0-1}.attention", (("cp", 2),)),
        ModuleRule("{layers.5,head}", zero=3),
        ModuleRule("*.ffn", (("tp", 2),)),
    )
    kinds = LIST.kinds(rules)
    assert [len({*kinds[:n]}) for n in (1, 2, 3, 6)] == [1, 1, 2, 3]
    small = LIST.sampled(rules, [kinds[0], kinds[2], kinds[2], kinds[5]])
    assert [str(rule) for rule in small] == [
        "layers.0.attention: cp2",
        "head: +zero3",
        "layers.3: +zero3",
        "layers.{0-3}.ffn: tp2",
    ]


@pytest.mark.parametrize(
    ("numbers", "text"), [([7], "7"), (range(8), "{0-7}"), ([0, 1, 2, 8, 9, 11], "{0-2,8-9,11}"), ([3, 5], "{3,5}")]
)
def test_numbers_as_a_glob_says_them(numbers, text):
    assert numbered(list(numbers)) == text
    found = [n for n in range(20) if ModuleRule(f"layers.{text}").matches(f"layers.{n}")]
    assert found == list(numbers)
