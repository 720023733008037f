"""What is around the sections."""

from __future__ import annotations

from dataclasses import replace

from fxpar.cost.cluster import ClusterSpec
from fxpar.viz import Viewed, view_document
from fxpar.viz.document import about
from tests.viz.shown import tall, viewed


def test_head():
    views = [viewed("dp2.tp2+sp"), viewed("pp2.tp2")]
    document = view_document("llama", views, {"memory": {"m": 1}, "graph": {"g": 1}, "run": None}, made_with="fxpar 9")
    assert document["strategies"] == ["dp2.tp2+sp", "pp2.tp2"]
    assert list(document["sections"]) == ["graph", "memory"]  # in the order of the tabs, without empty ones
    head = dict(map(tuple, document["about"]["pp2.tp2"]))
    assert head["mesh"] == "pp 2 × tp 2"
    assert head["stages"] == "2 (1f1b)"
    assert head["micro-batches"] == "4"  # as `fxpar memory`
    assert head["cluster"].startswith("1 × 4 devices")
    assert head["cluster"].endswith("(assumed)")


def test_the_clusters_of_a_view():
    cluster = ClusterSpec(2, 2, 100, 10, 5)
    view = Viewed("tp2", viewed("dp2.tp2+sp").graph, cluster=cluster, sizes={"T": 9})
    assert view.links is cluster
    assert view.whole_sizes()["T"] == 10  # padded to what tp divides
    assert view.sequences.tokens == 20  # two rows


def test_models_without_token_ids():
    view = replace(tall(1), sizes={"B": 5})
    assert view.sequences.lengths == (5,)  # rows, not their elements
    assert ["micro-batch", "B = 5"] in about(view)
