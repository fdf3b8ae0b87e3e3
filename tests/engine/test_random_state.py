"""A replay draws what the first run drew and leaves the generator as it was, also when the op raises."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ebbtide.capture.offline import capture
from ebbtide.lower.targets import read_state, replay


def test_replay_draws_the_same_and_leaves_the_generator() -> None:
    state = read_state("cpu")
    first = torch.rand(5)
    torch.rand(3)
    now = torch.get_rng_state()
    again = replay("cpu", state, torch.rand, (5,), {})
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), now)


def test_replay_leaves_the_generator_when_the_op_raises() -> None:
    state = read_state("cpu")
    torch.rand(3)
    now = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        replay("cpu", state, torch.rand, (-1,), {})
    assert torch.equal(torch.get_rng_state(), now)


def test_the_recorded_state_does_not_move_with_the_generator() -> None:
    state = read_state("cpu")
    before = state.clone()
    torch.rand(100)
    replay("cpu", state, torch.rand, (5,), {})
    assert torch.equal(state, before)


class Drawing(nn.Module):
    def __init__(self, draw: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.draw == "dropout":
            y = F.dropout(y, 0.5)
        elif self.draw == "dropout 0":
            y = F.dropout(y, 0.0)
        elif self.draw == "noise":
            y = y * torch.rand_like(y)
        elif self.draw == "attention 0":
            y = F.scaled_dot_product_attention(y[None], y[None], y[None], dropout_p=0.0)
        elif self.draw == "bernoulli":
            y = y * torch.bernoulli(torch.full_like(y, 0.5))
        return y.square().mean()


@pytest.mark.parametrize(
    ("draw", "count"), [("dropout", 1), ("noise", 1), ("bernoulli", 1), ("dropout 0", 0), ("attention 0", 0)]
)
def test_ops_that_draw_are_known_by_what_they_do(draw: str, count: int) -> None:
    joint = capture(Drawing(draw), (torch.randn(4, 8),), {}, name="x", granularity_bytes=1, context={})
    random = [op for op in joint.program.ops if op.random]
    assert len(random) == count
    assert all(op.state_bytes == torch.get_rng_state().nbytes for op in random)
