"""What `fxpar train` makes of its [model] section: refusals by name, weights from a folder, frozen parameters."""

from __future__ import annotations

import pytest

from fxpar.errors import ExampleNeededError, TextModelError, TrainedParametersError, VocabularyError
from fxpar.models import load
from fxpar.train.config import parse_config
from fxpar.train.model import _check_text, build_model, freeze, text_alone, weights_of
from tests.models.folder import write_folder


def test_a_model_without_token_ids_is_told_how_it_is_trained():
    with pytest.raises(TextModelError, match=r"'mlp' takes no input_ids \(its batches have x, .*by plain calls after"):
        _check_text(load("mlp"), 300, "tokenizer.json")


def test_only_parameters_that_a_glob_names_are_trained():
    model = load("hf:gpt2", noise=False).model
    freeze(model, ["*.ln_1.*", "lm_head.weight"])  # another name of the embedding
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"transformer.wte.weight", *(name for name, _ in model.named_parameters() if ".ln_1." in name)}


def test_a_glob_that_names_nothing():
    with pytest.raises(
        TrainedParametersError, match=r"'\*\.lora' names no parameter.* called transformer\.wte\.weight,"
    ):
        freeze(load("hf:gpt2", device="meta").model, ["*.lora"])


def folder_config(folder, **model):
    lines = "".join(f"{key} = {value}\n" for key, value in model.items())
    return parse_config(
        f'[model]\nname = "hf:{folder}"\n{lines}[data]\nsource = "x"\nbatch_tokens = 8\n[strategies]\n8 = "dp1"\n',
        "x",
        "x",
    )


def test_a_folder_says_where_its_weights_are(tmp_path):
    folder = write_folder(tmp_path / "base")
    config = folder_config(folder, missing='["*.lora"]', unused='["old.*"]')
    assert config.data.tokenizer == str(folder / "tokenizer.json")
    loaded = build_model(config, 40, "tokenizer.json")
    assert all(parameter.is_meta for parameter in loaded.model.parameters())
    weights = weights_of(config, loaded)
    assert weights is not None
    assert (str(weights.folder), weights.missing, weights.unused) == (str(folder), ["*.lora"], ["old.*"])
    resumed = parse_config_resumed(config)
    assert weights_of(resumed, loaded) is None  # the checkpoint has them
    with pytest.raises(VocabularyError):
        build_model(config, 41, "tokenizer.json")


def parse_config_resumed(config):
    from dataclasses import replace

    return replace(config, checkpoint=replace(config.checkpoint, resume=True))


def test_a_key_that_text_has_not_says_what_a_run_can_do():
    """`parallelize` says to give an example; a run has a task for that."""
    want = r"'my.py:make' reads 'features' beside token ids, .*give it a \[task.NAME\]"
    with pytest.raises(TextModelError, match=want), text_alone("my.py:make"):
        raise ExampleNeededError("features", ["input_ids"])
