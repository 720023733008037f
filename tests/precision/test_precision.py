"""`Precision`: text and value say the same, and a mistake is named together with what to write instead."""

from __future__ import annotations

import contextlib
import json
import pickle
import string

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpar.errors import PrecisionDtypeError, PrecisionSyntaxError
from fxpar.precision import Precision

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
GLOBS = st.text(string.ascii_lowercase + string.digits + "_.*?[]!-", min_size=1)


@st.composite
def precisions(draw) -> Precision:
    return Precision(
        param_dtype=draw(st.sampled_from([None, *DTYPES])),
        reduce_dtype=draw(st.sampled_from([None, *DTYPES])),
        accumulate_dtype=draw(st.sampled_from(DTYPES)),
        fp32=tuple(draw(st.lists(GLOBS, max_size=3))),
        norms=draw(st.booleans()),
        softmax=draw(st.booleans()),
        loss=draw(st.booleans()),
    )


@given(precisions())
def test_text_round_trip(precision):
    assert Precision.parse(str(precision)) == precision
    assert Precision.parse(f"  {precision}\n".replace("+", " + ")) == precision


@given(precisions())
def test_json_and_pickle_round_trip(precision):
    text = json.dumps(precision.to_json())
    assert Precision.from_json(text) == Precision.from_json(json.loads(text)) == precision
    assert pickle.loads(pickle.dumps(precision)) == precision
    assert hash(Precision.from_json(text)) == hash(precision)


def test_all_parts():
    text = "bf16+reduce=bf16+accumulate=fp64+fp32(*.router|lm_head)+low(norms|loss)"
    precision = Precision.parse(text)
    assert precision == Precision(
        torch.bfloat16,
        torch.bfloat16,
        torch.float64,
        ("*.router", "lm_head"),
        norms=False,
        loss=False,
    )
    assert str(precision) == text


def test_short_forms():
    assert Precision.parse("bf16") == Precision.parse("bfloat16") == Precision(torch.bfloat16)
    assert Precision.parse("captured") == Precision()
    assert str(Precision(torch.bfloat16)) == "bf16"
    assert str(Precision()) == "captured"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "unknown dtype ''"),
        ("bf61", "did you mean 'bf16'?"),
        ("bf16+redcue=bf16", "did you mean 'reduce=bf16'?"),
        ("bf16+reduce=f32", "did you mean 'fp32'?"),
        ("bf16+reduce=captured", "unknown dtype 'captured'"),
        ("bf16+reduce=bf16+reduce=fp32", "given twice"),
        ("bf16+fp32()", "not a glob"),
        ("bf16+fp32(a b)", "not a glob"),
        ("bf16+fp32(a)+fp32(b)", "given twice"),
        ("bf16+low(norm)", "did you mean 'norms'?"),
        ("bf16+low(loss|loss)", "named twice"),
        ("bf16+low(loss)+low(loss)", "given twice"),
        ("bf16+fp32", "unknown flag 'fp32'"),
        ("bf16.tp2", "unknown dtype 'bf16.tp2'"),
    ],
)
def test_mistakes(text, hint):
    with pytest.raises(PrecisionSyntaxError) as caught:
        Precision.parse(text)
    assert hint in str(caught.value)
    assert repr(text) in str(caught.value)


@given(st.text("bfp163248+=()|*.lowredue ", max_size=24))
def test_any_text_parses_or_is_named(text):
    with contextlib.suppress(PrecisionSyntaxError, PrecisionDtypeError):
        precision = Precision.parse(text)
        assert Precision.parse(str(precision)) == precision


@pytest.mark.parametrize("text", ["bf16+reduce=fp16", "bf16+accumulate=float16", "fp16+reduce=fp16"])
def test_sums_in_fp16_are_refused(text):
    with pytest.raises(PrecisionDtypeError, match="sums of fp16 gradients overflow"):
        Precision.parse(text)


def test_fp16():
    assert str(Precision.parse("float16")) == "fp16"
    assert Precision.parse("fp16+reduce=bf16").param_dtype == torch.float16


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "accumulate_dtype"])
def test_dtypes_that_cannot_serve(field):
    with pytest.raises(
        PrecisionDtypeError, match=rf"int32 cannot be the {field}\. Use one of bf16, (fp16, )?fp32, fp64"
    ):
        Precision(**{field: torch.int32})


def test_a_glob_that_cannot_be_written_is_refused():
    with pytest.raises(PrecisionSyntaxError, match="not a glob"):
        Precision(torch.bfloat16, fp32=("a|b",))
