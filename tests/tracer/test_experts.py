"""Experts of transformers, and products by expert in models written by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fxpar import errors, expert_mm, losses, weighted_sum
from fxpar.tracer import capture
from tests.tracer.helpers import check, ops
from tests.tracer.host_models import LLAMA, tokens

transformers = pytest.importorskip("transformers")
SMALL = LLAMA | {"num_hidden_layers": 1, "experts_implementation": "eager"}
MOE = SMALL | {"moe_intermediate_size": 24, "num_experts_per_tok": 3, "num_local_experts": 5, "head_dim": 8}
# name -> (class, options): top-1 and top-3, a shared expert, groups of experts and a bias of choice, no gate
TYPES = {
    "mixtral": ("Mixtral", SMALL | {"num_local_experts": 5, "num_experts_per_tok": 1}),
    "qwen3_moe": ("Qwen3Moe", MOE | {"norm_topk_prob": True}),
    "olmoe": ("Olmoe", SMALL | {"num_experts": 4, "num_experts_per_tok": 4}),
    "deepseek_v3": (
        "DeepseekV3",
        MOE
        | {"first_k_dense_replace": 0, "num_local_experts": 6, "n_group": 3, "topk_group": 2, "num_key_value_heads": 4}
        | {
            "head_dim": 4,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
        },
    ),
}


def build(name: str) -> nn.Module:
    kind, options = TYPES[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**options))
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.normal_()
    return model.double().train()


@pytest.mark.parametrize("name", TYPES)
def test_numbers_of_eager_runs(name):
    graph = check(build(name), losses.causal_lm, [tokens(16), tokens(23)], 1e-10)
    assert [ops(graph).count(f"fxpar.{op}") for op in ("expert_mm", "expert_mm_backward", "weighted_sum")] == [4, 2, 1]


def test_experts_without_a_gate_or_with_biases_and_a_norm():
    """Layouts of the interface that no small model here has, on a module of its own."""
    from transformers.integrations.moe import use_experts_implementation

    for options in ({"has_gate": False}, {"has_bias": True, "is_transposed": True}, {"has_post_expert_norm": True}):
        model = Layer(use_experts_implementation(type("Experts", (Experts,), {}), **options))
        check(model.double(), losses.causal_lm, [tokens(16), tokens(23)], 1e-10)


class Experts(nn.Module):
    """As transformers writes them; the layout is what the decorator says."""

    def __init__(self, config) -> None:
        super().__init__()
        self.num_experts, self.act_fn, self.post_expert_norm = 4, nn.GELU(), nn.LayerNorm(8)
        E, D, F = 4, 8, 6
        for name, shape in {"up_proj": (E, F, D), "gate_up_proj": (E, 2 * F, D), "down_proj": (E, D, F)}.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) * 0.3))
            setattr(self, f"{name}_bias", nn.Parameter(torch.randn(shape[:2])))

    def forward(self, x, ids, weights):
        """The loop that is told of no layout: from the flags that the decorator sets."""
        y = torch.zeros_like(x)
        for expert in range(self.num_experts):
            slot, token = (ids.t() == expert).nonzero(as_tuple=True)
            rows = self._one("gate_up_proj" if self.has_gate else "up_proj", expert, x[token])
            rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
            rows = self._one("down_proj", expert, rows)
            rows = self.post_expert_norm(rows) if self.has_post_expert_norm else rows
            y.index_add_(0, token, rows * weights[token, slot, None])
        return y

    def _one(self, name, expert, rows):
        weight = getattr(self, name)[expert]
        made = rows @ (weight if self.is_transposed else weight.t())
        return made + getattr(self, f"{name}_bias")[expert] if self.has_bias else made


class Layer(nn.Module):
    def __init__(self, kind) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.PreTrainedConfig(experts_implementation="eager")
        self.embedding, self.router, self.head = nn.Embedding(61, 8), nn.Linear(8, 4), nn.Linear(8, 61)
        self.experts = kind(config)
        if self.experts.is_transposed:
            for name in ("up_proj", "gate_up_proj", "down_proj"):
                getattr(self.experts, name).data = getattr(self.experts, name).data.transpose(1, 2).contiguous()

    def forward(self, input_ids):
        x = self.embedding(input_ids).reshape(-1, 8)
        weights, ids = self.router(x).softmax(-1).topk(2, -1)
        return self.head(self.experts(x, ids, weights)).view(*input_ids.shape, 61)


def test_nothing_is_left_changed():
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    model = build("mixtral")
    config, before = copy.deepcopy(model.config.__dict__), dict(ALL_EXPERTS_FUNCTIONS._global_mapping)
    with pytest.raises(errors.LossError):
        capture(model, lambda m, b: m(b["input_ids"]).logits, tokens(8))
    assert model.config.__dict__ == config
    assert before == ALL_EXPERTS_FUNCTIONS._global_mapping


class Loop(nn.Module):
    """Experts one after the other, each on its tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.router, self.head = nn.Embedding(61, 8), nn.Linear(8, 3), nn.Linear(8, 61)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        best = self.router(x).argmax(-1)
        for i, expert in enumerate(self.experts):
            x = x.masked_scatter((best == i)[..., None], expert(x[best == i]))
        return self.head(x)


def test_a_loop_over_experts_is_told_what_to_write():
    with pytest.raises(errors.DataDependentError, match=r"loops over experts by expert_mm"):
        capture(Loop(), losses.causal_lm, tokens(8))


def test_products_follow_autocast_and_sum_in_the_dtype_of_their_rows():
    x, w, ids = torch.randn(5, 2, 8), torch.randn(3, 8, 4), torch.randint(3, (5, 2))
    with torch.autocast("cpu", torch.bfloat16):
        rows = expert_mm(x, w, ids)
    assert rows.dtype == torch.bfloat16
    assert weighted_sum(rows, torch.rand(5, 2)).dtype == torch.bfloat16
    assert expert_mm(x.bfloat16(), w, ids).dtype == torch.float32


def test_what_is_no_tensor():
    x = torch.zeros(5, 2, 8)
    with pytest.raises(errors.OpInputError, match="weight is a NoneType; give a tensor"):
        expert_mm(x, None, torch.zeros(5, 2, dtype=torch.int64))
    with pytest.raises(errors.OpInputError, match="weights is a list"):
        weighted_sum(x, [0.5, 0.5])
