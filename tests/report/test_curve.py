"""A measured curve has the most of every span, and is the run's own."""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.report.records.course import planned_course, unplanned_course
from ebbtide.report.records.curve import Curve, Marks, curve_of
from ebbtide.zoo import mlp_chain


@dataclass(frozen=True)
class Event:
    time_ns: int
    bytes: int


def most_while(events: list[Event], level: int, low: Fraction, high: Fraction) -> int:
    """The most that is there while the bytes from ``low`` to ``high`` of all that are handed out are, byte by byte."""
    found = []
    place = 0
    for each in events:
        level += each.bytes
        for _ in range(max(each.bytes, 0)):
            if low < place + 1 and place < high:
                found.append(level)
            place += 1
    return max(found)


@pytest.mark.parametrize("seed", range(20))
def test_a_span_has_the_most_that_was_there_while_its_bytes_were_handed_out(seed: int) -> None:
    draw = random.Random(seed)
    times = sorted(draw.sample(range(1000), draw.randrange(20, 60)))
    events = [Event(when, draw.choice([-9, -3, 1, 4, 17, 40])) for when in times]
    marks = Marks(100, draw.randrange(300, 700), 900)
    curve = curve_of(events, marks, 10_000, spans=7)
    assert curve is not None
    for part, begin, end in (
        (curve.forward, marks.begin_ns, marks.boundary_ns),
        (curve.backward, marks.boundary_ns, marks.end_ns),
    ):
        own = [each for each in events if begin <= each.time_ns < end]
        before = 10_000 + sum(each.bytes for each in events if each.time_ns < begin)
        total = sum(max(each.bytes, 0) for each in own)
        edges = [Fraction(total * i, 7) for i in range(8)]
        assert list(part) == [most_while(own, before, a, b) for a, b in pairwise(edges)]


def test_a_part_that_hands_out_nothing_is_level() -> None:
    assert curve_of([Event(1, -3)], Marks(0, 2, 4), 10, spans=2) == Curve((10, 10), (7, 7))


def test_nothing_recorded_is_no_curve() -> None:
    assert curve_of([], Marks(0, 1, 2), 5) is None


def test_a_verified_step_has_its_curve() -> None:
    """Held against the plan: its peak in each part is what the schedule takes there, and eager's is eager's."""
    torch.set_num_threads(1)
    case = mlp_chain(256, layers=6)
    plan = ebbtide.plan(case.model, case.args, budget="60%", options=ebbtide.Options(progress=None))
    verified = ebbtide.verify(case.model, case.args, plan=plan)
    measured = {each.label: each for each in verified.measured}
    assert [*measured] == ["planned", "unplanned", "eager"]
    for label, course in (("planned", planned_course(plan)), ("unplanned", unplanned_course(plan))):
        run = measured[label]
        assert run.curve is not None
        levels = [plan.resident_bytes + moment.bytes for moment in course.moments]
        forward, backward = max(levels[: course.boundary]), max(levels[course.boundary :])
        assert max(run.curve.forward) == pytest.approx(forward, rel=0.01)
        assert max(run.curve.backward) == pytest.approx(backward, rel=0.01)
        assert max(*run.curve.forward, *run.curve.backward) == run.peak_bytes
    assert measured["planned"].peak_bytes < 0.7 * measured["eager"].peak_bytes


def test_a_plan_and_its_file_know_what_is_resident(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    x = torch.zeros(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    plan = ebbtide.plan(
        model, (x,), budget="1GiB", options=ebbtide.Options(optimizer=optimizer, gradients="all", progress=None)
    )
    weights = 4 * (8 * 8 + 8 + 8 + 8)
    assert plan.resident_parts == {
        "weights": weights, "buffers of modules": 2 * 32 + 8, "optimizer state": weights, "arguments of the call": 128
    }  # fmt: skip
    assert sum(plan.resident_parts.values()) == plan.resident_bytes
    assert ebbtide.Plan.load(plan.save(tmp_path / "plan.json")).resident_parts == plan.resident_parts
