"""Small models of transformers, and batches for them."""

from __future__ import annotations

import pytest
import torch

from fxpar import losses

transformers = pytest.importorskip("transformers")

LLAMA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
PLAIN = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BLOOM = {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}

# name -> (class, config, options): the op's count in a graph is that of layers unless the type computes by itself
TYPES = {
    "llama": ("Llama", LLAMA),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 8}),
    "mistral": ("Mistral", LLAMA | {"sliding_window": 5}),
    "gemma2": ("Gemma2", LLAMA | {"head_dim": 8, "sliding_window": 5, "attn_implementation": "eager"}),
    "phi3": ("Phi3", LLAMA | {"pad_token_id": 0}),
    "gpt_neox": ("GPTNeoX", PLAIN),
    "gpt2": ("GPT2", GPT | NO_DROPOUT),
    "opt": ("OPT", PLAIN | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "pad_token_id": 0}),
    "falcon": ("Falcon", PLAIN),
    "bloom": ("Bloom", BLOOM),
    "biogpt": ("BioGpt", PLAIN | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
}
BY_ITSELF = {"bloom"}
TOLERANCE = {"gemma2": 1e-5}  # its eager attention computes in fp32


def build(name: str, layers: int = 1) -> torch.nn.Module:
    kind, options = TYPES[name]
    config = getattr(transformers, f"{kind}Config")(**options)
    config.num_hidden_layers = layers
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    return model.double().train()


def tokens(T: int, lengths: list[int] | None = None, B: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 61, (B, T))
    batch = {"input_ids": ids}
    if lengths is not None:
        batch["position_ids"] = torch.cat([torch.arange(n) for n in lengths]).expand(B, T).clone()
    batch["labels"] = losses.next_token_labels(ids, position_ids=batch.get("position_ids"))
    return batch


def attention_nodes(graph):
    return graph.gm.graph.find_nodes(op="call_function", target=torch.ops.fxpar.attention.default)
