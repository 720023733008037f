"""Whatever cannot be captured exactly is one clear error, and leaves the model as it was."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxpar import errors
from fxpar.tracer import capture
from tests.tracer.models import MLP

X = {"x": torch.randn(6, 8), "y": torch.randn(6, 4)}
IDS = torch.randint(61, (2, 10))
TOKENS = {"input_ids": IDS, "labels": IDS}


class With(nn.Module):
    """A linear layer with some function of its result after it."""

    def __init__(self, function) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.function = function

    def forward(self, x):
        return self.function(self.inner(x))


def sum_loss(model, batch):
    return model(batch["x"]).sum()


KEPT = torch.zeros(4)


def writes_through_data(x):
    KEPT.data.mul_(0.9).add_(x.detach().mean(0))
    return x + KEPT


SIZES = {
    "power of a fraction": lambda x: x * 2 if (x.shape[0] / 300 - 1) ** 2 < 1e-4 else x,
    "tensor of a condition": lambda x: torch.where(torch.tensor(x.shape[0] > 200), x, 2 * x),
    "divmod": lambda x: x * divmod(x.shape[0], 4)[0],
    "an attribute of int": lambda x: x * x.shape[0].to_bytes(2)[0],
}


@pytest.mark.parametrize("name", SIZES)
def test_what_fails_on_a_symbol_is_told(name):
    message = (
        r"^B, the rows of the batch, is a symbol at capture, and what is done with it fails \(at \S*test_errors.py"
    )
    with pytest.raises(errors.SymbolicSizeError, match=message):
        capture(With(SIZES[name]), sum_loss, X)


def test_what_sympy_fails_at_is_told():
    class Unfolding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(61, 4)

        def forward(self, input_ids):
            x = self.embed(input_ids)
            return (x + x.unfold(1, 4, 2).sum((-1, 1))[:, None]).sum()

    with pytest.raises(errors.SymbolicSizeError, match="T, the sequence length, is a symbol at capture"):
        capture(Unfolding(), lambda model, batch: model(batch["input_ids"]), {"input_ids": IDS[:1]})


def test_a_write_through_data_is_told():
    with pytest.raises(
        errors.UnsupportedOpError, match=r"a write through .data into .*test_errors.py.*Make it a buffer\.$"
    ):
        capture(With(writes_through_data), sum_loss, X)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x, mask, scale: float = 1.0):
        return self.inner(x) * mask * scale


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (sum_loss, "missing 1 required positional argument: 'mask'"),
        (lambda model, batch: model(**batch).sum(), "got an unexpected keyword argument 'y'"),
    ],
)
def test_a_forward_that_does_not_take_the_batch(loss, why):
    with pytest.raises(errors.ForwardArgumentsError) as caught:
        capture(Masked(), loss, X)
    assert str(caught.value).startswith(
        f"Masked.forward() {why}. The parameters of forward are x, mask, scale=1.0; the keys of the batch are 'x', "
        "'y'. Name the keys"
    )


def test_a_type_error_inside_of_the_model_stays_what_it_is():
    with pytest.raises(TypeError, match="value_branch") as caught:
        capture(With(lambda x: value_branch()), sum_loss, X)
    (note,) = caught.value.__notes__
    assert note.startswith("raised while fxpar captured the model, at ")
    assert "None" not in note


def value_branch(x):
    return x if x.sum() > 0 else -x


def item(x):
    return x * x.max().item()


def nonzero(x):
    return x[torch.nonzero(x[:, 0])[:, 0]]


def boolean_index(x):
    return x[x > 0]


def through_numpy(x):
    return x * torch.from_numpy(x.detach().numpy())


@pytest.mark.parametrize("function", [value_branch, item, nonzero, boolean_index, through_numpy])
def test_data_dependent(function):
    with pytest.raises(errors.DataDependentError, match=r"test_errors\.py:") as caught:
        capture(With(function), sum_loss, X)
    if function in (value_branch, item):
        assert "a value is read" in str(caught.value)
    if function is through_numpy:
        assert "its values go to NumPy (.numpy())" in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "said"),
    [(lambda model: 0, r"\(model\)"), (lambda a, b, c: 0, r"\(a, b, c\)"), (lambda *, model, batch: 0, r"batch\)")],
)
def test_a_loss_function_with_other_parameters(loss, said):
    with pytest.raises(errors.LossFunctionError, match=rf"{said}, not a function of the model and a batch"):
        capture(MLP(), loss, X)


def test_a_model_that_is_none():
    with pytest.raises(errors.CaptureError, match=r"the model is 3, not an nn\.Module"):
        capture(3, sum_loss, X)


def test_a_model_that_is_wrapped_or_lazy():
    inside = nn.Sequential(nn.DataParallel(MLP()))
    with pytest.raises(
        errors.WrappedModelError, match=r"^module '0' of the model is wrapped in DataParallel.*\.module"
    ):
        capture(inside, sum_loss, X)
    with pytest.raises(errors.WrappedModelError, match=r"^the model is wrapped in DataParallel"):
        capture(inside[0], sum_loss, X)
    with pytest.raises(errors.LazyParameterError, match=r"^'1\.weight' has no shape yet.*Call the model once"):
        capture(nn.Sequential(nn.Linear(8, 4), nn.LazyLinear(4)), sum_loss, X)


def test_a_batch_of_another_dtype():
    """Fake tensors of two dtypes have a product."""
    message = r"^a product of torch.float32 and torch.float64 .*test_errors.py.* In the batch 'x' is torch.float32,"
    with pytest.raises(errors.MixedDtypesError, match=message):
        capture(nn.Linear(8, 4).double(), sum_loss, X)
    capture(nn.Linear(8, 4).double(), lambda model, batch: model(batch["x"].double()).sum(), X)


@pytest.mark.parametrize("batch", [{}, {"x": 3}, {"x": [1.0]}, {1: torch.ones(2)}, {"x": torch.ones(2).to_sparse()}])
def test_bad_batch(batch):
    with pytest.raises(errors.BatchError):
        capture(MLP(), sum_loss, batch)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: m(b["x"]), "shape"),
        (lambda m, b: m(b["x"]).sum().detach(), "does not depend"),
        (lambda m, b: b["x"].sum(), "does not depend"),
        (lambda m, b: m(b["x"]).argmax(), "dtype"),
        (lambda m, b: 1.0, "float"),
        (lambda m, b: (m(b["x"]).sum(), 0), "tuple"),
        (lambda m, b: torch.ones((), requires_grad=True), "any trainable parameter"),
    ],
)
def test_bad_loss(loss, message):
    with pytest.raises(errors.LossError, match=message):
        capture(MLP(), loss, X)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (None, "None"),
        ("ce", "'ce'"),
        (F.cross_entropy, "'cross_entropy' of torch"),
        (nn.MSELoss(), "'MSELoss' of torch"),
    ],
)
def test_a_loss_of_something_else_than_a_model_and_a_batch(loss, name):
    with pytest.raises(errors.LossFunctionError, match=f"the loss is {name}, not a function of the model and a batch"):
        capture(MLP(), loss, X)


def test_item_in_loss():
    with pytest.raises(errors.DataDependentError, match=r"test_errors\.py"):
        capture(MLP(), lambda m, b: m(b["x"]).sum().item(), X)


def test_no_trainable_parameter():
    model = MLP().requires_grad_(False)
    with pytest.raises(errors.LossError):
        capture(model, sum_loss, X)


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, b: F.mse_loss(m(b["x"]), b["y"]) + 0.1 * m(b["x"]).pow(2).sum(),
        lambda m, b: m(b["x"]).pow(2).mean() + m(b["x"]).sum(),
        lambda m, b: m(b["x"]).pow(2).sum() / b["x"].shape[0],
        lambda m, b: m(b["x"]).pow(2).sum() / (b["y"] > 0).sum(),
        lambda m, b: m(b["x"]).pow(2).sum() * (1.0 / (b["y"] > 0).sum()),
        lambda m, b: (m(b["x"]).pow(2) * (b["y"] > 0) / (b["y"] > 0).sum()).sum(),
        lambda m, b: (m(b["x"]).pow(2) / (b["y"] > 0).sum()).transpose(0, 1).flip(0).sum(),
        lambda m, b: sum(t.sum() for t in (m(b["x"]).pow(2) / (b["y"] > 0).sum()).unbind(1)),
        lambda m, b: m(b["x"]).pow(2).mean(0).sum(),
        lambda m, b: -(m(b["x"]).log_softmax(-1)).sum(-1).mean(),
    ],
)
def test_mean_in_loss(loss):
    with pytest.raises(errors.MeanLossError, match=r"test_errors.py:.*reduction='sum'"):
        capture(MLP(), lambda m, b: loss(m, b) + 0.0 * m(b["x"]).sum(), X)


def writes_batch(model, batch):
    batch["x"].mul_(2)
    return sum_loss(model, batch)


def writes_parameter(model, batch):
    with torch.no_grad():
        model.inner.weight.mul_(2)
    return sum_loss(model, batch)


@pytest.mark.parametrize(("loss", "name"), [(writes_batch, "'x'"), (writes_parameter, "'inner.weight'")])
def test_writes_to_inputs(loss, name):
    with pytest.raises(errors.MutationError, match=name):
        capture(With(torch.relu), loss, X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + torch.randn_like(x),
        lambda x: F.alpha_dropout(x, 0.1, training=True),
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    ],
)
def test_random_ops(function):
    with pytest.raises(errors.UnsupportedOpError, match="random"):
        capture(With(function), sum_loss, X)


def test_other_devices():
    with pytest.raises(errors.DeviceError, match="'cuda'"):
        capture(With(lambda x: x + torch.ones(4, device="cuda")), sum_loss, X)
    with pytest.raises(errors.DeviceError, match="'cuda'"):
        capture(With(lambda x: x.to("cuda")), sum_loss, X)
    with pytest.raises(errors.DeviceError, match="'cuda'"):
        capture(With(lambda x: x.cuda()), sum_loss, X)


def test_reentrant_checkpoint():
    def loss(model, batch):
        return checkpoint(model, batch["x"].requires_grad_(), use_reentrant=True).sum()

    with pytest.raises(errors.UnsupportedOpError, match="use_reentrant=False"):
        capture(MLP(), loss, X)


def test_sparse_embedding():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(61, 4, sparse=True)

        def forward(self, input_ids):
            return self.embed(input_ids)

    with pytest.raises(errors.UnsupportedOpError, match=r"sparse.*'embed'"):
        capture(Sparse(), lambda m, b: m(b["input_ids"]).sum(), TOKENS)


def test_other_exceptions_say_where():
    def wrong(x):
        return x @ torch.ones(3, 3)

    with pytest.raises(RuntimeError) as caught:
        capture(With(wrong), sum_loss, X)
    assert any("while fxpar captured" in note for note in caught.value.__notes__)


def test_an_op_that_fails_is_named():
    with torch.library._scoped_library("failing", "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: x.missing, "CompositeImplicitAutograd")
        with pytest.raises(AttributeError) as caught:
            capture(With(torch.ops.failing.op.default), sum_loss, X)
    assert "raised by the op failing.op.default" in caught.value.__notes__


def snapshot(model):
    modules = {}
    for name, module in model.named_modules():
        state = {k: v for k, v in module.__dict__.items() if not isinstance(v, (dict, list))}
        tables = {k: copy.copy(v) for k, v in module.__dict__.items() if isinstance(v, (dict, list))}
        modules[name] = (state, tables)
    return modules


@pytest.mark.parametrize("fails", [False, True])
def test_model_is_left_as_it_was(fails):
    class Stateful(MLP):
        def __init__(self):
            super().__init__(0.1)
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
            self.last, self.seen = None, []

        def forward(self, x):
            self.last = x
            self.count = self.count + 1
            self.extra = x.shape[0]
            self.seen.append(x)
            self.eval()
            y = super().forward(x)
            if fails:
                raise ValueError("no")
            return y

    model = Stateful()
    before, values = snapshot(model), [t.clone() for t in (*model.parameters(), *model.buffers())]
    if fails:
        with pytest.raises(ValueError, match="no"):
            capture(model, sum_loss, X)
    else:
        graph = capture(model, sum_loss, X)
        assert [out.fqn for out in graph.outputs if out.kind == "buffer"] == ["count"]
    assert snapshot(model) == before
    for old, new in zip(values, (*model.parameters(), *model.buffers()), strict=True):
        assert torch.equal(old, new)
        assert new.grad is None


def test_ops_of_one_device():
    def direct(x):
        q = x.view(1, 1, -1, 4)
        return torch.ops.aten.scaled_dot_product_attention(q, q, q).view(-1, 4)

    with pytest.raises(errors.UnsupportedOpError, match="_for_cpu"):
        capture(With(direct), sum_loss, X, dynamic=None)


def test_operators_with_functions_inside():
    from torch.nn.attention.flex_attention import flex_attention

    def flex(x):
        q = x.view(1, 1, -1, 4)
        with torch.no_grad():
            y = flex_attention(q, q, q)
        return x + y.view(-1, 4)

    with pytest.raises(errors.UnsupportedOpError, match=r"flex_attention.*scaled_dot_product_attention"):
        capture(With(flex), sum_loss, X, dynamic=None)
