"""What a refusal advises is planned: each statement that is no graph, its refusal, and the advice as it is followed."""

from __future__ import annotations

import datetime
import logging
import random
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn import functional as F

import ebbtide
from ebbtide.errors import CaptureError

Body = Callable[[Any, torch.Tensor, Any], torch.Tensor]
ROWS, KINDS = 6, 4
_logger = logging.getLogger("a forward's")


@dataclass(frozen=True)
class Case:
    """A body that is refused with ``words``, one that follows the advice, and what each is given beside its input."""

    refused: Body
    words: str
    advised: Body
    given: Callable[[], Any] = lambda: None
    advised_given: Callable[[], Any] = lambda: None


def prints(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    print(h.mean().item())
    return h.square().sum()


def writes(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    sys.stdout.write("here")
    return h.square().sum()


def says_nothing(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    return h.square().sum()


def makes_a_logger(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    logging.getLogger("a forward's").info("here")
    return h.square().sum()


def logs(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    _logger.info("here")
    return h.square().sum()


def clock(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    return h.square().sum() * (time.perf_counter() > 0)


def date(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    m.when = datetime.datetime.now()
    return h.square().sum()


def lists(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    m.seen = h.mean(0).tolist()
    return h.square().sum()


def keeps(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    m.seen = h.mean(0).detach()
    return h.square().sum()


def sleeps(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    time.sleep(0)
    return h.square().sum()


def covariance(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    return torch.cov(h.T).square().sum()


def own_covariance(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    x = h.T
    c = x - x.mean(1, keepdim=True)
    return (c @ c.T / (x.shape[1] - 1)).square().sum()


def correlation(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    return torch.corrcoef(h.T).square().sum()


def own_correlation(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    x = h.T
    c = F.normalize(x - x.mean(1, keepdim=True), dim=1)
    return (c @ c.T).square().sum()


def asks_equal(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    return h.sum() if torch.equal(h[0], h[1]) else h.square().sum()


def asks_close(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    return h.sum() if torch.allclose(h[0], h[1]) else h.square().sum()


def chooses(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    return torch.where((h[0] == h[1]).all(), h.sum(), h.square().sum())


def per_kind(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    kinds, places = torch.unique(given, return_inverse=True)
    return torch.zeros(len(kinds), KINDS).index_add(0, places, h).square().sum()


def in_a_row(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    kinds, places = torch.unique_consecutive(given, return_inverse=True)
    return torch.zeros(len(kinds), KINDS).index_add(0, places, h).square().sum()


def of_all_kinds(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    return torch.zeros(KINDS, KINDS).index_add(0, given, h).square().sum()


def counts(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    return (torch.bincount(given, minlength=KINDS) * h).square().sum()


def counts_all(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    return (torch.zeros(KINDS).index_add(0, given, torch.ones(ROWS)) * h).square().sum()


def quantizes(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    return m.quantizer(h).square().sum()


def quantizes_by_an_op(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    q = m.quantizer
    return torch.fake_quantize_per_tensor_affine(h, q.scale, q.zero_point, q.quant_min, q.quant_max).square().sum()


def forks(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        mask = torch.rand_like(h) > 0.2
    return (h * mask).square().sum()


def forks_at_once(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]): torch.manual_seed(7)  # noqa: E701  # fmt: skip
    return h.square().sum()


def masks(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    return (h * given).square().sum()


def branches(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    return h.sum() if random.random() < 0.5 else h.square().sum()


def chooses_by_a_draw(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    return torch.where(given < 0.5, h.sum(), h.square().sum())


def iterates(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    return sum((h * each).square().sum() for each in given)  # type: ignore[return-value]


def attends(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    return m.encoder(h[None], mask=nn.Transformer.generate_square_subsequent_mask(ROWS)).square().sum()


def attends_causally(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(ROWS)
    return m.encoder(h[None], mask=mask, is_causal=True).square().sum()


def attends_by(m: Any, h: torch.Tensor, given: Any) -> torch.Tensor:
    return m.encoder(h[None], mask=given, is_causal=False).square().sum()


def numbers() -> list[torch.Tensor]:
    return [torch.tensor(0.5), torch.tensor(2.0)]


def labels() -> torch.Tensor:
    return torch.tensor([0, 0, 2, 3, 3, 3])


CASES = {
    "print": Case(prints, "print it after the call", says_nothing),
    "write": Case(writes, "print it after the call", says_nothing),
    "logger": Case(makes_a_logger, "outside of the forward", logs),
    "clock": Case(clock, "Read the clock before and after", says_nothing),
    "date": Case(date, "Read the clock before and after", says_nothing),
    "tolist": Case(lists, "Keep the tensor", keeps),
    "sleep": Case(sleeps, "Take the statement out", says_nothing),
    "cov": Case(covariance, r"c @ c\.T / \(x\.shape\[1\] - 1\)", own_covariance),
    "corrcoef": Case(correlation, r"F\.normalize", own_correlation),
    "equal": Case(asks_equal, r"torch\.where", chooses),
    "allclose": Case(asks_close, r"torch\.where", chooses),
    "unique": Case(per_kind, "index_add", of_all_kinds, labels, labels),
    "unique_consecutive": Case(in_a_row, "index_add", of_all_kinds, labels, labels),
    "bincount": Case(counts, "index_add", counts_all, labels, labels),
    "fake quantizer": Case(quantizes, "fake_quantize_per_tensor_affine", quantizes_by_an_op),
    "fork": Case(forks, "as a buffer", masks, advised_given=lambda: torch.arange(KINDS) > 0),
    "fork in a line": Case(forks_at_once, "as a buffer", says_nothing),
    "causal mask": Case(attends, "is_causal=True", attends_causally),
    "another mask": Case(attends, "or False", attends_by, advised_given=lambda: torch.eye(ROWS)),
    "random": Case(branches, r"torch\.where", chooses_by_a_draw, advised_given=lambda: torch.rand(())),
    "generator": Case(iterates, "a list or a tuple", iterates, lambda: iter(each for each in numbers()), numbers),
}


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(4, KINDS), body
        self.quantizer = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
        self.quantizer(torch.linspace(-1, 1, 8))
        layer = nn.TransformerEncoderLayer(KINDS, 1, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        return self.body(self, self.linear(x), given)


@pytest.fixture(autouse=True)
def anew() -> None:
    """Dynamo warns of each builtin once in a process."""
    torch._dynamo.utils.warn_once_cache.clear()


@pytest.mark.parametrize("name", CASES)
def test_the_advice_is_planned(name: str) -> None:
    case = CASES[name]
    model, x, given = ebbtide.fit(Model(case.refused), "1GiB"), torch.randn(ROWS, 4), case.given()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(CaptureError, match=rf"(?s){case.words}.*Why: ") as refused:
            model(x, given)
    assert not said, "torch's own words come besides"
    assert len(str(refused.value).split()) <= 80
    assert "Dynamo" not in str(refused.value)
    torch.manual_seed(0)
    eager, fitted = Model(case.advised), Model(case.advised)
    fitted.load_state_dict(eager.state_dict())
    ebbtide.fit(fitted, "1GiB", options=ebbtide.Options(effort=20))
    for _ in range(2):
        x, given = torch.randn(ROWS, 4), case.advised_given()
        losses = [model(x, given) for model in (eager, fitted)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
    assert torch.equal(eager.linear.weight.grad, fitted.linear.weight.grad)  # type: ignore[arg-type]
    assert ebbtide.calls_of(fitted).planned == 2


@pytest.mark.parametrize(("torchs", "own"), [(covariance, own_covariance), (correlation, own_correlation)])
def test_what_is_written_out_is_the_same(torchs: Body, own: Body) -> None:
    h = torch.randn(ROWS, KINDS)
    torch.testing.assert_close(torchs(None, h, None), own(None, h, None))


def test_a_draw_that_chooses_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teacher forcing."""
    import ebbtide.engine.compiled as compiled

    captures: list[object] = []
    compile_step = compiled.compile_step
    monkeypatch.setattr(compiled, "compile_step", lambda *a, **k: captures.append(a) or compile_step(*a, **k))
    model = ebbtide.fit(Model(chooses_by_a_draw), "1GiB")
    for drawn in (0.1, 0.9, 0.2, 0.8):
        model(torch.randn(ROWS, 4), torch.tensor(drawn)).backward()
    assert len(captures) == 1
