"""The linear program finds what trying every cut finds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from fxpar.ir.graph import TensorMeta
from fxpar.remat.cut import Cut, least_bytes, least_work
from fxpar.remat.forward import ForwardValues
from fxpar.remat.storages import Storages, trace_storages
from tests.repeat import examples

aten = torch.ops.aten


@dataclass(frozen=True)
class Small:
    """A few calls on vectors and what the backward reads of them."""

    nodes: tuple[fx.Node, ...]
    needed: frozenset[fx.Node]
    storages: Storages


@st.composite
def forwards(draw) -> Small:
    graph = fx.Graph()
    values = [graph.placeholder("x")]
    values[0].meta["tensor"] = TensorMeta((3,), torch.float64)
    for _ in range(draw(st.integers(1, 7))):
        a, b = (draw(st.sampled_from(values)) for _ in range(2))
        kinds = {"sin": (aten.sin.default, (a,)), "cat": (aten.cat.default, ([a, b],)), "sum": (aten.sum.default, (a,))}
        kinds |= {"view": (aten.slice.Tensor, (a, 0, 0, 2)), "outer": (aten.outer.default, (a, a))}
        flat = all(v.meta.get("flat", True) for v in (a, b))
        allowed = ["sin", "view", "cat", "outer"] if flat else ["sin", "sum"]
        target, args = kinds[draw(st.sampled_from(allowed))]
        values.append(graph.call_function(target, args))
        values[-1].meta["flat"] = flat and target is not aten.outer.default
    nodes = tuple(values[1:])
    needed = frozenset(draw(st.lists(st.sampled_from(nodes), min_size=1, unique=True)))
    graph.output(())
    storages = trace_storages(graph, {})
    for node in nodes:
        node.meta["local"] = TensorMeta((), torch.float64)
    return Small(nodes, needed, storages)


def cut_of(small: Small, allowed: frozenset[fx.Node], work: dict[fx.Node, float]) -> Cut:
    values = ForwardValues(small.nodes, small.needed, frozenset(), {})
    return Cut(values, small.storages, allowed, work, frozenset())


def by_hand(small: Small, again: set[fx.Node], work: dict[fx.Node, float]) -> tuple[int, float]:
    """Bytes saved and work done if the nodes in `again` are recomputed where they are wanted."""
    saved: set[int] = set()
    done: set[fx.Node] = set()

    def want(node: fx.Node) -> None:
        if node in again:
            done.add(node)
            for operand in node.all_input_nodes:
                want(operand)
        else:
            saved.update(small.storages.of[node])

    for node in small.needed:
        want(node)
    return sum(small.storages.nbytes[s] for s in saved - small.storages.borrowed), sum(work[n] for n in done)


@settings(max_examples=examples(25))
@given(forwards(), st.data())
def test_least(small, data):
    allowed = frozenset(data.draw(st.lists(st.sampled_from(small.nodes), unique=True)))
    work = {node: float(data.draw(st.integers(1, 9))) for node in small.nodes}
    cut = cut_of(small, allowed, work)
    subsets = itertools.chain.from_iterable(itertools.combinations(allowed, n) for n in range(len(allowed) + 1))
    every = [by_hand(small, set(subset), work) for subset in subsets]
    found = least_bytes(cut)
    assert (found.saved_bytes, found.work) == by_hand(small, set(found.recomputed), work)
    assert (found.saved_bytes, found.work) == min(every)
    budget = data.draw(st.integers(found.saved_bytes, max(nbytes for nbytes, _ in every)))
    within = least_work(cut, budget, found)
    assert (within.saved_bytes, within.work) == by_hand(small, set(within.recomputed), work)
    assert within.saved_bytes <= budget
    assert within.work == min(work for nbytes, work in every if nbytes <= budget)
