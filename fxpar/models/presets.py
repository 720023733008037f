"""Published configurations, by transformers type and size: `hf:llama@8b`.

Sources: the `config.json` files that the authors publish with the weights (Llama 3 and 3.1, Qwen3, Gemma 2, GPT-2).
`@default` is not in the table: it is the default configuration of the type in transformers, whatever its size.
"""

from __future__ import annotations

from typing import Any

Preset = dict[str, Any]

_LLAMA3: Preset = {
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
}
_QWEN3: Preset = {
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}


def _sizes(hidden: int, ffn: int, layers: int, heads: int) -> Preset:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


PRESETS: dict[str, dict[str, Preset]] = {
    "llama": {
        "1b": {**_LLAMA3, **_sizes(2048, 8192, 16, 32), "tie_word_embeddings": True},
        "3b": {**_LLAMA3, **_sizes(3072, 8192, 28, 24), "tie_word_embeddings": True},
        "8b": {**_LLAMA3, **_sizes(4096, 14_336, 32, 32)},
        "70b": {**_LLAMA3, **_sizes(8192, 28_672, 80, 64)},
    },
    "qwen3": {
        "0.6b": {**_QWEN3, **_sizes(1024, 3072, 28, 16), "tie_word_embeddings": True},
        "8b": {**_QWEN3, **_sizes(4096, 12_288, 36, 32), "tie_word_embeddings": False},
        "32b": {**_QWEN3, **_sizes(5120, 25_600, 64, 64), "tie_word_embeddings": False},
    },
    "gemma2": {
        "2b": {**_sizes(2304, 9216, 26, 8), "num_key_value_heads": 4, "head_dim": 256},
        "9b": {**_sizes(3584, 14_336, 42, 16), "num_key_value_heads": 8, "head_dim": 256},
    },
    "gpt2": {
        "124m": {"n_embd": 768, "n_layer": 12, "n_head": 12},
        "1.5b": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
    },
}
