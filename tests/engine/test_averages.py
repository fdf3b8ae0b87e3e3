"""Averages of weights beside a fitted model (``torch.optim.swa_utils.AveragedModel``) are plain models, as in eager."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ebbtide


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.dropout(self.norm(self.one(x)), 0.2, self.training)).square().mean()


def averaged(*, fitted: bool) -> tuple[nn.Module, AveragedModel, list[torch.Tensor]]:
    torch.manual_seed(1)
    model = Net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    if fitted:
        ebbtide.fit(model, "1GiB", optimizer=sgd, progress=None)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    told = []
    for _ in range(3):
        x = torch.randn(16, 8)
        loss = model(x)
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        average.update_parameters(model)
        with torch.no_grad():
            told += [loss.detach(), average(x)]
    return model, average, told


def test_an_average_of_a_fitted_model_is_eagers() -> None:
    model, average, told = averaged(fitted=True)
    _, theirs, expected = averaged(fitted=False)
    assert all(torch.equal(one, other) for one, other in zip(told, expected, strict=True))
    state = theirs.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in average.state_dict().items())
    assert type(average.module) is Net
    counted = ebbtide.calls_of(model)
    assert (counted.planned, counted.unplanned) == (3, {})
