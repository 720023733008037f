"""A program on one rank: order of calls, carried buffers, groups, and clear errors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

from fxpar.errors import FxparError
from fxpar.ir.mesh import Mesh
from fxpar.lowering import lower
from fxpar.runtime import bind
from fxpar.runtime.runner import compile_part, token_axes
from fxpar.torch_api.threaded import run_threads
from fxpar.tracer import capture
from fxpar.transport import ProcessGroups
from tests.captured import llama, odd


def bound_one():
    """The Llama's program for a single rank, ready to run."""
    captured = llama(layers=1)
    program = lower(captured.graph, "dp1")
    bound = bind(program, 0, {})
    bound.prepare(captured.params, captured.buffers)
    return captured, bound


def test_a_mini_batch():
    captured, bound = bound_one()
    bound.run(captured.batches[0], 0.5)
    once = bound.finish()
    bound.prepare(captured.params, captured.buffers)
    bound.run(captured.batches[0], 0.25)
    bound.run(captured.batches[0], torch.tensor(0.25))
    twice = bound.finish()
    assert set(once) == {"loss", "metrics", "grads", "buffers", "experts"}
    assert set(once["grads"]) == set(captured.params)
    assert torch.allclose(once["loss"], twice["loss"], rtol=1e-13)
    for name, grad in once["grads"].items():
        assert torch.allclose(grad, twice["grads"][name], rtol=1e-10, atol=1e-13)


def test_gradients_that_are_begun_are_added_to_where_they_are(monkeypatch):
    """No others are made meanwhile: that would be as much memory again."""
    captured, bound = bound_one()
    bound.run(captured.batches[0], 0.5)
    once = {name: value.clone() for name, value in bound.finish()["grads"].items()}
    begun, made = {name: value.clone() for name, value in once.items()}, []
    nothing = bound.nothing
    monkeypatch.setattr(bound, "nothing", lambda node: made.append(nothing(node)) or made[-1])
    bound.prepare(captured.params, captured.buffers, begun=begun)
    assert sum(value.numel() for value in made) == 1  # the loss
    bound.run(captured.batches[0], 0.5)
    for name, value in bound.finish()["grads"].items():
        assert value.data_ptr() == begun[name].data_ptr()
        assert torch.allclose(value, 2 * once[name], rtol=1e-10, atol=1e-13)


class Slopes(nn.Module):
    """Gradients that are an expanded number, and one piece of memory for two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2))
        self.half = torch.tensor(0.5, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.a + self.b).sum() * self.half


def bound_slopes():
    model = Slopes()
    batches = [{"x": torch.randn(4, dtype=torch.float64)} for _ in range(3)]
    program = lower(capture(model, lambda model, batch: model(batch["x"]).sum(), batches[0]), "dp1")
    return bind(program, 0, {}), {name: p.detach() for name, p in model.named_parameters()}, batches


def test_constants_go_where_the_parameters_are():
    bound, params, _ = bound_slopes()
    assert bound.program.constants
    for device in ("cpu", "meta", "cpu"):
        bound.prepare({name: p.to(device) for name, p in params.items()}, {})
        assert {value.device.type for value in bound.inputs if value is not None} == {device}


def test_gradients_that_are_views_add_up():
    bound, params, batches = bound_slopes()
    bound.prepare(params, {})
    for batch in batches:
        bound.run(batch, 1.0)
    expected = 0.5 * sum(batch["x"].sum() for batch in batches).expand(3)
    for grad in bound.finish()["grads"].values():
        torch.testing.assert_close(grad, expected)


def test_results_of_a_group_are_not_overwritten_by_the_next():
    captured, bound = bound_one()
    bound.run(captured.batches[0], 1.0)
    bound.run(captured.batches[1], 1.0)
    first = bound.finish()["grads"]
    copies = {name: grad.clone() for name, grad in first.items()}
    bound.prepare(captured.params, captured.buffers)
    bound.run(captured.batches[2], 1.0)
    bound.run(captured.batches[3], 1.0)
    bound.finish()
    assert all(torch.equal(first[name], copies[name]) for name in first)


def test_prepare_starts_over():
    captured, bound = bound_one()
    bound.run(captured.batches[0], 1.0)
    bound.prepare(captured.params, captured.buffers)
    bound.run(captured.batches[1], 1.0)
    again = bound.finish()
    bound.prepare(captured.params, captured.buffers)
    bound.run(captured.batches[1], 1.0)
    assert torch.equal(again["loss"], bound.finish()["loss"])


def test_an_idle_run_adds_zeros_and_keeps_buffers():
    captured = odd("norms")
    bound = bind(lower(captured.graph, "dp1"), 0, {})
    ends = []
    for idle in (0, 2):
        bound.prepare(captured.params, captured.buffers)
        bound.run(captured.batches[0], 1.0)
        for _ in range(idle):
            bound.run(captured.batches[0], 1.0, idle=True)
        ends.append(bound.finish())
    assert torch.equal(ends[0]["loss"], ends[1]["loss"])
    for kind in ("grads", "buffers"):
        assert all(torch.equal(ends[0][kind][name], ends[1][kind][name]) for name in ends[0][kind])


def test_a_missing_key_is_named():
    captured, bound = bound_one()
    with pytest.raises(FxparError, match=r"labels.* is missing; the batch has \['input_ids'"):
        bound.run({"input_ids": captured.batches[0]["input_ids"]}, 1.0)


def test_finish_without_a_run():
    _, bound = bound_one()
    with pytest.raises(FxparError, match=r"no micro-batch has run since prepare\(\)"):
        bound.finish()


def test_tokens_of_a_program():
    program = lower(llama().graph, "dp2.tp3")
    assert program.axes() == ("dp", "tp")
    assert token_axes(program) <= {"dp", "tp"}


def test_groups_are_made_once_per_set_of_ranks():
    mesh, other = Mesh((("dp", 2), ("tp", 2))), Mesh((("tp", 2), ("dp", 2)))

    def work(rank: int) -> tuple:
        groups = ProcessGroups()
        names = groups.names(mesh, ("dp", "tp", "dp.tp"))
        again = groups.names(mesh, ("tp", "dp"))
        swapped = groups.names(other, ("dp", "tp"))
        total = torch.ones(1)
        dist.all_reduce(total)
        return names, again, swapped, int(total)

    for names, again, swapped, total in run_threads(4, work):
        assert total == 4
        assert again == {axis: names[axis] for axis in ("dp", "tp")}
        assert swapped == {"dp": names["tp"], "tp": names["dp"]}
        assert len(set(names.values())) == 3
    # ranks that differ on dp only are in one group
    results = run_threads(4, lambda rank: ProcessGroups().names(mesh, ("dp",))["dp"])
    assert results[0] == results[2]
    assert results[1] == results[3]
    assert results[0] != results[1]


def test_an_error_on_one_rank_ends_the_others():
    def work(rank: int) -> None:
        if rank == 1:
            raise ValueError("rank 1 is unwell")
        dist.barrier()

    with pytest.raises(ValueError, match="rank 1 is unwell"):
        run_threads(4, work)
    assert run_threads(2, lambda rank: rank) == [0, 1], "the next world is not affected"


@pytest.mark.compiler
def test_the_error_of_a_kernel_in_a_compiled_program_is_shown():
    """And not that the compiler cannot compile what torch does with errors of a graph."""
    lib = torch.library.Library("fxpar_test_bound", "DEF")
    lib.define("fail(Tensor x) -> Tensor")
    torch.library.register_fake("fxpar_test_bound::fail", torch.empty_like, lib=lib)

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("the kernel's own")

    lib.impl("fail", fail, "CPU")
    graph = fx.Graph()
    graph.output((graph.call_function(torch.ops.fxpar_test_bound.fail.default, (graph.placeholder("x"),)),))
    with pytest.raises(ValueError, match="the kernel's own"):
        compile_part(graph, "inductor")([torch.ones(3)])
