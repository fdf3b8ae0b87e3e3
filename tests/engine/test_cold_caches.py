"""No budget is refused because nothing is known yet: a first call finds out what its plan rests on in its own room."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

import ebbtide
from ebbtide.cost import attach
from ebbtide.measurement.cpu_allocations import AllocationRecorder
from ebbtide.measurement.peak import peak_above
from ebbtide.rewrites import facts
from ebbtide.zoo.gpt import GPT, GPTConfig


def _peak_of_step(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Bytes above the weights and arguments in one step, and its loss."""
    gc.collect()
    recorder = AllocationRecorder()
    recorder.start()
    loss = model(tokens, tokens)
    loss.backward()
    return peak_above(recorder.stop()), loss.detach()


@pytest.mark.parametrize("share", [0.3, 0.4])
def test_logits_larger_than_what_a_budget_leaves_are_no_reason_to_refuse(
    share: float, monkeypatch: pytest.MonkeyPatch, cache_directory: object
) -> None:
    """What its plan rests on is a fact about a product whose result alone is larger than the room."""
    monkeypatch.setattr(attach, "_KNOWN", {})
    monkeypatch.setattr(attach, "_TIMED", {})
    monkeypatch.setattr(facts, "_KNOWN", {})
    plain = GPT(GPTConfig(vocabulary=30_011, length=64, width=64, layers=2, heads=4))
    tokens = torch.randint(30_011, (4, 64), generator=torch.Generator().manual_seed(1))
    there = sum(each.nbytes for each in {*plain.parameters(), tokens})
    fitted = copy.deepcopy(plain)
    above, expected = _peak_of_step(plain, tokens)
    budget = int(share * (there + above))
    assert budget - there < 256 * 30_011 * 4 * 1.1
    ebbtide.fit(fitted, budget, options=ebbtide.Options(effort=200, progress=None))
    fitted(tokens, tokens).backward()
    for parameter in fitted.parameters():
        parameter.grad = None
    above, loss = _peak_of_step(fitted, tokens)
    assert there + above <= budget
    assert torch.equal(loss, expected)
    assert ebbtide.calls_of(fitted).planned == 2
