"""Calls like an earlier one: the results are what torch makes, and a call that differs is another one."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode

from fxpar.torch_api.fake_calls import RepeatingFakeMode
from fxpar.torch_api.symbolic import FakeWorld

aten = torch.ops.aten


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld(lambda: None)


def _tensor(world: FakeWorld, *shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return world.empty([world.symbol("T", 8) if size == "T" else size for size in shape], dtype)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    facts = [
        (
            *(t.dtype, str(t.shape), str(t.stride()), str(t.storage_offset()), t.device, t.requires_grad, t.is_leaf),
            *(t.is_conj(), t._is_view(), str(t.untyped_storage().nbytes())),
        )
        for t in (a, b)
    ]
    return facts[0] == facts[1]


@pytest.mark.parametrize("shape", [("T", 4), (6, 4)], ids=["symbolic", "static"])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: aten.mul.Tensor(x, 2.0),
        lambda x: aten.t.default(x),
        lambda x: aten.slice.Tensor(x, 1, 1, 3),
        lambda x: aten.sum.dim_IntList(x, [0], True),
        lambda x: aten.to.dtype(x, torch.bfloat16),
        lambda x: aten.view.default(x, [x.shape[0], 2, 2]),
        lambda x: aten.topk.default(x, 2)[1],
        lambda x: aten.select.int(x, 1, 3),
        lambda x: aten.expand.default(x, [2, *x.shape]),
        lambda x: aten.view.dtype(x, torch.int32),
        lambda x: aten.mul.Tensor(aten.t.default(x), 2.0),
        lambda x: aten.t.default(x.requires_grad_()),
        lambda x: aten._conj.default(aten._conj.default(aten.to.dtype(x, torch.complex64))),
    ],
    ids=["mul", "t", "slice", "sum", "to", "view", "topk", "select", "expand", "bits", "strides", "of a leaf", "conj"],
)
def test_a_repeated_call_gives_what_the_first_gave(world: FakeWorld, shape, call) -> None:
    with world.mode:
        first, second, third = (call(_tensor(world, *shape)) for _ in range(3))
    assert _same(first, second)
    assert _same(first, third)
    assert first is not third
    plain = FakeWorld(lambda: None)
    plain.mode.cache_enabled = False
    with plain.mode:
        call(_tensor(plain, *shape))
    assert [str(guard.condition) for guard in world.guards] == [str(guard.condition) for guard in plain.guards]


def test_results_of_a_repeated_call_are_made_out_of_sight_of_function_modes(world: FakeWorld) -> None:
    seen = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with world.mode:
        xs = [_tensor(world, "T", 4) for _ in range(3)]
        for x in xs[:2]:
            aten.t.default(x)
        with Watching():
            world.mode._make(next(iter(world.mode._calls.values())).results[0], (xs[2],))
    assert not seen


def test_a_repeated_call_is_not_computed_again(world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    with world.mode:
        aten.mul.Tensor(_tensor(world, "T", 4), 2.0)
        monkeypatch.setattr(FakeTensorMode, "_dispatch_impl", None)
        aten.mul.Tensor(_tensor(world, "T", 4), 3.0 - 1.0)
        with pytest.raises(TypeError):
            aten.mul.Tensor(_tensor(world, "T", 5), 2.0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: aten.mul.Tensor(x, 2), lambda x: aten.mul.Tensor(x, 2.0)),
        (lambda x: aten.sum.dim_IntList(x, [0]), lambda x: aten.sum.dim_IntList(x, [1])),
        (lambda x: aten.sum.dim_IntList(x, [0], True), lambda x: aten.sum.dim_IntList(x, [0], False)),
        (lambda x: aten.slice.Tensor(x, 0, 0, 3), lambda x: aten.slice.Tensor(x, 1, 0, 3)),
        (
            lambda x: aten.mul.Tensor(x, 2),
            lambda x: aten.mul.Tensor(aten.empty_strided.default([6, 4], [1, 6]).long(), 2),
        ),
        (lambda x: aten.view.default(x, [24]), lambda x: aten.view.default(x, [24, 1])),
    ],
    ids=["type", "dim", "flag", "position", "strides", "shape"],
)
def test_calls_that_differ_are_told_apart(one, other) -> None:
    alone, after = FakeWorld(lambda: None), FakeWorld(lambda: None)
    with alone.mode:
        expected = other(_tensor(alone, 6, 4, dtype=torch.int64))
    with after.mode:
        for _ in range(2):
            one(_tensor(after, 6, 4, dtype=torch.int64))
        assert _same(other(_tensor(after, 6, 4, dtype=torch.int64)), expected)


def test_a_repeated_view_lies_in_the_memory_of_its_own_operand(world: FakeWorld) -> None:
    with world.mode:
        xs = [_tensor(world, "T", 4) for _ in range(3)]
        views = [aten.t.default(x) for x in xs]
    for x, view in zip(xs, views, strict=True):
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert len({x.untyped_storage()._cdata for x in xs}) == len(xs)


def test_a_repeated_write_returns_the_tensor_that_was_written(world: FakeWorld) -> None:
    with world.mode:
        xs = [_tensor(world, "T", 4) for _ in range(3)]
    for x in xs:
        assert world.mode.__torch_dispatch__(aten.mul_.Tensor, (), (x, 2.0)) is x


@pytest.mark.parametrize(
    ("call", "kept"),
    [
        (lambda x: aten.index.Tensor(x, [aten.arange.default(3)]), True),
        (lambda x: aten.mul.out(x, x, out=x), False),
        (lambda x: aten.unsqueeze_.default(x, 0), False),
        (lambda x: aten._unsafe_view.default(x, [24]), False),
        (lambda x: aten.sym_size.int(x, 0), False),
    ],
    ids=["index by numbers", "out", "a view in place", "unsafe view", "a size"],
)
def test_only_calls_that_torch_would_keep_are_kept(world: FakeWorld, call, kept: bool) -> None:
    with world.mode:
        x = _tensor(world, 6, 4)
        call(x)
    ops = {known.func for known in world.mode._calls.values()}
    assert bool(ops & {aten.index.Tensor, aten.mul.out, aten.unsqueeze_.default, aten._unsafe_view.default}) == kept


def test_an_index_by_a_mask_is_asked_each_time(world: FakeWorld) -> None:
    with world.mode:
        x = _tensor(world, 6, 4)
        for _ in range(2):
            aten.index.Tensor(x, [aten.arange.default(3)])
            with pytest.raises(DynamicOutputShapeException):
                aten.index.Tensor(x, [aten.gt.Scalar(aten.select.int(x, 1, 0), 0.0)])


def test_a_result_that_is_made_otherwise_is_not_kept(world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RepeatingFakeMode, "_make", lambda self, result, args: torch.empty(1, device="meta"))
    with world.mode:
        aten.mul.Tensor(_tensor(world, "T", 4), 2.0)
    assert not world.mode._calls
