"""What a graph of a file may call: all that fxpar's graphs are made of, and nothing that does more than compute."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

import fxpar.graph_files.vocabulary as vocabulary
from fxpar.errors import GraphFormatError
from fxpar.graph_files.vocabulary import (
    FUNCTIONS,
    REVIEWED,
    check_call,
    check_identifier,
    check_target,
    find_target,
    shown,
)
from fxpar.ir.serialize import OpOverload, target_name
from fxpar.ops.traits import IN_PLACE, OUT
from fxpar.rules.table import REPLICATED_ON_PURPOSE, TABLE
from fxpar.torch_api.schemas import schema_of

aten = torch.ops.aten


def known_ops():
    """All overloads of ATen that a file may name."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace != "aten":
            continue
        try:
            found.append(find_target(f"aten.{packet}.{overload or 'default'}"))
        except GraphFormatError:
            continue
    return found


def test_what_the_known_ops_have_in_common():
    """Of 3,100 ops of ATen, those that compute tensors or sizes; written to is only what our last pass writes to."""
    found = known_ops()
    assert 600 < len(found) < 1000
    in_place = {*IN_PLACE.values(), *(op for op, _ in OUT.values())}
    for op in found:
        schema = schema_of(op)
        assert not schema.writes or op in in_place, op
        assert {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output} & schema.tags == set(), op
        assert schema.results, op
        assert all(result in ("Tensor", "List[Tensor]", "int", "bool") for result in schema.results), op
        kinds = {argument.kind for argument in schema.arguments}
        assert not any("Generator" in kind or "Storage" in kind or "__torch__" in kind for kind in kinds), op
        for argument in schema.arguments:
            assert "str" not in argument.kind or argument.name in vocabulary._TEXTS, (op, argument.name)


def test_tables_name_what_is_there():
    assert all(hasattr(aten, name) for name in REVIEWED)
    for op in (*TABLE, *REPLICATED_ON_PURPOSE, *IN_PLACE.values(), *(op for op, _ in OUT.values())):
        assert find_target(target_name(op)) is op
    for name, function in FUNCTIONS.items():
        assert find_target(name) is function
        assert target_name(function) == name


@pytest.mark.parametrize(
    "name",
    [
        *("operator:attrgetter", "operator:itemgetter", "operator:methodcaller", "operator:call", "operator:setitem"),
        *("operator:iadd", "operator:concat", "operator:lshift", "os:system", "builtins:eval", "builtins:getattr"),
        *(
            "torch:load",
            "torch:save",
            "torch:compile",
            "torch:sym_not",
            "math:factorial",
            "math:comb",
            "math:__loader__",
        ),
        *("fxpar.ops.layout:torch", "fxpar.ops.layout:torch.load", "fxpar.ops.layout:_padded", "fxpar.ops.layout:x:y"),
        *(
            "fxpar.ir.collectives:_not_lowered",
            "fxpar.ir.markers:Tensor",
            "evil:run",
            ":",
            "a:b:c",
            "fxpar.ops.layout:pack ",
        ),
        *("aten.from_file.default", "aten.from_file.out", "aten.save.default", "aten.save", "aten._print.default"),
        *("aten.rand.default", "aten.randn_like.default", "aten.bernoulli.p", "aten.native_dropout.default"),
        *("aten.uniform_.default", "aten.manual_seed.default", "aten.seed.default", "aten.item.default"),
        *("aten.set_.source_Storage", "aten.set_.source_Tensor", "aten.resize_.default", "aten.copy_.default"),
        *("aten.set_data.default", "aten.requires_grad_.default", "aten._local_scalar_dense.default"),
        *("aten.record_stream.default", "aten.warn.default", "aten.index_put_.default", "aten.add.out", "aten.mm.out"),
        *("aten.fbgemm_linear_fp16_weight.default", "aten.mkldnn_rnn_layer.default", "aten._foreach_add.Scalar"),
        *("aten._cufft_set_plan_cache_max_size.default", "aten._assert_async.msg", "aten.set_grad_enabled.default"),
        *("aten.max_pool2d_with_indices_backward.default", "aten._embedding_bag.default", "aten._unsafe_index.Tensor"),
        "aten._reshape_alias.default",  # strides of its own over memory that nobody looks at
        *("_c10d_functional.broadcast_.default", "_c10d_functional.broadcast.default", "c10d.send.default"),
        *("inductor.resize_storage_bytes_.default", "debugprims.load_tensor.default", "prims.add.default"),
        *("profiler._record_function_exit.default", "quantized.linear_prepack.default", "load_library", "ops.x.y"),
        *("classes.load_library.x", "aten.mm.__class__", "aten.__class__.mro", "aten.mm.default.x", "", ".", "a..b"),
        *(None, 3, ["aten.mm.default"]),
    ],
)
def test_what_may_not_be_called(name):
    with pytest.raises(GraphFormatError):
        find_target(name)


def test_a_function_of_the_same_name_is_another():
    def pack(x):
        return x

    pack.__module__, pack.__qualname__ = "fxpar.ops.layout", "pack"
    with pytest.raises(GraphFormatError, match="none that graphs are made of"):
        check_target(pack)


@pytest.fixture(scope="module")
def mine():
    """An op of a user."""
    library = torch.library.Library("vocabulary_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.define("over(Tensor(a!) x) -> Tensor(a!)")
    yield torch.ops.vocabulary_test
    library._destroy()


def test_an_op_of_a_user_needs_a_rule(mine, monkeypatch):
    for op in (mine.twice.default, mine.over.default):
        with pytest.raises(GraphFormatError, match="this process has registered it"):
            check_target(op)
        with pytest.raises(GraphFormatError, match="this process has registered it"):
            find_target(str(op))
        monkeypatch.setitem(TABLE, op, TABLE[aten.mm.default])
    assert find_target("vocabulary_test.twice.default") is mine.twice.default
    with pytest.raises(GraphFormatError, match="not known to be harmless"):
        find_target("vocabulary_test.over.default")  # it writes to its operand


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "a b",
            "a-b",
            "1a",
            "a.b",
            "a\n",
            "a=1",
            "*a",
            "x): import os #",
            "ä",
            "a" * 1001,
            "class",
            "None",
            "eval",
        ),
        *("print", "__import__", "self", "torch", "fxpar", "operator", "math", "inf", "device", None, 1, ["a"]),
    ],
)
def test_what_is_no_name(name):
    with pytest.raises(GraphFormatError, match="name of a value"):
        check_identifier(name)


def test_names():
    for name in ("x", "_tensor_constant0", "layers_0_attention_q_proj_weight", "input_ids", "mul_3", "X9"):
        assert check_identifier(name) == name


NODE = fx.Graph().placeholder("x")
MADE = NODE.graph.call_function(aten.mm.default, (NODE, NODE))


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        (aten.mm.default, (NODE, NODE), {}),
        (aten.add.Tensor, (NODE, 1.5), {"alpha": 2}),
        (aten.cat.default, ([NODE, NODE], -1), {}),
        (aten.index.Tensor, (NODE, [None, NODE]), {}),
        (aten.view.default, (NODE, [2, NODE, -1]), {}),
        (aten.gelu.default, (NODE,), {"approximate": "tanh"}),
        (aten.full.default, ([2], 1.0), {"dtype": torch.float32, "device": torch.device("cpu"), "pin_memory": False}),
        (torch.ops._c10d_functional.all_reduce.default, (NODE, "sum", "@dp.cp"), {}),
        (operator.mul, (NODE, 2), {}),
        (operator.pow, (NODE, 2), {}),
        (operator.getitem, (NODE, 0), {}),
        (FUNCTIONS["fxpar.ops.layout:take"], (NODE, 2, 0, (), "#tp"), {}),
    ],
)
def test_calls(target, args, kwargs):
    check_call(target, args, kwargs)


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "message"),
    [
        (aten.mm.default, (NODE,), {}, "lacks its operand 'mat2'"),
        (aten.mm.default, (NODE, NODE, NODE), {}, "takes 2 operands, not 3"),
        (aten.mm.default, (NODE, "x"), {}, "cannot take mat2='x'"),
        (aten.mm.default, (NODE,), {"self": NODE}, "takes no 'self' here"),
        (aten.add.Tensor, (NODE, NODE), {"x=1, **y": 1}, "takes no 'x=1"),
        (aten.add.Tensor, (NODE, NODE), {"alpha": "1"}, "cannot take alpha='1'"),
        (aten.view.default, (NODE, [2, 1.5]), {}, "cannot take size=.*it takes List"),
        (aten.view.default, (NODE, {"a": 1}), {}, "cannot take size="),
        (aten.gelu.default, (NODE,), {"approximate": "import os"}, "cannot take approximate="),
        (aten.full.default, ([2], 1.0), {"device": "cpu"}, "cannot take device='cpu'"),
        (aten.full.default, ([2], 1.0), {"dtype": 6}, "cannot take dtype=6"),
        (torch.ops._c10d_functional.all_reduce.default, (NODE, "sum", "0"), {}, "cannot take group_name='0'"),
        (torch.ops._c10d_functional.all_reduce.default, (NODE, "bxor", "@dp"), {}, "cannot take reduce_op='bxor'"),
        (operator.pow, (9, NODE), {}, "cannot take b="),
        (operator.pow, (NODE, 10**9), {}, "cannot take b=1000000000"),
        (operator.mul, (NODE,), {}, "cannot be called so"),
        (operator.mul, (NODE, "x" * 99), {}, "computes with sizes, not with 'xxx"),
        (operator.getitem, (NODE, slice(0, 1)), {}, "cannot take b=slice"),
        (FUNCTIONS["fxpar.ops.layout:lift"], (NODE, 1), {}, "cannot be called so"),
        (FUNCTIONS["fxpar.ops.layout:lift"], (), {"y": NODE}, "cannot be called so"),
        (FUNCTIONS["fxpar.ops.layout:lift"], (torch.float32,), {}, "cannot take x=torch.float32"),
        (operator.mul, ((1,), 10**12), {}, "computes with sizes, not with \\(1,\\)"),  # 8 TB
        (operator.mul, ("@tp", 10**12), {}, "computes with sizes, not with '@tp'"),
        (operator.add, (MADE, MADE), {}, "computes with sizes, not with mm"),  # what a tensor is, or a list
        (
            aten.embedding_dense_backward.default,
            (NODE, NODE, 2, -1, True),
            {},
            "scale_grad_by_freq=True: it takes False",
        ),
    ],
)
def test_calls_that_are_refused(target, args, kwargs, message):
    with pytest.raises(GraphFormatError, match=message):
        check_call(target, args, kwargs)


def test_a_message_is_a_line():
    assert shown("a" * 100) == "'" + "a" * 56 + "..."
    assert all(isinstance(op, OpOverload) for op in TABLE)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(2, 3, dtype=torch.float64), "a tensor float64[2, 3]"),
        (torch.ones(2, 1), "a tensor float32[2, 1]"),  # printed in two lines by torch
        ((torch.ones(()), 4), "(a tensor float32[], 4)"),
    ],
)
def test_a_message_holds_no_elements(value, text):
    assert shown(value) == text
