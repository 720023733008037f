"""mask_padding: whatever an op makes of padding, sums and results do not see it."""

from __future__ import annotations

import pytest
import torch

from fxpar.checking import assign, run_world
from fxpar.ir import collectives as c
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.ops.layout import zero_padding
from fxpar.passes.mask_padding import MaskPadding
from tests.captured import ACTIVATIONS, Captured, llama, mlp
from tests.passes.sketch import Sketch, before, names, text
from tests.repeat import crossed

aten = torch.ops.aten


# ----------------------------------------------------------------------------------------------------- by hand
def contracted(activation, *, dims: tuple[int, int] = (6, 10), strategy: str = "tp3"):
    """act(h) @ w with h [6, 10@tp] and w [10@tp, 4]: a partial sum over an uneven dim."""
    s = Sketch(strategy)
    h, w = s.place("h", dims, ["", "tp"]), s.place("w", (dims[1], 4), ["tp", ""])
    y = s.call(activation, h, shape=dims, dims=["", "tp"])
    graph = s.done(s.call(aten.mm.default, y, w, shape=(dims[0], 4), partial="tp"))
    MaskPadding()(graph)
    return graph


def test_mask_in_front_of_a_contraction():
    assert text(contracted(aten.exp.default).graph) == "\n".join(
        [
            "%exp_default : f64[6, 10@tp] = aten.exp(%h)",
            "%zero_padding : f64[6, 10@tp] = zero_padding(%exp_default, 1, 10, #tp)",
            "%mm_default : f64[6, 4] P(tp) = aten.mm(%zero_padding, %w)",
        ]
    )


@pytest.mark.parametrize("activation", [aten.relu.default, aten.tanh.default, aten.neg.default])
def test_no_mask_where_zero_stays_zero(activation):
    assert zero_padding.__name__ not in names(contracted(activation).graph)


@pytest.mark.parametrize(
    ("moved", "rows"),
    [((aten.flip.default, [0]), 6), ((aten.roll.default, [2], [0]), 6), ((aten.repeat.default, [2, 1]), 12)],
)
def test_no_mask_where_rows_only_move(moved, rows):
    s = Sketch("tp3")
    h, w = s.place("h", (6, 10), ["", "tp"]), s.place("w", (10, 4), ["tp", ""])
    y = s.call(moved[0], h, *moved[1:], shape=(rows, 10), dims=["", "tp"])
    graph = s.done(s.call(aten.mm.default, y, w, shape=(rows, 4), partial="tp"))
    MaskPadding()(graph)
    assert zero_padding.__name__ not in names(graph.graph)


def test_no_mask_where_the_dim_divides():
    assert zero_padding.__name__ not in names(contracted(aten.exp.default, dims=(6, 12)).graph)


def test_one_mask_serves_all_users():
    s = Sketch("tp3")
    h, w = s.place("h", (6, 10), ["", "tp"]), s.place("w", (10, 4), ["tp", ""])
    y = s.call(aten.exp.default, h, shape=(6, 10), dims=["", "tp"])
    a = s.call(aten.mm.default, y, w, shape=(6, 4), partial="tp")
    b = s.call(aten.sum.dim_IntList, y, [1], shape=(6,), partial="tp")
    graph = s.done(a, b)
    MaskPadding()(graph)
    assert names(graph.graph).count("zero_padding") == 1


def test_results_are_clean():
    s = Sketch("tp3")
    y = s.call(aten.exp.default, s.place("h", (10,), ["tp"]), shape=(10,), dims=["tp"])
    graph = s.done(y)
    MaskPadding()(graph)
    assert names(graph.graph) == ["aten.exp", "zero_padding"]
    assert graph.results[0].target is zero_padding


def test_collectives_over_another_axis_do_not_clean():
    """Gradients that are padded on tp are masked before the sum over dp: once they are cut again it is too late."""
    s = Sketch("dp2.tp3")
    y = s.call(aten.exp.default, s.place("h", (10, 4), ["tp", ""]), shape=(10, 4), dims=["tp", ""], partial="dp")
    r = s.call(c.reduce_scatter, y, "dp", "sum", 0, (), shape=(10, 4), dims=["tp dp", ""])
    graph = s.done(r)
    MaskPadding()(graph)
    assert names(graph.graph) == ["aten.exp", "zero_padding", "reduce_scatter"]


def test_gathers_need_no_mask():
    s = Sketch("tp3")
    y = s.call(aten.exp.default, s.place("h", (10,), ["tp"]), shape=(10,), dims=["tp"])
    graph = s.done(s.call(c.all_gather, y, "tp", 0, (), shape=(10,)))
    MaskPadding()(graph)
    assert names(graph.graph) == ["aten.exp", "all_gather"]


@pytest.mark.parametrize(
    ("shapes", "dims", "masks"),
    [
        (((6, 10), (6, 10)), (["", "tp"], ["", "tp"]), 0),  # both padded with zeros
        (((6, 10), (6, 1)), (["", "tp"], ["", ""]), 1),  # the broadcast term is not zero in the padding
    ],
)
def test_sums_of_padded_terms(shapes, dims, masks):
    s = Sketch("tp3")
    a, b = (s.place(f"x{i}", shape, dim) for i, (shape, dim) in enumerate(zip(shapes, dims, strict=True)))
    y = s.call(aten.add.Tensor, a, b, shape=(6, 10), dims=["", "tp"])
    graph = s.done(s.call(aten.sum.dim_IntList, y, [1], shape=(6,), partial="tp"))
    MaskPadding()(graph)
    assert names(graph.graph).count("zero_padding") == masks


# --------------------------------------------------------------------------------------------- captured models
@pytest.mark.parametrize(("activation", "strategy"), crossed(list(ACTIVATIONS), ["tp3", "dp2.tp3", "dp2.tp4+sp+zero3"]))
def test_odd_widths_are_exact(activation, strategy):
    """Hidden widths of 11 and 10; the activation makes padding anything, up to infinite."""
    result = mlp(activation).check(strategy)
    assert result.ok, result


@pytest.mark.parametrize("strategy", ["tp3", "dp2.tp4+zero3", "dp5+zero1"])
def test_padding_of_every_result_is_zero(strategy):
    """Gradients that reach an optimizer hold no garbage where no parameter is."""
    captured: Captured = mlp("exp")
    program = lower(captured.graph, strategy)
    plan = assign(Strategy.parse(strategy), len(captured.batches))
    ranks = run_world(program, captured.params, captured.buffers, captured.batches, plan, 1.0)
    padded = 0
    for out, stored in zip(program.outputs, program.stored_outputs, strict=True):
        if out.kind != "grad":
            continue
        real = torch.ones(stored.meta.shape)
        for rank, result in enumerate(ranks):
            outside = stored.dist.take(real, rank) == 0
            padded += int(outside.sum())
            assert not result["grads"][out.fqn][outside].any(), (out.fqn, rank)
    assert padded


def test_even_models_are_not_touched():
    graph = before(llama(vocab=96).graph, "tp2+sp", "mask_padding")
    once = text(graph.graph)
    MaskPadding()(graph)
    assert text(graph.graph) == once


def test_an_uneven_vocabulary_needs_no_mask():
    """The loss knows which columns are classes."""
    assert "zero_padding" not in names(lower(llama().graph, "tp3").body.graph)
