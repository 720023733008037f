"""The configuration of `fxpar train --demo`."""

from __future__ import annotations

DEMO = """
[model]
name = "llama"
options = { layers = 3, dim = 128, heads = 4, kv_heads = 2, ffn = 352 }

[data]
source = "python-stdlib"
unit = "definition"
vocab = 4096
max_length = 2048
overlong = "truncate"
batch_tokens = 8192
validation = 60

[strategies]
256 = "dp4"
1024 = "dp2.pp2"
2048 = "cp4"

[engine]
merge = false

[optimizer]
lr = 3e-3

[schedule]
warmup = 3

[checkpoint]
enabled = false

[run]
steps = 30
"""
