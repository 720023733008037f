"""A strategy per module gives the gradients of a single device, whatever roles, degrees, ZeRO levels and recomputation
are mixed.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxpar import losses
from fxpar.checking import CheckResult
from fxpar.errors import BinsError, RematGlobError, RuleConflictError, RuleGlobError, RuleHeadsError
from fxpar.ir.fqn import starred
from fxpar.ir.module_rules import ModuleRule
from fxpar.ir.remat import Remat
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.models.llama import Llama, LlamaOptions
from fxpar.passes.pack_documents import pack_documents
from fxpar.runtime.micro import as_one_sequence
from tests.captured import Captured, fused, gpt, llama, take, tokens
from tests.repeat import crossed, examples, thinned
from tests.stages.models import Model, loaded, random_model


@dataclass(frozen=True)
class Named:
    """A model, and what its parts are called."""

    attention: str
    ffn: str
    block: str
    ends: str


PARTS = {
    "llama": Named("*.attention", "*.ffn", "layers", "{embedding,head}"),
    "gpt": Named("*.attention", "*.{up,down}", "layers", "embedding"),
    "hf:llama": Named("*.self_attn", "*.mlp", "model.layers", "{model.embed_tokens,lm_head}"),
    "hf:qwen3": Named("*.self_attn", "*.mlp", "model.layers", "{model.embed_tokens,lm_head}"),
    "hf:gpt2": Named("*.attn", "*.mlp", "transformer.h", "transformer.wte"),
    "hf:gemma2": Named("*.self_attn", "*.mlp", "model.layers", "model.embed_tokens"),
}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
OPTIONS = {"hf:gpt2": {"n_head": 8}}

# {a} attention, {f} feed-forward, {b}.0 and {b}.1 blocks, {e} embedding and head.
STRATEGIES = [
    # roles
    "tp2+sp[{b}.{{0-1}}: cp2; {a}: tp2]",
    "dp2.cp2[{f}: tp2+sp; {e}: tp2]",
    "dp2.rows2+zero3",
    "cp4[{a}: rows4; {e}: tp4]",
    # degrees
    "cp2.tp2+sp[{a}: rows2.cp2; {f}: tp4]",
    "rows2.cp2[{f}: tp4+sp; {a}: cp4+remat]",
    "rows4[{a}: cp2.tp2; {b}.0: rows2.tp2+zero3]",
    "cp4[{a}: tp2.cp2; {f}: tp4; {e}: cp2.tp2]",
    "tp8+sp[{a}: cp2.tp4+sp; {f}: cp4.tp2]",
    "tp6+sp[{a}: cp2.tp3; {f}: cp6]",
    # ZeRO
    "dp4+zero3[{b}.1: +zero0; {e}: +zero1]",
    "dp2.tp2+sp[{a}: cp2+zero3; {f}: +zero1]",
    "cp4+zero3[{a}: tp2.cp2; {f}: tp4+sp]",
    # recomputation
    "tp2+sp[{a}: cp2+remat; {f}: +remat(selective)]",
    "cp2+remat(selective)[{b}.0: +remat(keep_comm); {f}: tp2]",
    # stages
    "pp2.cp2+zb_h1[{b}.0: tp2; {b}.1: +remat]",  # what a stage is sent lies as without rules
    # stages that differ, on as many ranks and on others
    "dp2.cp2+gpipe+zero3 > dp2+zero1",
    "dp1+cut({b}.1) > tp4+sp[{a}: cp2.tp2; {b}.1: +remat]",
    "rows2 > rows3",
]

# Each is part of one above, or of a test below, that has the same change of roles and something more; or has together
# what two of these have. Nightly: they say which part fails.
COVERED = [
    "cp4[{a}: tp4+sp; {f}: tp4]",
    "cp2.tp2+sp[{f}: tp4+sp; {a}: cp4]",
    "dp4[{b}.0: +zero3]",
    "dp2.tp2+sp+zero2[{a}: cp2]",
    "dp2+remat[{b}.1: +remat(none)]",
    "pp2.tp2+sp[{a}: rows2; {b}.1: cp2]",
    "tp2+sp > cp2",
    "tp4+sp[{a}: cp4] > tp2.rows2",
    "rows3+zb_h1 > tp2",
    "tp2 > dp1+remat",
    "tp4+sp[{a}: cp4]",
    "dp2.pp2+zero2[{b}.0: +zero3]",
    "tp2+sp[{a}: cp2]",
    "tp4+sp[{f}: cp4]",
    "rows2",
    "tp2+sp[{a}: rows2]",
    "tp4+sp[{a}: rows4]",
    "rows2[{f}: tp2+sp]",
    "tp4+sp[{a}: rows2.tp2]",
    "tp4[{a}: tp2.cp2]",
    "cp2.tp2[{a}: tp4; {f}: cp4]",
    "tp2.cp2[{a}: cp2.tp2+sp]",
    "cp8[{a}: cp2.tp4; {f}: tp8+sp]",
    "dp2.cp2+zero3[{f}: tp2]",
    "dp2.cp4+zero1[{a}: cp2.tp2+zero2]",
    "dp2+zero3[{f}: +remat; {b}.0: +zero1]",
    "pp2.tp4+sp+gpipe[{a}: cp2.tp2; {e}: cp4]",
    "pp2.dp2.tp2[{a}: cp2+zero3; {b}.1: +remat]",
    "tp2[{a}: cp2]",
    "cp2[{f}: tp2]",
    "cp2[{f}: tp2+sp]",
    "cp4[{e}: tp4]",
    "tp4[{b}.0: cp4]",
    "dp2.tp2+sp[{a}: cp2]",
    "tp4+sp[{a}: cp2.tp2]",
    "cp2.tp2+sp[{f}: tp4+sp]",
    "tp8+sp[{a}: cp2.tp4]",
    "cp4[{a}: tp2.cp2+zero3]",
    "cp4[{f}: cp2.tp2]",
    "pp2.tp2+sp[{a}: cp2]",
    "tp2+sp[{b}.0: +remat]",
]


@functools.cache
def model(name: str) -> Captured:
    if name == "llama":
        return llama(layers=2, heads=8, kv_heads=4, dim=32)
    if name == "gpt":
        return gpt(heads=8)
    return with_checks(loaded(name, **OPTIONS.get(name, HEADS)))


def with_checks(found: Model) -> Captured:
    numbered = tuple(as_one_sequence(found.graph.inputs, batch, i) for i, batch in enumerate(found.batches))
    return Captured(found.graph, dict(found.params), dict(found.buffers), numbered)


def parted(template: str, name: str) -> str:
    """The strategy for a model."""
    parts = PARTS[name]
    return template.format(a=parts.attention, f=parts.ffn, b=parts.block, e=parts.ends)


def assert_exact(result: CheckResult) -> None:
    assert result.ok, result
    assert max(result.loss_rel_err, result.grad_max_rel_err) <= 1e-10


@pytest.mark.parametrize(
    ("template", "name"),
    [*crossed(STRATEGIES, list(PARTS)), *thinned(itertools.product(COVERED, PARTS), [])],
)
def test_gradients_are_those_of_one_device(template, name):
    if "tp3" in template:
        with pytest.raises(RuleHeadsError, match=r"cannot be shared evenly under tp3\. The nearest degree is tp[24];"):
            lower(model(name).graph, parted(template, name))
        return
    assert_exact(model(name).check(parted(template, name)))


@st.composite
def ruled(draw, globs: list[str]) -> str:
    """A strategy of up to eight ranks with rules for some of these globs, none of which holds another."""
    world, replicas = draw(st.sampled_from([2, 4, 4, 8])), draw(st.sampled_from([1, 1, 2]))

    def axes() -> tuple[tuple[str, int], ...]:
        first = draw(st.sampled_from([d for d in (1, 2, 4, 8) if d <= world]))
        names = draw(st.permutations(["tp", "cp", "rows"]))
        return tuple((n, d) for n, d in ((names[0], first), (names[1], world // first)) if d > 1)

    rules = []
    for glob in draw(st.lists(st.sampled_from(globs), unique=True, min_size=1, max_size=3)):
        zero = draw(st.sampled_from([None, 0, 1, 2, 3]))
        remat = draw(st.sampled_from([None, None, Remat("full"), Remat("selective")]))
        rules.append(ModuleRule(glob, axes(), draw(st.booleans()), zero, remat))
    outer = (("dp", replicas),) if replicas > 1 else ()
    zero = draw(st.integers(0, 3))
    return str(Strategy((*outer, *axes()), draw(st.booleans()), zero, rules=tuple(rules)))


# 97 rows of a table do not divide: on two halves of an axis they are padded otherwise than on all of it.
@example("tp4+sp[*.attention: cp4; layers.0.attention_norm: tp2.cp2]", 8)
# One axis cuts keys and values, and queries are cut by both: in the other order a rank has other heads of these.
@example("cp2.tp2[*.attention: tp4]", 2)
@example("tp2.cp2[*.attention: cp2.tp2]", 2)
# Keys and values are terms of a sum over part of one atom and all of the next, which are written as one.
@example("tp8[*.attention: tp4.cp2]", 2)
@settings(max_examples=examples(5))
@given(
    ruled(["*.attention", "*.ffn", "embedding", "head", "norm", "layers.0.attention_norm"]),
    st.sampled_from([1, 2, 4, 8]),
)
def test_any_rules(strategy, kv_heads):
    """Eight query heads are enough for all of them; keys and values may have fewer."""
    try:
        result = llama(layers=1, heads=8, kv_heads=kv_heads, dim=32).check(strategy)
    except RuleHeadsError:
        assert kv_heads < 8
        return
    assert_exact(result)


@settings(max_examples=examples(10))
@given(seed=st.integers(0, 10**6), strategy=ruled(["layers.{0-2}", "layers.{3-4}", "layers.5", "embedding", "weights"]))
def test_any_rules_on_any_program(seed, strategy):
    """Random programs, in which a rule matches what it happens to match."""
    try:
        result = with_checks(random_model(seed)).check(strategy)
    except (BinsError, RuleGlobError, RuleHeadsError):
        return
    assert_exact(result)


@settings(max_examples=examples(2))
@given(st.lists(ruled(["*.attention", "*.ffn"]), min_size=2, max_size=3))
def test_any_stages(strategies):
    """Stages under strategies of their own; of replicas they have as many as the first."""
    stages = [Strategy.parse(text) for text in strategies]
    replicas = stages[0].replicas
    same = [replace(one, axes=(("dp", replicas), *(axis for axis in one.axes if axis[0] != "dp"))) for one in stages]
    try:
        result = llama(layers=len(same), heads=8, kv_heads=2, dim=32).check(" > ".join(map(str, same)))
    except RuleHeadsError:
        return
    assert_exact(result)


@pytest.mark.parametrize(
    ("strategy", "error", "why"),
    [
        ("tp2 > tp2[layers.0: cp2]", RuleGlobError, "matches no module of stage 1; did you mean 'layers.1'?"),
        ("tp2+remat(layers.1) > tp2", RematGlobError, "'layers.1' matches no module"),
        ("tp2[*.attn: cp2]", RuleGlobError, "matches no module of the model; did you mean '*.attention'?"),
        ("tp2[layers.7: cp2]", RuleGlobError, "matches no module"),
        ("pp2.tp2[layers.7: cp2]", RuleGlobError, "matches no module"),
        ("tp2[*.attention: cp2; layers.0.*: tp2+sp]", RuleConflictError, "two rules say the roles of module"),
        (
            "tp16[*.attention: cp16]",
            RuleHeadsError,
            "rule '*.attention: cp16': the attention of 'layers.0.attention' has 8 query and 4 key-value heads, which "
            "cannot be shared evenly under cp16. The nearest degree is cp4;",
        ),
    ],
)
def test_rules_that_do_not_fit_the_model(strategy, error, why):
    with pytest.raises(error) as raised:
        lower(model("llama").graph, strategy)
    assert why in str(raised.value)


@pytest.mark.parametrize(
    "strategy", ["tp2[*: +remat]", "tp4+sp[embedding: tp2.cp2+zero3]", "tp4[*.ffn: tp2.cp2+zero1]"]
)
def test_dims_that_do_not_divide(strategy):
    """97 rows of a table and 37 columns, and everything recomputed that is in no module either."""
    assert_exact(llama(layers=1, heads=8, kv_heads=8, dim=32, ffn=37).check(strategy))


@pytest.mark.parametrize("how", thinned(["split", "chunk", "slice", "view"], ["slice", "view"]))
def test_a_fused_weight_on_parts_of_an_axis(how):
    """The second part cuts what the first one left, bounds of slices too."""
    assert_exact(fused(how, 8, 8).check("tp4+sp[head: tp2.cp2]"))


def test_what_is_for_tokens_everywhere_need_not_cut_weights():
    program = lower(model("llama").graph, "tp4+sp[*: cp2.tp2]")
    assert not any("shards no parameter" in note for note in program.notes)


def of_documents(*lengths: int) -> dict[str, Tensor]:
    """A row of documents of these lengths."""
    ids, labels = (torch.randint(97, (1, sum(lengths))) for _ in range(2))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    marks = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "document_ids": marks}


@pytest.mark.parametrize(
    "strategy",
    thinned(
        ["rows2", "rows4", "tp4+sp[*.attention: rows4]", "dp2.rows2.cp2[*.ffn: tp4]", "pp2.rows4"],
        ["dp2.rows2.cp2[*.ffn: tp4]", "pp2.rows4"],
    ),
)
def test_many_documents_in_few_bins(strategy):
    """Also fewer documents than bins, one that is longer than all others, and bins of no document."""
    torch.manual_seed(0)
    rows = [of_documents(5, 9, 2, 7, 4, 1, 6), of_documents(3, 3), of_documents(40, 1, 2, 3, 1)]
    found = take(Llama(LlamaOptions(2, 32, 8, 4, 48, 97)), losses.causal_lm, tokens(97, 13))
    assert_exact(replace(found, batches=tuple(rows)).check(strategy))


def collectives(strategy: str, rows: bool = False) -> Counter[tuple[str, str, bool]]:
    """Kind, module, and whether it is of the backward, of all that run per micro-batch, with one sequence per row or
    with `rows` of documents.
    """
    graph = model("hf:llama").graph
    comms = lower(pack_documents(graph) if rows else graph, strategy).communications()
    return Counter((comm.kind, starred(comm.fqn), comm.backward) for comm in comms if comm.part == "body")


def inside(found: Counter[tuple[str, str, bool]], module: str) -> Counter[tuple[str, str, bool]]:
    return Counter({key: count for key, count in found.items() if module in key[1]})


def test_attention_in_bins_sends_nothing():
    """tp+sp leaves tokens as rows wants them: what is left is what the rest sends under tp+sp."""
    mixed, tp = (collectives(s, rows=True) for s in ("tp4+sp[*.self_attn: rows4]", "tp4+sp"))
    assert not inside(mixed, "self_attn")
    assert not mixed - tp
    assert sum(mixed.values()) < sum(tp.values())


@pytest.mark.parametrize("roles", ["rows2.tp2", "tp2.rows2"])
def test_bins_are_cut_first(roles):
    """Then terms of a sum over heads become the tokens of a rank in one step, wherever rows stands."""
    found = inside(collectives(f"tp4+sp[*.self_attn: {roles}]", rows=True), "self_attn")
    assert {kind for kind, _, _ in found} == {"reduce_scatter"}


def test_a_change_of_role_costs_nothing():
    """Between modules tokens lie alike under tp+sp and cp: attention sends what it sends under cp, and the rest what it
    sends under tp+sp, without what brings tokens to attention and back there.
    """
    mixed, tp, cp = (collectives(s) for s in ("tp4+sp[*.self_attn: cp4]", "tp4+sp", "cp4"))
    assert inside(mixed, "self_attn") == inside(cp, "self_attn")
    assert not mixed - inside(mixed, "self_attn") - tp
    assert sum(inside(cp, "self_attn").values()) == 16
