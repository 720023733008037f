"""Plan files: written, read, edited, and refused."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.errors import PlanFileError
from fxpar.models.options import parse_assignments
from fxpar.models.resolved import resolved_options
from fxpar.search.plan_file import Plan, PlanGroup, read_plan

PLAN = Plan(
    "llama",
    4,
    16384,
    (PlanGroup(512, "dp4", 2048, 0.25), PlanGroup(4096, "dp2.tp2+sp", 4096, 1.5)),
    options=("layers=4",),
    memory_budget_bytes=10**9,
    predicted_s=1.75,
)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.to_toml(["a remark"]))
    assert path.read_text().startswith("# a remark\nfxpar_plan = 1\n")
    assert read_plan(str(path)) == PLAN


def test_rules_are_a_part_of_a_strategy(tmp_path):
    text = "dp2.tp2+sp+remat[*.attention: cp2+zero3; layers.{0-7,16-23}: +remat(none)]"
    plan = replace(PLAN, groups=(PlanGroup(4096, text, 4096, 1.5),))
    path = tmp_path / "plan.toml"
    path.write_text(plan.to_toml())
    assert read_plan(str(path)) == plan


@given(st.text(), st.lists(st.text(min_size=1), max_size=3))
def test_texts_survive(model, options):
    import tomllib

    plan = Plan(model, 4, 1, PLAN.groups, options=tuple(options))
    if any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in model + "".join(options)):
        return
    data = tomllib.loads(plan.to_toml())
    assert (data["model"], tuple(data["options"])) == (model, tuple(options))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("fxpar_plan = 1", "fxpar_plan = 2", "does not begin with fxpar_plan = 1"),
        ("world = 4", "wrold = 4", "key 'wrold' is unknown; did you mean 'world'"),
        ("world = 4\n", "", "world is missing"),
        ("world = 4", 'world = "4"', "world = '4' must be a whole number"),
        ("world = 4", "world = 8", "world = 8, and all of its strategies are for 4. Plan for as many as you have"),
        ('strategy = "dp4"', 'strategy = "dp2"', r"group 1 \(limit 512\): strategy 'dp2' needs 2 ranks"),
        ("limit = 512", "limit = 5000", "limits are 5000, 4096"),
        ("limit = 512\n", "", "group 1: limit is missing"),
        (
            "token_budget = 2048",
            "token_budget = 100",
            r"group 1 \(limit 512\): token_budget = 100 holds no sequence of 512 tokens",
        ),
        ('strategy = "dp4"', 'strategy = "dq4"', "unknown axis 'dq'"),
        ('strategy = "dp4"', 'strat = "dp4"', r"group 1 \(limit 512\): key 'strat' is unknown"),
        ("predicted_s = 1.75", "predicted_s = -1.0", "must be a number from 0 on"),
        ("[[groups]]", "[[grops]]", "it has no \\[\\[groups\\]\\]"),
        ("world = 4", "world = ", "it is not TOML"),
        ("fxpar_plan = 1", "fxpar_plan = true", "it does not begin with fxpar_plan = 1"),
        (
            'options = ["layers=4"]',
            'options = ["layers=4", "layers =2"]',
            "'layers=4' and 'layers =2' set the same option",
        ),
        ('options = ["layers=4"]', 'options = ["layers"]', "options: 'layers' is not an assignment"),
        ("world = 4", "world = 0", "world = 0 ranks can run nothing"),
        ("world = 4", f"world = {'9' * 400}", "world = a number of 400 digits cannot be used"),
        ("world = 4", f"world = {'9' * 5000}", "world = a number of 5,000 digits cannot be used"),
        ("world = 4", "world = 4\nx = " + "[" * 5000, "nested more than 50 deep"),
        ("predicted_s = 1.75", "predicted_s = 1e400", "predicted_s = inf cannot be used"),
        ("limit = 4096", "limit = 2147483648", "limit = 2147483648 must be from 1 to 1,073,741,824 tokens"),
        ("token_budget = 2048", "token_budget = 2000000000000", "token_budget = 2000000000000 must be from 1 to"),
        (f"tokens_per_step = {PLAN.tokens_per_step}", "tokens_per_step = 0", "tokens_per_step = 0 must be from 1 to"),
    ],
)
def test_a_bad_file_is_one_error(tmp_path, old, new, why):
    path = tmp_path / "plan.toml"
    text = PLAN.to_toml()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(PlanFileError, match=why):
        read_plan(str(path))


def test_a_folder_in_place_of_a_plan(tmp_path):
    with pytest.raises(PlanFileError, match="it is a folder; name the file that fxpar plan -o has written"):
        read_plan(str(tmp_path))


def test_another_model_or_world_is_refused():
    PLAN.check("p", "llama", ["layers=4"], 4)
    PLAN.check("p", "llama", ["layers=4"], None)
    with pytest.raises(PlanFileError, match="for the model llama layers=4, not gpt layers=4"):
        PLAN.check("p", "gpt", ["layers=4"], 4)
    PLAN.check("p", "llama", [], 4, decided=["layers"])  # data may decide what the plan has to say
    with pytest.raises(PlanFileError, match=r"for the model llama layers=4, not llama\. Make one"):
        PLAN.check("p", "llama", [], 4)
    with pytest.raises(PlanFileError, match="for the model llama layers=4, not llama layers=3"):
        PLAN.check("p", "llama", ["layers=3"], 4)
    with pytest.raises(PlanFileError, match="for 4 ranks, not 8"):
        PLAN.check("p", "llama", ["layers=4"], 8)


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        (["layers=4", "heads=4"], True),  # the default
        (["layers=4", "theta=1e4", "tied=false"], True),
        (["eps=0.00001"], False),  # its layers are left out, and the default is another number
        (["layers=4", "vocab=131"], True),  # decided by data, and named: the default
        (["layers=4", "vocab=132"], False),
        (["layers=4", "heads=8"], False),
        (["layers= 3"], False),
    ],
)
def test_options_are_compared_as_what_they_come_to(options, fits):
    def resolved(given):
        return resolved_options("llama", parse_assignments(given))

    with nullcontext() if fits else pytest.raises(PlanFileError, match="for the model llama layers=4, not llama"):
        PLAN.check("p", "llama", options, 4, resolved, ["vocab"])


def test_options_of_other_loaders_are_compared_as_values(tmp_path):
    (tmp_path / "my.py").write_text("def make(a, b=False, c=3, **others): ...")
    given = {"a": "1.0", "b": "True", "d": "2"}
    assert resolved_options(f"{tmp_path}/my.py:make", given) == {"a": 1.0, "b": True, "c": 3, "d": 2}
    assert resolved_options("hf:llama", {"num_hidden_layers": "3"})["num_hidden_layers"] == 3


def test_a_model_without_a_name_is_told_by_its_parameters():
    plan = replace(PLAN, parameters=1000)
    plan.check_module("p", 1000, 4)
    PLAN.check_module("p", 1000, None)  # it does not say
    with pytest.raises(PlanFileError, match="for llama with 1,000 parameters, and this model has 999"):
        plan.check_module("p", 999, 4)
    with pytest.raises(PlanFileError, match="for 4 ranks, not 2"):
        plan.check_module("p", 1000, 2)


def test_it_cannot_be_read(tmp_path):
    with pytest.raises(PlanFileError, match="cannot be read"):
        read_plan(str(tmp_path / "none.toml"))


def test_mini_batches_of_another_size_are_noted():
    plan = Plan("llama", 2, 4096, (PlanGroup(8, "dp2", 8),))
    assert plan.other_batches("p.toml", 4096) == plan.other_batches("p.toml", None) == []
    (note,) = plan.other_batches("p.toml", 2048)
    assert "'p.toml' is for mini-batches of 4,096 tokens, and data.batch_tokens is 2,048" in note
