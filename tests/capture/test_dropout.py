"""A captured dropout on CPU is eager's to the bit, in every dtype, layout and for the edges of its probability."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ebbtide

FORMS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "plain": lambda y, p: F.dropout(y, p),
    "transposed": lambda y, p: F.dropout(y.t().exp(), p),
    "strided": lambda y, p: F.dropout(y[:, ::2], p),
    "expanded": lambda y, p: F.dropout(y[:, None].expand(-1, 3, -1), p),
    "in place": lambda y, p: F.dropout(y.t() * 2, p, inplace=True),
    "attention": lambda y, p: F.scaled_dot_product_attention(*[y[None]] * 3, dropout_p=p),
}


class Dropped(nn.Module):
    """One form, or all of them in a row, each on its own input."""

    def __init__(self, form: str, p: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.forms, self.p = tuple(FORMS) if form == "all" else (form,), p
        self.linear = nn.Linear(16, 16, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((FORMS[form](self.linear(x), self.p).square().sum() for form in self.forms), x.new_zeros(()))


def case(form: str, p: float, dtype: torch.dtype) -> tuple[Dropped, torch.Tensor]:
    torch.manual_seed(0)
    return Dropped(form, p, dtype), torch.randn(8, 16, dtype=dtype)


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    loss = model(x)
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    return [loss, *[g for g in gradients if g is not None], torch.random.get_rng_state()]


DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.mark.parametrize(
    ("form", "p", "dtype"),
    [*((form, 0.1, torch.float32) for form in FORMS), *(("all", p, dtype) for p in (0.1, 0.5) for dtype in DTYPES)],
)
def test_bits_and_random_state_are_eagers(form: str, p: float, dtype: torch.dtype) -> None:
    model, x = case(form, p, dtype)
    eager = step(copy.deepcopy(model), x)
    ours = step(ebbtide.fit(model, "1GiB"), x)
    assert len(ours) == len(eager) == 4
    assert all(map(torch.equal, ours, eager))


@pytest.mark.parametrize("p", [0.0, 1.0])
@pytest.mark.parametrize("form", ["all", "plain"])
def test_nothing_is_drawn_at_the_edges(form: str, p: float) -> None:
    model, x = case(form, p, torch.float32)
    eager = step(copy.deepcopy(model), x)
    ours = step(ebbtide.fit(model, "1GiB"), x)
    assert all(map(torch.equal, ours, eager))
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert not any(op.random for op in plan.program.ops)
    assert not any("clone" in op.target for op in plan.program.ops if p == 0.0 and form == "plain")


def test_the_mask_is_kept_in_bytes_and_the_noise_made_again() -> None:
    model, _ = case("plain", 0.1, torch.float32)
    plan = ebbtide.plan(model, (torch.randn(4096, 16),), budget="1GiB")
    ops, buffers = plan.program.ops, plan.program.buffers
    draw = next(op for op in ops if op.random)
    assert buffers[draw.outputs[0]].bytes == 4096 * 16
    noise = next(op for op in ops if draw.outputs[0] in op.inputs)
    assert not noise.random
    assert buffers[noise.outputs[0]].bytes == 4096 * 16 * 4


def test_torch_traces_its_own_again_afterwards() -> None:
    model, x = case("plain", 0.1, torch.float32)
    step(ebbtide.fit(model, "1GiB"), x)
    other, _ = case("plain", 0.1, torch.float32)
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        from torch._dynamo.backends.common import aot_autograd

        def note(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
            seen.extend(str(n.target) for n in graph.graph.nodes)
            return graph.forward

        return aot_autograd(fw_compiler=note)(graph, inputs)

    torch.compile(other, backend=backend)(x)
    assert "aten.native_dropout.default" in seen
