"""Tiny configurations: sizes by name, and what follows from what the user sets. No transformers needed."""

from __future__ import annotations

from fxpar.models.hf_shrink import cut, tiny

LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "max_position_embeddings": 2048,
    "sliding_window": None,
    "rms_norm_eps": 1e-6,
    "eos_token_id": [128001, 2],
    "pad_token_id": None,
    "use_cache": True,
}


def test_sizes_are_small_and_awkward():
    small = tiny(LLAMA, {})
    assert small["hidden_size"] == 64
    assert small["num_attention_heads"] == 4
    assert small["num_key_value_heads"] == 2  # grouped queries
    assert small["vocab_size"] % 2  # odd
    assert small["num_hidden_layers"] == 2
    assert "rms_norm_eps" not in small
    assert "sliding_window" not in small  # None stays None
    assert "pad_token_id" not in small


def test_token_ids_move_inside_the_vocabulary():
    assert all(0 <= t < tiny(LLAMA, {})["vocab_size"] for t in tiny(LLAMA, {})["eos_token_id"])


def test_user_wins_and_the_rest_follows():
    small = tiny(LLAMA, {"num_attention_heads": 3})
    assert (small["num_attention_heads"], small["hidden_size"], small["num_key_value_heads"]) == (3, 48, 1)
    wide = tiny(LLAMA, {"hidden_size": 4096, "num_attention_heads": 32})
    assert (wide["head_dim"], wide["num_key_value_heads"]) == (128, 16)
    assert tiny(LLAMA, {"vocab_size": 7})["eos_token_id"] == [128001 % 7, 2]


def test_other_names():
    gpt2 = {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_inner": None, "n_positions": 1024, "vocab_size": 50257}
    small = tiny(gpt2, {"n_layer": 5})
    assert (small["n_embd"], small["n_head"], small["n_layer"], small["n_inner"]) == (64, 4, 5, 88)
    assert "hidden_size" not in small


def test_latent_attention_has_a_key_per_head():
    latent = {**LLAMA, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "head_dim": 64}
    small = tiny(latent, {})
    assert small["num_key_value_heads"] == small["num_attention_heads"]
    assert small["head_dim"] == small["qk_rope_head_dim"] == 8


def test_layer_lists_keep_every_kind():
    kinds = ["sliding"] * 5 + ["full"]
    config = {**LLAMA, "num_hidden_layers": 12, "layer_types": kinds * 2, "sliding_window": 4096}
    assert tiny(config, {})["layer_types"] == ["sliding", "full"]
    assert tiny(config, {"num_hidden_layers": 3})["layer_types"] == ["sliding", "sliding", "full"]
    assert len(tiny(config, {"num_hidden_layers": 14})["layer_types"]) == 14
    assert tiny(config, {})["sliding_window"] == 16


def test_scans_are_as_wide_as_their_types_ask():
    mamba2 = {
        "hidden_size": 4096,
        "num_heads": 128,
        "head_dim": 64,
        "expand": 2,
        "n_groups": 8,
        "num_hidden_layers": 64,
    }
    small = tiny(mamba2, {})
    assert small["num_heads"] * small["head_dim"] == small["hidden_size"] * small["expand"]
    assert small["num_heads"] % small["n_groups"] == 0
    bamba = tiny({**LLAMA, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_expand": 2}, {})
    assert bamba["mamba_n_heads"] * bamba["mamba_d_head"] == 2 * bamba["hidden_size"]
    zamba = {**LLAMA, "n_mamba_heads": 2, "attn_layer_period": 6, "layers_block_type": ["mamba", "hybrid"] * 16}
    assert tiny(zamba, {})["layers_block_type"] == ["hybrid", "hybrid"]
    lfm2 = {**LLAMA, "conv_L_cache": 3, "layer_types": None}
    assert tiny(lfm2, {"num_hidden_layers": 3})["layer_types"] == ["conv", "full_attention", "full_attention"]


def test_cut():
    assert cut([1, 1, 2, 1, 3], 3) == [1, 2, 3]
    assert cut([1, 2], 5) == [1, 2, 1, 2, 1]
    assert cut([[0], [0], [1]], 2) == [[0], [1]]
