"""What torch raises while a step is captured, in the user's terms: their line and what to do, or our own fault."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import ebbtide
from ebbtide.capture import trace
from ebbtide.errors import BudgetError, CaptureError, InternalError
from ebbtide.lower.proof import ProofError
from ebbtide.zoo import mlp_chain

Body = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(4, 4), body

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return self.body(self.linear(x), given)


def split(y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.stack([part.mean() for part in torch.split(y, lengths.tolist())]).sum()  # the line


def split_and_ask(y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return sum((p.mean() for p in torch.split(y, lengths.tolist()) if p.shape[0] > 2), y.sum())  # the line


def pad_parts(y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    parts = torch.split(y, lengths.tolist())
    return nn.utils.rnn.pad_sequence(list(parts)).mean()  # the line


def item_size(y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return y[: lengths.max().item()].square().mean()  # type: ignore[misc]  # the line


def item_loop(y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.stack([y[i].mean() for i in range(int(lengths[0]))]).sum()  # the line


def zeros_of(y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return y.sum() * torch.zeros(lengths[0].item()).sum()  # type: ignore[arg-type]  # the line


def boolean_mask(y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return y[torch.arange(6) < lengths[0]].square().mean()  # the line


def nonzero(y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return y[(torch.arange(6) < lengths[0]).nonzero().squeeze(1)].mean()  # the line


def repeats(y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(y[:2], lengths, dim=0).mean()  # the line


def conv_of_part(y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    part = y[: lengths[0].item()]  # type: ignore[misc]  # the line
    return F.softmax(part @ part.T, -1).mean()


def pairs(y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.combinations(y[0] * lengths[0]).square().mean()  # the line


def of_a_known_size(y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return (y[y.abs() * lengths[0] >= 0] * torch.ones(24)).mean()  # the line


DATA_DEPENDENT: list[Body] = [
    split,
    split_and_ask,
    pad_parts,
    item_size,
    item_loop,
    zeros_of,
    boolean_mask,
    nonzero,
    repeats,
    conv_of_part,
    pairs,
    of_a_known_size,
]


def line_of(body: Body) -> str:
    """``file:line`` of the line of ``body`` that is marked."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    first = body.__code__.co_firstlineno
    return f"{Path(__file__).name}:{next(n for n in range(first, first + 9) if lines[n - 1].endswith('# the line'))}"


def arguments() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 4), torch.tensor([2, 4])


def run(entry: str, model: nn.Module, *args: torch.Tensor, budget: str | int = "1GiB") -> None:
    """A step of ``model``, planned with its costs measured, estimated, or as it runs."""
    if entry == "fit":
        ebbtide.fit(model, budget)
        model(*args)
    else:
        ebbtide.plan(model, args, budget=budget, machine="a100-80gb" if entry == "estimate" else None)


@pytest.mark.parametrize("body", DATA_DEPENDENT, ids=lambda body: body.__name__)
@pytest.mark.parametrize("entry", ["plan", "estimate", "fit"])
def test_sizes_that_depend_on_data_are_refused_at_their_line(body: Body, entry: str) -> None:
    model = Model(body)
    assert torch.isfinite(model(*arguments())), "eager runs it"
    with pytest.raises(CaptureError) as raised:
        run(entry, model, *arguments())
    error = raised.value
    assert error.source == line_of(body)
    assert "data" in error.reason
    assert "mask" in error.remedy
    assert error.source.replace(":", '", line ') in str(error) or error.source in str(error)
    assert "custom op" not in str(error)
    assert "u0" not in str(error), "torch's own symbols say nothing to a user"


def test_a_graph_break_has_its_line_and_a_remedy() -> None:
    def branch(y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return y.mean() if y.sum() > 0 else y.sum()  # the line

    with pytest.raises(CaptureError, match=r"one graph") as raised:
        ebbtide.plan(Model(branch), arguments(), budget="1GiB")
    assert raised.value.source == line_of(branch)
    assert "y.sum() > 0" in raised.value.reason
    assert "forward" in raised.value.remedy


def fine(y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def raises(error: Exception) -> Callable[..., object]:
    def broken(*_: object, **__: object) -> object:
        raise error

    return broken


def test_a_fault_of_ours_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An assertion that fails in our own code while the compiler calls us is no reason to change the model."""
    monkeypatch.setattr("ebbtide.engine.step_code.lower", lambda *_: None)
    model = ebbtide.fit(Model(fine), "1GiB")
    with pytest.raises(InternalError, match=r"AttributeError.*fault in Ebbtide") as raised:
        model(*arguments())
    assert isinstance(raised.value.__cause__, AttributeError)
    assert "model's forward" not in str(raised.value)


@pytest.mark.parametrize(("file", "torchs"), [(torch.__file__, True), (__file__, False)])
def test_an_assertion_of_torchs_own_is_not_the_models(monkeypatch: pytest.MonkeyPatch, file: str, torchs: bool) -> None:
    """An op that the trace fails on for a reason of its own raises nothing in eager; the user's assertion does."""
    fails = "assert 'addmm' not in str(func), 'of the trace'"
    source = f"def fails(mode, func, *rest):\n    {fails}\n    return below(mode, func, *rest)"
    place = "torch._subclasses.fake_tensor.FakeTensorMode.dispatch"
    exec(compile(source, file, "exec"), scope := {"below": FakeTensorMode.dispatch})
    monkeypatch.setattr(place, scope["fails"])
    with pytest.raises(CaptureError if torchs else AssertionError, match="of the trace") as raised:
        ebbtide.plan(Model(fine), arguments(), budget="1GiB")
    assert not torchs or "cannot be captured" in str(raised.value)


@pytest.mark.parametrize(
    ("fails", "file"), [("assert False", torch.__file__), ("raise RuntimeError('in a rule')", trace.__file__)]
)
def test_a_trace_that_failed_by_itself_is_made_again(monkeypatch: pytest.MonkeyPatch, fails: str, file: str) -> None:
    """At an assertion of torch's, or in code of ours, which is where torch's other errors are raised from."""
    failed: list[str] = []

    def first(func: object) -> bool:
        if "aten.mm" not in str(func) or failed:  # of the backward, which Dynamo does not trace
            return False
        failed.append(str(func))
        return True

    source = f"def fails(mode, func, *rest):\n    if first(func): {fails}\n    return below(mode, func, *rest)"
    exec(compile(source, file, "exec"), scope := {"below": FakeTensorMode.dispatch, "first": first})
    monkeypatch.setattr("torch._subclasses.fake_tensor.FakeTensorMode.dispatch", scope["fails"])
    plan = ebbtide.plan(Model(fine), arguments(), budget="1GiB")
    assert failed
    assert plan.overhead == 0


@torch.library.custom_op("ebbtide_refusals::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
    raise LookupError("no such table")


doubled.register_autograd(_backward)


def test_a_fault_of_the_users_own_is_neither_ours_nor_torchs() -> None:
    def body(y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return doubled(y).mean()

    with pytest.raises(CaptureError, match="LookupError: no such table") as raised:
        ebbtide.plan(Model(body), arguments(), budget="1GiB")
    assert raised.value.source.startswith("test_capture_refusals.py:")
    assert "report" not in str(raised.value)


def test_a_failed_proof_is_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.engine.step_code.prove", raises(ProofError("mm claims nothing")))
    model = ebbtide.fit(Model(fine), "1GiB")
    with pytest.raises(InternalError, match=r"mm claims nothing.*fault in Ebbtide"):
        model(*arguments())


def test_a_planner_that_fails_is_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.planning.one_program.floor_bytes", lambda program: None)
    with pytest.raises(InternalError, match=r"TypeError.*fault in Ebbtide"):
        ebbtide.plan(Model(fine), arguments(), budget="1GiB")
    with pytest.raises(InternalError, match="fault in Ebbtide"):
        ebbtide.sweep(Model(fine), arguments(), budgets=["1GiB"])


def test_what_the_users_progress_raises_is_theirs() -> None:
    with pytest.raises(ZeroDivisionError):
        ebbtide.plan(Model(fine), arguments(), budget="1GiB", options=ebbtide.Options(progress=lambda told: 1 / 0))  # type: ignore[arg-type]


@pytest.mark.parametrize("entry", ["plan", "fit"])
def test_a_budget_error_ends_in_our_own_frames(entry: str) -> None:
    case = mlp_chain(64, layers=4, width=32)
    with pytest.raises(BudgetError) as raised:
        run(entry, case.model, *case.args, budget=64)
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    torchs = [frame for frame in frames if "/torch/" in frame.filename]
    assert len(torchs) <= 2, "those of calling a module"
    assert len(frames) <= 20, "and ours: the entry point, the loop, planning with and without rewrites"
    assert "/ebbtide/" in frames[-1].filename
