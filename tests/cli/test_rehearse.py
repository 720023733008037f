"""Labels of a file of anybody's are looked at before a gradient takes them for places in memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxpar.cli.check_file import check_file
from fxpar.cli.rehearse import look_at_labels, nll_loss_backward
from fxpar.cli.source import GraphSource
from fxpar.errors import GraphFileError
from fxpar.graph_files import Origin, save_graph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.tracer import capture

aten = torch.ops.aten
BATCH = {"x": torch.randn(4, 3, dtype=torch.float64), "labels": torch.tensor([1, 0, 4, -100])}


def captured():
    model = nn.Linear(3, 5).double()
    return capture(model, lambda m, b: F.nll_loss(m(b["x"]).log_softmax(-1), b["labels"], reduction="sum"), BATCH)


def test_a_loss_of_labels_is_checked(tmp_path):
    logical = captured()
    origin = Origin(logical, (BATCH, BATCH))
    for graph, strategies in ((logical, [Strategy.parse("dp2")]), (lower(logical, "dp2"), [])):
        path = tmp_path / "g.fxpar"
        save_graph(path, graph, origin)
        _, (result,) = check_file(GraphSource(str(path)), strategies, tolerance=None, compile="eager", seed=1)
        assert result.ok


def test_labels_that_no_loss_has_looked_at():
    logical = captured()
    (node,) = logical.gm.graph.find_nodes(op="call_function", target=aten.nll_loss_backward.default)
    with logical.gm.graph.inserting_before(node):
        other = logical.gm.graph.call_function(aten.neg.default, (node.args[2],))
    node.args = (*node.args[:2], other, *node.args[3:])
    with pytest.raises(GraphFileError, match=f"%{node.name} of its graph is not the gradient of a loss before it"):
        look_at_labels("g.fxpar", logical)


def test_the_gradient_of_a_program_looks_for_itself():
    """ATen's own writes to wherever a label leads, and ends the process at best."""
    program = lower(captured(), "dp2")
    look_at_labels("g.fxpar", program)
    targets = [node.target for placed in program.placed for p in placed.parts.values() for node in p.graph.nodes]
    assert nll_loss_backward in targets
    assert aten.nll_loss_backward.default not in targets
    scores, total = torch.zeros(3, 5), torch.tensor(2.0)
    labels = torch.tensor([4, -100, 0])
    for bad in (5, -1, 10**9):
        with pytest.raises(IndexError, match=f"label {bad} is none of 5 classes"):
            nll_loss_backward(torch.ones(()), scores, labels.where(labels != 4, bad), None, 2, -100, total)
    found = nll_loss_backward(torch.ones(()), scores, labels, None, 2, -100, total)
    assert found.nonzero().tolist() == [[0, 4], [2, 0]]
