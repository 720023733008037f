"""What a graph of a file may call: functions one by one, ops by what they are known to do.

A graph file may be anybody's, and `fxpar check` runs what it holds. So a name that reaches generated code is an
identifier and nothing else, and a call is one of

    functions   the arithmetic of sizes, and those that fxpar's passes put into graphs: FUNCTIONS
    own ops     of fxpar, and ops of others that this process has registered; the module that an installed package
                names for them is imported if need be
    ATen        ops that torch counts to its core or calls pointwise, those with a sharding rule, and those in REVIEWED;
                of these only what computes tensors or sizes from tensors and plain numbers: nothing that reads or
                writes files, draws random numbers, shows values to Python, or writes to an operand
    in place    the forms in which `passes/write_in_place` writes over a value that nobody needs any more
    collectives those of `_c10d_functional` that the lowering makes, between the ranks of a mesh axis

What is in none of these is refused, harmless or not.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import keyword
import math
import operator
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.errors import GraphFormatError
from fxpar.ir import collectives, markers
from fxpar.ir.serialize import OpOverload, target_name
from fxpar.ops import copies, layout
from fxpar.ops.traits import DECLARED, IN_PLACE, OUT
from fxpar.rules.installed import import_ops
from fxpar.rules.table import REPLICATED_ON_PURPOSE, TABLE
from fxpar.torch_api.schemas import schema_of

_ARITHMETIC = (
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod, operator.pow),
    *(operator.neg, operator.getitem),
    *(math.trunc, math.ceil, math.floor),
    *(torch.sym_max, torch.sym_min, torch.sym_float, torch.sym_sqrt),
)
_OF_PASSES = (
    *(layout.pack, layout.unpack, layout.take, layout.lower, layout.lift, layout.fuse, layout.unfuse),
    layout.shift,
    *(copies.copies, copies.own_ids, copies.own_rows, copies.within_capacity, copies.exchange, copies.sum_copies),
    *(layout.zero_padding, layout.keep_on_first),
    *(markers.vary, collectives.reshard, *collectives.COLLECTIVES),
)
FUNCTIONS: dict[str, Callable[..., Any]] = {target_name(f): f for f in (*_ARITHMETIC, *_OF_PASSES)}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# ATen ops, whatever the overload, of which torch's tags do not say that they are harmless: read one by one. None trusts
# an index or a packed buffer that it is given.
REVIEWED = _words(
    "_cdist_backward _conj _conj_physical _fft_c2c _fused_rms_norm _fused_rms_norm_backward _grouped_mm "
    "_linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _native_batch_norm_legit_functional _neg_view "
    "_pdist_backward _prelu_kernel _prelu_kernel_backward _safe_softmax _to_copy _unsafe_view "
    "_upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa "
    "_upsample_bilinear2d_aa_backward _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d _weight_norm_interface _weight_norm_interface_backward adaptive_avg_pool2d "
    "adaptive_avg_pool3d addbmm addmv addr affine_grid_generator alias alias_copy all aminmax angle argmax argmin "
    "argsort avg_pool3d_backward baddbmm batch_norm_backward binary_cross_entropy block_diag bucketize cdist "
    "channel_shuffle cholesky_inverse cholesky_solve clone complex contiguous copy count_nonzero cross cummax "
    "cummin cumprod cumsum detach detach_copy diag_embed diagonal diagonal_backward diagonal_copy "
    "diagonal_scatter dot elu_backward empty_like expand_as expand_copy eye flip full_like gelu_backward glu "
    "glu_backward glu_jvp grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward hardshrink_backward "
    "hardtanh_backward heaviside im2col index_add index_copy index_fill index_select_backward inner kron kthvalue "
    "lift lift_fresh lift_fresh_copy linalg_cholesky_ex linalg_cross linalg_householder_product linalg_inv_ex "
    "linalg_lu_factor_ex linalg_matrix_exp linalg_solve_triangular linalg_vector_norm linspace "
    "log_sigmoid_backward log_sigmoid_forward logcumsumexp logspace masked_fill matmul median mish_backward mode "
    "movedim msort mvlgamma nan_to_num nanmedian nansum narrow native_batch_norm native_batch_norm_backward "
    "native_channel_shuffle native_dropout_backward new_empty_strided new_full new_ones new_zeros nonzero norm "
    "one_hot ones_like outer permute_copy pixel_shuffle pixel_unshuffle polar prod ravel "
    "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward renorm repeat_interleave "
    "replication_pad1d replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward "
    "resolve_conj resolve_neg roll rot90 scatter scatter_reduce searchsorted select_backward select_copy "
    "slice_backward slice_copy smooth_l1_loss soft_margin_loss_backward softshrink_backward sort split_copy "
    "split_with_sizes_copy squeeze_copy stack std std_mean sum t_copy take_along_dim tile topk trace "
    "transpose_copy triangular_solve tril tril_indices triu triu_indices unbind_copy unflatten unfold "
    "unfold_backward unfold_copy unsafe_split unsafe_split_with_sizes unsqueeze_copy upsample_bicubic2d "
    "upsample_bicubic2d_backward upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d "
    "upsample_linear1d_backward upsample_nearest1d upsample_nearest1d_backward upsample_nearest2d "
    "upsample_nearest2d_backward upsample_nearest3d upsample_nearest3d_backward upsample_trilinear3d "
    "upsample_trilinear3d_backward var var_mean vdot view_as view_copy zeros_like"
)
# Of torch's core, but their CPU kernels write where a tensor of indices says, without a look at its bounds.
_TRUST_AN_INDEX = _words("max_pool2d_with_indices_backward max_pool3d_with_indices_backward _embedding_bag")
# Values that arguments must have, for the same reason: counting ids takes each for a place.
_ONLY = {(torch.ops.aten.embedding_dense_backward.default, "scale_grad_by_freq"): False}
_KNOWN_TAGS = {torch.Tag.core, torch.Tag.pointwise}
_HARMFUL_TAGS = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.inplace_view}
_IN_PLACE = {*IN_PLACE.values(), *(op for op, _ in OUT.values())}
_COLLECTIVES = _words(
    "all_gather_into_tensor all_reduce all_reduce_ all_to_all_single reduce_scatter_tensor wait_tensor"
)
_REDUCTIONS = ("sum", "avg", "max", "min", "product")
# What a text may say, by the name of the argument.
_TEXTS: dict[str, tuple[str, ...]] = {
    "approximate": ("none", "tanh"),
    "rounding_mode": ("trunc", "floor"),
    "reduce": ("sum", "prod", "mean", "amax", "amin"),
    "side": ("left", "right"),
    "UPLO": ("L", "U"),
    "op": (*_REDUCTIONS, "logsumexp"),
    "reduce_op": _REDUCTIONS,
}

_OP = re.compile(r"([A-Za-z_]\w{0,99})\.([A-Za-z_]\w{0,199})\.([A-Za-z_]\w{0,99})", re.ASCII)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w{0,999}", re.ASCII)
_PART = r"[a-z]{1,20}(:\(\d{1,9}\)\d{1,9})?"  # an axis or a sub-axis
_AXIS = re.compile(rf"[@#]?{_PART}(\.{_PART}){{0,7}}", re.ASCII)
# What generated code calls by name: a placeholder of that name would take its place.
_TAKEN = {"self", "torch", "fxpar", "operator", "math", "inf", "nan", "NoneType", "device", "fx_pytree", "pytree"}
_NUMBERS = (bool, int, float)


def check_identifier(text: Any) -> str:
    """A name that may stand in generated code. Raises GraphFormatError."""
    if not isinstance(text, str) or not _IDENTIFIER.fullmatch(text):
        raise GraphFormatError(f"{shown(text)} is not a name of a value")
    if keyword.iskeyword(text) or hasattr(builtins, text) or text in _TAKEN:
        raise GraphFormatError(f"{text!r} cannot be the name of a value: Python or torch have it already")
    return text


def find_target(name: Any) -> Any:
    """The function or op of a name, as `target_name` writes it. Raises GraphFormatError."""
    if not isinstance(name, str):
        raise GraphFormatError(f"{shown(name)} is not a name of an op")
    if ":" in name:
        if name not in FUNCTIONS:
            raise GraphFormatError(f"function {shown(name)} is none that graphs are made of")
        return FUNCTIONS[name]
    parts = _OP.fullmatch(name)
    if parts is None:
        raise GraphFormatError(f"{shown(name)} is not an op of torch")
    namespace, packet, overload = parts.groups()
    found: Any = None
    if not _is_known(namespace):
        import_ops(namespace)
    if _is_known(namespace):
        found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
    else:
        raise GraphFormatError(f"op {name!r} is not available here, or not registered {_RULE}")
    if not isinstance(found, OpOverload):
        raise GraphFormatError(f"op {name!r} is not available here")
    check_target(found)
    return found


def _is_known(namespace: str) -> bool:
    registered = {op.namespace for op in (*TABLE, *DECLARED)}
    return namespace in {"aten", "fxpar", "_c10d_functional", *registered}


def check_target(target: Any) -> None:
    """Raises GraphFormatError for a function or an op that is not known to be harmless."""
    if not isinstance(target, OpOverload):
        if FUNCTIONS.get(target_name(target)) is not target:
            raise GraphFormatError(f"function {target_name(target)!r} is none that graphs are made of")
        return
    schema, namespace = schema_of(target), target.namespace  # type: ignore[attr-defined]
    packet = str(target).split(".")[1]
    if namespace == "_c10d_functional":
        allowed = packet in _COLLECTIVES
    elif namespace != "aten":
        allowed = (namespace == "fxpar" or target in TABLE or target in DECLARED) and not schema.writes
    elif schema.writes:
        allowed = target in _IN_PLACE
    else:
        listed = target in TABLE or target in REPLICATED_ON_PURPOSE or packet in REVIEWED
        known = listed or bool(_KNOWN_TAGS & schema.tags)
        allowed = known and packet not in _TRUST_AN_INDEX and not _HARMFUL_TAGS & schema.tags
    if not allowed or not schema.results:
        raise GraphFormatError(f"op {target} is not known to be harmless {_RULE}")


_RULE = "(an op of your own is, once this process has registered it, see docs/how-to-add.md)"


@dataclass(frozen=True)
class _Operand:
    """An argument of an op; `fits` says whether a value is of its kind: what a node computes is seen when it runs."""

    name: str
    kind: str
    required: bool
    keyword_only: bool
    fits: Callable[[Any], bool]


@functools.lru_cache(maxsize=4096)
def _operands(op: Any) -> tuple[dict[str, _Operand], tuple[str, ...]]:
    """All arguments of an op by name, and the names of the positional ones."""
    known = [
        _Operand(
            a.name,
            a.kind if (op, a.name) not in _ONLY else str(_ONLY[op, a.name]),
            a.required,
            a.keyword_only,
            _fits(a.kind, a.name) if (op, a.name) not in _ONLY else functools.partial(operator.is_, _ONLY[op, a.name]),
        )
        for a in schema_of(op).arguments
    ]
    return {one.name: one for one in known}, tuple(one.name for one in known if not one.keyword_only)


def check_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Whether a function or an op that is allowed can be called like that. Raises GraphFormatError."""
    if not isinstance(target, OpOverload):
        _check_function(target, args, kwargs)
        return
    known, positional = _operands(target)
    if len(args) > len(positional):
        raise GraphFormatError(f"op {target} takes {len(positional)} operands, not {len(args)}")
    given = dict(zip(positional, args, strict=False))
    for name, value in kwargs.items():
        if name in given or name not in known:
            raise GraphFormatError(f"op {target} takes no {shown(name)} here")
        given[name] = value
    for name, operand in known.items():
        if name not in given:
            if operand.required:
                raise GraphFormatError(f"op {target} lacks its operand {name!r}")
        elif not operand.fits(given[name]):
            raise GraphFormatError(f"op {target} cannot take {name}={shown(given[name])}: it takes {operand.kind}")


_signature = functools.lru_cache(maxsize=1024)(inspect.signature)  # of FUNCTIONS: reading one takes a millisecond


def _check_function(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    try:
        bound = _signature(target).bind(*args, **kwargs).arguments
    except (TypeError, ValueError) as error:
        raise GraphFormatError(f"function {target_name(target)!r} cannot be called so: {error}") from error
    counts = target in _ARITHMETIC and target is not operator.getitem
    for name, value in bound.items():
        if counts and not _is_number(value):
            raise GraphFormatError(f"function {target_name(target)!r} computes with sizes, not with {shown(value)}")
        if not _is_plain(value, name) or (target is operator.pow and name != "a" and not _is_exponent(value)):
            raise GraphFormatError(f"function {target_name(target)!r} cannot take {name}={shown(value)}")


def _is_plain(value: Any, name: str) -> bool:
    """A node, a number, the name of a mesh axis, or a tuple of these."""
    if isinstance(value, tuple | list):
        return all(_is_plain(v, name) for v in value)
    if isinstance(value, str):
        return value in _TEXTS.get(name, ()) or _AXIS.fullmatch(value) is not None
    return value is None or isinstance(value, (fx.Node, *_NUMBERS))


def _is_number(value: Any) -> bool:
    """A number, or what computes one: texts and lists, which arithmetic multiplies too, could fill the memory."""
    if not isinstance(value, fx.Node):
        return isinstance(value, _NUMBERS)
    if isinstance(value.target, OpOverload):
        return schema_of(value.target).results in (("int",), ("float",))
    return value.op == "placeholder" or (value.target in _ARITHMETIC and value.target is not operator.getitem)


def _is_exponent(value: Any) -> bool:
    """Numbers grow fast: 9 ** 9 ** 9 has more digits than a computer has bytes."""
    return isinstance(value, float) or (isinstance(value, int) and 0 <= value <= 16)


def _fits(kind: str, name: str) -> Callable[[Any], bool]:
    """Whether a value is of the schema's kind, as a function of the value. `name` is that of the argument."""
    if kind.startswith("Optional["):
        fits = _fits(kind.removeprefix("Optional[")[:-1], name)
        return lambda value: value is None or fits(value)
    if kind.startswith("List["):
        inner = kind.removeprefix("List[")[:-1]
        fits, spread = _fits(inner, name), inner in ("int", "float")
        return lambda value: (
            all(map(fits, value))
            if isinstance(value, tuple | list)
            else isinstance(value, fx.Node) or (spread and fits(value))
        )
    of_node, wanted = kind in ("Tensor", "int", "float", "number", "bool"), _KINDS.get(kind, ())
    if kind == "str":
        texts = _TEXTS.get(name, ())
        return lambda value: not isinstance(value, fx.Node) and value in texts
    if kind == "Any":  # the process group of a collective: a mesh axis, never a group of this process
        return lambda value: _is_axis(value, "@")
    if kind == "int" and name == "rank":  # the rank's place on an axis
        return lambda value: isinstance(value, fx.Node) or _is_axis(value, "#") or type(value) in wanted
    return lambda value: of_node if isinstance(value, fx.Node) else type(value) in wanted


def _is_axis(value: Any, mark: str) -> bool:
    return isinstance(value, str) and value[:1] == mark and _AXIS.fullmatch(value) is not None


_KINDS: dict[str, tuple[type, ...]] = {
    "Tensor": (int, float, bool),
    "int": (int, bool),
    "float": (float, int),
    "number": (int, float, bool),
    "bool": (bool, int),
    "ScalarType": (torch.dtype,),
    "Layout": (torch.layout,),
    "MemoryFormat": (torch.memory_format,),
    "Device": (torch.device,),
}


class _Short(reprlib.Repr):
    """Looks at the beginning of a value only, and at no element of a tensor: torch loads modules to print one."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 1 << 16  # `shown` cuts them at their end

    def repr_Tensor(self, value: torch.Tensor, level: int) -> str:
        return f"a tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def shown(value: Any) -> str:
    """A value of a file in a message, not longer than a line."""
    text = _Short().repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
