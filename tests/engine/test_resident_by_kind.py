"""A refusal says what of the smallest budget is there before the step, by kind, to the byte; whoever refuses."""

from __future__ import annotations

import itertools
import re
from io import StringIO

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.errors import BudgetError
from ebbtide.report.records.diagnosis import Findings
from ebbtide.report.text.doctor import write_findings
from ebbtide.step.resident_in_words import OTHER, parts_of
from ebbtide.zoo import mlp_chain


class Net(nn.Module):
    """Weights of 2 x 4096 bytes, a buffer of 128, and a table of 512 in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(2))
        self.register_buffer("shift", torch.zeros(32))
        self.table = [torch.zeros(128)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x + self.shift).tanh()
        return x.square().mean()


X = torch.ones(64, 32)  # 8192 bytes
KINDS = {"weights": 8192, "arguments of the call": 8192, "other tensors of modules": 512, "buffers of modules": 128}
STATE = 2 * 2 * 4096 + 2 * 4  # of Adam: two moments and a step for each weight


def refused(call: object) -> BudgetError:
    with pytest.raises(BudgetError) as caught:
        call()  # type: ignore[operator]
    return caught.value


def without_reserve(error: BudgetError) -> dict[str, int]:
    return {kind: size for kind, size in error.resident_parts.items() if kind != "kept in reserve"}


def by_fit() -> BudgetError:
    model = ebbtide.fit(Net(), 9000)
    return refused(lambda: model(X))


def by_plan() -> BudgetError:
    return refused(lambda: ebbtide.plan(Net(), (X,), budget=9000))


def by_max_batch() -> BudgetError:
    return refused(lambda: ebbtide.max_batch(lambda _: ebbtide.Case(Net(), (X,)), budget=9000))


def by_doctor(x: torch.Tensor = X) -> Findings:
    return ebbtide.doctor(Net(), (x,), budget=9000)


@pytest.mark.parametrize("by", [by_fit, by_plan, by_max_batch])
def test_what_is_there_before_the_step_is_told_by_kind(by: object) -> None:
    error: BudgetError = by()  # type: ignore[operator]
    assert without_reserve(error) == KINDS
    assert sum(error.resident_parts.values()) == error.resident_bytes
    reserve = error.resident_parts["kept in reserve"]
    total = sum(KINDS.values()) + reserve
    rows = [re.sub(r" {2,}", " ", row).strip() for row in error.figures.splitlines()]
    assert rows[rows.index(f"resident before the step {_bytes(total)} {total} bytes whatever the plan") + 1 :] == [
        "arguments of the call 8.00 KiB 8192 bytes",
        "weights 8.00 KiB 8192 bytes",
        "other tensors of modules 512 B 512 bytes",
        "buffers of modules 128 B 128 bytes",
        f"kept in reserve {_bytes(reserve)} {reserve} bytes",
    ]


def _bytes(size: int) -> str:
    """Rounded up, as needed bytes are printed."""
    hundredths = -(-100 * size // 1024)
    return f"{size} B" if size < 1024 else f"{hundredths // 100}.{hundredths % 100:02} KiB"


def test_the_doctor_tells_the_same() -> None:
    found = by_doctor()
    assert found.overhead is None
    assert found.resident_parts == KINDS
    assert sum(found.resident_parts.values()) == found.resident_bytes


def test_state_that_is_to_come_gradients_and_what_was_returned_are_told_apart() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    ebbtide.fit(model, "1MiB", optimizer=optimizer)
    kept = []
    for accumulated in (0, 8192):
        ebbtide.set_budget(model, 9000)
        error = refused(lambda: model(X))
        parts = without_reserve(error)
        returned = {"batches of data loaders, what earlier calls returned, and constants": 4} if kept else {}
        gradients = {"gradients of earlier steps": accumulated} if accumulated else {}
        assert parts == {**KINDS, "optimizer state": STATE, **gradients, **returned}
        ebbtide.set_budget(model, "1MiB")
        loss = model(X)
        loss.backward()
        kept.append(loss.detach())


@pytest.mark.filterwarnings("ignore:another forward of this model is in flight")
def test_a_forward_in_flight_is_a_kind() -> None:
    model = ebbtide.fit(Net(), "1MiB")
    first = model(X)
    ebbtide.set_budget(model, "2MiB")
    losses = [first, model(X)]
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert sum(plan.resident_parts.values()) == plan.resident_bytes
    kept = plan.resident_bytes - sum(KINDS.values())
    assert kept > 0
    assert plan.resident_parts == {**KINDS, "kept by forwards whose backward has not come": kept}
    ebbtide.set_budget(model, 9000)
    assert without_reserve(refused(lambda: model(X))) == KINDS, "it is not held against a budget that nobody could keep"
    sum(losses).backward()  # type: ignore[union-attr]


def test_a_given_plan_says_what_is_resident_now() -> None:
    model = Net()
    plan = ebbtide.plan(model, (X,), budget="100%")
    plan = ebbtide.plan(model, (X,), budget=plan.smallest_bytes)
    model.more = torch.zeros(100_000)
    ebbtide.fit(model, plan)
    error = refused(lambda: model(X))
    assert error.resident_parts["other tensors of modules"] == 512 + 400_000
    assert sum(error.resident_parts.values()) == error.resident_bytes
    assert re.search(r"other tensors of modules +391\.13 KiB +400512 bytes", str(error))


def test_what_is_unknown_is_a_kind_and_all_add_up() -> None:
    assert parts_of({"weights": 10, "nothing": 0}, 30, 5) == {"weights": 10, OTHER: 20, "kept in reserve": 5}
    assert parts_of({"weights": 10}, 4) == {OTHER: 4}, "of a plan that has moved to a call with less"
    assert parts_of({}, 0) == {}
    for sizes in itertools.product((0, 3), repeat=3):
        parts = dict(zip("abc", sizes, strict=True))
        assert sum(parts_of(parts, 12, 1).values()) == 13


# -- steps in which planning gains nothing --------------------------------------------------------------------


def _written(found: Findings) -> str:
    stream = StringIO()
    write_findings(found, stream)
    return stream.getvalue()


def test_the_doctor_says_of_a_small_step_that_planning_gains_next_to_nothing() -> None:
    found = by_doctor(torch.ones(4, 32))
    assert found.is_small
    parts = ", ".join(
        f"{_bytes(size)} ({size} bytes) {words}"
        for words, size in [
            ("resident", sum(KINDS.values()) - X.nbytes + 4 * 32 * 4),
            ("kept in reserve", found.reserve_bytes),
            *((f"of {each}" if each.startswith("what") else each, n) for each, n in found.floor.parts.items()),
        ]
    )
    gain = found.baseline_peak_bytes - min(found.smallest_bytes, found.baseline_peak_bytes)
    share = 100 * gain / found.baseline_peak_bytes
    assert (
        f"  gain       {_bytes(gain)} at most, {share:.2f} % of the peak: the rest is there under any plan\n"
        f"             {parts}\n"
    ) in _written(found)


def test_of_a_step_that_has_much_to_gain_it_says_nothing_of_it() -> None:
    case = mlp_chain(512, layers=12, width=32)
    found = ebbtide.doctor(case.model, case.args)
    assert not found.is_small
    by_plans = ebbtide.doctor(case.model, case.args, options=ebbtide.Options(rewrites="none"))
    assert by_plans.gain_bytes == by_plans.baseline_peak_bytes - by_plans.smallest_bytes
    assert by_plans.gain_bytes <= found.gain_bytes < found.baseline_peak_bytes, "rewrites go below what plans reach"
    assert "\n  gain " not in _written(found)
