"""Capture reads a training step as a program, or says in the user's terms why it cannot."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import ebbtide
from ebbtide.capture.joint import Captured
from ebbtide.capture.offline import capture
from ebbtide.errors import CaptureError
from ebbtide.zoo import GPTConfig, gpt, mlp_chain

Body = Callable[["Body_", torch.Tensor], Any]


class Body_(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table = nn.Embedding(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.body = body

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


def joint_of(model: nn.Module, *args: torch.Tensor) -> Captured:
    return capture(model, args, {}, name="case", granularity_bytes=1, context={"device": "cpu"})


X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)

# -- what is read ---------------------------------------------------------------------------------------------


def test_views_are_no_ops_and_buffers_are_storages() -> None:
    joint = joint_of(Body_(lambda m, x: m.linear(x).t().reshape(-1)[2:].tanh().sum()), X)
    forward = [op.target for op in joint.program.ops[: joint.program.boundary]]
    assert not any(word in target for target in forward for word in ("view", "aten.t.", "slice", "permute"))
    (linear,) = (op for op in joint.program.ops if "addmm" in op.target and op.inputs == ())
    assert joint.program.buffers[linear.outputs[0]].bytes == X.nbytes


def test_parameters_and_inputs_are_resident_not_buffers() -> None:
    model = Body_(lambda m, x: m.linear(x).sum())
    joint = joint_of(model, X)
    assert joint.program.resident_bytes == X.nbytes + sum(p.nbytes for p in model.linear.parameters())
    gradients = sorted(joint.program.buffers[b].bytes for b in joint.program.gradients)
    assert gradients == sorted(p.nbytes for p in model.linear.parameters())


def test_tangents_are_counted() -> None:
    program = joint_of(Body_(lambda m, x: m.linear(x).sum()), X).program
    assert [program.buffers[b].bytes for b in program.tangents] == [4]


def test_a_tied_weight_has_one_gradient() -> None:
    case = gpt(1, GPTConfig(vocabulary=16, length=8, layers=1, width=8, heads=2, tied=True))
    program = joint_of(case.model, *case.args).program
    assert len(program.gradients) == len(list(case.model.parameters()))


def test_ops_know_their_source_and_module() -> None:
    case = gpt(1, GPTConfig(vocabulary=16, length=8, layers=2, width=8, heads=2))
    ops = joint_of(case.model, *case.args).program.ops
    assert all("gpt.py:" in op.source or "transformer" in op.source for op in ops if op.source)
    assert any(op.module.endswith("blocks.1.up") for op in ops)


def test_mutations_are_outputs_and_their_readers_stay_before_the_boundary() -> None:
    joint = joint_of(Body_(lambda m, x: m.norm(m.linear(x)).square().mean()), X)
    assert len(joint.mutated) == 3  # mean, variance, count
    readers = [op for op in joint.program.ops if op.reads_mutated]
    assert readers
    assert all(not op.name.endswith("backward") for op in readers)


def test_one_call_gives_one_program() -> None:
    case = mlp_chain(8, layers=2, width=8, dropout=0.1)
    one, two = (joint_of(copy.deepcopy(case.model), *case.args).program for _ in range(2))
    assert one.fingerprint == two.fingerprint


def test_capture_runs_nothing() -> None:
    model = Body_(lambda m, x: F.dropout(m.norm(m.linear(x)), 0.5).sum())
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    ebbtide.plan(model, (X,), budget="1MiB")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_a_model_without_memory_gives_the_same_program(kind: str) -> None:
    config = GPTConfig(vocabulary=16, length=8, layers=1, width=8, heads=2, dropout=0.1)
    real = gpt(2, config)
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        unreal = gpt(2, config)
    expected = joint_of(real.model, *real.args).program
    found = joint_of(unreal.model, *unreal.args).program
    assert [(op.target, op.inputs, op.outputs) for op in found.ops] == [
        (op.target, op.inputs, op.outputs) for op in expected.ops
    ]
    assert [b.bytes for b in found.buffers] == [b.bytes for b in expected.buffers]


# -- what cannot be read --------------------------------------------------------------------------------------


def prints(m: Body_, x: torch.Tensor) -> torch.Tensor:
    print("hello")
    return m.linear(x).sum()


def branches(m: Body_, x: torch.Tensor) -> torch.Tensor:
    if m.linear(x).sum() > 0:
        return m.linear(x).sum()
    return m.linear(x).mean()


def selects(m: Body_, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x[x[:, 0] > 0]).sum()


def takes_an_item(m: Body_, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x[: int(x.sum().item())]).sum()


def planned(model: nn.Module, x: torch.Tensor) -> None:
    ebbtide.plan(model, (x,), budget="1MiB")


@pytest.fixture(params=["fit", "plan"])
def refused(request: pytest.FixtureRequest) -> Callable[[Body], str]:
    def message(body: Body) -> str:
        model = Body_(body)
        state = copy.deepcopy(model.state_dict())
        step = ebbtide.fit(model, "1MiB") if request.param == "fit" else partial(planned, model)
        with pytest.raises(CaptureError) as caught:
            step(X)
        assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
        return str(caught.value)

    return message


@pytest.mark.parametrize("body", [prints, branches, selects, takes_an_item], ids=lambda f: f.__name__)
def test_what_breaks_the_graph_is_named_with_its_line(refused: Callable[[Body], str], body: Any) -> None:
    message = refused(body)
    first = body.__code__.co_firstlineno
    assert "test_capture.py" in message
    lines = [f'test_capture.py", line {first + i}' for i in (1, 2)] + [f"test_capture.py:{first + i}" for i in (1, 2)]
    assert any(line in message for line in lines), message


def test_no_step_of_a_model_that_needs_no_gradient_can_be_planned() -> None:
    model = Body_(lambda m, x: m.linear(x).sum()).requires_grad_(False)
    with pytest.raises(CaptureError, match="needs no gradient"):
        planned(model, X)


def test_an_op_that_returns_its_input_is_named() -> None:
    @torch.library.custom_op("ebbtide_tests::number", mutates_args=())
    def number(x: torch.Tensor) -> int:
        return int(x.numel())

    @number.register_fake
    def _(x: torch.Tensor) -> int:
        return 12

    with pytest.raises(CaptureError):
        joint_of(Body_(lambda m, x: m.linear(x).sum() * number(x)), X)


# -- the user's own exceptions --------------------------------------------------------------------------------


class Mine(Exception):
    pass


def raises_mine(m: Body_, x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] == 3:
        raise Mine("of the user", 3)
    return m.linear(x).sum()


def raises_key(m: Body_, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x).sum() * {"a": 1.0}["b" if x.shape[0] == 3 else "a"]


def raises_value(m: Body_, x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] == 3:
        raise ValueError(f"{x.shape[0]} rows are too few")
    return m.linear(x).sum()


def has_wrong_shape(m: Body_, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x[:, :2] if x.shape[0] == 3 else x).sum()


def has_no_method(m: Body_, x: torch.Tensor) -> torch.Tensor:
    return (m.linear(x).gelu() if x.shape[0] == 3 else m.linear(x)).sum()


def reads_beyond(m: Body_, x: torch.Tensor) -> torch.Tensor:
    return m.table(torch.arange(4) + (x.shape[0] == 3)).sum() + (m.table.weight.sum() if x.shape[0] == 3 else 0)


@pytest.mark.parametrize(
    "body",
    [raises_mine, raises_key, raises_value, has_wrong_shape, has_no_method, reads_beyond],
    ids=lambda f: f.__name__,
)
def test_the_users_exception_is_the_users(body: Body) -> None:
    plain = Body_(body)
    with pytest.raises(Exception) as expected:  # noqa: PT011 - compared below
        plain(X)
    fitted = ebbtide.fit(copy.deepcopy(plain), "1MiB")
    for _ in range(2):
        with pytest.raises(type(expected.value)) as caught:
            fitted(X)
        assert type(caught.value) is type(expected.value)
        # Kernels refuse fake tensors in words of their own, and nothing is run to hear others.
        assert caught.value.args == expected.value.args or (body is has_wrong_shape and "[3, 2]" in str(caught.value))
        if body is not reads_beyond:
            assert "test_capture.py" in caught.value.__notes__[0]
        for model in (fitted, plain):
            model.zero_grad()
            model(torch.ones(5, 4)).backward()
        for p, q in zip(fitted.parameters(), plain.parameters(), strict=True):
            assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


def test_an_index_out_of_range_in_a_captured_step_is_the_users() -> None:
    case = gpt(1, GPTConfig(vocabulary=16, length=8, layers=1, width=8, heads=2))
    model = ebbtide.fit(case.model, "1MiB")
    tokens, targets = case.args
    beyond = tokens.clone()
    beyond[0, 0] = 99
    for wrong in (True, False, True, False, False):
        if wrong:
            with pytest.raises(IndexError, match="index out of range in self"):
                model(beyond, targets)
        else:
            model(tokens, targets).backward()
    step = ebbtide.step_of(model)
    assert step is not None
    assert step.measured_above_bytes is not None


def test_a_forward_that_raises_is_not_run_and_leaves_nothing_in_its_model() -> None:
    def keeps(m: Body_, x: torch.Tensor) -> torch.Tensor:
        runs.append(type(x))
        m.last = m.linear(x)  # type: ignore[assignment]
        raise Mine

    runs: list[type] = []
    model = ebbtide.fit(Body_(keeps), "1MiB")
    with pytest.raises(Mine):
        model(X)
    assert not runs
    assert not hasattr(model, "last")
