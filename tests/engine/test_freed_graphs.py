"""Force fields: a gradient in the forward that is part of the step in training, and frees its graph in eval mode."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.engine.freed_graphs import GRAPH_FREED
from ebbtide.errors import CaptureError
from ebbtide.torch_seams.autograd import is_freed

OPTIONS = ebbtide.Options(effort=20)


class ForceField(nn.Module):
    """Energy and forces.

    Args:
        retains: whether the gradient keeps its graph.
        trains: whether the gradient itself is trained; ``None`` in training mode.
        detaches: whether the energy is returned without its graph.
        beside: whether something is returned that the gradient does not come to.
    """

    def __init__(
        self, *, retains: bool = False, trains: bool | None = None, detaches: bool = False, beside: bool = False
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1))
        self.other = nn.Linear(3, 1)
        self.retains, self.trains, self.detaches, self.beside = retains, trains, detaches, beside

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            energy = self.net(positions).sum()
            trains = self.training if self.trains is None else self.trains
            (gradient,) = torch.autograd.grad(
                energy, positions, create_graph=trains, retain_graph=self.retains or trains
            )
        found = (energy.detach() if self.detaches else energy, -gradient)
        return (*found, self.other(positions.detach()).sum()) if self.beside or self.detaches else found


def positions(rows: int = 4) -> torch.Tensor:
    return torch.linspace(-1, 1, 3 * rows).reshape(rows, 3).requires_grad_()


def pair(**kind: bool) -> tuple[ForceField, ForceField]:
    torch.manual_seed(0)
    eager = ForceField(**kind)
    fitted = ForceField(**kind)
    fitted.load_state_dict(eager.state_dict())
    return eager, ebbtide.fit(fitted, "1GiB", options=OPTIONS)


def trained(model: ForceField) -> list[torch.Tensor]:
    model.zero_grad()
    sum(each.square().sum() for each in model(positions())).backward()  # type: ignore[union-attr]
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("frozen", [False, True])
def test_an_evaluation_runs_between_planned_steps(frozen: bool) -> None:
    eager, fitted = pair()
    for _ in range(2):
        assert all(map(torch.equal, trained(eager), trained(fitted)))
        for model in (eager, fitted):
            model.eval()
            model.requires_grad_(not frozen)
        for rows in (4, 5, 6, 4):
            expected, found = eager(positions(rows)), fitted(positions(rows))
            assert all(map(torch.equal, expected, found))
            assert [each.requires_grad for each in found] == [each.requires_grad for each in expected]
        for model in (eager, fitted):
            model.train()
            model.requires_grad_(True)
    calls = ebbtide.calls_of(fitted)
    assert (calls.planned, calls.unplanned) == (2, {GRAPH_FREED: 8})


def test_evaluations_of_new_sizes_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    import ebbtide.engine.compiled as compiled

    _, fitted = pair()
    fitted.eval()
    fitted(positions(4))
    monkeypatch.setattr(compiled, "compile_step", None)
    fitted(positions(5))
    fitted(positions(6))


def test_a_backward_from_an_evaluation_raises_as_in_eager() -> None:
    said = []
    for model in pair():
        model.eval()
        with pytest.raises(RuntimeError, match="second time") as raised:
            model(positions())[0].backward()
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_what_an_evaluation_makes_is_freed() -> None:
    _, fitted = pair()
    fitted.eval()
    given = positions()
    alive = weakref.ref(given)
    fitted(given)
    del given
    gc.collect()
    assert alive() is None


def test_what_is_left_to_train_is_refused() -> None:
    """In eval mode as well: a model may be trained in it."""
    _, fitted = pair(beside=True)
    fitted.eval()
    for _ in range(2):
        with pytest.raises(CaptureError, match="frees the graph"):
            fitted(positions())


@pytest.mark.parametrize("kind", [{"trains": True}, {"retains": True}, {"detaches": True}])
def test_training_is_refused_with_what_is_planned(kind: dict[str, bool]) -> None:
    with pytest.raises(CaptureError, match=r"(?s)create_graph=True.*retain_graph=True.*detached.*Why") as refused:
        pair(trains=False)[1](positions())
    assert len(str(refused.value).split()) <= 80
    eager, fitted = pair(**{"trains": False, **kind})
    for _ in range(2):
        assert all(map(torch.equal, trained(eager), trained(fitted)))
    assert ebbtide.calls_of(fitted).planned == 2


def test_whether_a_graph_is_freed() -> None:
    x = torch.ones(3, requires_grad=True)
    y = (x * x).sum()
    assert not is_freed(x)
    assert not is_freed(y)
    y.backward()
    assert is_freed(y)
    assert is_freed(y * 2)
