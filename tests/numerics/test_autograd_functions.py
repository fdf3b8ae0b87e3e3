"""``torch.autograd.Function`` of every kind: planned with eager's bits, or refused by name at its line.

Kinds are drawn: how the function is written (with ``ctx`` in its forward, or with ``setup_context``), what it returns,
what it saves and where, and how its backward comes to the gradients. The truth is the same model in eager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.function import once_differentiable

import ebbtide
from ebbtide.errors import BudgetError, CaptureError
from strategies import examples

Body = Callable[[torch.Tensor, Any], torch.Tensor]
Function = torch.autograd.Function
WIDTH = 16


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.weight, self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), torch.randn(WIDTH, WIDTH) / 4
        self.inner, self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.body(torch.tanh(layer(x)), self)
        return x.square().mean()


def trained(model: nn.Module, steps: int = 2) -> list[torch.Tensor | None]:
    torch.manual_seed(1)
    x, found = torch.randn(48, WIDTH), list[torch.Tensor | None]()
    for _ in range(steps):
        loss = model(x)
        loss.backward()
        found += [loss.detach().clone()]
        found += [None if each.grad is None else each.grad.clone() for each in model.parameters()]
        found += [torch.get_rng_state()]
        model.zero_grad()
    return found


def assert_planned(body: Body) -> None:
    alone, model = trained(Net(body)), Net(body)
    ebbtide.fit(model, "75%", progress=None, options=ebbtide.Options(effort=50))
    try:
        planned = trained(model)
    except BudgetError as error:
        ebbtide.set_budget(model, error.smallest_bytes or 0)
        planned = trained(model)
    for one, other in zip(alone, planned, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)
    assert ebbtide.calls_of(model).planned == 2


# -- drawn kinds ---------------------------------------------------------------------------------------------------


def drawn_function(
    *, modern: bool, saves: str, outputs: int, marked: bool, materialized: bool, once: bool, vmap: bool, how: str
) -> type[Function]:
    """``y = x * tanh(x @ w)``, beside it ``tanh(x @ w)`` and a number, written in one of many ways."""

    def made(x: torch.Tensor, w: torch.Tensor, number: float) -> Any:
        gate = torch.tanh(x @ w)
        return (x * gate * number, gate, number)[:outputs] if outputs > 1 else x * gate * number

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, ctx.number = inputs
        gate = output[1] if outputs > 1 else None
        if marked and gate is not None:
            ctx.mark_non_differentiable(gate)
        if not materialized:
            ctx.set_materialize_grads(False)
        if saves == "inputs" or gate is None:
            ctx.save_for_backward(x, w, None)
        elif saves == "outputs":
            ctx.save_for_backward(x, w, gate)
        else:
            ctx.save_for_backward(x, w, None)
            ctx.gate = gate

    def derive(ctx: Any, of_y: Any, of_gate: Any = None, *_: Any) -> Any:
        x, w, gate = ctx.saved_tensors
        gate = getattr(ctx, "gate", gate)
        if how == "inner grad" and not marked:
            x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
            with torch.enable_grad():
                y = x * torch.tanh(x @ w) * ctx.number
            return (*torch.autograd.grad(y, (x, w), of_y), None)
        if gate is None:
            gate = torch.tanh(x @ w)
        inner = of_y * x * ctx.number
        if of_gate is not None and not marked:
            inner = inner + of_gate
        inner = inner * (1 - gate * gate)
        of_x = of_y * gate * ctx.number + inner @ w.t() if ctx.needs_input_grad[0] else None
        of_w = x.t() @ inner if how != "needed" or ctx.needs_input_grad[1] else None
        return of_x, of_w, None

    def old(ctx: Any, x: torch.Tensor, w: torch.Tensor, number: float) -> Any:
        output = made(x, w, number)
        keep(ctx, (x, w, number), output)
        return output

    body: dict[str, Any] = {"backward": staticmethod(once_differentiable(derive) if once else derive)}
    body |= {"forward": staticmethod(made), "setup_context": staticmethod(keep)} if modern else {}
    body |= {"forward": staticmethod(old)} if not modern else {}
    body |= {"generate_vmap_rule": True} if vmap and modern else {}
    return type("Drawn", (Function,), body)


@given(
    modern=st.booleans(),
    saves=st.sampled_from(["inputs", "outputs", "attribute"]),
    outputs=st.integers(1, 3),
    marked=st.booleans(),
    materialized=st.booleans(),
    once=st.booleans(),
    vmap=st.booleans(),
    how=st.sampled_from(["plain", "needed", "inner grad"]),
    weight=st.sampled_from(["weight", "frozen"]),
    uses_gate=st.booleans(),
)
@settings(max_examples=examples(30))
def test_drawn_functions_are_planned(weight: str, uses_gate: bool, **kind: Any) -> None:
    function = drawn_function(**kind)

    def body(x: torch.Tensor, m: Any) -> torch.Tensor:
        found: Any = function.apply(x, getattr(m, weight), 1.5)
        y = found if kind["outputs"] == 1 else found[0]
        return y + found[1] if kind["outputs"] > 1 and uses_gate else y

    assert_planned(body)


# -- kinds by name -------------------------------------------------------------------------------------------------


class Modern(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return 2 * ctx.scale * ctx.saved_tensors[0] * gradient, None


class Cast(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return (gradient @ w.to(gradient.dtype)).to(x.dtype), (gradient.t() @ x.to(gradient.dtype)).to(w.dtype)


class CastInputs(Cast):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()


class Dirty(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


class DirtyByItsName(Dirty):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class Reversal(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return -0.3 * gradient


class Noisy(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        kept = (torch.rand_like(x) > 0.3).float()
        ctx.save_for_backward(kept)
        return x * kept

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0]


def under_autocast(function: type[Function]) -> Body:
    def body(x: torch.Tensor, m: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: Any = function.apply(x, m.weight)
        return found.float()

    return body


def without_gradients(x: torch.Tensor, m: Any) -> torch.Tensor:
    with torch.no_grad():
        found: Any = Modern.apply(x, 0.5)
    return x + found


PLANNED: dict[str, Body] = {
    "custom_fwd": lambda x, m: Cast.apply(x, m.weight),  # type: ignore[no-any-return]
    "custom_fwd under autocast": under_autocast(Cast),
    "cast_inputs under autocast": under_autocast(CastInputs),
    "mark_dirty": lambda x, m: Dirty.apply(x.clone()),  # type: ignore[no-any-return]
    "a view": lambda x, m: Reversal.apply(x),  # type: ignore[no-any-return]
    "random draws": lambda x, m: Noisy.apply(x),  # type: ignore[no-any-return]
    "under vmap": lambda x, m: torch.vmap(lambda row: Modern.apply(row, 0.5))(x),
    "in a checkpoint": lambda x, m: torch.utils.checkpoint.checkpoint(Modern.apply, x, 0.5, use_reentrant=False),  # type: ignore[no-any-return]
    "by keyword": lambda x, m: Modern.apply(x, scale=0.5),  # type: ignore[no-any-return]
    "without gradients": without_gradients,
}


@pytest.mark.parametrize("kind", PLANNED)
def test_kinds_are_planned(kind: str) -> None:
    assert_planned(PLANNED[kind])


class InnerBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = x.tanh()
        y.backward(gradient)  # the line
        return x.grad


class Reentrant(Function):
    @staticmethod
    def forward(ctx: Any, layer: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        torch.autograd.backward(y, gradient)  # the line
        return None, x.grad


class ClassMethods(Function):
    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * 2

    @classmethod
    def backward(cls, ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


class ModernClassMethods(Function):
    @classmethod
    def forward(cls, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * 2

    @classmethod
    def setup_context(cls, ctx: Any, inputs: Any, output: Any) -> None:  # type: ignore[override]
        ctx.factor = 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * ctx.factor


class Forwards(Modern):
    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> torch.Tensor:  # type: ignore[override]
        return 2 * ctx.scale * ctx.saved_tensors[0] * tangent


class Functional(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Any) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return torch.autograd.functional.vjp(ctx.function, x, gradient)[1], None  # the line


SEEN: list[str] = []


class Telling(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        SEEN.append("backward")  # the line
        return gradient * 2


class Reading(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.most = x.max().item()
        return x / (ctx.most + 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient / (ctx.most + 1)


REFUSED: dict[str, tuple[Body, str, str]] = {
    "inner backward": (lambda x, m: InnerBackward.apply(x), "y.backward(gradient)", "torch.autograd.grad(outputs"),  # type: ignore[no-any-return]
    "reentrant": (lambda x, m: Reentrant.apply(m.inner, x), "torch.autograd.backward(y", "torch.autograd.grad(outputs"),  # type: ignore[no-any-return]
    "class methods": (lambda x, m: ClassMethods.apply(x), "ClassMethods.apply", "@staticmethod"),  # type: ignore[no-any-return]
    "modern class methods": (lambda x, m: ModernClassMethods.apply(x), "ModernClassMethods.apply", "@staticmethod"),  # type: ignore[no-any-return]
    "jvp": (lambda x, m: Forwards.apply(x, 0.5), "Forwards.apply", "jvp = torch.autograd.Function.jvp"),  # type: ignore[no-any-return]
    "vmap of apply": (lambda x, m: torch.vmap(Modern.apply, (0, None))(x, 0.5), "vmap(Modern", "torch.vmap(lambda"),
    "mark_dirty": (lambda x, m: DirtyByItsName.apply(x.clone()), "DirtyByItsName.apply", "return x"),  # type: ignore[no-any-return]
    "functional": (lambda x, m: Functional.apply(x, torch.tanh), "functional.vjp", "torch.func.vjp"),  # type: ignore[no-any-return]
    "a list": (lambda x, m: Telling.apply(x), "SEEN.append", "compute tensors and return them"),  # type: ignore[no-any-return]
    "a number of data": (lambda x, m: Reading.apply(x), "Reading.apply", "depends on data"),  # type: ignore[no-any-return]
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_graph_is_refused_by_name(kind: str) -> None:
    body, line, remedy = REFUSED[kind]
    trained(Net(body), steps=1)  # eager takes it
    model = ebbtide.fit(Net(body), "1GiB", progress=None)
    with pytest.raises(CaptureError) as refused:
        trained(model, steps=1)
    said = str(refused.value)
    assert "test_autograd_functions.py" in said
    assert line in said
    assert remedy in said
    assert all(each.grad is None for each in model.parameters())


def test_a_subclass_without_its_forward_derivative_is_planned() -> None:
    class Plain(Forwards):
        jvp: Any = Function.jvp

    assert_planned(lambda x, m: Plain.apply(x, 0.5))  # type: ignore[no-any-return, arg-type]
