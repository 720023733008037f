"""The text of a strategy: a mistake in it is named together with what to write instead."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.errors import FxparError, StrategySyntaxError, WorldSizeError
from fxpar.ir.strategy import Strategy

SYNTAX = [
    ("tp", "'tp'", "an axis is a name and a degree"),
    ("2", "'2'", "an axis is a name and a degree"),
    ("tp2.", "''", "an axis is a name and a degree"),
    (".tp2", "''", "an axis is a name and a degree"),
    ("dp2..tp2", "''", "an axis is a name and a degree"),
    ("dp2,tp2", "'dp2,tp2'", "an axis is a name and a degree"),
    ("dp2 tp2", "'dp2 tp2'", "an axis is a name and a degree"),
    ("tp-2", "'tp-2'", "an axis is a name and a degree"),
    ("tp2.5", "'5'", "an axis is a name and a degree"),
    ("TP2", "'TP2'", "an axis is a name and a degree"),
    ("tp=2", "'tp=2'", "an axis is a name and a degree"),
    ("tp0", "'tp0'", "a degree is from 1 to 1,048,576"),
    ("dp2.tp99999999999", "'tp99999999999'", "a degree is from 1 to 1,048,576"),
    ("dp2.dp4", "'dp4'", "axis 'dp' stands twice without another one between; write dp8"),
    ("dp2.pp2.dp4", "'dp4'", "axis 'dp' stands twice without another one between; write dp8"),
    ("dp2.tp1.dp4", "'dp4'", "axis 'dp' stands twice without another one between; write dp8"),
    ("dp2.tp2.dp1", "'dp1'", "each part of an axis in several places has 2 or more; leave dp1 out"),
    ("pp2.tp2.pp2", "'pp'", "stages are blocks of neighbouring ranks wherever pp stands, so it stands once"),
    ("tp8[*.mlp: tp2.cp2.tp2]", "'tp2'", "axis 'tp' is given twice"),
    ("tpp2", "'tpp2'", "unknown axis 'tpp'; did you mean 'tp'?"),
    ("ddp2", "'ddp2'", "unknown axis 'ddp'; did you mean 'dp'?"),
    ("xyz2", "'xyz2'", "Axes are dp, pp, cp, ring, tp, rows, ep"),
    ("tp2+", "'+'", "there is no flag behind a '+'"),
    ("dp\u0662", "'dp\u0662'", "an axis is a name and a degree"),  # a digit, but none of ASCII
    (None, "'None'", "it is not text"),
    ("tp2+sq", "'sq'", "unknown flag 'sq'; did you mean 'sp'?"),
    ("dp2+ep2", "'ep2'", "ep2 is an axis, not a flag: join axes with '.', as in dp2.ep2"),
    ("tp2+zero", "'zero'", "did you mean 'zero"),
    ("tp2+zero4", "'zero4'", "did you mean 'zero"),
    ("tp2+sp+sp", "'sp'", "flag 'sp' is given twice"),
    ("tp2+zero1+zero2", "'zero2'", "one ZeRO level at a time"),
    ("tp2+zero1+zero1", "'zero1'", "one ZeRO level at a time"),
    ("sp+tp2", "'sp'", "an axis is a name and a degree"),
    ("tp2+remt", "'remt'", "unknown flag 'remt'; did you mean 'remat'?"),
    ("tp2+remat+remat(full)", "'remat(full)'", "flag 'remat' is given twice"),
    ("tp2+remat(", "'remat('", "unknown flag 'remat('; did you mean 'remat'?"),
    ("tp2+remat()", "'remat()'", "'' says nothing about recomputation. Write full, selective, a size such as 200MB"),
    ("tp2+remat(selectiv)", "'remat(selectiv)'", "did you mean 'selective'?"),
    ("tp2+remat(keep_com)", "'remat(keep_com)'", "did you mean 'keep_comm'?"),
    ("tp2+remat(full|selective)", "'remat(full|selective)'", "'full' stands alone in remat(...)"),
    ("tp2+remat(*.ffn|20MB)", "'remat(*.ffn|20MB)'", "'20MB' stands alone in remat(...)"),
    ("tp2+remat(infGB)", "'remat(infGB)'", "'infGB' is not a size"),
    ("tp2+remat(-1MB)", "'remat(-1MB)'", "'-1MB' is not a size"),
    ("dp99999999", "'dp99999999'", "99,999,999 ranks are more than 1,048,576"),
    ("tp2+remat(*.ffn|*.ffn)", "'remat(*.ffn|*.ffn)'", "a glob is given twice"),
    ("tp2+remat(full|keep_comm|redo_comm)", "'remat(full|keep_comm|redo_comm)'", "keep_comm or redo_comm, once"),
    ("tp2+remat(none|keep_comm)", "'remat(none|keep_comm)'", "says twice what to do"),
    ("tp2+remat(200)", "'remat(200)'", "'200' is not a size; units are B, kB, MB, GB, TB, such as 200MB"),
    ("tp2+remat(200MiB)", "'remat(200MiB)'", "'200MiB' is not a size"),
    ("tp2+remat(0MB)", "'remat(0MB)'", "a budget is at least 1 byte"),
    ("tp2+remat(a b)", "'remat(a b)'", "'a b' says nothing about recomputation"),
    ("tp2+offload(0)", "'offload(0)'", "'0' is not a share of what is saved; write one above 0 and up to 1"),
    ("tp2+offload(0.0)", "'offload(0.0)'", "'0.0' is not a share"),
    ("tp2+offload(1.5)", "'offload(1.5)'", "'1.5' is not a share"),
    ("tp2+offload(-0.5)", "'offload(-0.5)'", "'-0.5' is not a share"),
    ("tp2+offload(nan)", "'offload(nan)'", "'nan' is not a share"),
    ("tp2+offload()", "'offload()'", "'' is not a share"),
    ("tp2+offload(\u0661)", "'offload(\u0661)'", "is not a share"),  # a digit, but none of ASCII
    ("tp2+offload+offload", "'tp2+offload+offload'", "flag 'offload' is given twice"),
    ("tp2+lsh(0)", "'lsh(0)'", "'0' is not a share of what experts are given; write one above 0 and up to 1"),
    ("tp2+lsh(1.1)", "'lsh(1.1)'", "'1.1' is not a share"),
    ("tp2+lsh", "'lsh'", "there is no share of what experts are given; write one above 0 and up to 1, such as"),
    ("tp2+lsh(0.2)+lsh(0.2)", "'tp2+lsh(0.2)+lsh(0.2)'", "flag 'lsh' is given twice"),
    (
        "ep2+capacity",
        "'capacity'",
        "there is no capacity; write a number of 1 or more, such as capacity(1.25)",
    ),
    ("ep2+capacity(0.99)", "'capacity(0.99)'", "'0.99' is not a capacity"),
    ("ep2+capacity(2)+capacity(2)", "'ep2+capacity(2)+capacity(2)'", "flag 'capacity' is given twice"),
    ("tp2+ofload", "'ofload'", "did you mean 'offload'?"),
    ("tp2+chunks", "'chunks'", "write in how many chunks of tokens the loss runs, such as chunks(16)"),
    ("tp2+chunks(0)", "'chunks(0)'", "the loss runs in 1 to 64 chunks"),
    ("tp2+chunks(65)", "'chunks(65)'", "the loss runs in 1 to 64 chunks"),
    ("tp2+chunks(-2)", "'chunks(-2)'", "write in how many chunks"),
    ("tp2+chunks(\u0662)", "'chunks(\u0662)'", "write in how many chunks"),  # a digit, but none of ASCII
    ("tp2+chunks(2)+chunks(2)", "'tp2+chunks(2)+chunks(2)'", "flag 'chunks' is given twice"),
    ("ep2+ep_chunks", "'ep_chunks'", "write in how many chunks tokens travel to their experts, such as ep_chunks(2)"),
    ("ep2+ep_chunks(0)", "'ep_chunks(0)'", "tokens travel to their experts in 1 to 64 chunks"),
    ("tp2+tokens", "'tokens'", "write how many tokens a micro-batch has at most, such as tokens(4096)"),
    ("tp2+tokens(0)", "'tokens(0)'", "a micro-batch has from 1 to 2,147,483,647 tokens"),
    ("tp2+tokens(2)+tokens(2)", "'tp2+tokens(2)+tokens(2)'", "flag 'tokens' is given twice"),
    ("tp2[a: +tokens(2)]", "'a: +tokens(2)'", "tokens(...) and role(...) are of all modules"),
    ("tp2 > tp2+tokens(9)", "'tp2+tokens(9)'", "a schedule, cuts and tokens(...) are of all stages"),
    ("tp2+chunk(2)", "'chunk(2)'", "did you mean 'chunks'?"),
    ("pp2+1f1", "'1f1'", "unknown flag '1f1'; did you mean '1f1b'?"),
    ("pp2+gpip", "'gpip'", "did you mean 'gpipe'?"),
    ("pp2+gpipe+zb_h1", "'pp2+gpipe+zb_h1'", "a schedule is given twice"),
    ("pp2+1f1b+1f1b", "'pp2+1f1b+1f1b'", "a schedule is given twice"),
    ("pp2+gpipe(2)", "'gpipe(2)'", "only interleaved_1f1b(2) has several stages per rank"),
    ("pp2+interleaved_1f1b(1)", "'interleaved_1f1b(1)'", "needs 2 or more stages per rank; else write 1f1b"),
    ("pp2+interleaved_1f1b(0)", "'interleaved_1f1b(0)'", "needs 2 or more stages per rank"),
    ("pp2+interleaved_1f1b()", "'interleaved_1f1b()'", "did you mean 'interleaved_1f1b'?"),
    ("tp2+gpipe", "'gpipe'", "it needs a pp axis, such as pp2"),
    ("pp1+interleaved_1f1b", "'interleaved_1f1b(2)'", "it needs a pp axis, such as pp2"),
    ("dp2+cut(a)", "'cut(a)'", "it needs a pp axis, such as pp2"),
    ("pp3+cut(a)", "'cut(a)'", "3 stages have 2 cuts, not 1"),
    ("pp2+cut(a|b)", "'cut(a|b)'", "2 stages have 1 cuts, not 2"),
    ("pp2+interleaved_1f1b+cut(a)", "'cut(a)'", "4 stages have 3 cuts, not 1"),
    ("pp2+cut()", "'cut()'", "'' is not a module; write cut(layers.3|layers.6)"),
    ("pp2+cut(a.*)", "'cut(a.*)'", "'a.*' is not a module"),
    ("pp2+cut(a)+cut(b)", "'pp2+cut(a)+cut(b)'", "flag 'cut' is given twice"),
    ("pp2+cut", "'cut'", "Flags are"),
    ("tp2 >", "'>'", "a pipeline stage stands on each side of it"),
    ("tp2 > pp2", "'pp2'", "what stands between '>' is one stage, without a pp axis"),
    ("dp2 > dp3", "'dp3'", "all stages have as many replicas, the first one 2 and this one 3"),
    ("tp2 > tp2+gpipe", "'tp2+gpipe'", "cuts and tokens(...) are of all stages; write them with the first"),
    (
        "tp2+gpipe > tp2+1f1b",
        "'tp2+1f1b'",
        "a schedule, cuts and tokens(...) are of all stages; write them with the first",
    ),
    (
        "tp2 > tp2+cut(a)",
        "'tp2+cut(a)'",
        "a schedule, cuts and tokens(...) are of all stages; write them with the first",
    ),
    ("tp2+cut(a|b) > tp2", "'cut(a|b)'", "2 stages have 1 cuts, not 2"),
    ("tp2+interleaved_1f1b > tp2", "'tp2+interleaved_1f1b'", "a stage that is written has one place"),
    ("tp2+chunks(2) > tp2", "'tp2+chunks(2)'", "the loss is on the last stage; write its chunks there"),
    ("cp2@0", "'cp2@0'", "says where one of several stages begins, such as cp2 > cp2 > cp4@0"),
    ("cp2 > cp2@x", "'cp2@x'", "behind '@' stands the rank at which a stage begins, such as cp4@0"),
    ("cp2 > cp2+remat@0", "'cp2+remat@0'", "stands behind the axes of a stage, before its flags, such as cp4@0+remat"),
    ("cp2 > cp4@3", "'cp4@3'", "no stage is on rank 2, where an earlier one has to begin"),
    ("dp2 > dp2@0", "'dp2'", "stages that share ranks have one replica"),
    ("cp2+gpipe > cp2@0", "'cp2+gpipe'", "run one micro-batch after the other: 1f1b or zb_h1"),
]


@pytest.mark.parametrize(("text", "part", "why"), SYNTAX, ids=[text or "empty" for text, _, _ in SYNTAX])
def test_syntax_errors(text, part, why):
    with pytest.raises(StrategySyntaxError) as caught:
        Strategy.parse(text)
    message = str(caught.value)
    assert repr(text) in message
    assert f"(at {part})" in message
    assert why in message
    assert "for example 'dp2.tp4+sp+zero1'" in message


@given(st.text(string.ascii_lowercase + string.digits + ".+ _-@()|>", max_size=12))
def test_any_text_parses_or_says_why(text):
    try:
        strategy = Strategy.parse(text)
    except FxparError:
        return
    assert Strategy.parse(str(strategy)) == strategy


def test_messages_read_as_sentences():
    """No nearest name: the list of names still starts after a full stop."""
    with pytest.raises(StrategySyntaxError, match=r"unknown axis 'xyz'\. Axes are"):
        Strategy.parse("xyz2")
    with pytest.raises(StrategySyntaxError, match=r"unknown flag 'fast'\. Flags are"):
        Strategy.parse("tp2+fast")


def test_world_error_names_both_numbers():
    with pytest.raises(WorldSizeError, match=r"'dp2.tp4' needs 8 ranks .* but the world has 6"):
        Strategy.parse("dp2.tp4", world=6)
    with pytest.raises(WorldSizeError, match=r"needs 9 ranks \(its stages 8 \+ 1\), .* so that the sum is 8, or use 9"):
        Strategy.parse("tp4.cp2 > dp1", world=8)
    assert Strategy.parse("dp2.tp4", world=8).world == 8
