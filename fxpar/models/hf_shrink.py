"""Tiny configurations of any transformers decoder, from the attribute names that their configurations share.

Sizes are small, and awkward where a type allows it: an odd vocabulary, half as many key-value heads as query heads, a
feed-forward width that few degrees divide. What a user sets wins, and sizes that depend on it follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HIDDEN, HEADS, HEAD_DIM, FFN, VOCAB, LAYERS, POSITIONS, WINDOW = 64, 4, 16, 88, 131, 2, 512, 16
EXPERTS, EXPERT_FFN = 8, 44

HIDDEN_NAMES = [
    "hidden_size",
    "n_embd",
    "d_model",
    "dim_model",
    "embedding_size",
    "word_embed_proj_dim",
    "emb_dim",
    "embedding_dim",
    "lru_width",
    "input_embedding_size",
    "output_embedding_size",
]
HEAD_NAMES = [
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "attention_heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
    "num_decoder_attention_heads",
    "num_encoder_attention_heads",
]
KV_HEAD_NAMES = ["num_key_value_heads", "num_kv_heads"]
HEAD_DIM_NAMES = ["head_dim", "dim_head", "d_head", "query_pre_attn_scalar", "kv_channels"]
LAYER_NAMES = [
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "num_blocks",
]
# Plain sizes: name -> tiny value, set only where the type has a number there by default.
SIZES: dict[str, int] = {
    **dict.fromkeys(["vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"], VOCAB),
    **dict.fromkeys(
        [
            "intermediate_size",
            "n_inner",
            "ffn_dim",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "dim_ff",
            "dff",
            "ffn_hidden_size",
            "d_inner",
            "intermediate_size_mlp",
            "dense_intermediate_size",
            "feed_forward_size",
        ],
        FFN,
    ),
    **dict.fromkeys(
        [
            "max_position_embeddings",
            "n_positions",
            "n_ctx",
            "max_seq_len",
            "max_target_positions",
            "max_source_positions",
            "model_max_length",
            "context_length",
            "original_max_position_embeddings",
            "position_bias_max_distance",
        ],
        POSITIONS,
    ),
    **dict.fromkeys(
        [
            "sliding_window",
            "window_size",
            "local_attention",
            "attention_window_size",
            "sliding_window_size",
            "attention_chunk_size",
        ],
        WINDOW,
    ),
    **dict.fromkeys(
        ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"],
        EXPERTS,
    ),
    **dict.fromkeys(
        [
            "moe_intermediate_size",
            "expert_ffn_hidden_size",
            "shared_expert_intermediate_size",
            "shared_experts_intermediate_size",
            "moe_shared_expert_intermediate_size",
        ],
        EXPERT_FFN,
    ),
    "zero_expert_num": 2,
    "router_hidden_size": 24,
    # Latent attention: ranks and the two parts of a head.
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_rope_head_dim": HEAD_DIM // 2,
    "qk_nope_head_dim": HEAD_DIM // 2,
    "qk_head_dim": HEAD_DIM,
    "v_head_dim": 12,
    "rotary_dim": HEAD_DIM // 2,
    "hidden_size_per_layer_input": 12,
    "laurel_rank": 8,
    "num_kv_shared_layers": 0,
    "max_window_layers": 1,
    "dim_model_base": HIDDEN // 2,
    "position_bias_num_buckets": 32,
    "index_head_dim": HEAD_DIM,
    "index_n_heads": HEADS,
    # Scans: heads times their width are twice the hidden size, which is what types expand it by.
    **dict.fromkeys(["mamba_n_heads", "mamba_num_heads"], 2 * HEADS),
    **dict.fromkeys(["mamba_d_head", "mamba_head_dim", "mamba_headdim"], HEAD_DIM),
    "mamba_d_ssm": 2 * HIDDEN,
    **dict.fromkeys(["mamba_d_state", "ssm_state_size", "state_size", "linear_key_head_dim"], 8),
    **dict.fromkeys(["n_groups", "linear_num_key_heads"], HEADS // 2),
    **dict.fromkeys(["linear_num_value_heads", "linear_num_heads"], HEADS),
    **dict.fromkeys(["linear_value_head_dim", "linear_head_dim"], HEAD_DIM),
    **dict.fromkeys(["time_step_rank", "mamba_dt_rank"], 4),
    "adapter_rank": 8,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}
# Sizes that are made smaller, and never larger: experts of a token, groups of experts, and layers without experts.
AT_MOST: dict[str, int] = {
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"], 2),
    **dict.fromkeys(["n_group", "num_expert_group"], 2),
    **dict.fromkeys(["topk_group", "first_k_dense_replace", "num_dense_layers"], 1),
}
# Sizes that some types leave open by default.
UNSET = {
    **{"n_inner": FFN, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_shared_experts": 1},
    **{"indexer_n_heads": HEADS, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM},
    **{"indexer_budget": WINDOW // 2, "indexer_compress_ratio": 4},
}
FLAGS = {"use_cache": False, "is_decoder": True}


def tiny(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a tiny configuration.

    `defaults` are the attributes of the type's own default configuration, `given` what the user sets (by the same
    names). Numbers are replaced by name; lists with one entry per layer are cut to the new number of layers.
    """
    result: dict[str, Any] = {k: v for k, v in FLAGS.items() if k in defaults}
    result.update({k: v for k, v in SIZES.items() if _is_size(defaults.get(k))})
    result.update({k: v for k, v in UNSET.items() if k in defaults and defaults[k] is None})
    result.update({k: min(v, defaults[k]) for k, v in AT_MOST.items() if _is_size(defaults.get(k))})
    result.update(_attention(defaults, given))
    layers = _first(given, LAYER_NAMES, LAYERS)
    result.update({k: layers for k in LAYER_NAMES if _is_size(defaults.get(k))})
    result.update({**result, **given})
    vocab = _first(result, ("vocab_size",), VOCAB)
    result.update(_token_ids(defaults, vocab))
    result.update(_per_layer(defaults, layers))
    if "conv_L_cache" in defaults and set(result.get("layer_types") or ["full_attention"]) == {"full_attention"}:
        # Published models have both kinds, the defaults only one.
        result["layer_types"] = ["conv", *["full_attention"] * (layers - 1)]
    if "kv_n_heads" in (defaults.get("attn_config") or {}):  # dbrx has parts with sizes, and needs two that are unset
        half = max(1, _first(result, HEAD_NAMES, HEADS) // 2)
        result["attn_config"] = {"kv_n_heads": half, "rope_theta": 10_000.0, "clip_qkv": 8.0}
        result["ffn_config"] = {"ffn_hidden_size": FFN, "moe_num_experts": EXPERTS, "moe_top_k": 2}
    if defaults.get("attention_type") == "block_sparse":
        result["attention_type"] = "original_full"  # of short sequences; at run time the type makes new modules for it
    if {"num_heads", "head_dim", "expand"} <= set(defaults):
        result["expand"] = 1  # its heads are those of the scan, as wide as the hidden size
    if "n_mamba_heads" in defaults and "layers_block_type" in result and "attn_layer_period" in defaults:
        result["layers_block_type"] = ["hybrid"] * layers  # these share their weights, so there must be two
    if defaults.get("rope_parameters") == {}:  # a type whose defaults name no rotary frequencies at all
        rope = {"rope_type": "default", "rope_theta": 10_000.0}
        result["rope_parameters"] = {kind: rope for kind in result.get("layer_types", ())} or rope
    if defaults.get("use_sliding_window") is False and "sliding_window" in defaults:
        result.update(use_sliding_window=True, sliding_window=WINDOW)
    return {**result, **given}


def _attention(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Head counts, widths and head dims that fit each other and what the user gave."""
    heads = _first(given, HEAD_NAMES, HEADS)
    hidden = _first(given, HIDDEN_NAMES, HEAD_DIM * heads)
    head_dim = _first(given, HEAD_DIM_NAMES[:3], hidden // heads if hidden % heads == 0 else HEAD_DIM)
    latent = _is_size(defaults.get("kv_lora_rank"))
    kv_heads = heads if latent else max(d for d in range(1, max(1, heads // 2) + 1) if heads % d == 0)
    found: dict[str, Any] = {}
    for names, value in ((HEAD_NAMES, heads), (HIDDEN_NAMES, hidden)):
        found.update({k: value for k in names if _is_size(defaults.get(k))})
    found.update({k: kv_heads for k in KV_HEAD_NAMES if k in defaults})
    found.update({k: head_dim for k in HEAD_DIM_NAMES if _is_size(defaults.get(k))})
    if latent and _is_size(defaults.get("head_dim")) and defaults["head_dim"] == defaults.get("qk_rope_head_dim"):
        found["head_dim"] = SIZES["qk_rope_head_dim"]
    elif "head_dim" in defaults and not latent:
        found["head_dim"] = head_dim  # None may mean "derive it", or that nobody thought of it
    return found


def _token_ids(defaults: Mapping[str, Any], vocab: int) -> dict[str, Any]:
    """Special tokens moved inside the vocabulary."""

    def inside(value: Any) -> Any:
        return [v % vocab for v in value] if isinstance(value, list) else value % vocab

    names = [k for k in defaults if k.endswith(("_token_id", "_token_index"))]
    return {
        k: inside(defaults[k])
        for k in names
        if (_is_size(defaults[k]) and defaults[k] >= vocab) or (isinstance(defaults[k], list) and defaults[k])
    }


def _per_layer(defaults: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Lists with one entry per layer, cut so that as many different kinds of layer as possible are left."""
    old = _first(defaults, LAYER_NAMES, 0)
    return {
        k: cut(v, layers)
        for k, v in defaults.items()
        if isinstance(v, list) and len(v) == old and not k.endswith("label")
    }


def cut(kinds: list[Any], count: int) -> list[Any]:
    """`count` entries in the order of `kinds`, different ones first; more than there are repeat from the start."""
    if count >= len(kinds):
        return [kinds[i % len(kinds)] for i in range(count)]
    firsts = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    others = [i for i in range(len(kinds)) if i not in firsts]
    return [kinds[i] for i in sorted((firsts + others)[:count])]


def _first(values: Mapping[str, Any], names: Any, default: int) -> int:
    return next((values[k] for k in names if _is_size(values.get(k))), default)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
