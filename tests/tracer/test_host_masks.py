"""Masks of models of transformers: which are left out, which are used as they are, what their builders say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fxpar import errors, losses
from fxpar.tracer import capture, hosts
from fxpar.tracer.context import MaskRule, running
from tests.repeat import thinned
from tests.tracer.helpers import check
from tests.tracer.host_models import LLAMA, PLAIN, attention_nodes, build, tokens

transformers = pytest.importorskip("transformers")
HIDDEN = [slice(0, 5), slice(11, 16), slice(4, 8)]


@pytest.mark.parametrize("hidden", thinned(HIDDEN, HIDDEN[2:]))
def test_padding_sees_the_tokens_and_may_have_a_loss(hidden):
    model, batch = build("llama"), tokens(16)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, hidden] = 0
    batch["attention_mask"] = mask
    graph = check(model, losses.causal_lm, [batch])
    assert all(node.args[4] is not None and node.args[5] for node in attention_nodes(graph))


def test_padding_in_a_bidirectional_model():
    config = transformers.BertConfig(**PLAIN | {"num_hidden_layers": 1}, hidden_dropout_prob=0.0)
    config.attention_probs_dropout_prob = 0.0
    batch = tokens(12)
    batch["attention_mask"] = torch.ones(2, 12, dtype=torch.long)
    batch["attention_mask"][0, 9:] = 0
    check(transformers.BertForMaskedLM(config).double().train(), losses.causal_lm, [batch])


def test_beside_a_mask_positions_make_no_documents():
    batch = tokens(12, [7, 5])
    batch["attention_mask"] = torch.ones(2, 12, dtype=torch.long)
    check(build("llama"), losses.causal_lm, [batch])


class Masking(transformers.LlamaForCausalLM):
    """Makes its masks by itself."""

    def __init__(self, padding=None, change=None, late=None, **options):
        super().__init__(transformers.LlamaConfig(**LLAMA | {"num_hidden_layers": 1}))
        self.padding, self.change, self.late, self.options = padding, change, late, options
        self.register_buffer("kept", torch.arange(64) >= 2)

    def forward(self, input_ids):
        embedded = self.model.embed_tokens(input_ids)
        padding = None if self.padding is None else self.padding(self, input_ids)
        mask = transformers.masking_utils.create_causal_mask(
            self.config, embedded, padding, None, allow_is_causal_skip=False, **self.options
        )
        if self.change is not None:
            self.change(mask)
        if self.late is not None:
            self.late(padding)
        return self.lm_head(embedded + attend(self, embedded, mask))


def attend(model, x, mask, queries=None, **options):
    """The attention interface of transformers by itself: nothing else of a layer has to do with masks."""
    heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
    attention = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    options = {name: give(heads) for name, give in options.items()}
    return attention(model, heads[:, :, :queries], heads, heads, mask, **options)[0].flatten(2)


def first_hidden(model, ids):
    mask = torch.ones_like(ids)
    mask.view(-1)[1] = 0
    return mask.bool()


PADDINGS = {
    "ones": lambda model, ids: torch.ones_like(ids),
    "of a buffer": lambda model, ids: model.kept[: ids.shape[1]].expand(ids.shape),
    "of positions": lambda model, ids: (torch.arange(ids.shape[1]) >= 2).expand(ids.shape),
    "written": first_hidden,
    "halves": lambda model, ids: torch.full(ids.shape, 0.5).long(),
}


@pytest.mark.parametrize("name", thinned(PADDINGS, ["ones", "of a buffer", "written"]))
def test_a_mask_that_the_model_makes_is_left_out_only_if_it_hides_nothing(name):
    model = Masking(PADDINGS[name]).double()
    graph = check(model, losses.causal_lm, [tokens(12)])
    assert all((node.args[4] is None) == (name == "ones") for node in attention_nodes(graph))


CHANGES = {
    "whole": lambda mask: mask.logical_or_(torch.arange(mask.shape[-1]) < 3),
    "part": lambda mask: mask[..., :3].fill_(True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_mask_that_the_model_writes_to_is_used_as_it_is(name):
    """Such as a prefix that all tokens see."""
    graph = check(Masking(change=CHANGES[name]).double(), losses.causal_lm, [tokens(12, B=1)])
    assert all(node.args[4] is not None and not node.args[5] for node in attention_nodes(graph))


def test_padding_that_is_written_to_after_the_mask_was_made():
    """The mask was made of what the padding was before."""
    model = Masking(first_hidden, late=lambda padding: padding.fill_(False)).double()
    graph = check(model, losses.causal_lm, [tokens(12)])
    assert all(not node.args[5] for node in attention_nodes(graph))


def test_documents_that_are_written_to_after_the_mask_was_made():
    from transformers import masking_utils as masks

    class Documents(Masking):
        def forward(self, input_ids):
            documents = (torch.arange(input_ids.shape[1]) < 5).expand(input_ids.shape).clone()
            self.options = {"and_mask_function": masks.packed_sequence_mask_function(documents)}
            self.change = lambda mask: documents.fill_(True)
            return super().forward(input_ids)

    check(Documents().double(), losses.causal_lm, [tokens(12)])


class Attending(transformers.LlamaForCausalLM):
    """Calls the attention interface of transformers by itself, without a mask."""

    def __init__(self, queries=None, **options):
        super().__init__(transformers.LlamaConfig(**LLAMA | {"num_hidden_layers": 1}))
        self.queries, self.options = queries, options

    def forward(self, input_ids):
        x = self.model.embed_tokens(input_ids)
        return self.lm_head(x + attend(self, x, None, self.queries, **self.options))


ATTENDING = {
    "one query sees all keys": Attending(1),
    "a window is the mask's business": Attending(sliding_window=lambda heads: 3),
    "numbers that change nothing": Attending(position_embeddings=lambda heads: heads),
}


@pytest.mark.parametrize("name", ATTENDING)
def test_attention_without_a_mask_is_that_of_torch(name):
    check(ATTENDING[name].double(), losses.causal_lm, [tokens(12), tokens(17)])


@pytest.mark.parametrize("tilt", [lambda heads: heads.sum(-1), lambda heads: 2.0])
def test_numbers_that_some_attention_computes_with_are_an_error(tilt):
    with pytest.raises(errors.UnsupportedOpError, match="attention with 'tilt' cannot be captured"):
        capture(Attending(tilt=tilt).double(), losses.causal_lm, tokens(8))


def test_a_sink_per_query_is_one_key_more():
    def dense(model, batch):
        x = model.model.embed_tokens(batch["input_ids"])
        heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
        behind = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        scores = (heads @ heads.mT / 8**0.5).masked_fill(behind, -torch.inf)
        weights = torch.cat([scores, heads.sum(-1, keepdim=True)], -1).softmax(-1)[..., :-1]
        logits = model.lm_head(x + (weights @ heads).transpose(1, 2).flatten(2))
        return losses.cross_entropy_sum(logits, batch["labels"])

    model = Attending(sinks=lambda heads: heads.sum(-1, keepdim=True)).double()
    assert attention_nodes(check(model, losses.causal_lm, [tokens(12), tokens(17)], expected=dense))


@pytest.mark.parametrize("options", [{"s_aux": lambda heads: heads}, {"sinks": lambda heads: heads.sum(-1)}])
def test_sinks_of_another_shape(options):
    with pytest.raises(errors.UnsupportedOpError, match="attention with sinks of the shape"):
        capture(Attending(**options).double(), losses.causal_lm, tokens(8))


def test_prepared_mask_is_used_as_it_is():
    model, batch = build("llama"), tokens(8)
    batch["attention_mask"] = torch.rand(2, 1, 8, 8).gt(0.3) | torch.eye(8, dtype=torch.bool)
    graph = check(model, losses.causal_lm, [batch])
    assert all(node.args[4] is not None and not node.args[5] for node in attention_nodes(graph))


def test_a_part_of_a_model_that_adds_its_mask_to_the_scores():
    """Padding stays hidden in the encoder of an eager model; its decoder calls the attention interface."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BigBirdPegasusConfig(vocab_size=61, max_position_embeddings=64, **sizes, **heads)
    config.attention_type, config._attn_implementation = "original_full", "eager"
    model = transformers.BigBirdPegasusForConditionalGeneration(config).double().eval()

    def loss(model, batch):
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
        return losses.cross_entropy_sum(model(**inputs, decoder_input_ids=batch["labels"]).logits, batch["labels"])

    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 8:] = 0
    batch = {"input_ids": torch.randint(61, (2, 12)), "attention_mask": mask, "labels": torch.randint(61, (2, 5))}
    check(model, loss, [batch], 1e-5)  # eager attention computes in fp32


def test_what_builders_of_masks_say():
    """Releases of transformers put a mask together in different ways: 5.23 in one call, 5.24 in two."""
    from transformers import masking_utils as masks

    ids, more, positions = torch.tensor([[1, 1, 2]]), torch.tensor([[1, 2, 2]]), torch.tensor([[0, 1, 0]])
    with hosts._described_masks():
        within = masks.packed_sequence_mask_function(ids)
        windowed = masks.sliding_window_causal_mask_function(5)
        packed = masks.and_masks(masks.remap_positions_for_packed_sequence(windowed, positions), within)
        assert hosts._rule_of(packed) == MaskRule(True, 5, documents=ids, positions=positions)
        assert hosts._rule_of(masks.and_masks(masks.causal_mask_function, within)) == MaskRule(True, documents=ids)
        unknown = masks.or_masks(windowed, masks.causal_mask_function)
        for meaningless in (
            unknown,
            masks.and_masks(unknown, within),
            masks.and_masks(within, unknown),
            masks.and_masks(windowed, masks.causal_mask_function),
            masks.and_masks(packed, masks.packed_sequence_mask_function(more)),
            masks.and_masks(windowed, within, within),
        ):
            assert hosts._rule_of(meaningless) is None
    assert hosts._rule_of(masks.and_masks(masks.causal_mask_function, within)) is None


@pytest.mark.parametrize("restarting", [True, False])
def test_chunks_of_documents_are_known_by_their_positions(restarting):
    """Chunks of three tokens, counted within documents of four and two, or along the row as before 5.23."""
    from transformers import masking_utils as masks

    ids, positions = torch.tensor([[1, 1, 1, 1, 2, 2]]), torch.tensor([[0, 1, 2, 3, 0, 1]])
    rules = []
    with hosts._described_masks(), running(SimpleNamespace(add_mask=lambda mask, rule: rules.append(rule))):
        function = masks.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.long))
        if restarting:
            function = masks.remap_positions_for_packed_sequence(function, positions)
        function = masks.and_masks(function, masks.packed_sequence_mask_function(ids))
        dense = hosts.mask_forward(1, 6, 6, mask_function=function)
    assert len(rules) == restarting
    if restarting:
        within = rules[0].documents[:, :, None] == rules[0].documents[:, None, :]
        assert torch.equal(dense[0], within & torch.ones(6, 6).tril().bool())


def test_a_builder_that_a_release_lacks_costs_knowledge_only(monkeypatch):
    """The mask stays in the graph as the model makes it, and the numbers are the same."""
    from transformers import masking_utils as masks

    monkeypatch.setattr(hosts, "_rule_of", lambda function: None)
    monkeypatch.delattr(masks, "chunked_causal_mask_function")
    graph = check(Masking().double(), losses.causal_lm, [tokens(16), tokens(23)])
    assert all(node.args[4] is not None and not node.args[5] for node in attention_nodes(graph))
