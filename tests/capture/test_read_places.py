"""A queue whose pointer is in a tensor, as MoCo's: refused where it is read as a number, planned where it is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.errors import CaptureError

SIZE, BATCH = 16, 4


def mocos(m: Any, keys: torch.Tensor) -> None:
    at = int(m.pointer)
    m.queue[:, at : at + BATCH] = keys.T  # the line
    m.pointer[0] = (at + BATCH) % SIZE


def one_column(m: Any, keys: torch.Tensor) -> None:
    m.queue[:, m.pointer.item()] = keys[0]  # the line


def read_slice(m: Any, keys: torch.Tensor) -> None:
    m.queue.add_(m.queue[:, m.pointer : m.pointer + 1])  # the line


def read_index(m: Any, keys: torch.Tensor) -> None:
    m.queue.mul_(m.queue[int(m.pointer)].sum())  # the line


def selected(m: Any, keys: torch.Tensor) -> None:
    m.queue.mul_(m.queue.select(1, int(m.pointer)).sum())  # the line


def narrowed(m: Any, keys: torch.Tensor) -> None:
    m.queue.mul_(torch.narrow(m.queue, 1, int(m.pointer), 1).sum())  # the line


def rolled(m: Any, keys: torch.Tensor) -> None:
    m.queue.copy_(m.queue.roll(int(m.pointer), 1))  # the line


def places(m: Any, keys: torch.Tensor) -> None:
    where = (m.pointer + torch.arange(BATCH)) % SIZE
    m.queue[:, where] = keys.T
    m.pointer[0] = (m.pointer[0] + BATCH) % SIZE


def copied(m: Any, keys: torch.Tensor) -> None:
    m.queue.index_copy_(1, (m.pointer + torch.arange(BATCH)) % SIZE, keys.T)
    m.pointer.add_(BATCH).remainder_(SIZE)


def read_by_places(m: Any, keys: torch.Tensor) -> None:
    m.queue.add_(m.queue[:, (m.pointer + torch.arange(1)) % SIZE])
    places(m, keys)


class Queued(nn.Module):
    def __init__(self, enqueue: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.linear, self.enqueue = nn.Linear(4, 4), enqueue
        self.register_buffer("queue", torch.randn(4, SIZE))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.linear(x)
        logits = keys @ self.queue.clone().detach()
        with torch.no_grad():
            self.enqueue(self, keys.detach())
        return logits.square().sum()


@pytest.mark.parametrize("enqueue", [mocos, one_column, read_slice, read_index, selected, narrowed, rolled])
def test_an_index_that_is_read_from_a_tensor_is_refused(enqueue: Callable[[Any, torch.Tensor], None]) -> None:
    with pytest.raises(CaptureError, match=r"^Index by a tensor.*\n.*indexes by a number") as refused:
        ebbtide.fit(Queued(enqueue), "1GiB")(torch.ones(BATCH, 4))
    code = enqueue.__code__
    line = code.co_firstlineno + (2 if enqueue is mocos else 1)
    assert refused.value.source == f"test_read_places.py:{line}"
    assert len(str(refused.value).split()) <= 80


def after_the_call(model: Queued, keys: torch.Tensor) -> None:
    with torch.no_grad():
        mocos(model, keys)


@pytest.mark.parametrize("enqueue", [places, copied, read_by_places, None])
def test_what_the_refusal_advises_is_planned_once(
    enqueue: Callable[[Any, torch.Tensor], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``None`` is a queue that is written after the call."""
    import ebbtide.engine.compiled as compiled

    captures: list[object] = []
    compile_step = compiled.compile_step
    monkeypatch.setattr(compiled, "compile_step", lambda *a, **k: captures.append(a) or compile_step(*a, **k))
    ends = []
    for fitted in (False, True):
        torch.manual_seed(0)
        model = Queued(enqueue or (lambda _m, _keys: None))
        if fitted:
            ebbtide.fit(model, "1GiB")
        for step in range(6):
            x = torch.full((BATCH, 4), 1.0 + step)
            model(x).backward()
            if enqueue is None:
                after_the_call(model, x)
        ends.append([model.linear.weight.grad, *model.buffers()])
    assert all(map(torch.equal, *ends))
    assert ebbtide.calls_of(model).planned == 6
    assert len(captures) == 1
