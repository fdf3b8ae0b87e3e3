"""``assert`` in a forward: of what is known, raised as eager raises it; of values of tensors, part of the step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ebbtide
from asserting import all_below, branching, formatted, index, literal, none, number, wordless
from ebbtide.errors import CaptureError


class Asserting(nn.Module):
    def __init__(self, check: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.check = check

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.check(x)
        return x.square().mean()


VALUES: dict[str, Callable[[torch.Tensor], None]] = {"a message": all_below, "none": wordless, "negated": branching}


@pytest.mark.parametrize("check", VALUES.values(), ids=VALUES)
def test_an_assertion_about_values_is_part_of_the_step(check: Callable[[torch.Tensor], None]) -> None:
    plain = Asserting(check)
    x = torch.randn(4096, 8)
    plain(x).backward()
    model = ebbtide.fit(Asserting(check), "75%", options=ebbtide.Options(effort=20))
    model.load_state_dict(plain.state_dict())
    for step in range(4):
        model.zero_grad()
        model(x).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)), (  # type: ignore[arg-type]
            step
        )
        with pytest.raises(AssertionError) as theirs:
            plain(x * torch.nan)
        with pytest.raises(AssertionError) as ours:
            model(x * torch.nan)
        assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("check", [literal, formatted, none])
def test_an_assertion_about_what_is_known_is_eagers(check: Callable[[torch.Tensor], None]) -> None:
    model = ebbtide.fit(Asserting(check), "1MiB", options=ebbtide.Options(effort=20))
    with pytest.raises(AssertionError) as theirs:
        Asserting(check)(torch.randn(7, 8))
    with pytest.raises(AssertionError) as ours:
        model(torch.randn(7, 8))
    assert str(ours.value) == str(theirs.value)
    model(torch.randn(6, 8)).backward()


@pytest.mark.parametrize("check", [number, index])
def test_what_no_graph_holds_is_refused_with_what_would_do(check: Callable[[torch.Tensor], None]) -> None:
    model = ebbtide.fit(Asserting(check), "1MiB", options=ebbtide.Options(effort=20))
    with pytest.raises(CaptureError, match=r"\.all\(\)") as refused:
        model(torch.randn(6, 8))
    assert refused.value.source == f"asserting.py:{check.__code__.co_firstlineno + 1}"
