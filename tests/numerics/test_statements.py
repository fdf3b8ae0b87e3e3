"""Statements that a compiler alone refuses, or that eager runs and nobody plans: planned, with eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import ebbtide
from eager_steps import assert_trains_as_eager

WIDTH = 8
X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
Body = Callable[..., Any]


class Model(nn.Module):
    """Two linear layers and a stack; what is made of them is the test's."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.stack = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(4)))
        self.rate = 0.0
        self.body = body

    def forward(self, *args: Any) -> Any:
        return self.body(self, *args)


def energy(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_(True)
    value = torch.tanh(m.two(torch.tanh(m.one(x)))).sum()
    (force,) = torch.autograd.grad(value, x, create_graph=True)
    return (force - 1).square().mean()


def leaf_inside(m: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = m.one(x).detach().requires_grad_(True)
    return m.two(torch.tanh(hidden)).square().mean()


def leaf_by_assignment(m: Any, x: torch.Tensor) -> torch.Tensor:
    identity = torch.eye(WIDTH)
    identity.requires_grad = False
    hidden = m.one(x).detach()
    hidden.requires_grad = True
    return m.two(torch.tanh(hidden) @ identity).square().mean()


def parameter_inside(m: Any, x: torch.Tensor) -> torch.Tensor:
    weight = nn.Parameter(m.one.weight.T)
    fixed = nn.Parameter(m.two.weight.T, requires_grad=False)
    if not isinstance(weight, nn.Parameter) or not weight.requires_grad or fixed.requires_grad:
        return m.two(x).sum()
    return (m.two(x @ weight) / torch.linalg.norm(weight, dim=1) @ fixed).square().mean()


def names_of_classes(m: Any, x: torch.Tensor) -> torch.Tensor:
    kind = type(m.one.weight)
    if kind.__module__.startswith("torchao.") or kind.__name__.endswith("4bit") or not F.gelu.__name__.islower():
        return m.two(x).sum()
    return F.gelu(m.one(x)).square().mean()


def layerdrop(m: Any, x: torch.Tensor) -> torch.Tensor:
    for each in m.stack:
        drawn = torch.rand([])
        skip = m.training and (drawn < m.rate)
        if not skip:
            x = torch.tanh(each(x))
        if m.rate > drawn or drawn >= 1 or not drawn > -1e-3:
            x = x * 2
    return m.one(x).square().mean()


def sequential(reentrant: bool) -> Body:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential(m.stack, 3, m.one(x), use_reentrant=reentrant).square().mean()

    return body


def checkpointed(reentrant: bool) -> Body:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(m.stack, m.one(x), use_reentrant=reentrant).square().mean()

    return body


def draws_in_vain(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch.rand(3)
    x = F.dropout(m.one(x), 0.2)
    torch.randint(5, (2,)), torch.bernoulli(x.sigmoid())
    return F.dropout(x, 0.2).square().mean()


def matrix(m: Any) -> torch.Tensor:
    return m.one.weight @ m.one.weight.T + torch.eye(WIDTH)


def algebra(m: Any, x: torch.Tensor) -> torch.Tensor:
    solved = torch.linalg.solve(matrix(m), m.two(x).T).square().mean()
    return solved + torch.logdet(matrix(m)) + torch.linalg.inv(matrix(m)).mean()


def factors(m: Any, x: torch.Tensor) -> torch.Tensor:
    solved = torch.linalg.lu_solve(*torch.linalg.lu_factor(matrix(m)), m.two(x).T)
    return solved.mean() + torch.linalg.cholesky(matrix(m)).sum()


BODIES: dict[str, Body] = {
    "autograd.grad": energy,
    "a leaf inside": leaf_inside,
    "a leaf by assignment": leaf_by_assignment,
    "a parameter inside": parameter_inside,
    "names of classes": names_of_classes,
    "layerdrop of 0": layerdrop,
    "draws that nobody reads": draws_in_vain,
    "sequential checkpoints": sequential(False),
    "reentrant sequential checkpoints": sequential(True),
    "reentrant checkpoint": checkpointed(True),
    "linear algebra": algebra,
    "factors": factors,
}


@pytest.mark.parametrize("name", BODIES)
def test_a_statement_is_planned_with_eagers_bits(name: str) -> None:
    assert_trains_as_eager(Model(BODIES[name]), lambda: (X,))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_hook_that_makes_an_embedding_take_a_gradient(frozen: bool) -> None:
    """What transformers' ``enable_input_require_grads`` does for PEFT and for checkpoints."""
    model = Model(lambda m, i: checkpoint(m.stack, torch.tanh(m.table(i)), use_reentrant=True).square().mean())
    model.table = nn.Embedding(10, WIDTH)
    model.table.weight.requires_grad_(not frozen)
    model.table.register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    assert_trains_as_eager(model, lambda: (torch.tensor([1, 2, 2]),))


def test_a_matrix_that_is_singular_raises_as_in_eager() -> None:
    model = ebbtide.fit(Model(lambda m, x: (torch.linalg.inv(x) @ m.one.weight).sum()), "1GiB")
    for given in (torch.eye(WIDTH), torch.zeros(WIDTH, WIDTH), torch.eye(WIDTH)):
        if given.any():
            model(given).backward()
            continue
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):
            model(given)
    assert ebbtide.plan_of(model) is not None


FRAMES = torch.randn(6, 2, WIDTH, generator=torch.Generator().manual_seed(3))
ROWS, LINE = torch.tensor([[1, 2, 3], [2, 1, 0]]), torch.tensor([1, 2, 3, 2, 1])
LENGTHS = {
    "tensors": (torch.tensor([6, 5]), torch.tensor([3, 2])),
    "short ones": (torch.tensor([6, 2], dtype=torch.int32), torch.tensor([2, 1])),
    "tuples": ((6, 5), (3, 2)),
    "lists": ([6, 5], [2, 2]),
}


def ctc(**options: Any) -> Body:
    def body(m: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return F.ctc_loss(m.two(torch.tanh(m.one(x))).log_softmax(-1), *rest, **options).sum()

    return body


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ("tensors", {"reduction": "none", "blank": 7}),
        ("short ones", {"zero_infinity": True}),
        ("tuples", {"reduction": "sum"}),
        ("lists", {}),
    ],
)
def test_ctc_loss(lengths: str, options: dict[str, Any]) -> None:
    inputs, targets = LENGTHS[lengths]
    assert_trains_as_eager(Model(ctc(**options)), lambda: (FRAMES, ROWS, inputs, targets))


def test_ctc_loss_of_targets_in_one_line_and_of_a_single_sequence() -> None:
    assert_trains_as_eager(Model(ctc()), lambda: (FRAMES, LINE, *LENGTHS["tensors"]))
    assert_trains_as_eager(Model(ctc()), lambda: (FRAMES[:, 0], LINE[:3], torch.tensor(6), torch.tensor(3)))
    assert_trains_as_eager(Model(ctc()), lambda: (FRAMES[:, 0], LINE[:3], (6,), (3,)))


def test_lengths_that_change_are_one_step() -> None:
    """Bytes of the step do not depend on them."""
    model = ebbtide.fit(Model(ctc()), "1GiB")
    for longest in (3, 1, 2, 3):
        model(FRAMES, ROWS, torch.tensor([6, 6]), torch.tensor([longest, 1])).backward()
    step = ebbtide.step_of(model)
    assert step is not None
    assert step.forward_calls == 4
    assert step.measured_above_bytes is not None
    assert step.plan is not None
    assert step.measured_above_bytes <= step.plan.timeline.above_bytes
