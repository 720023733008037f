"""A folder of a small model, as transformers writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import AutoConfig

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}


def write_folder(folder: Path, **config: Any) -> Path:
    """Random weights of a llama, and a tokenizer.json (which is none); `config` is changed in the file afterwards."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder
