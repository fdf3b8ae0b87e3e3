"""Statements that cannot be part of a step: refused by name, at their line, with what to write instead."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.capture import known_breaks, known_libraries
from ebbtide.capture.refusals import refusal
from ebbtide.errors import CaptureError

Body = Callable[[Any, torch.Tensor], torch.Tensor]
_generator, _python, _numpy = torch.Generator(), random.Random(1), np.random.default_rng(1)


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(4, 4), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def python_uniform(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x).sum() * random.uniform(0.5, 1.5)  # the line


def python_branch(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x).sum() if random.random() < 0.5 else m.linear(x).mean()  # the line


def python_size(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x)[: random.randint(1, 3)].sum()  # the line


def python_own(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x).sum() * _python.random()  # the line


def numpy_number(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x).sum() * np.random.rand()  # the line


def numpy_array(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (m.linear(x) * torch.from_numpy(np.random.randn(3, 4)).float()).sum()  # the line


def numpy_beta(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x).sum() * np.random.beta(0.4, 0.4)  # the line


def numpy_own(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x).sum() * _numpy.random()  # the line


def torch_own(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (m.linear(x) * torch.rand(3, 4, generator=_generator)).sum()  # the line


@pytest.mark.parametrize(
    ("body", "whose"),
    [
        *((body, "Python's random") for body in (python_uniform, python_branch, python_size, python_own)),
        *((body, "NumPy") for body in (numpy_number, numpy_array, numpy_beta, numpy_own)),
        (torch_own, "torch.Generator"),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_foreign_draws_are_refused_at_their_line(body: Body, whose: str) -> None:
    model = ebbtide.fit(Model(body), "1GiB")
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with pytest.raises(CaptureError, match=whose) as raised:
        model(torch.ones(3, 4))
    assert raised.value.source == line_of(body)
    assert "before the call" in raised.value.remedy
    assert states[:2] == (random.getstate(), np.random.get_state()[1].tolist()), "nothing was drawn"
    assert torch.equal(states[2], torch.get_rng_state())


def line_of(body: Body) -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    first = body.__code__.co_firstlineno
    return f"{Path(__file__).name}:{next(n for n in range(first, first + 9) if lines[n - 1].endswith('# the line'))}"


def layerdrop(m: Any, x: torch.Tensor) -> torch.Tensor:
    drawn = torch.rand([])
    if drawn < m.layerdrop:  # the line
        return x.sum()
    return m.linear(x).sum()


def test_layerdrop_names_the_configurations_field() -> None:
    model = Model(layerdrop)
    model.layerdrop, model.config = 0.3, SimpleNamespace(encoder_layerdrop=0.3, decoder_layerdrop=0.0, layers=2)
    with pytest.raises(CaptureError, match=r"(?s)\(config\.encoder_layerdrop=0\.3\).*layerdrop"):
        ebbtide.fit(model, "1GiB")(torch.ones(3, 4))


def freezes(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.linear.bias.requires_grad_(False)  # the line
    return m.linear(x).sum()


def keeps_a_leaf(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.hidden = m.linear(x).detach().requires_grad_(True)
    return (m.linear(m.hidden) * m.hidden).sum()


def test_what_takes_a_gradient_is_set_before_the_call() -> None:
    with pytest.raises(CaptureError, match="before the call") as raised:
        ebbtide.fit(Model(freezes), "1GiB")(torch.ones(3, 4))
    assert raised.value.source == line_of(freezes)


def test_a_leaf_that_is_kept_is_refused() -> None:
    """The model that keeps it would look for its gradient."""
    with pytest.raises(CaptureError, match="own gradient would be lost"):
        ebbtide.fit(Model(keeps_a_leaf), "1GiB")(torch.ones(3, 4))


def sparse_table(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(nn.functional.embedding(x.long()[0], m.linear.weight, sparse=True)).sum()  # the line


def sparse_bag(m: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding_bag(x.long(), m.linear.weight, sparse=True, mode="sum").sum()  # the line


@pytest.mark.parametrize("body", [sparse_table, sparse_bag])
def test_sparse_gradients_are_refused_by_name(body: Body) -> None:
    with pytest.raises(CaptureError, match=r"(?s)sparse=False.*sparse_coo") as raised:
        ebbtide.fit(Model(body), "1GiB")(torch.ones(3, 4))
    assert raised.value.source == line_of(body)


PLACES, TIMES = torch.tensor([1, 2]), torch.tensor([1, 2, 1])


def cut(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tensor_split(m.linear(x), PLACES)[1].sum()  # the line


def cut_by_numbers(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tensor_split(m.linear(x), (1, 2))[1].sum()


def repeated(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x).repeat_interleave(TIMES, dim=0).square().sum()  # the line


def repeated_to_a_size(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x).repeat_interleave(TIMES, dim=0, output_size=4).square().sum()


def combined(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.combinations(m.linear(x)[0]).square().sum()  # the line


def combined_by_index(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.linear(x)[0]
    i, j = torch.triu_indices(4, 4, 1)
    return torch.stack([h[i], h[j]], 1).square().sum()


@pytest.mark.parametrize(
    ("refused", "planned", "advice"),
    [
        (cut, cut_by_numbers, "tensor_split(x, (2, 4))"),
        (repeated, repeated_to_a_size, "output_size=n"),
        (combined, combined_by_index, "torch.triu_indices(n, n, 1)"),
    ],
)
def test_what_hides_its_size_is_refused_with_what_is_planned(refused: Body, planned: Body, advice: str) -> None:
    model = ebbtide.fit(Model(refused), "1GiB")
    with pytest.raises(CaptureError) as raised:
        model(torch.ones(3, 4))
    assert advice in raised.value.remedy
    assert raised.value.source == line_of(refused)
    model.body = planned
    model(torch.ones(3, 4)).backward()
    mine = [each.grad for each in model.parameters()]
    ebbtide.unfit(model).zero_grad()
    model.body = refused
    model(torch.ones(3, 4)).backward()
    assert all(torch.equal(a, each.grad) for a, each in zip(mine, model.parameters(), strict=True))  # type: ignore[arg-type]


def seeds(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)  # the line
    return nn.functional.dropout(m.linear(x)).sum()


def notes_gradients(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = m.linear(x)
    if x.requires_grad:
        x.register_hook(lambda g: m.seen.append(g.norm()))  # the line
    return x.sum()


def branches(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (m.linear(x),)).sum()  # the line


def hooks(m: Any, x: torch.Tensor) -> torch.Tensor:
    handle = m.linear.register_forward_pre_hook(lambda _, args: (args[0] * 2,))  # the line
    try:
        return m.linear(x).sum()
    finally:
        handle.remove()


def parametrizes(m: Any, x: torch.Tensor) -> torch.Tensor:
    nn.utils.parametrize.register_parametrization(m.linear, "weight", nn.Tanh())  # the line
    return m.linear(x).sum()


def gives_data(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.linear.weight.data = m.linear.weight.data * 0.5  # the line
    return m.linear(x).sum()


@pytest.mark.parametrize(
    ("body", "remedy"),
    [
        (seeds, "before the call"),
        (hooks, "puts a hook or a parametrization on a module"),
        (parametrizes, "puts a hook or a parametrization on a module"),
        (
            gives_data,
            "Do it before the call.\nWhy: the step cannot be captured as one graph. It gives a parameter, a buffer",
        ),
        (notes_gradients, "outside of the forward"),
        (branches, "torch.where"),
    ],
)
def test_what_would_work_is_said(body: Body, remedy: str) -> None:
    model = Model(body)
    model.seen = []  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=re.escape(remedy)) as refused:
        ebbtide.fit(model, "1GiB", options=ebbtide.Options(effort=50))(torch.randn(2, 4))
    assert "bitsandbytes" not in str(refused.value)
    assert "is_compiling" not in str(refused.value)  # a guard would drop what it guards from the step


def test_a_batch_norm_that_counts_is_named_wherever_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4, momentum=None)))
    with pytest.raises(CaptureError, match=re.escape("momentum=0.1")):
        ebbtide.fit(model, "1GiB", options=ebbtide.Options(effort=50))(torch.randn(2, 4))


def test_every_known_break_leaves_room_for_its_line() -> None:
    """A refusal has 80 words at most."""
    of_torch = [f"{each.reason} {each.remedy}" for each in known_breaks._BREAKS]
    of_libraries = [f"{each.reason} {each.remedy}" for each in known_libraries._LIBRARIES]
    assert [each for each in (*of_torch, *of_libraries) if len(each.split()) > 58] == []


def test_other_breaks_are_told_in_few_words() -> None:
    class Unsupported(Exception):
        pass

    said = f"Something{' new' * 40}\n  Explanation: It does not{' at all' * 40} ('the end')\n"
    line = f'from user code:\n  File "/a/model.py", line 3, in forward\n    y = x{" + x" * 60}\n'
    told = str(refusal(Unsupported(f"{said}\n{line}"), nn.Linear(1, 1)))
    assert len(told.split()) <= 80
    assert "Something new" in told
    assert "('the end')" in told
    assert 'File "/a/model.py", line 3, in forward: y = x + x' in told
