"""Rules of a strategy: text and value say the same, globs mean what they say, degrees are split as far as needed."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.errors import RuleConflictError, StrategySyntaxError
from fxpar.ir.module_rules import ModuleRule, governing, split_outside
from fxpar.ir.remat import Remat
from fxpar.ir.strategy import Strategy

GLOBS = ["*.mlp", "layers.{0-7}", "{embed,head}", "layers.1?.attn", "*"]


def factored(draw, world: int) -> tuple[tuple[str, int], ...]:
    """Axes of a rule with this product; one of degree 1 may be among them."""
    first = draw(st.sampled_from([d for d in range(1, world + 1) if world % d == 0]))
    names = draw(st.permutations(["tp", "cp"]))
    return ((names[0], first), (names[1], world // first))


@st.composite
def ruled(draw) -> Strategy:
    """Powers of two, so that degrees always factor."""
    world = 2 ** draw(st.integers(0, 4))
    rules = []
    for glob in draw(st.lists(st.sampled_from(GLOBS), unique=True, min_size=1)):
        axes = factored(draw, world) if draw(st.booleans()) else ()
        zero = draw(st.sampled_from([None, 0, 3])) if axes else draw(st.integers(0, 3))
        remat = draw(st.sampled_from([None, Remat("none"), Remat("full"), Remat("selective", collectives="keep")]))
        chunks = draw(st.sampled_from([None, 1, 16]))
        shares = (draw(st.sampled_from([None, 0.0, 0.25, 1.0])) for _ in ("offload", "lsh"))
        capacity = draw(st.sampled_from([None, 0.0, 1.0, 1.25]))
        more = draw(st.sampled_from([None, 1, 2]))
        sp = draw(st.booleans()) and bool(axes)
        rules.append(ModuleRule(glob, axes, sp, zero, remat, chunks, *shares, capacity, more))
    return Strategy((("dp", 2), *factored(draw, world)), draw(st.booleans()), rules=tuple(rules))


@given(ruled())
def test_text_and_value_say_the_same(strategy):
    assert Strategy.parse(str(strategy)) == strategy
    assert Strategy.from_json(strategy.to_json()) == strategy


@given(ruled())
def test_every_axis_is_made_of_atoms(strategy):
    """In the strategy and in each rule: the degrees of an axis' atoms multiply to its own, in order of the ranks."""
    assert math.prod(map(strategy.degree, strategy.atoms)) == strategy.world // 2
    layouts = [strategy.axes[1:], *(rule.axes or strategy.axes[1:] for rule in strategy.rules)]
    for index, axes in enumerate(layouts):
        owners = [(owners[index], strategy.degree(atom)) for atom, owners in strategy.atoms.items()]
        assert list(dict.fromkeys(name for name, _ in owners)) == [name for name, degree in axes if degree > 1]
        for name, degree in axes:
            assert math.prod(d for owner, d in owners if owner == name) == degree


@given(ruled())
def test_atoms_are_split_no_further_than_needed(strategy):
    """Two neighbours lie on one axis in every layout only if that axis is two in the strategy itself."""
    atoms = list(strategy.atoms.items())
    for (outer, owners), (inner, others) in itertools.pairwise(atoms):
        assert owners != others, (outer, inner)


def test_roles_of_parts():
    strategy = Strategy.parse("dp2.tp4+sp[*.attn: cp2.tp2+zero3; *.mlp: +zero1]")
    assert strategy.atoms == {"tp:(1)2": ("tp", "cp", "tp"), "tp:(2)2": ("tp", "tp", "tp")}
    assert strategy.data_axes_of("layers.0.attn.q.weight") == "dp.tp:(1)2"
    assert strategy.data_axes_of("layers.0.mlp.up.weight") == "dp"
    assert [strategy.zero_of(f"layers.0.{name}.weight") for name in ("attn.q", "mlp.up", "norm")] == [3, 1, 0]
    assert (strategy.most_zero, strategy.token_parts) == (3, 4)
    assert Strategy.parse("cp4+zero3[*.attn: cp2.tp2]").data_axes_of("layers.0.mlp.up") == "cp"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("tp4[*.attn: cp2.tp2]", 2),  # the strategy itself cuts no tokens
        ("tp4[*.attn: cp2.tp2; *.mlp: tp2.cp2]", 4),  # each rule cuts another part
        ("cp2.tp2[*.attn: tp4; *.mlp: +zero3]", 2),
        ("tp4[*.mlp: tp4+sp]", 4),  # sp is of the rule
        ("tp2 > tp2[*.attn: cp2] > rows3", 6),
    ],
)
def test_tokens_are_cut_as_the_rules_say(text, parts):
    assert Strategy.parse(text).token_parts == parts


def test_the_innermost_module_decides():
    """Property by property: the rule of the block says what is recomputed, that of the module inside the axes."""
    rules = Strategy.parse("tp2[layers.{0-1}: cp2+remat; *.attn: tp2; layers.0: +zero3]").rules
    assert governing(rules, "layers.1.attn.q.weight", "roles") == 1
    assert governing(rules, "layers.1.attn.q.weight", "remat") == 0
    assert governing(rules, "layers.1.mlp", "roles") == 0
    assert governing(rules, "layers.0.mlp", "zero") == 2
    assert governing(rules, "layers.2.mlp", "roles") is None
    assert governing(rules, "", "roles") is None


def test_globs_are_over_modules():
    """Not over parameters, whose last name is none of a module; `*` is the root too."""
    strategy = Strategy.parse("tp2[*.w*: cp2+zero3]")
    assert [strategy.zero_of(fqn) for fqn in ("a.weight", "a.wide.weight", "weight")] == [0, 3, 0]
    assert Strategy.parse("tp2[*: +zero1]").zero_of("weight") == 1


@pytest.mark.parametrize(
    ("glob", "yes", "no"),
    [
        ("layers.{0-11}", "layers.11", "layers.12"),
        ("layers.{0-11}", "layers.0", "layers.0.mlp"),
        ("{embed,lm_*}", "lm_head", "head"),
        ("*.mlp", "model.layers.3.mlp", "mlp"),
        ("layers.{1,4-5}.attn", "layers.4.attn", "layers.3.attn"),
        ("a.b", "a.b", "aXb"),
        ("layers.?", "layers.7", "layers.17"),
    ],
)
def test_globs(glob, yes, no):
    rule = ModuleRule(glob, zero=3)
    assert rule.matches(yes)
    assert not rule.matches(no)


def test_two_rules_for_one_module():
    rules = Strategy.parse("tp2[*.attn: cp2; layers.0.*: tp2+sp]").rules
    with pytest.raises(RuleConflictError, match=r"two rules say the roles of module 'layers\.0\.attn'"):
        governing(rules, "layers.0.attn", "roles")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tp4[*.mlp: cp3]", "of 3 ranks, a replica has 4; give axes with the product 4"),
        ("dp4[*.mlp: cp2]", "of 2 ranks, a replica has 1; in front of the brackets stands what all other modules do"),
        ("[*.mlp: tp4]", "what all other modules do, such as cp4[*.mlp: tp4] (at '[*.mlp: tp4]')"),
        ("tp6[*.a: cp2.tp3; *.b: cp3.tp2]", "degrees do not factor: ranks in runs of 2 do not fit in runs of 3"),
        ("tp2[*.mlp dp2]", "a rule is a glob of modules, ':' and roles"),
        ("tp2[*.mlp:]", "a rule is a glob of modules, ':' and roles"),
        (
            "tp2[*.mlp: dp2]",
            "those inside of a replica, tp, cp, ring, rows, ep; dp is of all modules",
        ),
        ("tp2[*.mlp: +sp]", "sp goes with axes"),
        ("tp2[*.mlp: +zeor3]", " sp, zero0, zero1, zero2, zero3, remat, offload, lsh, capacity, chunks, ep_chunks (at"),
        ("tp2[]", "there are no rules in the brackets"),
        ("tp2[*.mlp: +1f1b]", "a schedule, cuts, tokens(...) and role"),
        ("tp2[*.mlp: +cut(a)]", "a schedule, cuts, tokens(...) and role"),
        ("tp2[*.mlp: +remat(20MB)]", "a rule recomputes all of its modules"),
        ("tp2[*.mlp: +lsh(2)]", "'2' is not a share of what experts are given"),
        ("tp2[*.mlp: +offload(2)]", "'2' is not a share of what is saved"),
        ("tp2[*.mlp: +zero1+zero3]", "one ZeRO level at a time"),
        ("tp2[*.mlp: tp2; *.mlp: cp2]", "there are two rules for '*.mlp'"),
        ("tp2[*.mlp: cp2", "']' is missing at its end"),
        ("tp2[*.mlp: cp2]+sp", "flags of the strategy stand in front of the rules"),
        ("tp2[*.mlp: cp2, *.attn: tp2]", "rules are separated by ';'"),
        ("tp2[{a: cp2]", "a rule begins with a glob of modules"),
        ("tp2[*.m lp: cp2]", "a rule begins with a glob of modules"),
        ("tp2[*.mlp: tq2]", "unknown axis 'tq'"),
        ("tp2[layers.{0-999999999}: cp2]", "a range is from a smaller number to a larger one, 10,000 at most"),
        ("tp2[layers.{0-" + "9" * 5000 + "}: cp2]", "a range is from a smaller number to a larger one"),
        ("tp2[layers.{5-2}: cp2]", "a range is from a smaller number to a larger one"),
        ("tp2[{a,}: cp2]", "write what may stand there"),
        ("tp2[{}: cp2]", "write what may stand there"),
        ("tp2[" + "*" * 31 + "x: cp2]", "a glob has at most 6 stars"),
    ],
)
def test_bad_rules(text, why):
    with pytest.raises(StrategySyntaxError) as error:
        Strategy.parse(text)
    assert why in str(error.value)


def test_lists_are_split_outside_of_brackets():
    assert split_outside("dp2,tp4[{a,b}: cp4],cp2", ",") == ["dp2", "tp4[{a,b}: cp4]", "cp2"]
