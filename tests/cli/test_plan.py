"""`fxpar plan` by its words."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import tokenizers

from fxpar.batching import length_groups
from fxpar.cli.console import human_bytes
from fxpar.cli.plan import _won, static_line, why_slower
from fxpar.models import load
from fxpar.runtime.planned import parameters_of
from fxpar.search.plan_file import read_plan
from fxpar.search.pricing import PricedGroup, PricedSet
from fxpar.train.config import parse_config
from fxpar.train.demo import DEMO
from tests.cli.helpers import fxpar

WORDS = ["plan", "llama", "--world", "2", "--lengths", "github:256", "--tokens-per-step", "2048", "--samples", "2"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    written = "-o", str(folder / "plan.toml"), "--json", str(folder / "plan.json")
    status, text, _ = fxpar(*WORDS, "--rounds", *written)
    assert status == 0
    return text, read_plan(str(folder / "plan.toml")), json.loads((folder / "plan.json").read_text()), folder


def test_it_shows_what_it_writes(planned):
    text, plan, data, _ = planned
    assert "plan 1:" in text
    assert re.search(r"% slower, because it(s micro-batches take|s ranks wait| waits) longer", text)
    for group in (group for one in data["plans"] for group in one["groups"] if group["tokens"]):
        assert group["micro_batches"] >= group["tokens"] / group["token_budget"]
        assert 0 < group["busy_s"] <= group["seconds"] + 1e-6
    assert "no set takes less than" in text
    best = data["plans"][0]
    assert [group["strategy"] for group in best["groups"]] == [group.strategy for group in plan.groups]
    assert all(group.strategy in text for group in plan.groups)
    assert best["groups"][-1]["limit"] == 256
    assert {"limit", "strategy", "seconds"} <= best["groups"][0].keys()
    assert {"predicted_s", "lower_bound_s", "memory_bytes", "switch_s", "reduce_s"} <= best.keys()
    sent = [one["link_bytes"]["micro_batches"] for one in data["plans"]]
    assert all(one["inter_node_bytes"] == 0 for one in sent)  # there is one node
    assert any(one["intra_node_bytes"] for one in sent)
    assert f"sent inside nodes per mini-batch: micro-batches {human_bytes(sent[0]['intra_node_bytes'])}, " in text
    assert best["lower_bound_s"] <= best["predicted_s"] <= data["best_static"]["predicted_s"]
    assert f'"{data["rounds"]["strategy"]}"' in text
    is_less = data["rounds"]["predicted_s"] < best["predicted_s"]
    assert data["rounds"]["better"] == is_less == ("less than plan 1" in text)
    groups = length_groups({256: data["rounds"]["strategy"]}, world=2, token_budget=data["rounds"]["token_budget"])
    assert [group.replicas for group in groups if group.limit == 256][:1] == [1]  # the widest holds the longest
    assert data["speedup"] == data["best_static"]["predicted_s"] / best["predicted_s"]
    assert data["evaluated"] > 2
    assert data["search_cpu_s"] > 0
    assert data["tokens_per_step"] == plan.tokens_per_step == 2048
    assert [one["tokens_per_step"] for one in data["batch_sizes"]] == [2048]


def test_a_slower_plan_says_where_it_loses_most():
    def made(busy_s, waits_s=0.0, exposed_s=0.0, switch_s=0.0, reduce_s=0.0, micro_batches=8.0):
        groups = tuple(
            PricedGroup(64, "dp2", 64, (busy_s + waits_s) / 2, 400.0, 0.0, micro_batches / 2, busy_s / 2) for _ in "12"
        )
        return PricedSet(groups, 0.0, exposed_s, switch_s, reduce_s, 0.0, {}, 0)

    best = made(1.0)
    for plan, why in (
        (made(1.5, 0.4, 0.4), "its micro-batches take longer"),
        (made(1.5, micro_batches=16.0), "its micro-batches take longer (16 of 50 tokens, not 8 of 100)"),
        (made(1.5, micro_batches=2.5), "its micro-batches take longer (2.5 of 320 tokens, not 8 of 100)"),
        (made(0.5, 0.6, 0.1, 9.0), "its ranks wait longer, in bubbles and for slower replicas"),
        (made(1.1, 0.1, 0.2, 1.0, 0.5), "it waits longer for switches"),
        (made(1.1, 0.1, 0.2, 0.0, 0.5), "it waits longer for reductions"),
    ):
        assert why_slower(plan, best) == why


def test_it_knows_its_model_by_the_number_of_parameters(planned):
    planned[1].check_module("p", parameters_of(load("llama").model), 2)


@pytest.mark.nightly
def test_it_knows_a_deep_model_of_which_only_shallow_ones_are_lowered(tmp_path):
    path = str(tmp_path / "deep.toml")
    status, _, _ = fxpar(*WORDS, "--set", "layers=4", "--max-strategies", "1", "-o", path)
    assert status == 0
    read_plan(path).check_module("p", parameters_of(load("llama", options={"layers": "4"}).model), 2)


def test_a_run_takes_the_plan(planned):
    plan = planned[1]
    config = parse_config(DEMO, "--demo", "demo", ["data.max_length=256", *plan.assignments()])
    assert dict(config.strategies) == plan.strategies
    assert config.engine.token_budgets == {str(limit): most for limit, most in plan.token_budgets.items()}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["plan"], "name a model"),
        (["plan", "llama", "--world", "2"], "--lengths"),
        ([*WORDS, "--max-tokens-per-step", "4096"], "leave one of them out"),
        ([*WORDS[:6], "--max-tokens-per-step", "100"], "the longest sequence has 256 tokens"),
        (["plan", "llama", "--lengths", "github:64", "--tokens-per-step", "9"], "name a cluster file"),
        (
            ["plan", "llama", "--cluster", "h100", "--lengths", "github:64", "--tokens-per-step", "9"],
            "h100 is a kind of node: say on how many ranks",
        ),
        ([*WORDS, "--memory", "80"], "not a size such as 80GB or 500MB"),
        ([*WORDS[:5], "nothing.txt", *WORDS[6:]], "there is no such file or folder"),
        ([*WORDS, "-o", "plan.json"], "a plan is TOML: name it .toml"),
        (["plan", "lama", *WORDS[2:]], "did you mean 'llama'"),
        (
            ["plan", "gpt", "--set", "positions=128", *WORDS[2:]],
            "has 128 positions, and the longest sequence 256 tokens",
        ),
        ([*WORDS, "--memory", "0.1MB"], "no strategy fits a sequence of 256 tokens"),
    ],
)
def test_bad_words_are_one_error(words, why):
    status, out, err = fxpar(*words)
    assert status in (1, 2)
    assert why in " ".join(err.replace("│", " ").split())
    assert not out


def test_a_mini_batch_of_whole_sequences_says_so(planned):
    assert re.search(
        r"[\d,]+ tokens per mini-batch \(the mean: as many whole sequences as fit into 2,048\), longest", planned[0]
    )


def test_sequences_that_are_longer_than_a_mini_batch_are_told_of():
    few = ["plan", "llama", "--world", "2", "--lengths", "github:256", "--tokens-per-step", "100"]
    status, text, _ = fxpar(*few, "--samples", "2", "--max-strategies", "1")
    assert status == 0
    assert "(the mean: as many whole sequences as fit into 100, or one that is longer)" in text


def test_a_tokenizer_has_no_more_ids_than_the_model(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "text.txt").write_text("1 2 3")
    tokens = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(300)}, "0"))
    tokens.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokens.save(str(tmp_path / "mine.json"))
    lengths = ["--lengths", f"{tmp_path / 'corpus'}:8", "--tokenizer", str(tmp_path / "mine.json")]
    status, _, err = fxpar(
        "plan", "llama", "--set", "vocab=256", "--world", "2", *lengths, "--tokens-per-step", "8", "--no-cache"
    )
    assert status == 1, err
    assert "has 300 ids, but the model's vocabulary has 256" in err


def test_a_plan_of_fxpars_is_not_imported(tmp_path):
    (tmp_path / "mine.toml").write_text("fxpar_plan = 1\n")
    status, _, err = fxpar("plan", "--import", tmp_path / "mine.toml")
    assert (status, "fxpar train CONFIG --plan " in err) == (1, True)


def test_without_a_size_the_smallest_that_is_near_the_best_rate_is_taken(tmp_path):
    path, data = tmp_path / "plan.toml", tmp_path / "plan.json"
    words = [*WORDS[:6], "--max-tokens-per-step", "2048", "--samples", "2", "--max-strategies", "1", "-o", str(path)]
    status, text, err = fxpar(*words, "--json", str(data))
    assert (status, err) == (0, "")
    found = json.loads(data.read_text())
    rates = {one["tokens_per_step"]: one["tokens_per_s"] for one in found["batch_sizes"]}
    assert sorted(rates, reverse=True) == [2048 >> number for number in range(len(rates))]
    near = [size for size, rate in rates.items() if rate >= 0.98 * max(rates.values())]
    assert found["tokens_per_step"] == read_plan(str(path)).tokens_per_step == min(near)
    assert f"{min(near):,} tokens per step: of the sizes tried the smallest within 2% of the best rate" in text


@pytest.mark.parametrize(
    ("tried", "won", "words"),
    [
        (0, 0.0, "there are none to try"),
        (12, 0.001, "12 tried, none wins 0.2%"),
        (3, 0.068, "3 tried; plan 1 takes 6.8% less than the best set without, 268 ms"),
    ],
)
def test_what_rules_win_is_said(tried, won, words):
    found = SimpleNamespace(ruled=tried, won=won, uniform_s=0.268)
    assert words in _won(found, False)
    assert "they are for built-in and hf:TYPE models" in _won(found, True)


@pytest.mark.parametrize(("best", "words"), [("dp2", "is just that"), ("cp2 | dp2", "is 1.25 times as fast")])
def test_plan_1_may_be_one_strategy_and_not_the_best_single_one(best, words):
    static, one = (SimpleNamespace(strategies=(name,), predicted_s=0.5) for name in ("dp2", best))
    found = SimpleNamespace(best_static=static, plans=[one], speedup=1.25)
    assert static_line(found) == f"best single strategy: dp2, 500 ms; plan 1 {words}"
