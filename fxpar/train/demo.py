"""The configuration of `fxpar train --demo`."""

from __future__ import annotations

DEMO = """
[model]
name = "llama"
options = { layers = 4, dim = 256, heads = 8, kv_heads = 4, ffn = 704 }

[data]
source = "python-stdlib"
vocab = 4096
max_length = 4096
overlong = "split"
batch_tokens = 24576

[strategies]
256 = "dp4"
1024 = "dp2.tp2+sp"
4096 = "cp4"

[optimizer]
lr = 1e-3

[schedule]
kind = "cosine"
warmup = 5

[checkpoint]
enabled = false

[run]
steps = 30
"""
