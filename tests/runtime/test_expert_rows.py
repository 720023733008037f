"""Rows of each expert and rank: the same sums however tokens and experts are cut."""

from __future__ import annotations

import functools
import operator
import pickle

import pytest
import torch
from torch import Tensor, fx, nn

from fxpar import losses
from fxpar.checking import assign, run_world
from fxpar.ir.exec_graph import compile_graph
from fxpar.ir.graph import TensorMeta
from fxpar.ir.mesh import Mesh
from fxpar.lowering import default_passes, lower
from fxpar.passes.compress_dispatch import CompressDispatch
from fxpar.runtime.expert_rows import ExpertRows, expert_layers, expert_loads
from fxpar.runtime.report import ExpertLoad
from tests.captured import Captured, lowered, take, tokens
from tests.passes.test_exchange_tokens import EXPERTS, SLOTS, Model

own = torch.ops.fxpar
LAYER, LENGTHS = "layers.0.experts", (8, 16)


@functools.cache
def routed() -> tuple[Captured, Model]:
    model = Model()
    return take(model, losses.causal_lm, tokens(31, *LENGTHS)), model


@functools.cache
def chosen() -> list[tuple[Tensor, Tensor]]:
    """Of each of the two rows its tokens, for each of their experts, and these."""
    found, model = routed()
    seen: list[tuple[Tensor, Tensor]] = []

    def look(_: nn.Module, given: tuple[Tensor], made: Tensor) -> None:
        seen.append((given[0].detach()[:, None].expand(-1, SLOTS, -1), made.topk(SLOTS, -1).indices))

    hook = model.layers[0]["experts"].router.register_forward_hook(look)
    for row in found.batches:
        model(row["input_ids"], row["position_ids"])
    hook.remove()
    return seen


@pytest.mark.parametrize(
    "strategy",
    [
        "dp2+zero3",
        "tp4+sp+remat[*.experts: ep2.tp2+ep_chunks(2)]",
        "cp2.pp2+cut(layers.0.experts)[*.experts: ep2]",
    ],
)
def test_each_row_counts_once_for_its_expert(strategy: str) -> None:
    found, _ = routed()
    want = torch.bincount(torch.cat([ids for _, ids in chosen()]).flatten(), minlength=EXPERTS).tolist()
    program = lowered(found, strategy)
    ranks = run_world(program, found.params, found.buffers, found.batches, assign(program.strategy, 2), 1.0)
    rows = [rank["experts"].get(LAYER, torch.zeros(2 * EXPERTS + 3)) for rank in ranks]
    assert sum(rows)[:EXPERTS].tolist() == want
    assert expert_layers([pickle.loads(pickle.dumps(program))]) == {LAYER: EXPERTS}
    assert expert_layers([program]) == {LAYER: EXPERTS}
    together = sum(LENGTHS) * SLOTS
    assert sum(rows)[-1] == together * (2 if ".tp2" in strategy else 1)


def test_how_far_rows_are_from_their_means() -> None:
    """As by hand, on the first token of each row."""
    found, _ = routed()
    passes = default_passes()
    at = [step.name for step in passes].index(CompressDispatch.name)
    passes[at] = CompressDispatch(pool=0)
    program = lower(found.graph, "dp1+lsh(0.5)", passes=passes)
    (rank,) = run_world(program, found.params, found.buffers, found.batches, assign(program.strategy, 2), 1.0)
    squares = torch.zeros(2, dtype=torch.float64)
    for x, ids in chosen():
        codes = own.hash_rows.default(x, 8, 8, 0)
        cluster, sizes, _ = own.cluster_rows.default(codes, ids, EXPERTS, 16, 8, 0.5, EXPERTS + 1)
        apart = x - own.cluster_mean.default(x, cluster, sizes)[cluster, 0]
        squares += torch.stack([apart[0].square().sum(), x[0].square().sum()])
    assert 0 < squares[0] < squares[1]
    (load,) = expert_loads([rank["experts"]], {LAYER: EXPERTS}, 0, 1, torch.device("cpu"), None)
    assert load.figures()["residual"] == pytest.approx(float((squares[0] / squares[1]).sqrt()))


def test_loads_of_several_groups() -> None:
    device = torch.device("cpu")
    groups = [{"b": torch.tensor([1.0, 3, 1, 3, 0, 0, 4])}, {"b": torch.tensor([2.0, 0, 2, 0, 0, 0, 2])}, {}]
    (load,) = expert_loads(groups, {"a": 3, "b": 2}, 0, 1, device, None)
    assert load == ExpertLoad("b", (3.0, 3.0), (6.0,))
    assert ExpertLoad("b", (1.0, 3.0), (4.0, 0.0, 2.0)).expert_balance == 1.5
    assert ExpertLoad("b", (1.0, 3.0), (4.0, 0.0, 2.0)).rank_balance == pytest.approx(4 / 3)


def test_sets_of_experts_of_several_sizes_in_a_module() -> None:
    graph = fx.Graph()
    for experts in (2, 4, 2):
        ids = graph.call_function(torch.full, ((3, 1), 1))
        routes = graph.call_function(own.route_rows.default, (ids, experts))
        counts = graph.call_function(operator.getitem, (routes, 1))
        counts.meta |= {"experts": ("", 1), "fqn": "moe", "local": TensorMeta((experts,), torch.int64)}
    graph.output(())
    rows = ExpertRows(Mesh(()), 0)
    rows.watch(graph)
    compile_graph(graph)()
    found = {name: counts[: (len(counts) - 3) // 2].tolist() for name, counts in rows.take().items()}
    assert found == {"moe (2 experts)": [0, 6], "moe": [0, 3, 0, 0]}
