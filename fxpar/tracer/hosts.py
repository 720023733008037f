"""Hugging Face transformers: its attention and mask interfaces lead to `fxpar::attention` while a model is captured,
and its experts interface to `fxpar::expert_mm`.

The mask function returns the dense mask that transformers would make and remembers beside it what the mask means
(`MaskRule`). The attention function that gets exactly this tensor uses the meaning, and the dense mask becomes dead
code; a mask that the model has changed on the way is used as it is. Models that do not go through the interfaces
keep what they have, and their calls of torch's attention are redirected like those of any module.

transformers is imported only if the user's program has imported it already.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.torch_api.symbolic import known_equal
from fxpar.torch_api.tracing import is_computed_from
from fxpar.tracer.attention import AttentionRule, attend
from fxpar.tracer.context import CaptureContext, MaskRule, attribute, current
from fxpar.tracer.counts import is_filled
from fxpar.tracer.documents import documents_of_positions, with_batch_documents
from fxpar.tracer.experts import experts_forward, experts_modules
from fxpar.tracer.hosts_loops import loops_as_ops
from fxpar.tracer.hosts_scans import scans_as_ops

NAME = "fxpar"
EAGER = "fxpar_eager"  # of models whose own attention is "eager": a part of them may add the mask to its scores


@contextmanager
def host_models(model: nn.Module) -> Iterator[None]:
    """Inside the block, models of transformers within `model` use the "fxpar" attention, its experts, and no cache."""
    if "transformers" not in sys.modules:
        yield
        return
    with _own_experts(model), loops_as_ops(model), _own_attention(model):
        yield


@contextmanager
def _own_experts(model: nn.Module) -> Iterator[None]:
    configs = {id(module.config): module.config for module in experts_modules(model)}
    if not configs:
        yield
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    with contextlib.ExitStack() as stack:
        stack.enter_context(_registered(ALL_EXPERTS_FUNCTIONS, NAME, experts_forward))
        for config in configs.values():
            stack.enter_context(attribute(config, "_experts_implementation_internal", NAME))
        yield


@contextmanager
def _own_attention(model: nn.Module) -> Iterator[None]:
    from transformers import PreTrainedModel
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    models = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    if not models:
        yield
        return
    with contextlib.ExitStack() as stack:
        for interface, name, function in (
            (ALL_ATTENTION_FUNCTIONS, NAME, attention_forward),
            (ALL_ATTENTION_FUNCTIONS, EAGER, attention_forward),
            (ALL_MASK_ATTENTION_FUNCTIONS, NAME, mask_forward),
            (ALL_MASK_ATTENTION_FUNCTIONS, EAGER, added_mask_forward),
            (ALL_MASK_ATTENTION_FUNCTIONS, "eager", added_mask_forward),  # models that write their attention out
            (ALL_MASK_ATTENTION_FUNCTIONS, "sdpa", mask_forward),  # models that call torch's attention themselves
        ):
            stack.enter_context(_registered(interface, name, function))
        for config, switch in _configs(models):
            if switch:
                name = EAGER if config._attn_implementation == "eager" else NAME
                stack.enter_context(attribute(config, "_attn_implementation_internal", name))
            if hasattr(config, "use_cache"):
                stack.enter_context(attribute(config, "use_cache", False))
        stack.enter_context(_described_masks())
        stack.enter_context(scans_as_ops(model))
        yield


@contextmanager
def _registered(interface: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """`function` under a name of an interface, and inside the block alone."""
    mapping: dict[str, Any] = type(interface)._global_mapping
    old = mapping.get(name)
    mapping[name] = function
    try:
        yield
    finally:
        if old is None:
            del mapping[name]
        else:
            mapping[name] = old


def _configs(models: list[Any]) -> list[tuple[Any, bool]]:
    """Every config of the models, sub-configs too, and whether all models that use it take their attention by name."""
    found: dict[int, tuple[Any, bool]] = {}
    for model in models:
        able = model._can_set_attn_implementation()
        todo = [model.config]
        while todo:
            config = todo.pop()
            known = found.get(id(config))
            found[id(config)] = (config, able and (known is None or known[1]))
            subs = (getattr(config, key, None) for key in getattr(config, "sub_configs", {}))
            todo += [sub for sub in subs if sub is not None and id(sub) not in found]
    return list(found.values())


# --------------------------------------------------------------------------------------------------- masks
@contextmanager
def _described_masks() -> Iterator[None]:
    """Make the mask builders of transformers say what they build, in an attribute `fxpar_rule` of the mask function.

    Releases of transformers differ in the builders they have. One that is missing, or new, costs knowledge only: a
    mask function of unknown meaning leaves the dense mask in the graph, as the model makes it.
    """
    from transformers import masking_utils as masks

    describe: dict[str, Callable[..., MaskRule | None]] = {
        "sliding_window_causal_mask_function": lambda window: MaskRule(True, int(window)),
        "chunked_causal_mask_function": lambda size, _: MaskRule(True, chunk=int(size)),
        "packed_sequence_mask_function": lambda documents: MaskRule(False, documents=documents),
        "remap_positions_for_packed_sequence": lambda function, positions: _changed(function, positions=positions),
        "packed_sequence_compatibility_function": lambda function, positions, documents: _changed(
            function, positions=positions, documents=documents
        ),
        "and_masks": _both,
    }
    with contextlib.ExitStack() as stack:
        for name, rule in describe.items():
            if hasattr(masks, name):
                stack.enter_context(attribute(masks, name, _describing(getattr(masks, name), rule)))
        stack.enter_context(attribute(masks, "find_packed_sequence_indices", packed_documents))
        yield


def _describing(builder: Callable[..., Any], rule: Callable[..., MaskRule | None]) -> Callable[..., Any]:
    def build(*args: Any, **kwargs: Any) -> Any:
        function = builder(*args, **kwargs)
        function.fxpar_rule = rule(*args, **kwargs)
        return function

    return build


def _rule_of(function: Callable[..., Any]) -> MaskRule | None:
    """What a mask function means, if that is known."""
    from transformers import masking_utils as masks

    if function is masks.causal_mask_function:
        return MaskRule(causal=True)
    if function is masks.bidirectional_mask_function:
        return MaskRule(causal=False)
    return getattr(function, "fxpar_rule", None)


def _changed(function: Callable[..., Any], **changes: Any) -> MaskRule | None:
    rule = _rule_of(function)
    return None if rule is None else replace(rule, **changes)


def _both(*functions: Callable[..., Any]) -> MaskRule | None:
    """What hides all that one of the functions hides: known for a rule and the documents that it stays inside."""
    if len(functions) != 2:
        return None
    rule, within = map(_rule_of, functions)
    if rule is None or rule.documents is not None or within is None:
        return None
    only_documents = replace(within, documents=None) == MaskRule(causal=False)
    return replace(rule, documents=within.documents) if only_documents else None


def packed_documents(position_ids: Tensor) -> Tensor | None:
    """In place of transformers' `find_packed_sequence_indices`: the documents, if positions come from the batch at all.

    Positions that the model makes itself count up once, so there is one document.
    """
    context = current()
    if context is None or not is_computed_from(position_ids, "batch"):
        return None
    return documents_of_positions(context, position_ids)


def mask_forward(*args: Any, **kwargs: Any) -> Tensor:
    """The mask function of the "fxpar" attention: the dense bool mask [B, 1, Sq, Skv], with its meaning noted."""
    return _noted(*_mask_and_rule(*args, **kwargs))


def added_mask_forward(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Tensor:
    """The same as numbers that are added to scores, as "eager" makes them: 0, and the least of `dtype` where hidden."""
    dense, rule = _mask_and_rule(*args, **kwargs)
    return _noted(torch.zeros_like(dense, dtype=dtype).masked_fill(~dense, torch.finfo(dtype).min), rule)


def _noted(mask: Tensor, rule: MaskRule | None) -> Tensor:
    context = current()
    if context is not None and rule is not None:
        context.add_mask(mask, rule)
    return mask


def _mask_and_rule(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, MaskRule | None]:
    """The dense bool mask [B, 1, Sq, Skv], and what it means if that is known."""
    from transformers.masking_utils import sdpa_mask

    if attention_mask is not None and is_filled(attention_mask):
        attention_mask = None  # made by the model itself: it hides nothing
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    dense: Any = sdpa_mask(
        batch_size, q_length, kv_length, *args, mask_function=mask_function, attention_mask=attention_mask, **kwargs
    )
    rule = _rule_of(mask_function)
    if rule is None or not known_equal(q_length, kv_length):
        return dense, None
    if attention_mask is not None:
        if rule.chunk or rule.documents is not None or not known_equal(attention_mask.shape[-1], kv_length):
            return dense, None
        rule = replace(rule, keys=attention_mask)
    elif rule.chunk:
        if rule.documents is not None and rule.positions is None:
            return dense, None  # chunks of the row, cut at documents: releases before 5.23
        positions = torch.arange(q_length).unsqueeze(0) if rule.positions is None else rule.positions
        rule = replace(rule, documents=(positions % rule.chunk == 0).cumsum(-1))
    return dense, rule


# ----------------------------------------------------------------------------------------------- attention
def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The "fxpar" attention: query [B, H, S, E], key, value [B, Hkv, S, E] -> [B, S, H, E]."""
    context = current()
    assert context is not None
    _refuse_unknown(kwargs, context)
    rule = _mask_rule(module, query, attention_mask, is_causal, context)
    if rule is None:
        mask, rule = attention_mask, MaskRule(causal=False)
    else:
        mask, rule = rule.hidden_keys(), with_batch_documents(rule, query, key, kwargs.get("cu_seq_lens_q"))
    if position_bias is not None:
        mask = _with_bias(mask, position_bias)
    wanted = AttentionRule(
        rule.causal,
        rule.window,
        float(softcap or 0.0),
        scaling,
        mask,
        rule.documents,
        float(dropout),
        _sinks(s_aux, sinks, context),
    )
    return attend(query, key, value, wanted).transpose(1, 2).contiguous(), None


def _sinks(per_head: Tensor | None, per_query: Tensor | None, context: CaptureContext) -> Tensor | None:
    """Sinks as the op takes them, [B or 1, H, S or 1], from [H] and [B, H, S, 1]."""
    found = [s for s in (per_head, per_query) if s is not None]
    wanted = 1 if per_query is None else 4
    if len(found) > 1 or any(sinks.dim() != wanted or (wanted == 4 and sinks.shape[-1] != 1) for sinks in found):
        shapes = " and ".join(str(tuple(sinks.shape)) for sinks in found)
        why = f"attention with sinks of the shape {shapes}"
        raise context.unsupported(why, "Give one per head (s_aux [H]) or per query (sinks [B, H, S, 1]).")
    if per_head is not None:
        return per_head[None, :, None]
    return None if per_query is None else per_query[..., 0]


def _refuse_unknown(kwargs: dict[str, Any], context: CaptureContext) -> None:
    """Raise UnsupportedOpError for a number that some attention may compute with, unless the batch has it."""
    given = {id(value) for value in context.batch.values()}
    for name, value in kwargs.items():
        number = isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())
        if number and name not in _WITHOUT_EFFECT and id(value) not in given:
            raise context.unsupported(f"attention with {name!r}", "Write it into the scores that attention is given.")


_WITHOUT_EFFECT = {"cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "hidden_states", "position_embeddings"} | {
    "num_items_in_batch",
    "position_ids",
}
"""Arguments of attentions that say again what queries, keys and masks have in them already."""


def _mask_rule(
    module: nn.Module, query: Tensor, mask: Tensor | None, is_causal: bool | None, context: CaptureContext
) -> MaskRule | None:
    """What the mask means; None for one that nothing is known about.

    Without a mask there is no window either, and a single query sees all keys, as with torch's attention.
    """
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        return MaskRule(bool(causal) and not known_equal(query.shape[2], 1))
    return context.mask_rule(mask)


def _with_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    """A float mask: the bias, -inf where `mask` hides a key."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, -torch.inf)
    return bias + mask
