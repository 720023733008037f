"""What stays as it is with fxpar off, validation, chat data, and the commands that users type."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.components.validate import Validator
from torchtitan.hf_datasets.text_datasets import ChatDataLoader, HuggingFaceTextDataLoader
from torchtitan.trainer import Trainer

from fxpar.recipes import debug
from fxpar.recipes.convert import to_fxpar
from fxpar.recipes.stock import stock
from tests.docs.blocks import find_blocks
from tests.repeat import thinned

from .runs import SWITCHING, command, recipe, shallow, train

pytestmark = pytest.mark.titan


@pytest.mark.parametrize("world", thinned([1, 2], [2]))  # of one rank: `test_strategies_from_the_command_line`
def test_off_is_stock_to_the_bit(world, tmp_path):
    def off():
        config = recipe("llama3", None)
        config.training.steps = 3
        config.training.local_batch_size = 2 // world
        return config

    def without():
        config = stock(shallow("llama3"))
        assert type(config) is Trainer.Config
        given = off()
        config.training, config.lr_scheduler = given.training, given.lr_scheduler
        return config

    found = train(world, off, tmp_path / "off", weights=True)
    plain = train(world, without, tmp_path / "plain", weights=True)
    assert (found.losses, found.norms) == (plain.losses, plain.norms)
    assert all((found.weights[name] == value).all() for name, value in plain.weights.items())


class Mine(Validator):
    """A validator of the user's own, which calls the model itself."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    def validate(self, model_parts, step):
        super().validate(model_parts, step)


def test_validation(tmp_path):
    def make(strategies, kind=Validator):
        def made():
            config = recipe("llama3", strategies)
            config.training.steps = 2
            data = HuggingFaceTextDataLoader.Config(dataset=debug.DATASET, infinite=True)
            config.validator = kind.Config(enable=True, freq=1, steps=3, dataloader=data)
            return config

        return made

    one = train(1, make(None), tmp_path / "one")
    for kind in (Validator, Mine):
        two = train(2, make(SWITCHING, kind), tmp_path / kind.__name__)
        assert one.validation.keys() == {1, 2} == two.validation.keys()
        assert max(abs(one.validation[step] - two.validation[step]) for step in one.validation) < 1e-5


def test_chat(tmp_path):
    """Prompts without labels, rows padded at their ends."""
    rows = [{"question": "what " * (3 + i % 7), "answer": "that " * (2 + 17 * i % 60)} for i in range(400)]
    (tmp_path / "chat.json").write_text(json.dumps(rows))

    def messages(sample):
        return [{"role": "user", "content": sample["question"]}, {"role": "assistant", "content": sample["answer"]}]

    def make(strategies):
        def made():
            config = recipe("llama3", strategies)
            config.training.steps = 3
            config.tokenizer = HuggingFaceTokenizer.Config()
            config.dataloader = ChatDataLoader.Config(
                dataset_path="json",
                load_dataset_kwargs={"data_files": str(tmp_path / "chat.json"), "split": "train"},
                sample_processor=messages,
            )
            return config

        return made

    one = train(1, make(None), tmp_path / "one")
    two = train(2, make(SWITCHING), tmp_path / "two")
    assert max(abs(one.losses[step] - two.losses[step]) for step in one.losses) < 1e-5
    assert max(abs(one.norms[step] - two.norms[step]) for step in one.norms) < 1e-5


def test_the_trainer_of_the_docs(tmp_path, monkeypatch):
    """The class of docs/torchtitan.md ends once the loss is low enough, under strategies as under torchtitan alone."""
    page = Path(__file__).parents[2] / "docs" / "torchtitan.md"
    (block,) = (b for b in find_blocks(page, page.name) if b.title == "my_trainer.py")
    (tmp_path / block.title).write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    page_module = importlib.import_module("my_trainer")

    def make(strategies):
        def made():
            config = to_fxpar(recipe("llama3", None), trainer=page_module.EarlyTrainer, strategies=strategies)
            config.target_loss = 8.05
            return config

        return made

    one = train(1, make(None), tmp_path / "one")
    two = train(2, make(SWITCHING), tmp_path / "two", inspect=watch_report)
    assert list(one.losses) == [1, 2, 3] == list(two.losses)  # of ten
    assert max(abs(one.losses[step] - two.losses[step]) for step in one.losses) < 1e-5
    eight = page_module.llama3_8b_early()
    assert (type(eight), eight.target_loss) == (page_module.EarlyTrainer.Config, 2.5)


def watch_report(trainer):
    """Each step leaves what it did."""
    step = trainer.train_step

    def watched(data_iterator):
        step(data_iterator)
        assert trainer.fxpar_report.step == trainer.step

    trainer.train_step = watched


# ------------------------------------------------------------------------------------------------------- command line
DEBUG = ("--module", "fxpar.recipes.llama3", "--config", "debug_hot_switch")
SMALL = ("--training.seq-len", "512", "--training.local-batch-size", "1", "--metrics.disable-color-printing")


def torchrun(folder, ranks, *arguments):
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    words += ["--local-ranks-filter", "0", "-m", "torchtitan.train", *arguments, *SMALL]
    return subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=300, env={**os.environ}, check=False
    )


@pytest.mark.parametrize("how", thinned(["forked", "torchrun"], ["forked"]))  # torchrun imports torchtitan three times
def test_the_command_of_the_docs(how, tmp_path):
    arguments = (
        *DEBUG,
        "--training.steps",
        "2",
        "--fxpar.strategies",
        "128",
        "dp2",
        "512",
        "tp2+sp",
        "--fxpar.no-merge",
    )
    if how == "torchrun":
        done = torchrun(tmp_path, 2, *arguments)
        log = done.stderr + done.stdout
        assert done.returncode == 0, log[-3000:]
    else:
        log = command(2, tmp_path, *arguments, *SMALL)
    assert re.search(r"\[fxpar\] step 1: 1,024 valid tokens of \d+ documents, valid_tps \d", log)
    assert re.search(r"\[fxpar\]   <=128 dp2: \d+ documents, .* switch \d.* gradients \d", log)
    assert re.search(r"\[fxpar\]   <=512 tp2\+sp: \d+ documents", log)
    assert "step:  2  loss:" in log


def test_strategies_from_the_command_line(tmp_path):
    """Set on a stock recipe, and unset on a switching one."""
    fp32 = ("--training.mixed-precision-param", "float32", "--training.steps", "1")
    module = ("--module", "fxpar.recipes.llama3", "--config")
    on = command(1, tmp_path, *module, "debug_stock", *fp32, *SMALL, "--fxpar.strategies", "512", "dp1")
    off = command(1, tmp_path, *module, "debug_hot_switch", *fp32, *SMALL, "--fxpar.strategies", "None")
    for log, is_on in ((on, True), (off, False)):
        assert ("[fxpar] <=512 dp1" in log) == is_on
        assert re.search(r"step:  1  loss:  8\.\d", log)


BAD_INPUT = {
    "ranks": (
        ("--fxpar.strategies", "512", "dp4"),
        "StrategyWorldsError: each strategy must use all 2 ranks, but 'dp4'",
    ),
    "length": (
        ("--fxpar.strategies", "256", "dp2"),
        "UnsupportedRecipeError: recipe option training.seq_len: documents have",
    ),
    "dtype": (
        ("--training.dtype", "bfloat16"),
        "UnsupportedRecipeError: recipe option training.dtype: it is bfloat16",
    ),
}


def test_bad_input_ends_the_run(tmp_path):
    arguments, message = BAD_INPUT["length"]
    with pytest.raises(AssertionError, match=re.escape(message)):
        command(2, tmp_path, *DEBUG, *SMALL, *arguments)


@pytest.mark.nightly  # three processes that import torchtitan; the messages: tests/recipes/test_checks.py
@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input(name, tmp_path):
    arguments, message = BAD_INPUT[name]
    done = torchrun(tmp_path, 2, *DEBUG, *arguments)
    assert done.returncode != 0
    assert message in done.stderr + done.stdout
