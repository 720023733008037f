"""Every rule: each option gives what the whole op gives, and none of the cuts that the op allows is missing."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fxpar.errors import OpContractError, OpExistsError
from fxpar.ir.dist_config import OuterShard, P, Partial, Placement, R, Shard
from fxpar.ir.pass_registry import get
from fxpar.ops.traits import DECLARED
from fxpar.rules.option import Factor, Option, OpView, TensorRef, from_factors
from fxpar.rules.own_ops import narrow_attention
from fxpar.rules.table import TABLE, OpRule, options, register_op, rule_of
from fxpar.rules.validate import Trial, trials, validate_op
from tests.repeat import thinned
from tests.rules import cases, cases_own
from tests.rules.cases import aten, own, x

# A test per group: one per case would take longer to report than to run.
GROUPS = {
    "products": cases.MATMUL,
    "views": cases.VIEWS,
    "parts": cases.PARTS,
    "indexing": cases.INDEXING,
    "reductions": cases.REDUCTIONS,
    "norms": cases.NORMS,
    "own": cases_own.OWN,
    "pointwise": cases_own.POINTWISE,
}
CASES = [case for group in GROUPS.values() for case in group]


@pytest.fixture(scope="module", autouse=True)
def rms_norm_backward() -> Iterator[None]:
    """A CPU kernel of the backward of the fused RMS norm, which torch has for GPUs only."""

    def kernel(grad, x, shape, rstd, weight, mask):
        wide = grad * weight if weight is not None else grad
        dims = list(range(-len(shape), 0))
        dx = rstd * wide - x * rstd**3 * (wide * x).mean(dims, keepdim=True)
        dweight = (grad * x * rstd).sum(list(range(x.dim() - len(shape)))) if mask[1] else None
        return dx, dweight

    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm_backward", kernel, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize(
    ("degree", "cases"),
    # Pointwise ops know nothing of degrees.
    thinned(
        itertools.product([2, 3], GROUPS), [*((2, g) for g in GROUPS), *((3, g) for g in GROUPS if g != "pointwise")]
    ),
)
def test_options_are_exact(cases, degree):
    for case in GROUPS[cases]:
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` keeps the stack of each call: milliseconds
        found = trials(case.target, case.args(), case.kwargs, degree, tolerance=case.tolerance)
        assert_exact(case, found)
        plain = {_plain(trial.option) for trial in found}
        assert len(plain) >= case.at_least[degree - 2], [str(case), *(str(trial) for trial in found)]


@pytest.mark.parametrize("cases", GROUPS)
def test_options_on_sub_axes_are_exact(cases):
    """Four ranks as 2 x 2: cut in two pieces, and on the inner sub-axis the same or terms of a sum."""
    for case in GROUPS[cases]:
        torch.default_generator.manual_seed(0)
        assert_exact(case, trials(case.target, case.args(), case.kwargs, 4, sections=(), tolerance=case.tolerance))


def assert_exact(case: cases.Case, found: list[Trial]) -> None:
    wrong = [str(trial) for trial in found if trial.error]
    assert not wrong, "\n".join([str(case), *wrong])


def test_products_pass_terms_on_an_inner_sub_axis():
    """What the gradients of few key and value heads need: of a projection's input, and of its weight."""
    found = trials(aten.mm.default, (x(8, 12), x(12, 8)), None, 4, sections=())
    options = {trial.option for trial in found if not trial.error}
    assert Option((OuterShard(1, 2, P), OuterShard(0, 2)), (P,)) in options
    assert Option((OuterShard(0, 2, P), R), (OuterShard(0, 2, P),)) in options
    assert Option((OuterShard(0, 2), R), (OuterShard(0, 2),)) in options


def _plain(option: Option) -> Option:
    """The option without sections: cases count each loop once."""

    def strip(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
        return tuple(Shard(p.dim) if isinstance(p, Shard) else p for p in placements)

    return Option(strip(option.inputs), strip(option.outputs))


@pytest.mark.parametrize("note", ["plain", "gqa groups", "documents kv6", "mask of both kv3", "bias kv1"])
def test_attention_on_four_ranks(note):
    sizes = {"plain": (4, 8, 8), "gqa groups": (1, 16, 2), "documents kv6": (4, 16, 4), "mask of both kv3": (4, 8, 2)}
    B, H, Hkv = sizes.get(note, (4, 8, 1))
    extras = {
        "documents kv6": lambda: cases_own.documents(B),
        "mask of both kv3": lambda: cases_own.mask(B, H),
        "bias kv1": lambda: cases_own.bias(B, H),
    }
    for target, make in (
        (own.attention.default, cases_own.forward),
        (own.attention_backward.default, cases_own.backward),
    ):
        torch.default_generator.manual_seed(0)
        found = trials(target, make(B, H, Hkv, extras.get(note, lambda: (None, None))(), False), None, 4)
        assert [str(t) for t in found if t.error] == []
        found = [t for t in found if not _on_sub_axes(t.option)]
        assert len(found) == (1 if B == 1 else 2), [str(t) for t in found]


def _on_sub_axes(option: Option) -> bool:
    return any(isinstance(p, OuterShard) for p in (*option.inputs, *option.outputs))


NARROW = [(4, 8, 2, None), (6, 12, 2, None), (6, 6, 3, None), (8, 8, 4, None), (4, 8, 2, "mask"), (6, 12, 3, "bias")]


@pytest.mark.parametrize(("degree", "heads", "kv_heads", "extra"), NARROW, ids=str)
def test_attention_with_fewer_key_value_heads_than_ranks(degree, heads, kv_heads, extra):
    """Each rank has its query heads and the one key-value head of theirs."""
    extras = {None: (None, None), "mask": cases_own.mask(2, heads), "bias": cases_own.bias(2, heads)}[extra]
    key = OuterShard(1, kv_heads)
    for target, make, keys in (
        (own.attention.default, cases_own.forward, (1, 2)),
        (own.attention_backward.default, cases_own.backward, (2, 3)),
    ):
        torch.default_generator.manual_seed(0)
        args = make(2, heads, kv_heads, extras, False)
        option = narrow_attention(view_of(target, args), degree)
        assert option is not None
        assert [i for i, p in enumerate(option.inputs) if p == key] == list(keys)
        (trial,) = [t for t in trials(target, args, None, degree, also=[option]) if t.option == option]
        assert not trial.error, str(trial)
    assert option.outputs[1:] == (OuterShard(1, kv_heads, P),) * 2


@pytest.mark.parametrize(("degree", "heads", "kv_heads"), [(2, 4, 2), (4, 4, 4), (4, 6, 2), (4, 12, 3), (3, 6, 2)])
def test_other_heads_need_no_sub_axes(degree, heads, kv_heads):
    """Or cannot have them: 6 query heads on 4 ranks, 3 key-value heads on 4, 2 on 3."""
    assert narrow_attention(view_of(own.attention.default, cases_own.forward(2, heads, kv_heads)), degree) is None


def view_of(target: Any, args: tuple[Any, ...]) -> OpView:
    """A call of attention on these tensors."""
    count = iter(range(len(args)))
    numbered = tuple(TensorRef(next(count)) if isinstance(a, torch.Tensor) else a for a in args)
    operands = tuple(tuple(a.shape) for a in args if isinstance(a, torch.Tensor))
    return OpView(target, numbered, (), operands, tuple(tuple(result.shape) for result in target(*args)))


def test_every_rule_has_a_case():
    own = {op for op in TABLE if op.namespace != "extras"}  # of the example package, if its tests ran before
    missing = own - {case.target for case in CASES}
    assert not missing, sorted(map(str, missing))


def test_every_case_has_a_rule():
    assert [str(case.target) for case in CASES if rule_of(case.target) is None] == []


def test_dropout_keeps_its_mask():
    """A cut keeps what the whole tensor keeps: the comparison above saw zeros among other elements."""
    (case,) = [c for c in cases_own.OWN if c.target is own.dropout.default and not c.note]
    whole = case.target(*case.args())
    assert 0 < whole.count_nonzero() < whole.numel()


# ------------------------------------------------------------------------------------------ the validator can fail
WRONG = [
    (aten.cumsum.default, (x(6, 12), 1), [Factor((1,), (1,))], "off by"),  # scans each piece by itself
    (aten.mm.default, (x(6, 12), x(12, 6)), [Factor((1, 0), ("avg",))], "off by"),
    (aten.mm.default, (x(6, 12), x(12, 6)), [Factor((1, None), ("sum",))], "RuntimeError"),
    (aten.exp.default, (x(6, 12),), [Factor((0,), ("sum",))], "global_to_local says"),
    (aten.flip.default, (x(6, 12), [1]), [Factor((1,), (1,))], "off by"),
    (aten.amax.default, (x(6, 7) - 9, [1]), [Factor((1,), ("max",))], "off by"),  # padding is larger than the maximum
    (aten.view.default, (x(6, 12), [72]), [Factor((1,), (0,))], "off by"),
    (aten.argmax.default, (x(6, 12), 1), [Factor((1,), ("max",))], "other integers"),
]


@pytest.mark.parametrize(("target", "args", "factors", "message"), WRONG, ids=lambda v: str(v) if callable(v) else "")
def test_validator_finds_a_wrong_rule(target, args, factors, message, monkeypatch):
    rule = OpRule(lambda op, degree, seed, shard: from_factors(factors, op, degree, seed, shard))
    monkeypatch.setitem(TABLE, target, rule)
    found = validate_op(target, args, degree=3, sections=())
    assert found
    assert any(message in trial.error for trial in found), [str(t) for t in found]


def test_validator_finds_padding_that_leaks(monkeypatch):
    """A sum over an uneven dim is right only because `mask_padding` cleans it."""
    module = sys.modules[get("mask_padding").__module__]
    monkeypatch.setattr(module, "zero_padding", lambda value, dim, size, index: value)
    assert any("unknown" in t.error for t in validate_op(aten.sum.dim_IntList, (x(6, 7), [1]), degree=2))
    assert any("unknown" in t.error for t in validate_op(aten.mm.default, (x(6, 7), x(7, 6)), degree=2))


def test_validator_finds_a_false_claim_of_zero_padding(monkeypatch):
    module = sys.modules[get("mask_padding").__module__]
    monkeypatch.setattr(module, "KEEPS_ZERO", module.KEEPS_ZERO | {aten.cos.default})
    assert any("not zero" in t.error for t in validate_op(aten.cos.default, (x(6, 7),), degree=2))


def test_trial_prints():
    found = trials(aten.mm.default, (x(6, 12), x(12, 6)), None, 3, sections=())
    (trial,) = [t for t in found if t.option.inputs == (Shard(1), Shard(0))]
    assert str(trial) == "(S(1), S(0)) -> (P) on 3 ranks: equal"


def test_a_rule_of_the_user(monkeypatch):
    """Registered once; another one only on purpose."""
    op = torch.ops.aten.bernoulli.p
    monkeypatch.setattr("fxpar.rules.table.TABLE", dict(TABLE))
    monkeypatch.setattr("fxpar.ops.traits.DECLARED", dict(DECLARED))
    register_op(op, rule=lambda view: [Factor((0,), (0,))])
    view = OpView(op, (), (), ((4, 6),), ((4, 6),))
    assert any(option.inputs == (Shard(0),) for option in options(view, 2, [((False, 0), Shard(0))]))
    with pytest.raises(OpExistsError, match=r"bernoulli.*replace=True"):
        register_op(op, rule=lambda view: [])
    register_op(op, rule=lambda view: [], replace=True)
    assert all(option.inputs != (Shard(0),) for option in options(view, 2, [((False, 0), Shard(0))]))


LOOP = Factor((0,), (0,))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"rule": lambda view: None}, "its rule= returned None, no list of Factors"),
        ({"rule": lambda view: ["a"]}, "its rule= returned .* no list of Factors"),
        ({"rule": lambda view: 1 / 0}, "its rule= raised ZeroDivisionError: division by zero"),
        ({"rule": lambda: []}, "its rule= raised TypeError"),
        ({"rule": lambda view: [Factor((0, 0), (0,))]}, "is not for the 1 operands of this call"),
        ({"rule": lambda view: [Factor((0,), ())]}, "is not for the 1 results of this call"),
        ({"rule": lambda view: [Factor((2,), (0,))]}, r"2 is not a dim of the shape \(4, 6\)"),
        ({"rule": lambda view: [Factor((-1,), (0,))]}, "-1 is not a dim"),
        ({"rule": lambda view: [Factor((0,), (7,))]}, "7 is not a dim .* and no word of absent, sum"),
        ({"rule": lambda view: [Factor((0,), ("prod",))]}, "'prod' is not a dim"),
        ({"rule": lambda view: [Factor(("sum",), (0,))]}, "'sum' is not a dim"),
        ({"rule": lambda view: [LOOP], "partials": lambda view: ["x"]}, "its partials= returned .* no list of Options"),
        ({"rule": lambda view: [LOOP], "partials": lambda view: 1 / 0}, "its partials= raised ZeroDivisionError"),
        ({"rule": lambda view: [LOOP], "partials": lambda view: [Option((P, P), (P,))]}, "is not for the 1 operands"),
        ({"rule": lambda view: [LOOP], "partials": lambda view: [Option((Partial("prod"),), (P,))]}, "no placement of"),
        ({"rule": lambda view: [LOOP], "partials": lambda view: [Option((Shard(2),), (P,))]}, "no placement of"),
    ],
)  # fmt: skip
def test_what_a_rule_of_the_user_may_not_say(said, message, monkeypatch):
    op = torch.ops.aten.bernoulli.p
    monkeypatch.setattr("fxpar.rules.table.TABLE", dict(TABLE))
    monkeypatch.setattr("fxpar.ops.traits.DECLARED", dict(DECLARED))
    register_op(op, **said)
    view = OpView(op, (), (), ((4, 6),), ((4, 6),))
    with pytest.raises(OpContractError, match=f"op aten.bernoulli.p: .*{message}"):
        options(view, 2, [((False, 0), Shard(0))])
